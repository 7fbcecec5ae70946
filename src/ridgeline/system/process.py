"""Processes that this one starts: how they begin and end, and programs that answer in them.

A program is for work whose time and memory nothing else can limit: it is asked in lines of JSON,
and may be stopped. Its process starts with the first question, or when told to, and sleeps between
two. It limits its own computing and memory (``text.process_limits``), and is gone if a question
takes more; the next one gets a new process. If no answer has come long after that, it is killed:
then not the question is at fault, but the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NUM_PROCESSES = 3  # of one program
BUSY_TIMES = 20  # as long as what it may compute, a question may take where others compute as well
_START_S, _GOODBYE_S = 20.0, 1.0
_NUM_PIECES = 20  # in which a time is waited for
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(what: signal.Signals) -> None:
    """Ask for a signal when the parent process is gone; on systems other than Linux we live on."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, what)
        if os.getppid() != parent:  # it went in this moment
            sys.exit(1)


def start_connected(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module, which is told its end of a connection; return ours too. Raises OSError."""
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(its.fileno())],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return process, ours


def end_within(grace_s: float, process: subprocess.Popen[Any]) -> None:
    """Wait for a process that is about to end by itself; kill it if it takes longer."""
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def signal_of(status: int | None) -> str:
    """Return the name of the signal that ended a process of this status; "" if none did."""
    names = {-one: one.name for one in signal.Signals}
    return names.get(status, f"signal {-status}") if status and status < 0 else ""


class RunningTime:
    """How long something takes; time in which all processes stand still does not count."""

    def __init__(self, most_s: float) -> None:
        """Begin; of what passes between two looks no more than ``most_s`` counts."""
        self._most_s, self._looked_s, self.passed_s = most_s, time.monotonic(), 0.0

    def look(self) -> float:
        """Return how many seconds have passed; it must be called again and again."""
        looked_s, self._looked_s = self._looked_s, time.monotonic()
        self.passed_s += min(self._looked_s - looked_s, self._most_s)
        return self.passed_s


class Overdue(ChildProcessError):
    """No answer came, though the process has computed less than it may: the machine is too busy."""


class Child:
    """Asks one program. One question at a time: its owner sees to that.

    Attributes:
        has_started: whether it could be started once. If it cannot any more, the machine is the
            reason, and not the greeting.
    """

    def __init__(self, program: Path, greeting: Callable[[], Any]) -> None:
        """Prepare to run ``program``, whose first line is what ``greeting`` returns."""
        self._program, self._greeting = program, greeting
        self._process: subprocess.Popen[bytes] | None = None
        self.has_started = False

    @property
    def is_running(self) -> bool:
        """Whether there is a process that can be asked without starting one."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process, unless it runs. Raises ChildProcessError if it does not answer.

        Overdue, which is one, if it only takes too long.
        """
        if self._process and self._process.poll() is not None:  # it was killed
            self.close()
        if self._process is not None:
            return
        self._process = _started(self._program)
        self._finalizer = weakref.finalize(self, _end, self._process)
        if not self._exchange(self._process, self._greeting(), _START_S):
            self.close()
            raise ChildProcessError("its process does not start")
        self.has_started = True

    def ask(self, value: Any, limit_s: float) -> Any:
        """Return the answer to a value; None if the process has ended over it.

        Raises ChildProcessError if it does not start, and Overdue if no answer came in ``limit_s``.
        """
        self.start()
        assert self._process is not None
        reply = self._exchange(self._process, value, limit_s)
        if not reply:
            self.close()
            return None
        return json.loads(reply)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _exchange(self, process: subprocess.Popen[bytes], value: Any, limit_s: float) -> bytes:
        """Send a value and return the line that answers it, nothing if the process is gone.

        Raises Overdue if it was killed for it.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        has_answered, is_late = threading.Event(), threading.Event()
        threading.Thread(target=_kill_late, args=(process, has_answered, is_late, limit_s)).start()
        try:
            process.stdin.write(json.dumps(value).encode() + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        except BaseException:  # Ctrl-C: an unread answer must not be taken for the next one
            process.kill()
            self.close()
            raise
        finally:
            has_answered.set()
        if not reply and is_late.is_set():
            self.close()
            raise Overdue(f"there was no answer in {limit_s:g} s, for the machine is busy")
        return reply


class Children:
    """A few processes of one program, ``NUM_PROCESSES`` at most. Any thread may ask.

    A further process starts when all that run are busy.
    """

    def __init__(self, program: Path, greeting: Callable[[], Any]) -> None:
        """Prepare to run ``program``, as ``Child`` does."""
        self._all = [Child(program, greeting) for _ in range(NUM_PROCESSES)]
        self._idle = list(self._all)  # the last is next
        self._are_idle = threading.Semaphore(NUM_PROCESSES)

    @property
    def has_started(self) -> bool:
        """Whether a process could be started once: ``Child`` has it."""
        return any(child.has_started for child in self._all)

    def start(self) -> None:
        """Start one process now. Raises ChildProcessError if it does not answer."""
        with self._one() as child:
            child.start()

    def ask(self, value: Any, limit_s: float) -> Any:
        """Return the answer to a value, None or an error as ``Child.ask`` does."""
        with self._one() as child:
            answer = child.ask(value, limit_s)
            if answer is None:  # the next caller need not wait for the start
                with suppress(ChildProcessError):
                    child.start()
            return answer

    def close(self) -> None:
        """End the processes, when they have answered."""
        for _ in range(NUM_PROCESSES):
            self._are_idle.acquire()
        for child in self._idle:
            child.close()
        self._are_idle.release(NUM_PROCESSES)

    @contextmanager
    def _one(self) -> Iterator[Child]:
        with self._are_idle:
            child = self._idle.pop()
            try:
                yield child
            finally:
                self._idle.append(child)


def _started(program: Path) -> subprocess.Popen[bytes]:
    # -P: no module beside the program may replace one of the standard library.
    command = [sys.executable, "-P", str(program)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _kill_late(
    process: subprocess.Popen[bytes],
    has_answered: threading.Event,
    is_late: threading.Event,
    limit_s: float,
) -> None:
    """Kill a process that does not answer in time."""
    piece_s = limit_s / _NUM_PIECES
    waited = RunningTime(piece_s)
    while not has_answered.wait(piece_s):
        if waited.look() >= limit_s:
            is_late.set()
            process.kill()
            return


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the process see the end of its input, and wait for it to go."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it is gone, with something unread
        process.stdin.close()
    end_within(_GOODBYE_S, process)
    process.stdout.close()
