"""The lane of a change: print the files of tests that a change in a room can reach.

Run as ``python tools/lane.py ROOM``, where ROOM is a folder or file of src/ridgeline, such as
``planner``. It reads who imports whom: the tests of the room, those of each room that imports it,
directly or through others, and tests elsewhere that do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent


def room_of(module: str) -> str:
    """Return the second part of a module's name: ``planner`` of ``ridgeline.planner.plan``."""
    return module.split(".")[1]


def lane(room: str) -> list[str]:
    """Return the paths of test files, sorted; raise ValueError when there is no such room."""
    graph = grimp.build_graph("ridgeline", "tests", "peers", cache_dir=None)
    rooms = {room_of(name) for name in graph.find_children("ridgeline")} - {"__main__"}
    if room not in rooms:
        raise ValueError(f"no room is called {room!r}: there are {', '.join(sorted(rooms))}")
    start = f"ridgeline.{room}"
    reached = {start} | graph.find_downstream_modules(start, as_package=True)
    above = {room} | {room_of(name) for name in reached if name.startswith("ridgeline.")}
    tests = [name for name in graph.modules if name.rpartition(".")[2].startswith("test_")]
    # Tests of processes import nothing of the room, so the folder counts as well.
    chosen = [name for name in tests if name in reached or room_of(name) in above]
    paths = [f"{name.replace('.', '/')}.py" for name in chosen]
    return sorted(path for path in paths if not path.startswith("tests/parity/"))  # needs torch


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]  # where tests and peers are
    try:
        print(*lane(*sys.argv[1:2] or [""]), sep="\n")
    except ValueError as error:
        sys.exit(str(error))
