"""Each room has a README that a newcomer can begin with: short, and true of what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOMS = sorted(
    path
    for path in (Path(__file__).parents[1] / "src" / "ridgeline").iterdir()
    if (path / "__init__.py").is_file()
)
HEADINGS = ["Parts, in reading order", "What it never knows", "Where a new thing goes"]


def test_there_are_thirteen_rooms() -> None:
    assert len(ROOMS) == 13


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_readme_names_all_parts_of_its_room_and_no_other(room: Path) -> None:
    text = (room / "README.md").read_text()
    assert len(text.splitlines()) <= 60
    assert text.startswith(f"# {room.name}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    there = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    there |= {f"{path.name}/" for path in room.iterdir() if any(path.glob("*.*"))} - {
        "__pycache__/"
    }
    assert sorted(named) == sorted(there)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_paths_that_a_readme_names_exist(room: Path) -> None:
    text = (room / "README.md").read_text()
    package, root = room.parent, room.parents[2]
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", text):
        assert any((place / name).exists() for place in (room, package, root)), name
