"""From samples to medians, spreads, ratios, the table and the result's document; all of it pure.

    python -m peers.report RESULT docs/benchmarks.md

puts the tables of a result, a file whose last line is the JSON that ``peers`` printed, into
the page. Samples are rates in tokens per second, of ``start_warm`` seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from peers.shapes import NAMES, START


class Spread(TypedDict):
    """Median, least and greatest of ``n`` samples."""

    median: float
    min: float
    max: float
    n: int


Samples = Mapping[str, Mapping[str, Sequence[float]]]  # engine and format, shape: samples
Summary = dict[str, dict[str, Spread]]

_BEGIN, _END = "<!-- result: begin -->", "<!-- result: end -->"
# A format this much slower than the best peer everywhere is not run again.
_HOPELESS = 0.85


def summarise(samples: Samples) -> Summary:
    """Return the spread of all samples; shapes without any are missing."""
    return {
        label: {name: _spread(shapes[name]) for name in NAMES if shapes.get(name)}
        for label, shapes in samples.items()
    }


def _spread(values: Sequence[float]) -> Spread:
    digits = 3 if max(values) < 100 else 1
    low, middle, high = min(values), statistics.median(values), max(values)
    return Spread(
        median=round(middle, digits),
        min=round(low, digits),
        max=round(high, digits),
        n=len(values),
    )


def speed(name: str, median: float) -> float:
    """Return what is greater when better."""
    return 1 / median if name == START else median


def best(summary: Summary, name: str, of: str | None = None, but: str = "") -> str | None:
    """Return which engine and format has the best median of shape ``name``.

    Args:
        summary: of all engines.
        name: of the shape.
        of: only formats of this engine.
        but: no format of this engine.
    """
    field = {
        label: speed(name, shapes[name]["median"])
        for label, shapes in summary.items()
        if name in shapes and of in (None, engine_of(label)) and engine_of(label) != but
    }
    return max(field, key=lambda label: field[label], default=None)


def engine_of(label: str) -> str:
    """Return the engine's name in ``engine format``."""
    return label.partition(" ")[0]


def ratios(summary: Summary, ours: str) -> dict[str, float | None]:
    """Return ours over the best peer for each shape; of times, theirs over ours. None: no peer."""
    result: dict[str, float | None] = {}
    for name in NAMES:
        we, they = best(summary, name, of=ours), best(summary, name, but=ours)
        result[name] = None
        if we and they:
            our_speed = speed(name, summary[we][name]["median"])
            result[name] = round(our_speed / speed(name, summary[they][name]["median"]), 3)
    return result


def hopeless(summary: Summary, ours: str) -> set[str]:
    """Return the peers' formats that are far behind the best of them at every rate.

    More rounds of them take an hour and would hardly change a ratio. The one that starts first
    stays.
    """
    leaders = {name: best(summary, name, but=ours) for name in NAMES}

    def is_far_behind(label: str, name: str) -> bool:
        rate, leader = summary[label][name]["median"], leaders[name] or label
        return rate < _HOPELESS * summary[leader][name]["median"]

    return {
        label
        for label, shapes in summary.items()
        if engine_of(label) != ours and label != leaders[START] and shapes.keys() - {START}
        if all(is_far_behind(label, name) for name in shapes if name != START)
    }


def rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Return the table as text cells, its heading first: medians, spreads, then the ratios."""
    summary: Summary = document["results"]
    table = [["", *NAMES]]
    tiles = document.get("tiles", {})  # results before 27 November 2026 have none
    for label, shapes in summary.items():
        name = f"{label}, AMX" if tiles.get(label) else label
        table.append([name, *(_cell(shapes.get(name)) for name in NAMES)])
    table.append(["best peer", *(document["best_peer"][name] or "-" for name in NAMES)])
    values = (document["ratios"][name] for name in NAMES)
    table.append(["ratio", *("-" if value is None else f"{value:.2f}" for value in values)])
    return table


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    digits = 0 if spread["median"] >= 100 else 2
    middle, low, high = (f"{spread[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{middle} ({low}-{high})"


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Return the table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    )


def markdown(document: Mapping[str, Any]) -> str:
    """Return the result as a page's section: machine, versions, table, what was left out."""
    facts = " · ".join(str(value) for value in document["machine"].values())
    versions = ", ".join(f"{name} {text}" for name, text in document["versions"].items())
    head, *body = rows(document)
    lines = [
        f"{document['date']}, `{document['command']}`, {document['model']}, "
        f"{document['rounds']} rounds.",
        "",
        f"{facts}. Versions: {versions}.",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(row) + " |" for row in body),
    ]
    notes = [f"{name}: {why}" for name, why in document["left_out"].items()] + document["notes"]
    return "\n".join([*lines, *([""] if notes else []), *(f"- {note}" for note in notes)])


def insert(page: str, document: Mapping[str, Any]) -> str:
    """Return the page with the result between its two marks.

    Raises:
        ValueError: the page lacks a mark.
    """
    if page.count(_BEGIN) != 1 or page.count(_END) != 1:
        raise ValueError(f"the page needs {_BEGIN} and {_END}, once each")
    before, _, after_begin = page.partition(_BEGIN)
    _, _, after = after_begin.partition(_END)
    return f"{before}{_BEGIN}\n{markdown(document)}\n{_END}{after}"


def main(result: Path, page: Path) -> None:
    """Write the result into the page."""
    document = json.loads(result.read_text().strip().splitlines()[-1])
    page.write_text(insert(page.read_text(), document))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
