"""The programs of ``system.process`` without a new Python for each: one process imports and forks.

A file's program still has a process of its own, with the limits it sets itself. What is left out is
the start of Python, 60 ms of computing, which is the same for all files.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PROGRAMS = ("ridgeline.text.template.process", "ridgeline.text.tokenizers.process")
_lock = threading.Lock()


class Forked:
    """A program's process, with what ``Child`` asks of a Popen."""

    def __init__(self, program: Path, forker: socket.socket) -> None:
        stdin, stdout = os.pipe(), os.pipe()
        with _lock:
            socket.send_fds(forker, [str(program).encode()], [stdin[0], stdout[1]])
            _, [self._pidfd], _, _ = socket.recv_fds(forker, 1, 1)
        os.close(stdin[0])
        os.close(stdout[1])
        self.stdin, self.stdout = os.fdopen(stdin[1], "wb"), os.fdopen(stdout[0], "rb")
        self._ending = select.poll()
        self._ending.register(self._pidfd, select.POLLIN)

    def poll(self) -> int | None:
        """Return None while it runs."""
        return 0 if self._pidfd < 0 or self._ending.poll(0) else None

    def kill(self) -> None:
        """End it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end. Raises TimeoutExpired."""
        if not self._ending.poll(None if timeout is None else 1e3 * timeout):
            raise subprocess.TimeoutExpired("a program", timeout or 0)
        os.close(self._pidfd)
        self._pidfd = -1


def forks() -> Callable[[Path], Forked]:
    """Start the process that forks; return what makes a process of a program's path."""
    ours, its = socket.socketpair()
    command = [sys.executable, "-P", __file__, str(its.fileno())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
    its.close()
    return lambda program: Forked(program, ours)


def _main(asking: socket.socket) -> None:
    """Fork for each path of a program that comes with the pipes it is to use, until no more come.

    A process waits for its first line, so that it is there when it gets its handle.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    programs = {str(one.__file__): one for one in map(importlib.import_module, _PROGRAMS)}
    gc.freeze()
    while True:
        path, pipes, _, _ = socket.recv_fds(asking, 4096, 2)
        if not path:
            return
        if not (pid := os.fork()):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asking.close()
            for ours, its in enumerate(pipes):
                os.dup2(its, ours)
                os.close(its)
            programs[path.decode()].main()
            os._exit(0)
        handle = os.pidfd_open(pid)
        socket.send_fds(asking, [b"."], [handle])
        for one in (handle, *pipes):
            os.close(one)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the program itself sets it
    _main(socket.socket(fileno=int(sys.argv[1])))
