"""One server of a model: ``ridgeline serve`` on a Unix socket that only we know.

It is a process of ours, or one of another machine that has joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2

from ridgeline.fleet.servers.remote_server import RemoteServer
from ridgeline.fleet.servers.transport import UnixTransport
from ridgeline.serve.http.errors import LEAVING
from ridgeline.serve.main import TUNNEL_KEY
from ridgeline.serve.tunnel.middleware import FINGERPRINT, HEADER, header_value
from ridgeline.system.machine import Memory, memory_of
from ridgeline.system.process import signal_of

Loaded = tuple[str, int]  # an adapter: its path, and which reading of it this is
STATUS_S = 1.0  # for a process to say how it is
_LOOK_S = 0.01  # between two looks whether it sleeps
_END_S = 5.0  # for a process to end by itself
_FACTS = ("digest", "system_fingerprint", "max_model_len", "parent")
_SILENT_S = 3.0  # after which it takes no more requests


class StartError(Exception):
    """A model could not be loaded; the text is the process's own last line."""


class Draining(Exception):
    """A server does not answer, or is about to leave, and another one is there."""


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
        key: by which it knows requests of this router.
        number: which server of its model it is.
        client: talks to it.
        trouble: what is wrong with it, if anything.
        is_leaving: whether it was told to end, as far as is known.
        since_s: when it was ready, as a time of the epoch.
        trial: held by the one request that may have ended another server, until it has brought
            something here.
        audit: what it says of lines that its audit log has lost.
        facts: what it says in ``/v1/models`` of its model and adapters, by name, since it joined or
            a request has asked for it.
        adapters: those that it was given since it started, or has from then.
    """

    def __init__(
        self, process: ChildProcess | RemoteServer, socket: Path, number: int, key: str
    ) -> None:
        """Take a server that listens on ``socket``, or will."""
        self._process, self._socket, self.key = process, socket, key
        self._last_line = ""
        self._reading: asyncio.Task[None] | None = None
        self._silent_since_s: float | None = None
        self._is_lost, self._is_ended_by_us = False, ""
        self._was_let_go, self._patience, self._heard_s = False, 1.0, 0.0
        self._requests = dict[asyncio.Timeout, Callable[[], Awaitable[None]]]()  # that it has
        self._moving = dict[asyncio.Timeout, asyncio.Task[None]]()  # those that are let go
        self.number = number
        self.trouble, self.since_s, self.is_leaving, self.audit = "", 0.0, False, ""
        self.trial = asyncio.Lock()
        self.facts: dict[str, dict[str, Any]] = {}
        self._spent: dict[str, int] = {}
        self.adapters: dict[str, Loaded] | None = None
        self._link = UnixTransport(socket)
        self.client = httpx2.AsyncClient(
            transport=self._link, base_url="http://localhost", timeout=None
        )

    @classmethod
    async def start(
        cls,
        process: asyncio.subprocess.Process,
        model: str,
        socket: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        number: int,
        write: Callable[[str], object],
    ) -> Worker:
        """Let a process load a model, and wait until it answers.

        Args:
            process: from ``spare_process``.
            model: as people type it.
            socket: where it will listen.
            arguments: its flags that may be there several times.
            variables: its other flags, as environment variables, and its ``TUNNEL_KEY``.
            number: which server of its model it will be.
            write: takes its log lines.

        Raises StartError with its last words if it ends instead.
        """
        worker = cls(ChildProcess(process), socket, number, variables[TUNNEL_KEY])
        worker._reading = asyncio.create_task(worker._read(process, write))
        order = ["serve", model, "--uds", str(socket), *arguments]
        orders = {"variables": variables, "arguments": order}
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
        worker.since_s = time.time()
        return worker

    async def _read(
        self, process: asyncio.subprocess.Process, write: Callable[[str], object]
    ) -> None:
        """Pass its log on, line by line."""
        assert process.stderr is not None
        while line := await _line(process.stderr):
            if text := line.decode(errors="replace").rstrip():
                self._last_line = text
                write(text)

    @property
    def memory(self) -> Memory:
        """What it uses now."""
        return self._process.memory

    async def fingerprint(self) -> str:
        """Return the fingerprint of its answers. Raises httpx2.HTTPError."""
        async with asyncio.timeout(_END_S):
            answer = await self.client.get("/health", headers=self._own())
        return answer.headers.get(FINGERPRINT.decode(), "")

    async def log_id(self) -> str:
        """Return the id of its audit log, nothing if it has none. Raises httpx2.HTTPError."""
        answer = await self.client.get("/v1/audit/head", headers=self._own())
        return str(json_of(answer)["log"]) if answer.is_success else ""

    async def send(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; return its answer once it begins. Raises httpx2.TransportError.

        It goes past the client, whose layers would read each piece of the answer too.
        """
        return await self._link.handle_async_request(request)

    async def order(self, path: str, fields: Mapping[str, Any]) -> httpx2.Response:
        """Ask for what operators may ask for, as the router. Raises httpx2.HTTPError."""
        return await self.client.post(path, json=fields, headers=self._own())

    def _own(self) -> dict[str, str]:
        """Return the header of a request that is the router's own."""
        value = header_value(self.key, 0, datetime.now(UTC), b"", is_own=True)
        return {HEADER.decode(): value.decode()}

    @property
    def is_listening(self) -> bool:
        """Whether it takes connections, now or when it has time."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            return probe.connect_ex(str(self._socket)) not in (errno.ENOENT, errno.ECONNREFUSED)

    async def look(self) -> None:
        """Ask it how it is, and wait a second at most; the result is in ``trouble``."""
        try:
            async with asyncio.timeout(STATUS_S):
                answer = await self.client.get("/health")
            said = json_of(answer)
        except TimeoutError:
            # Not since it was asked: all may have stood still meanwhile.
            asked_s = time.monotonic() - STATUS_S
            if self._heard_s > asked_s:  # it is busy
                self._silent_since_s, self.trouble = None, ""
                return
            self._silent_since_s = self._silent_since_s or asked_s
            self.trouble = f"has not answered for {self._silent_s():.0f} s"
        except httpx2.HTTPError:  # it has ended, which is seen elsewhere
            return
        else:
            self._silent_since_s, self._is_lost = None, answer.status_code == 503
            self.trouble = f"cannot go on: {said['reason']}" if self._is_lost else ""
            self.audit, self.is_leaving = said.get("audit", ""), LEAVING in said
            if not self._is_lost and self._was_let_go:  # it was slow, no more
                self._was_let_go = False
                self._patience *= 2

    async def learn(self) -> None:
        """Ask it, once, what its model, adapters and answers are called by their contents."""
        if not self.facts and not self.trouble:
            with contextlib.suppress(TimeoutError, httpx2.HTTPError):  # the next time then
                async with asyncio.timeout(STATUS_S):
                    answer = await self.client.get("/v1/models", headers=self._own())
                for one in json_of(answer)["data"] if answer.is_success else ():
                    self.facts[one["id"]] = {fact: one[fact] for fact in _FACTS if fact in one}

    def _silent_s(self) -> float:
        since_s = self._silent_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def hear(self) -> None:
        """Take note that it has just brought a piece of an answer: it lives, however busy."""
        self._heard_s = time.monotonic()

    def newly_spent(self, label: str, spent: int) -> int:
        """Return by how many tokens a key's total has grown since it last said one."""
        before = self._spent.get(label, 0)
        self._spent[label] = max(before, spent)
        return self._spent[label] - before

    async def check_leaving(self) -> bool:
        """Ask a server that has refused whether it was told to end; return what it says."""
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(STATUS_S):
                    answer = await self.client.get("/ready")
                self.is_leaving = LEAVING in json_of(answer)
            except httpx2.HTTPError:  # it has ended
                self.is_leaving = True
        return self.is_leaving

    @property
    def takes_requests(self) -> bool:
        """Whether it could still answer a request."""
        return not (self._is_lost or self.leaves) and self._silent_s() < _SILENT_S

    @property
    def leaves(self) -> bool:
        """Whether it has said that it will end, and goes on until its requests have gone."""
        return self.is_leaving or self._process.is_leaving

    def is_silent(self, timeout_s: float) -> bool:
        """Whether it has not answered for so long.

        Each time that this was a mistake, it gets twice as long. So requests stop moving even on a
        machine where all servers are slower than was thought (the detector "eventually perfect" of
        Chandra and Toueg, 1996).
        """
        return self._silent_s() >= timeout_s * self._patience

    def is_hung(self, timeout_s: float) -> bool:
        """Whether it has been silent for so long, or says itself that it cannot go on."""
        return self._is_lost or self._silent_s() > timeout_s

    @contextlib.asynccontextmanager
    async def having(self, prepare: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Have it answer a request within the block. Raises Draining when ``let_go`` is called.

        ``prepare`` is run before that if the server leaves, since it still answers then.
        """
        request = asyncio.timeout(None)
        try:
            async with request:
                self._requests[request] = prepare
                yield
        except TimeoutError:
            if request.expired():
                raise Draining(self.trouble) from None
            raise
        finally:
            self._requests.pop(request, None)
            if (moving := self._moving.pop(request, None)) is not None:
                moving.cancel()

    def let_go(self) -> int:
        """Let its requests go to another server; return how many there were."""
        requests, self._requests = self._requests, {}
        for request, prepare in requests.items():
            if self.leaves:
                self._moving[request] = asyncio.ensure_future(self._prepared(request, prepare))
            else:
                request.reschedule(asyncio.get_running_loop().time())
        self._was_let_go |= bool(requests)
        return len(requests)

    async def _prepared(
        self, request: asyncio.Timeout, prepare: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            await prepare()
        finally:
            if request in self._moving:  # it is not over yet
                request.reschedule(asyncio.get_running_loop().time())

    @property
    def node(self) -> str:
        """The machine that it runs on; empty for this one."""
        return self._process.node

    @property
    def place(self) -> str:
        """What it was told by whatever started it elsewhere; empty if nothing has."""
        return self._process.place

    @property
    def is_there(self) -> bool:
        """Whether it runs, and is no zombie."""
        return self._process.is_there

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def fate(self) -> str:
        """How its process has ended, or is about to."""
        return self._is_ended_by_us or self._process.fate

    @property
    def is_well(self) -> bool:
        """Whether it runs, and has answered when it was last asked."""
        return self._process.returncode is None and not (self.trouble or self._is_ended_by_us)

    @property
    def has_failed(self) -> bool:
        """Whether it hangs, or ended in a way that a request may have caused: by itself.

        The kernel's SIGKILL when memory is short does not count: all requests share in that.
        """
        code = self._process.returncode
        if code is None or self._is_ended_by_us:
            return not self.is_well
        return code not in (0, -signal.SIGKILL, -signal.SIGTERM)

    async def wait(self) -> None:
        """Wait until its process has ended."""
        await self._process.wait()

    def end_hung(self) -> None:
        """End it since it does not answer."""
        self._is_ended_by_us = f"{self.trouble} and is ended"
        self.kill()

    def reload_keys(self) -> None:
        """Let it read its file of keys again."""
        self._process.send_signal(signal.SIGHUP)

    async def sleep(self) -> bool:
        """Let it give its memory back; return whether it did, within a second."""
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):
            self._process.send_signal(signal.SIGUSR1)
            async with asyncio.timeout(STATUS_S):
                while "asleep" not in json_of(await self.client.get("/health")):
                    await asyncio.sleep(_LOOK_S)
                return True
        return False

    def kill(self) -> None:
        """End it at once."""
        self._process.send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        """End it; requests that still run are told, and end too."""
        for what in (signal.SIGTERM, signal.SIGINT):  # the second says: do not wait for them
            self._process.send_signal(what)
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading
        await self.client.aclose()
        self._socket.unlink(missing_ok=True)


def json_of(answer: httpx2.Response) -> Any:
    """Return an answer as JSON. Raises httpx2.DecodingError if it is not, as over a bad link."""
    try:
        return answer.json()
    except ValueError as error:
        raise httpx2.DecodingError(f"no JSON: {error}", request=answer.request) from None


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
        name = signal_of(self.returncode)
        return f"ended by itself ({name})" if name else "ended by itself"

    def send_signal(self, what: signal.Signals) -> None:
        """Send it a signal, if it runs.

        ``Process.send_signal`` would first look whether it has ended; how it ended would then be
        lost to those who wait for it.
        """
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, what)
