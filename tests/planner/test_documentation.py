"""docs/planning.md and devices.md: flags, the example and the table are what the program has."""

from __future__ import annotations

import json
import re
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest

from ridgeline.planner import LoadFlags, PlanFlags
from tests.cli.test_main import ridgeline
from tests.physics.published import PUBLISHED

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


def test_the_example_is_what_the_program_prints(tmp_path: Path) -> None:
    path = tmp_path / "llama-3.1-8b.json"
    path.write_text(json.dumps(PUBLISHED["llama-3.1-8b"]["config"]))
    done = ridgeline("plan", str(path), "--on", "l4", COLUMNS="120")
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    block = TEXT.split("$ ridgeline plan llama-3.1-8b.json --on l4\n")[1].split("\n\nThe bar")[0]
    shown = [line.removeprefix("    ").rstrip() for line in block.splitlines()]
    assert [line for line in printed if line] == [line for line in shown if line]


def test_the_table_of_devices_is_what_the_program_prints() -> None:
    printed = ridgeline("plan", "--list-devices").stdout.strip()
    assert (DOCS / "devices.md").read_text().endswith(f"\n\n{printed}\n")
