"""The parts, each in processes with a deadline: a kernel that hangs or faults ends its case alone.

A process announces each case as it begins and ends. If it is lost, or silent for too long, the case
under way is what is wrong, and a new process goes on behind it.
"""

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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

Finding = Mapping[str, Any]

# Seconds that each may take on a GPU, in the order of what must be known first.
PARTS: Mapping[str, float] = {
    "smoke": 110, "correct": 80, "bits": 65, "engine": 150, "roof": 20, "products": 45,
    "attention": 40, "peer": 60,
}  # fmt: skip
# Processes side by side, where nothing is timed but what decides nothing: they compile together.
_WORKERS: Mapping[str, int] = {"correct": 4, "bits": 4}
_TINY_S = 600.0  # of a part on a CPU, however busy the machine is
_SILENT_S = 60.0  # of a case on a GPU: the first of a part compiles
_REPORT_S = 8.0  # before its deadline a part begins nothing new
_LEAST_S = 12.0  # for a process to be begun
_TAIL = 4  # lines of what else a part printed, as of an error
_MODULE = "ridgeline.backends.cuda.measure"
NO_DEVICE = 3  # its status where there is nothing to compute on; its last line says why
LOST = 5  # its status where a device failed for good, in a case that it named


class ProcessEnd(NamedTuple):
    """How a process ended.

    Attributes:
        code: its status; None if it was ended.
        tail: the last lines of what was no finding.
        known: cases that ended.
        lost: the case that it did not end, nor say why; "" for none.
    """

    code: int | None
    tail: list[str]
    known: list[str]
    lost: str = ""


def measure(
    part: str, *, left_s: float, is_tiny: bool, home: Path, take: Callable[[Finding], None]
) -> None:
    """Run a part within ``left_s``, and hand on its findings; kernels are kept below ``home``."""
    seconds = _TINY_S if is_tiny else min(PARTS[part], left_s)
    kernels = str(home / "kernels" / "triton")
    cache = {"TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", kernels)}
    count = 1 if is_tiny else _WORKERS.get(part, 1)
    command = [sys.executable, "-m", _MODULE, part, "--workers", f"{count}"]
    if is_tiny:
        command.append("--tiny")
    silent_s = _TINY_S if is_tiny else _SILENT_S
    run(part, command, seconds, os.environ | cache, take, silent_s=silent_s, workers=count)


def run(
    part: str,
    command: Sequence[str],
    seconds: float,
    env: Mapping[str, str],
    take: Callable[[Finding], None],
    *,
    silent_s: float = _SILENT_S,
    workers: int = 1,
) -> None:
    """Run a command in as many processes, and hand on each line of JSON; the last is their end.

    Each is told which worker it is, its seconds, and which cases are known already.

    Args:
        part: what findings of its own are of.
        command: of a process.
        seconds: what still runs then is killed, with all processes that it started.
        env: of the processes.
        take: called with each finding.
        silent_s: how long a case may say nothing.
        workers: processes side by side.
    """
    begin_s, team = time.monotonic(), _Team()

    def take_one(finding: Finding) -> None:
        with team.lock:
            take(finding)

    worker = partial(_work, team, part, command, begin_s + seconds, env, take_one, silent_s)
    with ThreadPoolExecutor(workers) as pool:
        try:
            ends = list(pool.map(worker, range(workers)))
        finally:
            team.stop()
    worst = next((end for end in ends if end.code != 0), ends[0])
    took_s = time.monotonic() - begin_s
    take({"part": part, "what": "end", "code": worst.code, "seconds": took_s, "tail": worst.tail})


class _Team:
    """Processes that are under way, until all are told to stop."""

    def __init__(self) -> None:
        """Begin with none."""
        self.lock = threading.Lock()
        self._is_over, self._processes = False, list[_Process]()

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> _Process | None:
        """Start a process; None if it is too late."""
        with self.lock:
            if self._is_over:
                return None
            self._processes.append(_Process(command, env))
            return self._processes[-1]

    def stop(self) -> None:
        """Kill all processes, and start none any more."""
        with self.lock:
            self._is_over = True
        for process in self._processes:
            process.kill()


def _work(
    team: _Team,
    part: str,
    command: Sequence[str],
    end_s: float,
    env: Mapping[str, str],
    take: Callable[[Finding], None],
    silent_s: float,
    worker: int,
) -> ProcessEnd:
    """Run a worker's process, and new ones behind each case in which one is lost."""
    known: list[str] = []
    while True:
        left_s = end_s - time.monotonic()
        given = ["--worker", f"{worker}", "--seconds", f"{left_s - _REPORT_S:.1f}"]
        process = team.start([*command, *given, "--skip", json.dumps(known)], env)
        if process is None:
            return ProcessEnd(None, [], known)
        ended = process.follow(end_s, silent_s, take)
        known += ended.known
        if ended.lost:
            known.append(ended.lost)
            why = _why(ended, is_late=end_s <= time.monotonic())
            take({"part": part, "what": ended.lost, "failed": why, "ok": False})
        goes_on = ended.lost or (ended.known and ended.code == LOST)
        if not goes_on or end_s - time.monotonic() < _LEAST_S:
            return ended


def _why(ended: ProcessEnd, *, is_late: bool) -> str:
    last = (ended.tail or [""])[-1]
    if ended.code is not None:
        return f"its process ended with {ended.code}: {last}"
    return f"{'no time was left' if is_late else 'silent for too long'}, killed. {last}".rstrip()


class _Process:
    """A process, and the lines that it prints."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it, in a group of its own."""
        self._child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(env) | {"PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_read, args=(self._child, self._lines), daemon=True)
        self._reader.start()
        self._under_way: list[str] = []  # cases, of which each may be part of the one before
        self._known: list[str] = []
        self._tail: list[str] = []

    def follow(self, end_s: float, silent_s: float, take: Callable[[Finding], None]) -> ProcessEnd:
        """Hand on its findings until it ends; kill it at its end, or when it is silent."""
        code: int | None = None
        try:
            with contextlib.suppress(queue.Empty, subprocess.TimeoutExpired):
                while (line := self._lines.get(timeout=self._left_s(end_s, silent_s))) is not None:
                    self._note(line, take)
                code = self._child.wait(timeout=self._left_s(end_s, silent_s))
        finally:
            self.kill()
            self._reader.join(_REPORT_S)
        lost = self._under_way[-1] if self._under_way and code not in (0, LOST) else ""
        return ProcessEnd(code, self._tail, self._known, lost)

    def kill(self) -> None:
        """Kill it, and all that it started."""
        _kill(self._child)

    def _left_s(self, end_s: float, silent_s: float) -> float:
        left_s = end_s - time.monotonic()
        return max(0.0, min(left_s, silent_s) if self._under_way else left_s)

    def _note(self, line: str, take: Callable[[Finding], None]) -> None:
        found = _object(line)
        if found is None:
            if line.strip():
                self._tail = [*self._tail[1 - _TAIL :], line.rstrip()]
        elif "begins" in found:
            self._under_way.append(found["begins"])
        elif "ends" in found:
            self._under_way.remove(found["ends"])
            self._known.append(found["ends"])
        else:
            take(found)


def _read(child: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert child.stdout is not None
    with child.stdout as output:
        for line in output:
            lines.put(line)
    lines.put(None)


def _object(line: str) -> Finding | None:
    """Return a line of JSON that is a part's; None of what libraries print."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    known = isinstance(found, dict) and "part" in found
    return found if known and found.keys() & {"what", "begins", "ends"} else None


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill a process and those that it started. One that waits for a driver may outlive that."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_REPORT_S)
