"""Property tests try the same examples in every run, whatever ran before in the same process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

CONSTANTS = "NUMBERS = [{}]\n"


def drawn() -> list[Any]:
    """Return all that a property test is given."""
    found = []

    @given(st.lists(st.integers()), st.text())
    def note(numbers: list[int], text: str) -> None:
        found.append((numbers, text))

    note()
    return found


def test_what_is_loaded_changes_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    assert len(before) > 50
    numbers = ", ".join(str(10**9 + 7 * i) for i in range(200))
    (tmp_path / "many_constants.py").write_text(CONSTANTS.format(numbers))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("many_constants")
    assert drawn() == before
