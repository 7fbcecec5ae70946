"""Fixtures of other tests."""

from tests.engine.test_llm import model  # noqa: F401
from tests.fleet.test_router import folder  # noqa: F401
from tests.serve.page.browser import browser  # noqa: F401
