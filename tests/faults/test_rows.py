"""Every row of the fault table at CI size; ``python -m tests.faults`` runs them at full size."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.api.test_llm import model  # noqa: F401  (a fixture)
from tests.faults.rows import ROWS, Row, Unreachable


@pytest.mark.parametrize("row", [row for row in ROWS if row.ci], ids=lambda row: row.id)
def test_row(model: Path, row: Row) -> None:  # noqa: F811
    try:
        print(row.run(model, row.ci, random.Random(1)))
    except Unreachable as why:
        pytest.skip(str(why))
