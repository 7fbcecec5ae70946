"""Forms that an answer must have: grammars, compiled in a process of their own.

Why one cannot be used is said here, as ``grammar.grammars`` takes time to import.
"""

from __future__ import annotations

from typing import Literal


class GrammarError(ValueError):
    """A grammar cannot be used, and why."""

    def __init__(self, message: str, reason: Literal["invalid", "too_long", "too_slow"]) -> None:
        """Say why in words, and in one word."""
        super().__init__(message)
        self.reason = reason


class NotCached(LookupError):
    """A grammar would have to be compiled first, which takes time."""
