"""Tables that cut nothing: long cells are folded on a screen, and whole where a program reads."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table

_ANY_WIDTH = 100_000  # wider than any line


def console(*, markup: bool = False) -> Console:
    """Return a console as wide as the screen; elsewhere as COLUMNS says, or without a limit.

    Without ``markup`` brackets are text: they may stand in a path.
    """
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", _ANY_WIDTH))
    return Console(width=width, highlight=False, markup=markup)


def table_of(*headers: str) -> Table:
    """Return a table without lines, whose cells are folded and never cut.

    Without ``headers`` it has two columns: names and values.
    """
    table = Table(box=None, pad_edge=False, show_header=bool(headers))
    for header in headers or ("", ""):
        table.add_column(header, overflow="fold")
    return table
