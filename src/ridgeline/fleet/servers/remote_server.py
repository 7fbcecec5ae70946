"""Servers of other machines: they come over links that they open, and prove that they belong here.

Each gets a Unix socket on the router's machine, and every connection to that socket becomes one
more link. So the rest of the router speaks to all servers alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_state import LINK_PATH, LINK_PROTOCOL
from ridgeline.serve.tunnel.proof import (
    FOREIGN,
    GREETING_S,
    LINE_BYTES,
    TICKET,
    FleetLink,
    NotTaken,
    Ticket,
    accept,
    derived,
    greet_server,
    join_streams,
)
from ridgeline.system.machine import Memory

_LEFT, _LOST = 0, 1  # how one has ended, as if it were a process of ours
_FIELDS = {"node": str, "pid": int, "model": str, "version": str, "keys": str}  # of a server


class RemoteServer:
    """A server of another machine, as if it were a process.

    Attributes:
        id: what it calls itself; ``node``: its machine; ``pid``: its number there.
        place: what it was told by whatever started it; empty if nothing has.
        facts: what it says of itself.
        tunnel_key: by which it knows requests of this router.
        returncode: None while it is there.
        memory: unknown here.
        is_leaving: whether it has said that it will end.
    """

    memory = Memory(0, 0)

    def __init__(self, link: FleetLink, said: dict[str, Any], key: bytes) -> None:
        """Take a server that has proved itself. Raises NotTaken if it does not say what it must."""
        for name, kind in _FIELDS.items():
            if type(said.get(name)) is not kind:
                raise NotTaken(f"it sent no {name}")
        self._link, self.facts = link, said
        self.tunnel_key = derived(key, said["id"])
        self.id, self.node, self.pid = said["id"], said["node"][:64], said["pid"]
        self.place = str(said.get("place", ""))
        self.returncode: int | None = None
        self.is_leaving = False
        self._ended = asyncio.Event()
        self._wanted: dict[int, asyncio.Future[FleetLink]] = {}  # links, by their numbers
        self._open_numbers = set[int]()  # of those that wait for a link
        self._num_wanted = 0
        self._listener: asyncio.Server | None = None
        self._passing = set[asyncio.Task[None]]()

    async def listen(self, path: Path) -> None:
        """Take connections on a Unix socket."""
        self._listener = await asyncio.start_unix_server(self._pass_on, str(path))

    async def stay(self) -> None:
        """Listen to what it says until its link ends."""
        try:
            while True:
                said = await self._link.hear()
                self.is_leaving |= "leaving" in said
                self._link.say(beat=True)
        except (OSError, NotTaken):
            pass
        finally:
            self._end(_LEFT if self.is_leaving else _LOST)

    def refuse(self, why: str) -> None:
        """Let it go, and say why, if it is there."""
        if self.is_there:
            self._link.say(refused=why)
            self._end(_LEFT)

    def expects(self, number: int) -> bool:
        """Whether it was asked for this link for the first time; from now on it was."""
        is_expected = number in self._open_numbers
        self._open_numbers.discard(number)
        return is_expected

    def offer(self, number: int, link: FleetLink) -> bool:
        """Take a connection that it was asked to open; return whether it is still wanted."""
        wanted = self._wanted.get(number)
        if wanted is None or wanted.done():
            return False
        wanted.set_result(link)
        return True

    @property
    def is_there(self) -> bool:
        """Whether its link has not ended."""
        return self.returncode is None

    @property
    def fate(self) -> str:
        """How it has gone."""
        how = "has left" if self.returncode == _LEFT else "is gone: its link has ended"
        return f"{how} ({self.node})"

    async def wait(self) -> int:
        """Wait until it is gone."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, what: signal.Signals) -> None:
        """Let go of it; it may look for a router again."""
        if what in (signal.SIGTERM, signal.SIGKILL):
            self._end(_LEFT)
        elif what == signal.SIGHUP and self.is_there:
            self._link.say(reload=True)

    def _end(self, code: int) -> None:
        if self.returncode is not None:
            return
        self.returncode = code
        self._link.close()
        if self._listener is not None:
            self._listener.close()
        for task in self._passing:
            task.cancel()
        self._ended.set()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a connection of the router's go to the server, over a link of its own."""
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        self._num_wanted += 1
        number, wanted = self._num_wanted, asyncio.get_running_loop().create_future()
        self._wanted[number] = wanted
        self._open_numbers.add(number)
        try:
            self._link.say(open=number)
            async with asyncio.timeout(GREETING_S):
                link = await wanted
            await join_streams(reader, writer, link.reader, link.writer)
        except (TimeoutError, asyncio.CancelledError):
            pass  # the other side sees the end
        finally:
            self._open_numbers.discard(number)
            del self._wanted[number]
            self._passing.discard(task)
            writer.close()


def add_door(app: FastAPI) -> None:
    """Add what those find who come to the door without a ticket."""

    @app.get(LINK_PATH, include_in_schema=False)
    async def refuse() -> None:
        """Refuse a link."""
        raise ApiError(403, f"the link was refused: {FOREIGN}", code="not_allowed")


class Door:
    """Where servers of other machines come in."""

    def __init__(
        self,
        key: bytes,
        join: Callable[[RemoteServer], Awaitable[None]],
        write: Callable[[str], object],
    ) -> None:
        """Take those that have the ``key``; each goes to ``join``, which raises NotTaken.

        ``write`` takes the lines of the log.
        """
        self._key, self._join, self._write = key, join, write
        self._servers: dict[str, RemoteServer] = {}
        self._joining: dict[str, FleetLink] = {}  # first links that are proving themselves
        self._tasks = set[asyncio.Task[None]]()

    def link_for(
        self, headers: Mapping[bytes, bytes]
    ) -> Callable[[asyncio.Transport, bytes], None] | None:
        """Return what takes the connection of a request with these headers.

        Return None if they have no ticket, or one for a link that is not wanted: strangers get no
        place here, and no word.
        """
        ticket = Ticket.read(headers.get(TICKET.encode(), b"").decode("latin-1"), self._key)
        if ticket is None:
            return None
        if ticket.number:
            server = self._servers.get(ticket.server)
            if server is None or not server.expects(ticket.number):
                return None
        return partial(self._take, ticket)

    def _take(self, ticket: Ticket, transport: asyncio.Transport, rest: bytes) -> None:
        """Take a connection whose request for a link has been read; ``rest`` came behind it."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(LINE_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: "
            + LINK_PROTOCOL.encode()
            + b"\r\n\r\n"
        )
        if rest:
            reader.feed_data(rest)
        task = loop.create_task(self._greet(ticket, FleetLink(reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let go of all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _greet(self, ticket: Ticket, link: FleetLink) -> None:
        peer = (link.writer.get_extra_info("peername") or ("a socket",))[0]
        is_kept = False
        try:
            with self._proving(ticket, link):
                async with asyncio.timeout(GREETING_S):
                    said, nonces = await greet_server(link, self._key)
            if said.get("id") != ticket.server:
                raise NotTaken("its ticket is another server's")
            if not ticket.number and said.get("kind") == "server":
                await self._serve(link, said, nonces)
            elif said.get("kind") == "request" and said.get("number") == ticket.number:
                accept(link, self._key, nonces)
                server = self._servers.get(ticket.server)
                is_kept = server is not None and server.offer(ticket.number, link)
        except NotTaken as error:
            self._write(f"a server at {peer} was not taken: {error}")
        except OSError:  # it has left
            pass
        finally:
            if not is_kept:
                link.close()

    @contextlib.contextmanager
    def _proving(self, ticket: Ticket, link: FleetLink) -> Iterator[None]:
        """Have one first link of each server prove itself: a newer one takes its place."""
        if ticket.number:
            yield
            return
        if former := self._joining.get(ticket.server):
            former.close()
        self._joining[ticket.server] = link
        try:
            yield
        finally:
            if self._joining.get(ticket.server) is link:
                del self._joining[ticket.server]

    async def _serve(self, link: FleetLink, said: dict[str, Any], nonces: list[str]) -> None:
        """Have a server for as long as its link lasts."""
        server = RemoteServer(link, said, self._key)
        if former := self._servers.get(server.id):  # its old link is dead, unnoticed so far
            former.send_signal(signal.SIGKILL)
        self._servers[server.id] = server
        accept(link, self._key, nonces)
        staying = asyncio.ensure_future(server.stay())
        try:
            await self._join(server)
            link.say(joined=True)
            await staying
        except NotTaken as error:
            server.refuse(str(error))
            raise
        finally:
            staying.cancel()
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(asyncio.CancelledError):
                await staying
            if self._servers.get(server.id) is server:
                del self._servers[server.id]
