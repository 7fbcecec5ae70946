"""What is reported, as text: figures for people, and tables as markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Rows = Sequence[Mapping[str, Any]]  # plain mappings
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def gib(num_bytes: float) -> str:
    """Return a size in memory for people, in GiB, MiB or KiB."""
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if num_bytes >= unit:
            digits = 1 if num_bytes >= 10 * unit else 2
            return f"{num_bytes / unit:,.{digits}f} {name}"
    return f"{num_bytes:,.0f} B"


def gb(num_bytes: float) -> str:
    """Return the size of a model or a file for people, in GB, MB or kB as disks are sold."""
    if num_bytes >= 999.5e6:
        return f"{num_bytes / 1e9:,.2f} GB"
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 999.5e3 else f"{num_bytes / 1e3:,.0f} kB"


def duration(seconds: float) -> str:
    """Return a time with three digits that matter: ``3.42 s``, ``61.5 ms``."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    return f"{value:,.{2 - (value >= 10) - (value >= 100)}f} {unit}"


def figure(value: float | None, form: str = "") -> str:
    """Return a number as ``form`` says, else with three digits that matter; None as a dash."""
    if value is None:
        return "-"
    return f"{value:{form}}" if form else _digits(value, 3)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 token``, ``1,024 tokens``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _digits(value: float, most: int) -> str:
    """Return a number with the digits that matter, and all of its whole part."""
    return f"{value:,.{most}g}" if abs(value) < 10**most - 0.5 else f"{value:,.0f}"


class Cell(NamedTuple):
    """A text with a style, as rich names it; markdown shows what is bold."""

    text: str
    style: str = ""


Row = Sequence[str | Cell]


@dataclass(frozen=True, slots=True)
class Table:
    """Texts in rows, for people; ``terminal`` shows it.

    Attributes:
        heads: of the columns; empty if it has none.
        rows: a text for each column, perhaps with a style; empty ones at the end may be missing.
        sides: l or r for each column; without, numbers stand right of names in the first column.
    """

    heads: Sequence[str]
    rows: Sequence[Row]
    sides: str = ""

    def columns(self) -> list[tuple[str, str]]:
        """Return the head of each column, and ``l`` or ``r``."""
        sides = self.sides or "l" + "r" * (len(self.heads) - 1)
        return list(zip(self.heads or [""] * len(sides), sides, strict=True))

    def cells(self) -> Iterable[list[Cell]]:
        """Return the cells of each row, as many as there are columns."""
        for row in self.rows:
            cells = [Cell(one) if isinstance(one, str) else one for one in row]
            yield cells + [Cell("")] * (len(self.columns()) - len(cells))

    def markdown(self) -> list[str]:
        """Return its lines as GitHub's markdown."""
        heads, sides = zip(*self.columns(), strict=True)
        rule = "|".join("--:" if side == "r" else "---" for side in sides)
        rows = [heads, *(map(_in_markdown, row) for row in self.cells())]
        first, *others = (f"| {' | '.join(row)} |" for row in rows)
        return [first, f"|{rule}|", *others]


def of_pairs(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values, without heads."""
    return Table((), [(Cell(name, "dim"), value) for name, value in pairs], "ll")


def bold(*texts: str) -> tuple[Cell, ...]:
    """Return a row that stands out."""
    return tuple(Cell(text, "bold") for text in texts)


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
    """Return rows with a line of names above; what a row lacks is empty, and truths are JSON's."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _names(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def as_markdown(rows: Rows) -> str:
    """Return rows as a table of GitHub's markdown, numbers to the right."""
    names = _names(rows)
    sides = ["lr"[all(not isinstance(row.get(name), str) for row in rows)] for name in names]
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    return "".join(f"{line}\n" for line in Table(names, cells, "".join(sides)).markdown())


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _plain(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return _digits(value, 4) if isinstance(value, float) else str(_plain(value))


def _in_markdown(cell: Cell) -> str:
    text = cell.text.replace("|", "\\|")
    return f"**{text}**" if text and cell.style == "bold" else text
