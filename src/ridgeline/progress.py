"""Progress bars for work that takes a while. Drawn on standard error, and only on a terminal.

It measures nothing itself: whoever works calls back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Report = Callable[[int, int], None]  # done, total


def say(what: str) -> None:
    """Say what takes a moment, on standard error."""
    print(what, file=sys.stderr)


@contextmanager
def bytes_bar(what: str) -> Iterator[Report]:
    """Show ``what`` with a bar in bytes; gone when done."""
    with _bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        yield _report(progress, what)


@contextmanager
def count_bar(what: str, *, note: str = "") -> Iterator[Report]:
    """Show ``what`` with a bar that counts; gone when done. ``note`` stands behind the count."""
    with _bar(MofNCompleteColumn(), TextColumn(note), TimeRemainingColumn()) as progress:
        yield _report(progress, what)


def _bar(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _report(progress: Progress, what: str) -> Report:
    task = progress.add_task(what, total=None)
    return lambda done, total: progress.update(task, completed=done, total=total or None)
