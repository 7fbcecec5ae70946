"""docs/planning.md and devices.md: flags and the table of devices are what the program has."""

from __future__ import annotations

import re
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest

from ridgeline.planner import LoadFlags, PlanFlags
from tests.cli.test_main import ridgeline

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "planning.md").read_text()


@pytest.mark.parametrize("field", [*fields(PlanFlags), *fields(LoadFlags)], ids=lambda f: f.name)
def test_every_flag_is_explained(field: Field[Any]) -> None:
    row = re.search(rf"^\| `--{field.name.replace('_', '-')}` \| (.*) \| (.*) \|$", TEXT, re.M)
    assert row is not None
    assert row.groups() == (
        "" if field.default in (None, (), False) else f"`{field.default}`",
        field.metadata["help"],
    )


def test_the_table_of_devices_is_what_the_program_prints() -> None:
    printed = ridgeline("plan", "--list-devices").stdout.strip()
    assert (DOCS / "devices.md").read_text().endswith(f"\n\n{printed}\n")
