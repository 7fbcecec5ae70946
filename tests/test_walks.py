"""The walks of docs/architecture.md are as long as the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.walks import PACKAGE, modules_named

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SERVER = PACKAGE / "serve"
# Of a config, a directory, weights, and weights by way of a file; of a name, a body and a step:
# visits, and returns among them.
MOST_VISITS = (25, 15), (29, 15), (25, 14), (37, 28), (69, 47), (78, 56), (40, 30)
# What ``reply`` and ``prepare`` name that decides nothing there: types, constants, errors, threads,
# counters, and the parts that are handed on.
NO_DECISION = {
    *("core", "engine/llm", "planner/needs", "serve/http", "serve/observe", "text"),
    *("serve/deadlines/field", "serve/answer/dialect", "serve/engine/interface"),
}


def test_walks_visit_what_the_table_says() -> None:
    command = [sys.executable, "-m", "tests.walks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = done.stdout.splitlines()
    for row, most in zip(rows, MOST_VISITS, strict=True):
        check_row(row, *most)


def check_row(row: str, most: int, most_returns: int) -> None:
    """Assert that a row is in the table, and visits no more files than it may."""
    assert row in PAGE, f"python -m tests.walks prints the rows: {row}"
    _, visits, through = row.split(" | ")
    assert int(visits) <= most, row
    assert int(visits) - len(through.split(", ")) <= most_returns, row


def test_a_reply_passes_as_many_places_as_the_table_has_rows() -> None:
    places, number = _places()
    assert number == len(places)
    named = modules_named(SERVER / "model_server.py", "ModelServer", "reply")
    named |= modules_named(SERVER / "prepare.py", "Preparer", "prepare")
    passed = {one for one in named if not any(_is_in(one, other) for other in NO_DECISION)}
    assert passed <= {one for found in places for one in found}, "a place has no row"


def _is_in(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}/")


def _places() -> tuple[list[set[str]], int]:
    """Return the modules of each row of the table of ``reply``, and their number as said.

    A file of "the dialect" is one for each dialect.
    """
    text = PAGE[PAGE.index("`ModelServer.reply` makes one decision") :]
    [number] = re.findall(r"through these (\d+) places", text)
    found = []
    for i, path in re.findall(r"^\| (\d+) \| `([\w/]+)\.py`", text, re.MULTILINE):
        files = [*SERVER.glob(f"{path}.py"), *PACKAGE.glob(f"{path}.py")]
        files = files or [*SERVER.glob(f"dialects/*/{path}.py")]
        assert files, f"row {i}: there is no {path}.py"
        found.append({str(one.relative_to(PACKAGE).with_suffix("")) for one in files})
    return found, int(number)
