"""The gRPC port: its connections are strangers' until a call has a key, and go on to gRPC's socket.

gRPC's own server would take any number of them, and never say how much it keeps of a message that
is not whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

from ridgeline.serve.http.edge.connection import ACCEPTS_PER_TURN, MAX_WAITING, Stranger, Strangers
from ridgeline.serve.http.listening import Listener, SocketFolder

_PIECE_BYTES = 1 << 16
_CONNECTION_BYTES, _TLS_BYTES = 48 << 10, 112 << 10  # that gRPC keeps of one, and of TLS besides


class Caller:
    """Who is at the other end of a connection, and what has come that no call has read.

    Attributes:
        cut: ends the connection.
    """

    def __init__(self, stranger: Stranger, cut: Callable[[], None]) -> None:
        self._stranger, self.cut = stranger, cut
        stranger.give_way = cut
        self._num_unread = self._num_calls = 0

    def came(self, num_bytes: int) -> None:
        """Take note of bytes that go on to gRPC."""
        self._num_unread += num_bytes
        self._stranger.hold(self._num_unread)

    def read(self, num_bytes: int) -> None:
        """Take note that a call has got a message of this length."""
        self._num_unread = max(0, self._num_unread - num_bytes)
        self._stranger.hold(self._num_unread)

    def proved(self) -> None:
        """Take note that a call has a key."""
        self._stranger.prove()

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Keep its place out of others' reach while one of its messages is answered."""
        self._num_calls += 1
        self._stranger.rest()
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:  # what is left are heads and frames, which gRPC has dropped
                self._num_unread = 0
                self._stranger.wait()


class Relay:
    """Passes bytes on between the port and gRPC's own socket, which only this user can reach.

    Attributes:
        address: of that socket, as gRPC wants it.
    """

    def __init__(self, strangers: Strangers, receive_timeout_s: float, *, is_tls: bool) -> None:
        """Begin with nobody; who says nothing for so long is cut."""
        self._strangers, self._receive_timeout_s = strangers, receive_timeout_s
        self._own_bytes = _CONNECTION_BYTES + (_TLS_BYTES if is_tls else 0)
        self._folder = SocketFolder()
        self._path = self._folder.path / "grpc.sock"
        self.address = f"unix:{self._path}"
        self._callers: dict[str, Caller] = {}
        self._passing = set[asyncio.Task[None]]()
        self._num_connections = 0

    def caller(self, peer: str) -> Caller | None:
        """Return who makes a call, by what gRPC calls its connection, if that is one of ours."""
        return self._callers.get(peer)

    @contextlib.asynccontextmanager
    async def listening(self, listener: Listener) -> AsyncIterator[None]:
        """Take connections within the block."""
        listener.strangers, listener.own_bytes = self._strangers, self._own_bytes
        server = await asyncio.start_server(
            self._pass_on, sock=listener, limit=_PIECE_BYTES, backlog=ACCEPTS_PER_TURN
        )
        listener.listen(MAX_WAITING)
        try:
            yield
        finally:
            server.close()
            for task in self._passing:
                task.cancel()
            await asyncio.gather(*self._passing, return_exceptions=True)
            self._folder.remove()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        caller = Caller(self._strangers.of(writer), partial(_cut, task, writer))
        try:
            async with asyncio.timeout(self._receive_timeout_s):
                first = await reader.read(_PIECE_BYTES)
            if first:
                await self._join(caller, first, reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the other side sees the end
        finally:
            self._passing.discard(task)
            writer.close()

    async def _join(
        self,
        caller: Caller,
        first: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Pass bytes on, of which the first have come, until either side ends."""
        self._num_connections += 1
        own_path = self._folder.path / str(self._num_connections)
        inner = await self._connected(own_path)
        self._callers[peer := f"unix:{own_path}"] = caller
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(sock=inner)
            ways = [
                asyncio.ensure_future(self._come(caller, first, reader, inner_writer)),
                asyncio.ensure_future(_go(inner_reader, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                inner_writer.transport.abort()
        finally:
            del self._callers[peer]
            inner.close()
            own_path.unlink(missing_ok=True)

    async def _connected(self, own_path: Path) -> socket.socket:
        """Return a connection to gRPC's socket that has a name of its own."""
        inner = socket.socket(socket.AF_UNIX)
        inner.setblocking(False)
        try:
            inner.bind(str(own_path))
            await asyncio.get_running_loop().sock_connect(inner, str(self._path))
        except BaseException:
            inner.close()
            raise
        return inner

    async def _come(
        self,
        caller: Caller,
        first: bytes,
        reader: asyncio.StreamReader,
        target: asyncio.StreamWriter,
    ) -> None:
        data = first
        while data:
            caller.came(len(data))
            target.write(data)
            await target.drain()
            data = await reader.read(_PIECE_BYTES)


def _cut(task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
    task.cancel()
    writer.transport.abort()


async def _go(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(_PIECE_BYTES):
        target.write(data)
        await target.drain()
