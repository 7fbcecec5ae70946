"""Progress of work that takes a while, on standard error: a bar on a terminal, else some lines.

It measures nothing itself: the code that does the work calls back.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Report = Callable[[int, int], None]  # done, total

_LINE_S = 10.0  # between two lines where there is no terminal


def say(what: str) -> None:
    """Say something on standard error, if that can be written."""
    with suppress(OSError):  # a full disk is no reason to do nothing
        print(what, file=sys.stderr)


@contextmanager
def bytes_bar(what: str) -> Iterator[Report]:
    """Show ``what`` with a bar in bytes; without a terminal, by a line every ten seconds."""
    if not sys.stderr.isatty():
        yield byte_lines(what, time.monotonic)
        return
    with _bar(what, is_bytes=True) as report:
        yield report


def byte_lines(what: str, clock: Callable[[], float]) -> Report:
    """Return what prints a line with the megabytes so far, once in ten seconds of ``clock``."""
    next_s = clock() + _LINE_S

    def report(done: int, total: int) -> None:
        nonlocal next_s
        if clock() >= next_s:
            next_s = clock() + _LINE_S
            end = f" of {total / 1e6:,.0f}" if total else ""
            say(f"{what}: {done / 1e6:,.0f}{end} MB")

    return report


@contextmanager
def count_bar(what: str, *, note: str = "") -> Iterator[Report]:
    """Show ``what`` with a bar that counts, on a terminal. ``note`` stands behind the count."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with _bar(what, is_bytes=False, note=note) as report:
        yield report


@contextmanager
def _bar(what: str, *, is_bytes: bool, note: str = "") -> Iterator[Report]:
    # Imported here: without a terminal, drawing would cost a tenth of a start for nothing.
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
