"""What commands print: tables without lines, as wide as the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection

from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from ridgeline.system.report import Table

_ANY_WIDTH = 100_000  # wider than any line


def console(columns: int = _ANY_WIDTH, *, markup: bool = False) -> Console:
    """Return standard output, as wide as the screen; elsewhere as COLUMNS says, else ``columns``.

    Without ``markup`` brackets are text: they may stand in a path.
    """
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", columns))
    return Console(width=width, highlight=False, markup=markup)


def drawn(table: Table, *, whole: Collection[int] = ()) -> Drawn:
    """Return a table to print. What is too long is folded, so that nothing is cut.

    The columns ``whole`` are in one line: they are cut where others could not become narrower.
    """
    found = Drawn(box=None, pad_edge=False, show_header=bool(table.heads))
    for number, (head, side) in enumerate(table.columns()):
        is_whole = number in whole
        found.add_column(
            Text(head),
            justify="right" if side == "r" else "left",
            no_wrap=is_whole,
            overflow="ellipsis" if is_whole else "fold",
        )
    for row in table.cells():
        found.add_row(*(Text(*cell) for cell in row))
    return found
