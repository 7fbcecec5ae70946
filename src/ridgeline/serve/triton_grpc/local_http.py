"""Requests of the application in the same process, answered piece by piece, without a socket.

They pass the edge as those of the network do: key, limits, and a line of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from starlette.types import ASGIApp, Message

from ridgeline.serve.http.request_state import local_scope

_running: set[asyncio.Task[None]] = set()  # the loop keeps only weak references


class Cut(Exception):
    """An answer ended before it was whole."""


class LocalAnswer:
    """An answer as it comes.

    Attributes:
        status: its status.
        headers: by name in lower case.
    """

    def __init__(self) -> None:
        self.status, self.headers = 0, dict[str, str]()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(1)  # a slow reader is felt
        self._is_read = True

    async def begin(self) -> None:
        """Wait for status and headers. Raises Cut."""
        start = await self._next()
        self.status = start["status"]
        self.headers = {k.decode().lower(): v.decode() for k, v in start["headers"]}

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises Cut."""
        while True:
            message = await self._next()
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return

    async def read(self) -> bytes:
        """Return the whole body. Raises Cut."""
        return b"".join([piece async for piece in self.pieces()])

    async def put(self, message: Message | None) -> None:
        """Take a message of the application; None: there are no more."""
        if self._is_read:
            await self._messages.put(message)

    def leave(self) -> None:
        """Read no further: what comes goes nowhere."""
        self._is_read = False
        while not self._messages.empty():
            self._messages.get_nowait()

    async def _next(self) -> Message:
        if (message := await self._messages.get()) is None:
            raise Cut("the answer was cut")
        return message


@contextlib.asynccontextmanager
async def ask(
    app: ASGIApp, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[LocalAnswer]:
    """Ask an application; the answer has begun. Leaving the block means hanging up."""
    answer, unread, has_left = LocalAnswer(), [body], asyncio.Event()
    pairs = {"host": "localhost", "content-type": "application/json"} | dict(headers)
    scope = local_scope(method, path, pairs, {"cut": has_left.set})

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(scope, receive, answer.put)
        finally:
            await answer.put(None)

    task = asyncio.ensure_future(run())
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        await answer.begin()
        yield answer
    finally:
        has_left.set()
        answer.leave()
