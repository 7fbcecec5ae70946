"""The server of the tests beside, for what is asked of a server here."""

from tests.serve.conftest import (  # noqa: F401  (fixtures)
    coder_path,
    model,
    roomy,
    served,
    shared,
)
