"""What programs in processes of their own share: limits on memory and time, and how they answer.

``system.process`` asks them. It imports nothing: such a program starts while a request waits.
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


_USUAL_BYTES = 256 << 20  # of addresses, where the system does not say: twice what Linux gives


def begin(max_bytes: int | None = None) -> None:
    """Leave Ctrl-C to the parent, which got it too; take at most this memory for good."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A library in Rust that writes where it panicked takes 50 MiB for it, and where they are not
    # to be had waits for itself for ever.
    os.environ["RUST_BACKTRACE"] = "0"
    if resource:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # of ``bound_cpu``: it ends the process
        if max_bytes:
            with suppress(ValueError, OSError):  # not every system has it
                resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def bound_growth(max_bytes: int) -> None:
    """Take at most this memory from now on; a later bound replaces this one."""
    if resource is None:
        return
    try:
        with open("/proc/self/statm", "rb") as file:
            size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        size_bytes = _USUAL_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = size_bytes + max_bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def bound_cpu(seconds: float) -> None:
    """End this process after these seconds of computing from now on, of all its threads together.

    So a limit says something of the question, and nothing of what else the machine has to do.
    """
    if resource:
        signal.setitimer(signal.ITIMER_PROF, seconds)


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
