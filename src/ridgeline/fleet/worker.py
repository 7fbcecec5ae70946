"""One model in a process of its own: ``ridgeline serve`` on a Unix socket that only we know."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx2

from ridgeline.engine_setup.resolve import EngineConfig
from ridgeline.machine import Memory, memory_of

STATUS_S = 1.0  # in which a process says how it is
_LOOK_S = 0.01  # from one look whether it sleeps to the next
_END_S = 5.0  # that a process gets to end by itself
_SILENT_S = 3.0  # after which it takes no more requests


class StartError(Exception):
    """A model could not be loaded; the text is the process's own last line."""


async def spare_process() -> asyncio.subprocess.Process:
    """Start a process that can load any model, and wait until it has imported what it needs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ridgeline.cli.model_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not _is_flag(name)},
        start_new_session=True,  # Ctrl-C is for the router, which ends its models itself
    )
    assert process.stdout is not None
    await process.stdout.readline()
    return process


class Worker:
    """A running model.

    Attributes:
        client: talks to it.
        plan: with what it was loaded.
        trouble: what is wrong with it, if anything.
        fate: how it ends.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, socket: Path, plan: EngineConfig
    ) -> None:
        """Take a process that starts; ``started`` waits for it."""
        self._process, self._socket = process, socket
        self._last_line = ""
        self._reading: asyncio.Task[None] | None = None
        self._silent_since_s: float | None = None
        self._is_lost = False
        self.plan = plan
        self.trouble, self.fate = "", "ended by itself"
        self.client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(
                uds=str(socket), limits=httpx2.Limits(max_connections=None)
            ),
            base_url="http://localhost",
            timeout=None,
        )

    @classmethod
    async def start(
        cls,
        process: asyncio.subprocess.Process,
        model: str,
        socket: Path,
        variables: Mapping[str, str],
        plan: EngineConfig,
        write: Callable[[str], object],
    ) -> Worker:
        """Let a process load a model, and wait until it answers.

        Args:
            process: from ``spare_process``.
            model: as people type it.
            socket: where it will listen.
            variables: its flags, as environment variables.
            plan: what they come to.
            write: takes its log lines.

        Raises StartError with its last words if it ends instead.
        """
        worker = cls(process, socket, plan)
        worker._reading = asyncio.create_task(worker._read(write))
        orders = {"variables": variables, "arguments": ["serve", model, "--uds", str(socket)]}
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(orders).encode() + b"\n")
            process.stdin.close()
            if not await process.stdout.readline():  # the line that says where it listens
                await worker._reading
                await process.wait()
                raise StartError(worker._last_line.removeprefix("ridgeline: ") or "it ended")
        except BaseException:
            worker.kill()
            await worker.stop()
            raise
        return worker

    async def _read(self, write: Callable[[str], object]) -> None:
        """Pass its log on, line by line."""
        assert self._process.stderr is not None
        while line := await _line(self._process.stderr):
            if text := line.decode(errors="replace").rstrip():
                self._last_line = text
                write(text)

    @property
    def memory(self) -> Memory:
        """What it uses now."""
        return memory_of(self._process.pid)

    @property
    def is_listening(self) -> bool:
        """Whether it takes connections, now or when it has time."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            return probe.connect_ex(str(self._socket)) not in (errno.ENOENT, errno.ECONNREFUSED)

    async def look(self) -> None:
        """Ask it how it is, with a second's patience; the result is in ``trouble``."""
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(STATUS_S):
                answer = await self.client.get("/health")
        except TimeoutError:
            self._silent_since_s = self._silent_since_s or began_s
            self.trouble = f"has not answered for {self._silent_s():.0f} s"
        except httpx2.HTTPError:  # it has ended, which is seen elsewhere
            return
        else:
            self._silent_since_s, self._is_lost = None, answer.status_code == 503
            self.trouble = f"cannot go on: {answer.json()['reason']}" if self._is_lost else ""

    def _silent_s(self) -> float:
        since_s, now_s = self._silent_since_s, asyncio.get_running_loop().time()
        return 0.0 if since_s is None else now_s - since_s

    @property
    def takes_requests(self) -> bool:
        """Whether it could still answer a request."""
        return not self._is_lost and self._silent_s() < _SILENT_S

    def is_hung(self, timeout_s: float) -> bool:
        """Whether it has been silent for so long, or says itself that it cannot go on."""
        return self._is_lost or self._silent_s() > timeout_s

    async def wait(self) -> None:
        """Wait until its process has ended."""
        await self._process.wait()

    def reload_keys(self) -> None:
        """Let it read its file of keys again."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGHUP)

    async def sleep(self) -> bool:
        """Let it give its memory back; return whether it did, within a second."""
        with contextlib.suppress(ProcessLookupError, httpx2.HTTPError, TimeoutError):
            self._process.send_signal(signal.SIGUSR1)
            async with asyncio.timeout(STATUS_S):
                while "asleep" not in (await self.client.get("/health")).json():
                    await asyncio.sleep(_LOOK_S)
                return True
        return False

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """End it; requests that still run are told, and end too."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading
        await self.client.aclose()
        self._socket.unlink(missing_ok=True)


def _is_flag(name: str) -> bool:
    """Whether a variable is one of the flags, which the router has read for all of its models."""
    return name.startswith("RIDGELINE_") and name != "RIDGELINE_HOME"


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line; of a very long one, pieces."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)
