"""Progress bars for work that takes a while. Drawn on standard error, and only on a terminal.

It measures nothing itself: whoever works calls back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int], None]  # done, total


def say(what: str) -> None:
    """Say what takes a moment, on standard error."""
    print(what, file=sys.stderr)


@contextmanager
def bytes_bar(what: str) -> Iterator[Report]:
    """Show ``what`` with a bar in bytes; gone when done."""
    with _bar(what, is_bytes=True) as report:
        yield report


@contextmanager
def count_bar(what: str, *, note: str = "") -> Iterator[Report]:
    """Show ``what`` with a bar that counts; gone when done. ``note`` stands behind the count."""
    with _bar(what, is_bytes=False, note=note) as report:
        yield report


@contextmanager
def _bar(what: str, *, is_bytes: bool, note: str = "") -> Iterator[Report]:
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    # Imported here: where nobody looks, drawing would be a tenth of a start.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    in_bytes = (DownloadColumn(), TransferSpeedColumn())
    counted = (MofNCompleteColumn(), TextColumn(note))
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *(in_bytes if is_bytes else counted),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)
