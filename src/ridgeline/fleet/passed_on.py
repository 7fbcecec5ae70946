"""A request passed on to its model's process, and the answer, byte for byte.

A stream outlives that process. With its bytes comes a journal of the tokens that they were made
from. When the process ends, the request and the journal go to the next process, which continues
where the journal ends. Frames that were not complete are not shown, so nothing comes twice and
nothing is missing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager

import httpx2
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.fleet.pool import Pool
from ridgeline.fleet.worker import Worker
from ridgeline.server.http.errors import ApiError
from ridgeline.server.http.gate import client_left
from ridgeline.server.tunnel.frames import Frames
from ridgeline.server.tunnel.journal import is_diverged
from ridgeline.server.tunnel.middleware import HEADER, told

_TRIES = 3  # a kept connection, a new one, a new process
_OF_CONNECTION = frozenset({b"connection", b"transfer-encoding", b"keep-alive", b"content-length"})
_OURS = frozenset({b"date", b"x-request-id", HEADER})  # the gate sets the first two


class PassedOn(Response):
    """The answer of a model's own process."""

    def __init__(
        self,
        pool: Pool,
        name: str,
        use: Callable[[], AbstractAsyncContextManager[Worker]],
        body: bytes = b"",
    ) -> None:
        """Pass a request with this body on to a process of the model ``name``, from ``use``."""
        super().__init__()
        self._pool, self._name, self._use, self._body = pool, name, use, body
        self._seed, self._journal = secrets.randbits(63), bytearray()
        self._has_begun = self._is_framed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. Raises ApiError for what goes wrong before the answer has begun."""
        working = asyncio.ensure_future(self._try(scope, send))
        leaving = asyncio.ensure_future(client_left(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            working.cancel()  # no effect if it is done
        try:
            await working
        except asyncio.CancelledError:
            if not self._has_begun:  # else nobody reads why
                raise ApiError(499, "the client left") from None
        except (httpx2.HTTPError, ApiError) as error:
            if self._has_begun:  # the reader must see that it is not whole
                scope["state"]["cut"]()
            elif isinstance(error, ApiError):
                raise
            else:
                message = f"{self._name} ended while it answered: {error or type(error).__name__}"
                raise ApiError(503, message, code="model_ended") from None

    async def _try(self, scope: Scope, send: Send) -> None:
        """Answer; try again, and go on, when the process or a connection has ended.

        A request that ends what runs it, and gets no further, is given up.
        """
        left = _TRIES
        while True:
            length = len(self._journal)
            try:
                await self._answer(scope, send)
                break
            except httpx2.TransportError:
                left = _TRIES - 1 if len(self._journal) > length else left - 1
                if not left or (self._has_begun and not self._is_framed):
                    raise

    async def _answer(self, scope: Scope, send: Send) -> None:
        async with self._use() as worker:
            try:
                answer = await worker.client.send(self._request(scope, worker), stream=True)
                try:
                    await self._pass_on(answer, scope, send)
                finally:
                    await answer.aclose()
            except httpx2.TransportError:
                await self._pool.forget_dead(self._name, worker)
                raise

    async def _pass_on(self, answer: httpx2.Response, scope: Scope, send: Send) -> None:
        is_framed = HEADER.decode() in answer.headers
        if not self._has_begun:
            pairs = [pair for pair in answer.headers.raw if _passes(pair[0], _OURS)]
            length = answer.headers.get("content-length")
            pairs += [(b"content-length", length.encode())] if length else []
            self._has_begun, self._is_framed = True, is_framed
            scope["state"]["note"]["passed_on"] = True
            status = answer.status_code
            await send({"type": "http.response.start", "status": status, "headers": pairs})
        elif not is_framed:
            raise httpx2.RemoteProtocolError(f"it answers {answer.status_code}, and does not go on")
        else:
            self._pool.counts["resumed"] += 1
        pieces = self._unframed(answer.aiter_raw()) if is_framed else answer.aiter_raw()
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _unframed(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the answer's bytes of each whole frame, once its journal is kept."""
        frames = Frames()
        async for piece in pieces:
            try:
                found = list(frames.feed(piece))
            except ValueError as error:
                raise httpx2.RemoteProtocolError(str(error)) from None
            for lines, body in found:
                self._journal += lines
                self._pool.counts["diverged"] += is_diverged(lines)
                if body:
                    yield body

    def _request(self, scope: Scope, worker: Worker) -> httpx2.Request:
        path = scope["state"]["path"] + ("?" + scope["query_string"].decode("latin-1")).rstrip("?")
        kept = frozenset({b"host", b"origin", b"x-request-id", HEADER})
        headers = [pair for pair in scope["headers"] if _passes(pair[0], kept)]
        state, journal = scope["state"], bytes(self._journal)
        headers.append((b"x-request-id", state["request_id"].encode()))
        headers.append((HEADER, told(self._pool.key, self._seed, state["created"], journal)))
        return worker.client.build_request(
            scope["method"], path, headers=headers, content=journal + self._body
        )


def _passes(name: bytes, kept: Iterable[bytes]) -> bool:
    """Whether a header goes through: not those of a connection, nor those that are ``kept``."""
    return (lower := name.lower()) not in _OF_CONNECTION and lower not in kept
