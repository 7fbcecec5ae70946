"""The parts, each a process with a deadline: a kernel that hangs or faults ends its part alone."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Finding = Mapping[str, Any]

# Seconds that each may take on a GPU, in the order of what must be known first.
PARTS: Mapping[str, float] = {
    "smoke": 80, "correct": 80, "bits": 80, "engine": 150, "roof": 25, "products": 50,
    "attention": 50, "peer": 70,
}  # fmt: skip
_TINY_S = 600.0  # of a part on a CPU, however busy the machine is
_REPORT_S = 8.0  # before its deadline a part begins nothing new
_TAIL = 4  # lines of what else a part printed, as of an error
_MODULE = "ridgeline.backends.cuda.measure"
NO_DEVICE = 3  # its status where there is nothing to compute on; its last line says why


def measure(
    part: str, *, left_s: float, is_tiny: bool, home: str, take: Callable[[Finding], None]
) -> None:
    """Run a part within ``left_s``, and hand on its findings; kernels are kept in ``home``."""
    seconds = _TINY_S if is_tiny else min(PARTS[part], left_s)
    env = {"PYTHONUNBUFFERED": "1", "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", home)}
    command = [sys.executable, "-m", _MODULE, part, "--seconds", f"{seconds - _REPORT_S:.1f}"]
    if is_tiny:
        command.append("--tiny")
    run(part, command, seconds, os.environ | env, take)


def run(
    part: str,
    command: Sequence[str],
    seconds: float,
    env: Mapping[str, str],
    take: Callable[[Finding], None],
) -> None:
    """Run a command, and hand on each line of JSON as it comes; the last finding is its end.

    What still runs after ``seconds`` is killed, with all processes that it started.
    """
    begin_s = time.monotonic()
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(env),
        process_group=0,
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(child, lines), daemon=True)
    reader.start()
    tail: list[str] = []
    code: int | None = None  # of a part that was ended
    try:
        with contextlib.suppress(queue.Empty, subprocess.TimeoutExpired):
            while (line := lines.get(timeout=_left_s(begin_s, seconds))) is not None:
                finding = _finding(line)
                if finding is not None:
                    take(finding)
                elif line.strip():
                    tail = [*tail[1 - _TAIL :], line.rstrip()]
            code = child.wait(timeout=_left_s(begin_s, seconds))
    finally:
        _kill(child)
        reader.join(_REPORT_S)
    took_s = time.monotonic() - begin_s
    take({"part": part, "what": "end", "code": code, "seconds": took_s, "tail": tail})


def _read(child: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert child.stdout is not None
    with child.stdout as output:
        for line in output:
            lines.put(line)
    lines.put(None)


def _left_s(begin_s: float, seconds: float) -> float:
    return max(0.0, begin_s + seconds - time.monotonic())


def _finding(line: str) -> Finding | None:
    """Return a line of JSON as a finding; None of what libraries print."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "part" in found and "what" in found else None


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill a process and those that it started. One that waits for a driver may outlive that."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_REPORT_S)
