"""What commands print: tables without lines, as wide as the screen."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table

_ANY_WIDTH = 100_000  # wider than any line


def console(columns: int = _ANY_WIDTH, *, markup: bool = False) -> Console:
    """Return standard output, as wide as the screen; elsewhere as COLUMNS says, else ``columns``.

    Without ``markup`` brackets are text: they may stand in a path.
    """
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", columns))
    return Console(width=width, highlight=False, markup=markup)


def table_of(*headers: str) -> Table:
    """Return a table whose cells are folded on a screen, and whole where a program reads.

    Without ``headers`` it has two columns: names and values.
    """
    table = Table(box=None, pad_edge=False, show_header=bool(headers))
    for header in headers or ("", ""):
        table.add_column(header, overflow="fold")
    return table


def table_of_numbers(first: str, *others: str) -> Table:
    """Return a table whose first column is text, and whose others are numbers, to the right."""
    table = Table(first, box=None, pad_edge=False)
    for header in others:
        table.add_column(header, justify="right")
    return table
