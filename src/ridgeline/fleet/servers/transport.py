"""Connections to a server's socket, by asyncio's transports and a parser in C.

A router reads every piece of every answer. Beside httpx2's own transport, whose parser and streams
are Python, this costs a third of the processor's time for a piece (docs/results.md#server).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httptools
import httpx2
from typing_extensions import override

_IDLE_S = 3.0  # of a connection; the other side closes it after five
_MOST_UNREAD_BYTES = 1 << 18  # of an answer; then the server has to wait


class UnixTransport(httpx2.AsyncBaseTransport):
    """A client's connections to one server; each has one request at a time."""

    def __init__(self, socket: Path) -> None:
        """Connect to this Unix socket when there is something to ask."""
        self._socket = str(socket)
        self._idle: list[_Connection] = []  # the newest last
        self._open = set[_Connection]()

    @override
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and return its answer once it begins. Raises httpx2.TransportError."""
        head = b"%s %s HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)
        head += b"".join(b"%s: %s\r\n" % pair for pair in request.headers.raw)
        connection = await self._connection()
        answer = connection.ask(head + b"\r\n" + await request.aread(), request.method == "HEAD")
        try:
            await answer.begun()
        except BaseException:
            connection.close()
            raise
        return httpx2.Response(answer.status, headers=answer.headers, stream=answer)

    @override
    async def aclose(self) -> None:
        """End all connections."""
        for connection in tuple(self._open):
            connection.close()

    async def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if loop.time() - connection.used_s < _IDLE_S:
                return connection
            connection.close()
        try:
            _, connection = await loop.create_unix_connection(
                lambda: _Connection(self), self._socket
            )
        except OSError as error:
            raise httpx2.ConnectError(str(error)) from None
        self._open.add(connection)
        return connection

    def keep(self, connection: _Connection) -> None:
        """Keep a connection for the next request."""
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        """Forget a connection that has ended."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """A connection, which has an answer to bring or is idle.

    Attributes:
        used_s: when its last answer ended, on the loop's clock.
    """

    def __init__(self, link: UnixTransport) -> None:
        self._link = link
        self._answer: _LinkAnswer | None = None
        self.used_s = 0.0

    def ask(self, request: bytes, is_head: bool) -> _LinkAnswer:
        """Send a request whole; return what will be its answer."""
        self._answer = _LinkAnswer(self, is_head)
        self.transport.write(request)
        return self._answer

    def done(self, *, can_stay: bool) -> None:
        """Take note that the answer has come; stay for the next request, if the server does."""
        self._answer = None
        if can_stay and not self.transport.get_write_buffer_size():
            self.used_s = asyncio.get_running_loop().time()
            self._link.keep(self)
        else:
            self.close()

    def close(self) -> None:
        """End it at once, whatever is still to come."""
        self.transport.abort()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nothing was asked for
            self.close()
        else:
            self._answer.feed(data)

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._link.forget(self)
        if self._answer is not None:
            self._answer.fail(str(error or "the connection has ended"))


class _LinkAnswer(httpx2.AsyncByteStream):
    """An answer, as it comes: what the parser calls, and what a client reads.

    Attributes:
        status: its code; ``headers``: as they were sent.
    """

    def __init__(self, connection: _Connection, is_head: bool) -> None:
        self._connection, self._is_head = connection, is_head
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()
        self._pieces, self._num_bytes = list[bytes](), 0
        self._has_begun = self._is_whole = self._is_paused = False
        self._why_not: str | None = None
        self._news: asyncio.Future[None] | None = None

    async def begun(self) -> None:
        """Wait for the headers. Raises httpx2.RemoteProtocolError if none come."""
        while not self._has_begun:
            await self._hear()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield what has come since. Raises httpx2.RemoteProtocolError if it is not whole."""
        while True:
            if self._pieces:
                data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
                self._pieces.clear()
                self._num_bytes = 0
                self._resume()
                yield data
            elif self._is_whole:
                return
            else:
                await self._hear()

    @override
    async def aclose(self) -> None:
        """Read no more of it."""
        if not self._is_whole:
            self._connection.close()

    async def _hear(self) -> None:
        """Wait until something comes."""
        if self._why_not is not None:
            raise httpx2.RemoteProtocolError(self._why_not)
        self._news = self._loop.create_future()
        await self._news

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._connection.transport.resume_reading()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def feed(self, data: bytes) -> None:
        """Take bytes of it."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(str(error))
            self._connection.close()
        self._tell()

    def fail(self, why: str) -> None:
        """Take note that nothing more will come."""
        self._why_not = self._why_not or why
        self._tell()

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Take note that the headers are whole; those of 100 Continue are none of the answer's."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self._has_begun = True
        if self._is_head:  # the parser would wait for a body
            self._is_whole = True
            self._connection.done(can_stay=False)

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._pieces.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > _MOST_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            self._connection.transport.pause_reading()

    def on_message_complete(self) -> None:
        """Take note that it is whole."""
        if self._has_begun and not self._is_whole:
            self._is_whole = True
            self._resume()  # for the next one
            self._connection.done(can_stay=self._parser.should_keep_alive())
