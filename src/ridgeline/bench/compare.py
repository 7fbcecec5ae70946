"""``ridgeline bench compare``: results of load generators side by side, under the same names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ridgeline.bench.out_file import write_out
from ridgeline.bench.result_names import COUNTS, LATENCIES, NOTES, STATISTICS, Result, read_results
from ridgeline.system.report import as_csv, as_markdown

Format = Literal["table", "csv", "markdown", "json"]


def compare(files: Sequence[Path], form: Format, out: Path | None) -> None:
    """Print the results of files side by side, and in what their definitions differ.

    Raises ValueError if a file is not the result of a known tool, and OSError if it cannot be read.
    """
    results = [result for path in files for result in _read(path)]
    rows = compare_rows(results)
    notes = differences(results)
    if out is not None:
        write_out(out, rows, "")
    if form == "csv":
        print(as_csv(rows), end="")
    elif form == "markdown":
        print(as_markdown(rows))
        print("".join(f"- {note}\n" for note in notes), end="")
    elif form == "json":
        values = [{"label": r.label, "tool": r.tool} | r.values for r in results]
        print(json.dumps({"results": values, "differences": notes}, allow_nan=False))
    else:
        _print(results, rows, notes)


def _read(path: Path) -> list[Result]:
    text = path.read_text("utf-8")
    try:
        content = json.loads(text)
    except ValueError:  # what bench serve prints has a block above its last line
        lines = text.strip().splitlines() or [""]
        try:
            content = json.loads(lines[-1])
        except ValueError as error:
            raise ValueError(f"{path}: not a JSON document, nor is its last line") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object, which results are")
    try:
        return read_results(content, path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def compare_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each measure that one of the results has, with a column for each result."""
    latencies = [f"{key}_{statistic}_ms" for key in LATENCIES for statistic in STATISTICS]
    labels = unique_labels(results)
    return [
        {"measure": name}
        | {label: result.values.get(name) for label, result in zip(labels, results, strict=True)}
        for name in (*COUNTS, *latencies)
        if any(name in result.values for result in results)
    ]


def unique_labels(results: Sequence[Result]) -> list[str]:
    """Return the labels, numbered where two are the same."""
    seen: dict[str, int] = {}
    labels = []
    for result in results:
        seen[result.label] = seen.get(result.label, 0) + 1
        suffix = f" ({seen[result.label]})" if seen[result.label] > 1 else ""
        labels.append(result.label + suffix)
    return labels


def differences(results: Sequence[Result]) -> list[str]:
    """Return what the tools that are here mean by a measure, where it is not what we mean."""
    notes = []
    for tool in dict.fromkeys(result.tool for result in results):
        measured = {name for result in results if result.tool == tool for name in result.values}
        for name, note in NOTES[tool].items():
            if any(one == name or one.startswith(f"{name}_") for one in measured):
                notes.append(f"{tool}: {name}: {note}")
    return notes


def _print(results: Sequence[Result], rows: list[dict[str, Any]], notes: list[str]) -> None:
    out = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    labels = unique_labels(results)
    for label, result in zip(labels, results, strict=True):
        table.add_column(
            f"{escape(label)}\n[dim]{result.tool}[/]", justify="right", overflow="fold"
        )
    if len(results) == 2:
        table.add_column("ratio", justify="right")
    group = ""
    for row in rows:
        name = row["measure"]
        latency = next((key for key in LATENCIES if name.startswith(f"{key}_")), "")
        if latency and latency != group:
            table.add_row(f"{latency}, ms")
        group = latency
        values = [row[label] for label in labels]
        cells = [_shown(value) for value in values]
        if len(results) == 2:
            first, second = values
            cells.append(f"{second / first:.2f}" if first and second is not None else "")
        shown = f"  {name.removeprefix(f'{latency}_').removesuffix('_ms')}" if latency else name
        table.add_row(shown, *cells)
    out.print(table)
    if notes:
        out.print("\nWhat is not measured alike:", style="bold")
    for note in notes:
        out.print(Padding(Text(note), (0, 0, 0, 2)))


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value.is_integer() else f"{value:,.2f}"
