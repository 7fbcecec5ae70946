"""Which files of an audit log are old, by what lines show and not by one reading of the clock.

A clock may be wrong for a while, in either direction. So the present is what lines of two whole
days before today have shown: a time at which nothing else was written is no proof of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ridgeline.trust.audit.lines import written_time

_DAYS = 2  # that must have shown a time, before a file is as old as that says


class EndedFile(NamedTuple):
    """A file that gets no more lines, and when its last one was written: seconds of the epoch.

    The time is None if no line in it says so.
    """

    file: Path
    last_s: float | None


def seconds_of(time: str) -> float | None:
    """Return a time of a line as seconds of the epoch; None if it is none."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def day_of(now_s: float) -> str:
    """Return the day of a time, UTC."""
    return written_time(now_s)[:10]


def old_files(ended: Sequence[EndedFile], now_s: float, keep_s: float) -> Sequence[EndedFile]:
    """Return which of a log's files, the first ones, were ended more than ``keep_s`` ago.

    A file of a day that has not come yet was written while the clock was wrong: it is as old as
    the next one.
    """
    today = day_of(now_s)
    past = [one.last_s for one in ended if one.last_s is not None and day_of(one.last_s) < today]
    days = sorted(set(map(day_of, past)))
    if len(days) < _DAYS:
        return ()
    present_s = max(time_s for time_s in past if day_of(time_s) <= days[-_DAYS])
    num_old = 0
    for i, one in enumerate(ended, start=1):
        if one.last_s is None:
            break
        if day_of(one.last_s) > today:
            continue
        if one.last_s >= present_s - keep_s:
            break
        num_old = i
    return ended[:num_old]
