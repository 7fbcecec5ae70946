"""docs/server.md: every flag with its default, as the program has it."""

from __future__ import annotations

import re
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest

from ridgeline.engine_setup.options import Options
from ridgeline.server.options import ServeOptions

TEXT = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


@pytest.mark.parametrize("field", [*fields(ServeOptions), *fields(Options)], ids=lambda f: f.name)
def test_every_flag_is_explained(field: Field[Any]) -> None:
    row = re.search(rf"^\| `--{field.name.replace('_', '-')}` \| (.*) \| (.*) \|$", TEXT, re.M)
    assert row is not None
    default, what = row.groups()
    assert what == field.metadata["help"]
    shown = {None: "", "": "", False: "", True: "yes"}.get(field.default, f"`{field.default}`")
    assert default == shown
