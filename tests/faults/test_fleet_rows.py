"""The rows of several servers at CI size, apart from the others so that they run beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.faults.rows import ROWS, Row
from tests.faults.test_rows import check


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.ci and row.is_of_fleets], ids=lambda row: row.id
)
def test_row(model: Path, row: Row) -> None:  # noqa: F811
    check(model, row)
