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


def say(message: str) -> None:
    """Say something on standard error, if that is there and can be written."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # a full disk or a closed file is no reason to stop
            print(message, file=sys.stderr)


def _is_terminal() -> bool:
    """Whether standard error is one; it may be closed, or an object that is no file."""
    isatty = getattr(sys.stderr, "isatty", None)
    try:
        return isatty is not None and bool(isatty())
    except ValueError:  # it is closed
        return False


@contextmanager
def bytes_bar(label: str) -> Iterator[Report]:
    """Show ``label`` with a bar in bytes; without a terminal, by a line every ten seconds."""
    if not _is_terminal():
        yield byte_lines(label, time.monotonic)
        return
    with _bar(label, is_bytes=True) as report:
        yield report


def byte_lines(label: str, clock: Callable[[], float]) -> Report:
    """Return what prints a line with the megabytes so far, once in ten seconds of ``clock``."""
    next_s = clock() + _LINE_S

    def report(done: int, total: int) -> None:
        nonlocal next_s
        if clock() >= next_s:
            next_s = clock() + _LINE_S
            end = f" of {total / 1e6:,.0f}" if total else ""
            say(f"{label}: {done / 1e6:,.0f}{end} MB")

    return report


def count_lines(label: str, clock: Callable[[], float], *, note: str = "") -> Report:
    """Return what prints a line with the count so far, once in ten seconds of ``clock``.

    The line says how long the rest will take at the pace since the first count.
    """
    next_s = clock() + _LINE_S
    first: tuple[float, int] | None = None

    def report(done: int, total: int) -> None:
        nonlocal next_s, first
        now_s = clock()
        begin_s, begun = first = first or (now_s, done)
        if now_s < next_s:
            return
        next_s = now_s + _LINE_S
        end = f" of {total:,}" if total else ""
        behind = f" {note}" if note else ""
        left = ""
        if total and done > begun:
            left_s = (now_s - begin_s) * (total - done) / (done - begun)
            left = f", about {_in_words(left_s)} left"
        say(f"{label}: {done:,}{end}{behind}{left}")

    return report


def _in_words(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.0f} h"


@contextmanager
def count_bar(label: str, *, note: str = "") -> Iterator[Report]:
    """Show ``label`` with a bar that counts; without a terminal, by a line every ten seconds.

    ``note`` stands after the count.
    """
    if not _is_terminal():
        yield count_lines(label, time.monotonic, note=note)
        return
    with _bar(label, is_bytes=False, note=note) as report:
        yield report


@contextmanager
def _bar(label: str, *, is_bytes: bool, note: str = "") -> Iterator[Report]:
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
        # What has not begun has neither a size nor a time: "0/?" says nothing.
        task = progress.add_task(label, total=None, visible=False)
        yield lambda done, total: progress.update(
            task, completed=done, total=total or None, visible=bool(done or total)
        )
