"""Real models by their short names: pulled where they are not here, else skipped in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.engine_setup.locate import locate
from ridgeline.models.tensors import ModelFileError


def real_model(name: str) -> Path:
    """Return the file of a model that ``ridgeline pull`` knows; skip the test if it has none.

    A file that is damaged is an error.
    """
    try:
        return locate(name).path
    except ModelFileError:
        raise
    except (OSError, ValueError) as error:
        pytest.skip(f"{name} cannot be had: {error}")
