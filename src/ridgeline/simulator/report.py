"""``ridgeline replay``: read a trace, decide it again, print the result."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ridgeline.simulator.replay import Json, replay

_SHOWN = 60  # characters of a decision


def replay_trace(path: Path, console: Console) -> bool:
    """Print whether every decision of a recorded run is made again; return it.

    Raises ValueError, with the line, if the file is not a trace, and OSError if it cannot be read.
    """
    records: list[Json] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                if not line.endswith("\n"):
                    break  # the writer was stopped amid its last line
                raise ValueError(f"{path}, line {number}, is not JSON: {error}") from None
    found = replay(records)
    of = f"{found.num_steps:,} steps, {found.num_requests:,} requests"
    if found.difference is None:
        console.print(f"[green]equal[/]  {of}: every decision is made again", highlight=False)
    else:
        number, recorded, decided = found.difference
        console.print(f"[red]different[/]  {of} were equal; then step {number}:", highlight=False)
        table = Table("", "recorded", "decided now", box=None, pad_edge=False)
        for name, then in recorded.items():
            if then != decided[name]:
                table.add_row(name, _short(then), _short(decided[name]))
        console.print(table)
        console.print("Was the trace written by another version? A trace is for its own alone.")
    if found.unfinished is not None:
        console.print(
            f"step {found.unfinished:,} and what follows are left out: a request begins there that "
            "had not ended when the trace did"
        )
    return found.difference is None


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
