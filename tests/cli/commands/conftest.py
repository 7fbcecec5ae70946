"""The random model, for every command."""

from tests.engine.test_llm import model  # noqa: F401  (a fixture)
