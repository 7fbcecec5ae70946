"""A process of this machine that runs a server, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from ridgeline.system.machine import Memory, memory_of


class ChildProcess:
    """A process of ours.

    Attributes:
        pid: its number.
        node: its machine, which is this one; ``place``: nothing, for the same reason.
        is_leaving: whether it has said so over a link; a child of ours has none.
        wait: waits until it has ended.
    """

    node, place, is_leaving = "", "", False

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Take a process that has been started."""
        self._process, self.pid, self.wait = process, process.pid, process.wait

    @property
    def returncode(self) -> int | None:
        """How it has ended; None while it runs."""
        return self._process.returncode

    @property
    def memory(self) -> Memory:
        """What it uses now."""
        return memory_of(self.pid)

    @property
    def is_there(self) -> bool:
        """Whether it runs; a zombie, whose end nobody has seen yet, has no memory."""
        return self.memory.resident_bytes > 0

    @property
    def fate(self) -> str:
        """How it has ended, or is about to."""
        code = self.returncode
        how = f" ({signal.Signals(-code).name})" if code and code < 0 else ""
        return f"ended by itself{how}"

    def send_signal(self, what: signal.Signals) -> None:
        """Send it a signal, if it runs.

        ``Process.send_signal`` would first look whether it has ended; how it ended would then be
        lost to those who wait for it.
        """
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, what)
