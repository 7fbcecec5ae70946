"""The random model, for every command."""

from tests.api.test_llm import model  # noqa: F401  (a fixture)
