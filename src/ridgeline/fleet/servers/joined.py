"""Servers of other machines: they come over links that they open, and prove that they belong here.

Each gets a Unix socket on the router's machine, and every connection to that socket becomes one
more link. So the rest of the router speaks to all servers alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ridgeline.machine import Memory
from ridgeline.server.tunnel.proof import (
    GREETING_S,
    LINE_BYTES,
    PROTOCOL,
    FleetLink,
    NotTaken,
    accept,
    derived,
    greet_server,
    join_streams,
)

_MOST_STRANGERS = 1024  # servers that may be proving themselves at once
_LEFT, _LOST = 0, 1  # how one has ended, as if it were a process of ours
_FIELDS = {"node": str, "pid": int, "model": str, "version": str, "keys": str}  # of a server


class JoinedServer:
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
        self._links: asyncio.Queue[FleetLink] = asyncio.Queue()
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

    def offer(self, link: FleetLink) -> None:
        """Take one of the connections that it was asked to open."""
        self._links.put_nowait(link)

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
        while not self._links.empty():
            self._links.get_nowait().close()
        self._ended.set()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a connection of the router's go to the server, over a link of its own."""
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        try:
            self._link.say(open=True)
            async with asyncio.timeout(GREETING_S):
                link = await self._links.get()
            await join_streams(reader, writer, link.reader, link.writer)
        except (TimeoutError, asyncio.CancelledError):
            pass  # the other side sees the end
        finally:
            self._passing.discard(task)
            writer.close()


class Door:
    """Where servers of other machines come in."""

    def __init__(
        self,
        key: bytes,
        join: Callable[[JoinedServer], Awaitable[None]],
        write: Callable[[str], object],
    ) -> None:
        """Take those that have the ``key``; each goes to ``join``, which raises NotTaken.

        ``write`` takes the lines of the log.
        """
        self._key, self._join, self._write = key, join, write
        self._servers: dict[str, JoinedServer] = {}
        self._tasks = set[asyncio.Task[None]]()
        self._num_strangers = 0

    def take(self, transport: asyncio.Transport, rest: bytes) -> None:
        """Take a connection whose request for a link has been read; ``rest`` came behind it."""
        if self._num_strangers >= _MOST_STRANGERS:
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(LINE_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: "
            + PROTOCOL.encode()
            + b"\r\n\r\n"
        )
        if rest:
            reader.feed_data(rest)
        task = loop.create_task(self._greet(FleetLink(reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let go of all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _greet(self, link: FleetLink) -> None:
        """Let in a server that belongs here."""
        peer = (link.writer.get_extra_info("peername") or ("a socket",))[0]
        is_kept = False
        self._num_strangers += 1
        try:
            try:
                async with asyncio.timeout(GREETING_S):
                    said, nonces = await greet_server(link, self._key)
            finally:
                self._num_strangers -= 1
            if said.get("kind") == "server" and isinstance(said.get("id"), str):
                await self._serve(link, said, nonces)
            elif (server := self._servers.get(str(said.get("id")))) and said["kind"] == "request":
                accept(link, self._key, nonces)
                server.offer(link)
                is_kept = True
        except NotTaken as error:
            self._write(f"a server at {peer} was not taken: {error}")
        except OSError:  # it has left
            pass
        finally:
            if not is_kept:
                link.close()

    async def _serve(self, link: FleetLink, said: dict[str, Any], nonces: list[str]) -> None:
        """Have a server for as long as its link lasts."""
        server = JoinedServer(link, said, self._key)
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
