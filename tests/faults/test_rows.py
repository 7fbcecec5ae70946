"""The rows of one server at CI size; ``python -m tests.faults`` runs them at full size."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.faults.files import DAMAGED
from tests.faults.oracles import Unreachable
from tests.faults.rows import ROWS, Row


def check(model: Path, row: Row) -> None:  # noqa: F811
    """Run a row, or skip it where what it needs is not here."""
    try:
        print(row.run(model, row.ci, random.Random(1)))
    except Unreachable as why:
        pytest.skip(str(why))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.ci and not row.is_of_fleets], ids=lambda row: row.id
)
def test_row(model: Path, row: Row) -> None:  # noqa: F811
    check(model, row)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in ROWS if row.run in DAMAGED], ids=lambda row: row.id)
def test_damaged_files_in_number(model: Path, row: Row) -> None:  # noqa: F811
    """A twentieth of the 100,000 files of each kind that ``--count 100000`` uses.

    Each commit has files of its own; an error names the seed that makes them again.
    """
    print(row.run(model, row.full, random.Random(commit())))


def commit() -> str:
    """Return the name of the commit that is checked out, nothing outside of a repository."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip()
