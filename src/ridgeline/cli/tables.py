"""Tables that cut nothing: long cells are folded on a screen, and whole where a program reads."""

from __future__ import annotations

from rich.table import Table


def table_of(*headers: str) -> Table:
    """Return a table without lines, whose cells are folded and never cut.

    Without ``headers`` it has two columns: names and values.
    """
    table = Table(box=None, pad_edge=False, show_header=bool(headers))
    for header in headers or ("", ""):
        table.add_column(header, overflow="fold")
    return table
