"""The last in the row: a request's body, bounded, whole and as it was before it was compressed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serve.http.errors import ApiError, is_triton
from ridgeline.serve.http.fair_pool import in_thread
from ridgeline.serve.http.request_body import UPLOADS, too_long
from ridgeline.serve.http.request_state import first_headers

_BARE = ("/cancel", "/sleep", "/wake", "/wake_up")  # ends of paths that are posted without a body
_SLOTS = "/slots/"  # the beginning of others
_JSON = b"application/json"
_FORM_BYTES = 1 << 14  # of a form, around a file
_PRESSED_PART = 4  # of --max-body for a compressed one: blocks of nothing take time and no room


class BodyReader:
    """ASGI middleware: reads the whole body before the application runs, but for uploads."""

    def __init__(
        self, app: ASGIApp, routes: Sequence[BaseRoute], max_body_bytes: int, max_file_bytes: int
    ) -> None:
        """Stand before ``app``, which has ``routes``."""
        self._app, self._routes = app, routes
        self._max_body_bytes, self._max_file_bytes = max_body_bytes, max_file_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through with its body. Raises ApiError."""
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        if (scope["method"], scope["path"]) == ("POST", UPLOADS):
            body = self._counting(scope, receive)
        else:
            body = await self._bounded(scope, receive)
        await self._app(inner, body, send)

    async def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """Read the body, and return a ``receive`` that gives it once more."""
        headers = first_headers(scope)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise self._too_large()
        body = bytearray()
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client left")
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise self._too_large()
            has_more = message.get("more_body", False)
        coding = headers.get(b"content-encoding", b"").lower()
        if is_triton(scope["path"]) and coding in (b"gzip", b"deflate"):
            body = await self._unpacked(body, coding.decode())
            del headers[b"content-encoding"]
            _replace(scope, b"content-encoding", b"identity")
            _replace(scope, b"content-length", str(len(body)).encode())
        is_bare = scope["path"].endswith(_BARE) or scope["path"].startswith(_SLOTS)
        if body or not is_bare:  # which has nothing to say
            self._check_type(scope, headers)
        unread: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Message:
            return unread.pop() if unread else await receive()

        return again

    def _counting(self, scope: Scope, receive: Receive) -> Receive:
        """Return a ``receive`` for a body that its route reads piece by piece."""
        headers = first_headers(scope)
        if _kind(headers) != b"multipart/form-data":
            raise ApiError(415, "send the file as multipart/form-data")
        length = headers.get(b"content-length", b"0")
        most_bytes = self._max_file_bytes + _FORM_BYTES
        if length.isdigit() and int(length) > most_bytes:
            raise too_long(self._max_file_bytes)
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client left")
            num_bytes += len(message.get("body", b""))
            if num_bytes > most_bytes:
                raise too_long(self._max_file_bytes)
            return message

        return counted

    def _check_type(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse a body that is compressed, and a page's that does not say that it is JSON.

        A page of another site may send a form or a text without being asked, and never JSON. What
        other programs say of a body does not matter. If no route takes it, 404 or 405 follows.
        """
        kind = _kind(headers)
        is_form = b"origin" in headers and scope["method"] == "POST" and kind != _JSON
        has_tensors = kind == b"application/octet-stream" and is_triton(scope["path"])
        if is_form and not has_tensors:
            problem = "a page's body must be JSON: send Content-Type: application/json"
        elif headers.get(b"content-encoding", b"identity") != b"identity":
            problem = "a compressed body is not supported: send it as it is"
        else:
            if scope["method"] in ("POST", "DELETE"):
                _replace(scope, b"content-type", _JSON)
            return
        if any(route.matches(scope)[0] is Match.FULL for route in self._routes):
            raise ApiError(415, problem)

    async def _unpacked(self, body: bytearray, coding: str) -> bytearray:
        """Return what was compressed. Raises ApiError if it is broken, or too long."""
        most_bytes = self._max_body_bytes // _PRESSED_PART
        if len(body) > most_bytes:
            why = f"the compressed body is longer than {most_bytes} bytes: send it as it is"
            raise ApiError(413, why)
        stream = zlib.decompressobj(zlib.MAX_WBITS | 32)  # it sees itself which of the two it is
        try:
            data = await in_thread(stream.decompress, body, self._max_body_bytes + 1)
        except zlib.error:
            stream, data = zlib.decompressobj(), b""
        if len(data) > self._max_body_bytes:
            raise self._too_large()
        if not stream.eof:
            raise ApiError(400, f"the body is not whole {coding}")
        return bytearray(data)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._max_body_bytes} bytes (--max-body)")


def _kind(headers: dict[bytes, bytes]) -> bytes:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def _replace(scope: Scope, name: bytes, value: bytes) -> None:
    others = [pair for pair in scope["headers"] if pair[0] != name]
    scope["headers"] = [*others, (name, value)]
