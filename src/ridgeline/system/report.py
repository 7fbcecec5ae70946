"""What is reported, as text: sizes for people, and rows of a table as CSV and as markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]  # plain mappings
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def gib(num_bytes: float) -> str:
    """Return a size for people, in GiB, MiB or KiB."""
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if num_bytes >= unit:
            digits = 1 if num_bytes >= 10 * unit else 2
            return f"{num_bytes / unit:,.{digits}f} {name}"
    return f"{num_bytes:,.0f} B"


def decimal_size(num_bytes: float) -> str:
    """Return the size of a model or a file for people, in GB, MB or kB as disks are sold."""
    if num_bytes >= 999.5e6:
        return f"{num_bytes / 1e9:,.2f} GB"
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 999.5e3 else f"{num_bytes / 1e3:,.0f} kB"


def flat(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result as one row: what is nested gets the name of its place; lists are left out."""
    row: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, Mapping):
            row |= {f"{name}_{inner}": one for inner, one in flat(value).items()}
        elif not isinstance(value, list):
            row[name] = value
    return row


def as_csv(rows: Rows) -> str:
    """Return rows with a line of names above; what a row lacks is left empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _names(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(rows: Rows) -> str:
    """Return rows as a table of GitHub's markdown, numbers to the right."""
    names = _names(rows)
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    is_number = [all(not isinstance(row.get(name), str) for row in rows) for name in names]
    rule = ["---:" if number else "---" for number in is_number]
    return "".join(f"| {' | '.join(line)} |\n" for line in (names, rule, *cells))


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
