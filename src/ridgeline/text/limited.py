"""What programs in processes of their own share: limits on memory and time, and how they answer.

``text.child`` asks them. It imports nothing: such a program starts while a request waits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

try:
    import resource
except ImportError:  # Windows: the parent's limit on time is all there is
    resource = None  # type: ignore[assignment]


def begin(max_bytes: int) -> None:
    """Leave Ctrl-C to the parent, which got it too; take at most this memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if resource:
        with suppress(ValueError, OSError):  # not every system has it
            resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def bound_cpu(seconds: int) -> None:
    """End this process after these seconds of computing from now on.

    The parent's limit is on the time that passes, and is gone if the parent was killed.
    """
    if resource is None:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = int(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = used_s + 1 + seconds
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def lines() -> Iterator[bytes]:
    """Yield what the parent writes, line by line; once it has ended, amid a line or not, end."""
    while (line := sys.stdin.buffer.readline()).endswith(b"\n"):
        yield line
    sys.exit(0)


def answer(value: dict[str, Any]) -> None:
    """Write a line for the parent; if that has ended, end."""
    try:
        sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # the line stays in the buffer, and would be written at the exit again
        os._exit(0)
