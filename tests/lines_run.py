"""A bound on work that holds on any machine: the lines of Python that run, not the seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def at_most_lines(limit: int) -> Iterator[None]:
    """Raise AssertionError in what runs within as soon as it has run ``limit`` lines of Python."""
    num_lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        assert num_lines <= limit, f"more than {limit} lines run"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
