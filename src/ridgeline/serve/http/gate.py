"""The gate before every route: key, origin and size; and one log line for each request.

It decides by the ASGI scope alone, and refuses a route unless it is known to be open. It reads the
whole body, bounded, before a route runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from email.utils import formatdate
from functools import partial
from typing import Any

from starlette.datastructures import State
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serve.http.errors import SHORT, ApiError, body_at, is_triton
from ridgeline.serve.http.keys import ANYONE, Keys
from ridgeline.serve.http.limits import Limits
from ridgeline.serve.http.turns import CALLER, STATE, in_thread
from ridgeline.serve.page import FILES
from ridgeline.serve.tunnel.proof import PATH as DOOR

_ANY = "*"  # of origins
_PROBES = ("/health", "/ready", "/v2/health/live", "/v2/health/ready")
OPEN_PATHS = frozenset({*FILES, *_PROBES, DOOR})  # no key; the door has another one
UPLOADS = "/v1/files"  # the one path whose bodies are read by its route, and are no JSON
_BARE = ("/cancel", "/sleep", "/wake", "/wake_up")  # ends of paths that are posted without a body
_SLOTS = "/slots/"  # the beginning of others
_JSON = b"application/json"
_FORM_BYTES = 1 << 14  # of a form, around a file
_PRESSED_PART = 4  # of --max-body for a compressed one: blocks of nothing take time and no room
OWN = "localhost"  # in place of an origin
OWN_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
_log = logging.getLogger("ridgeline.serve")
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_COME_LATER = (429, 503)
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})


class Gate:
    """ASGI middleware around the whole application.

    Attributes:
        closed: returns why no request is let through now, if so.
        pace: how requests of a key are spaced out.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        hosts: Collection[str] | None,
        origins: Collection[str],
        limits: Limits,
        max_body_bytes: int,
        max_file_bytes: int,
        root_path: str,
        routes: Sequence[BaseRoute],
        log: Callable[[dict[str, Any]], object],
        count: Callable[[str, str, int], None],
        vouched: Callable[[Mapping[bytes, bytes]], str | None] = lambda headers: None,
    ) -> None:
        """Guard ``app``.

        Args:
            app: what runs behind.
            keys: the keys that open the server.
            hosts: names that a Host header may have, perhaps as ``*.example.org``; None allows any.
            origins: web origins that may call besides our own pages; "*" is any, and ``OWN`` any
                page of this machine.
            limits: what each key may send; every POST counts, whatever becomes of it.
            max_body_bytes: longest body.
            max_file_bytes: longest file.
            root_path: what a proxy may leave before each path.
            routes: those of ``app``; requests for other paths are counted as one.
            log: takes the fields of each request's line.
            count: takes path, method and status of each request.
            vouched: returns the label of the key that a router says is the caller's, or nothing
                if the headers say it themselves; None if it is no router that asks.
        """
        self._app = app
        self._keys, self._hosts, self._origins = keys, hosts, frozenset(origins)
        self._own_pages = OWN_PAGES if OWN in origins else None
        self._of_pages: ASGIApp = self._enter  # what takes the requests of web pages
        if origins:
            self._of_pages = CORSMiddleware(
                self._enter,
                allow_origins=[one for one in origins if one not in (OWN, _ANY)],
                # By name, as llama.cpp answers: some programs compare it with their own.
                allow_origin_regex=".*" if _ANY in origins else self._own_pages,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["*"],
                allow_private_network=True,
            )
        self._limits, self.pace = limits, limits.pace
        self._max_body_bytes, self._max_file_bytes = max_body_bytes, max_file_bytes
        self._root_path = root_path
        self._routes, self._paths = routes, frozenset(getattr(r, "path", "") for r in routes)
        self._log, self._count, self._vouched = log, count, vouched
        self.closed: Callable[[], ApiError | None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            return  # no lifespan, no websockets
        start_s = time.monotonic()
        sent_id = _first(scope).get(b"x-request-id", b"")
        request_id = sent_id if _SANE_ID.fullmatch(sent_id) else uuid.uuid4().hex.encode()
        extra = [(b"x-request-id", request_id), (b"date", formatdate(usegmt=True).encode())]
        note: dict[str, Any] = {}
        status = 499  # the client left before there was an answer
        is_head, is_over = scope["method"] == "HEAD", False

        async def answer(message: Message) -> None:
            nonlocal status, is_over
            if is_over:
                return
            if message["type"] == "http.response.start":
                if message["status"] == 400 and scope["method"] == "OPTIONS":
                    # A foreign page asked. Without the header of permission it may not call.
                    note.setdefault("error", _foreign(_first(scope)))
                    message["status"] = 200
                status = message["status"]
                left = scope["state"].get("left", dict)()
                told = [(name.encode(), value.encode()) for name, value in left.items()]
                message["headers"] = [*message.get("headers", ()), *extra, *told]
            elif is_head:  # some bodies have no end
                message, is_over = {"type": "http.response.body"}, True
            await send(message)

        scope["state"] |= {"note": note, "request_id": request_id.decode(), "arrived_s": start_s}
        created = datetime.fromtimestamp(time.time()).astimezone()  # what an answer says of time
        scope["state"]["created"] = created
        if self._root_path and scope["path"].startswith(f"{self._root_path}/"):
            scope["path"] = scope["path"].removeprefix(self._root_path)
        scope["path"] = scope["path"].rstrip("/") or "/"
        scope["state"]["path"] = scope["path"]  # as the client wrote it
        if scope["path"] in SHORT:
            scope["path"] = f"/v1{scope['path']}"
        try:
            enter = self._of_pages if b"origin" in _first(scope) else self._enter
            await enter(scope, receive, answer)
        except (KeyboardInterrupt, SystemExit):
            raise
        except asyncio.CancelledError:  # at the server's end: its body is still to come, or rests
            if status == 499:
                stopping = ApiError(503, "the server is stopping", code="stopping")
                note["error"] = str(stopping)
                shown = body_at(scope["state"]["path"], stopping, request_id.decode())
                await refuse(answer, stopping, shown)
        except BaseException:  # panics of compiled libraries are no Exceptions
            _log.exception("a request failed")
            if status == 499:
                error = ApiError(500, "something went wrong; the server's log says what")
                note["error"] = str(error)
                await refuse(
                    answer, error, body_at(scope["state"]["path"], error, request_id.decode())
                )
            elif status < 500:
                scope["state"].get("cut", lambda: None)()
        finally:
            if refused := scope["state"].get("refused"):  # by the protocol, while it ran
                status = refused[0] if status == 499 else status
                note["error"] = refused[1]
            if status in _COME_LATER and (tenant := scope["state"].get("tenant")):
                self.pace.note_refusal(tenant)
            self._count(*self._labels(scope["method"], scope["path"]), status)
            line = {"id": request_id.decode(), "key": scope["state"].get("tenant")}
            if trace := _TRACE.fullmatch(_first(scope).get(b"traceparent", b"")):
                line["trace_id"] = trace[1].decode()  # W3C's Trace Context
            line |= {"method": scope["method"], "path": scope["path"][:256]}
            line |= {"status": status, **note}
            line |= {"total_ms": round(1e3 * (time.monotonic() - start_s), 1)}
            scope["state"]["line"] = line  # for the middleware around this one
            self._log(line)

    def on_refused(self, status: int, reason: str, method: str, path: str) -> dict[str, Any]:
        """Log and count what the protocol has refused before it was a request; return the line.

        ``method`` and ``path`` are empty where they are not known.
        """
        self._count(*self._labels(method, path), status)
        line: dict[str, Any] = {"method": method or None, "path": path[:256] or None}
        line |= {"status": status, "error": reason}
        self._log(line)
        return line

    def _labels(self, method: str, path: str) -> tuple[str, str]:
        """Return path and method as they are counted."""
        return (
            path if path in self._paths else "other",
            method if method in _METHODS else "other",
        )

    def is_proved(self, headers: dict[bytes, bytes]) -> bool:
        """Whether what comes by another way has a key. Raises ApiError 401 if it needs one."""
        return self._tenant("", headers)[1]

    async def admit(self, headers: dict[bytes, bytes], num_bytes: int) -> None:
        """Let what comes by another way wait, as a request with a body of this length would.

        What is done for it then counts as done for its key. Raises ApiError 401.
        """
        tenant, _ = self._tenant("", headers)
        CALLER.set(tenant)
        await self._wait(tenant, num_bytes)

    async def _wait(self, tenant: str, num_bytes: int) -> None:
        if wait_s := self.pace.wait_s(tenant, num_bytes):
            await asyncio.sleep(wait_s)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check key and origin, and read the whole body, before the request goes on."""
        headers = _first(scope)
        try:
            self._check_origin(headers)
            tenant, is_proved = self._tenant(scope["path"], headers)
            if is_proved and (tell := scope["state"].get("proved")):
                tell()
            is_operator = self._keys.is_operator(tenant)
            scope["state"] |= {"tenant": tenant, "is_operator": is_operator}
            scope["state"] |= {"owner": self._keys.owner_of(tenant)}
            scope["state"] |= {"seed": None, "is_background": False}  # of a batch's requests alone
            scope["state"] |= {"journal": None}  # of a router's alone
            STATE.set(scope["state"])
            CALLER.set(tenant)  # of all that this request has done for it
            if scope["path"] not in OPEN_PATHS and (why := self.closed()):
                raise why
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            length = headers.get(b"content-length", b"")
            await self._wait(tenant, int(length) if length.isdigit() else 0)
            with self._counted(tenant, scope):
                if (scope["method"], scope["path"]) == ("POST", UPLOADS):
                    body = self._counting(headers, receive)
                else:
                    body = await self._bounded(scope, headers, receive)
                await self._app(asked, body, send)
        except ApiError as error:
            scope["state"]["note"].setdefault("error", str(error))
            scope["state"]["code"] = error.code
            if error.status != 499:
                request_id = scope["state"]["request_id"]
                await refuse(send, error, body_at(scope["state"]["path"], error, request_id))

    def _counted(self, tenant: str, scope: Scope) -> AbstractContextManager[None]:
        """Count a request if it asks for something; its answer says what is left."""
        if scope["method"] != "POST":
            return nullcontext()
        scope["state"]["left"] = partial(self._limits.headers, tenant)
        return self._limits.counted(tenant)

    def _tenant(self, path: str, headers: dict[bytes, bytes]) -> tuple[str, bool]:
        """Return the label of the caller's key, and whether one was proved. Raises ApiError 401.

        A router proves its own.
        """
        said = self._vouched(headers)
        if said or not self._keys.are_needed:
            return said or ANYONE, said is not None
        label = self._keys.label_of(headers.get(b"authorization"), headers.get(b"x-api-key"))
        if label is None and path not in OPEN_PATHS:
            raise ApiError(
                401,
                "this server needs an API key: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return label or ANYONE, bool(label) or said is not None

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Refuse names that are not ours: a web page may have made its own name point to us."""
        if self._hosts is None:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        if not _is_among(_name(host), self._hosts):
            message = f"this server is not {host[:80]!r}: see --allowed-host"
            raise ApiError(403, message, code="unknown_host")
        origin = headers.get(b"origin", b"").decode("latin-1")
        is_named = origin in self._origins or _ANY in self._origins
        is_named |= bool(self._own_pages and re.fullmatch(self._own_pages, origin))
        if origin and not is_named and origin.partition("://")[2] != host:
            raise ApiError(403, _foreign(headers), code="origin")

    async def _bounded(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive
    ) -> Receive:
        """Read the body, and return a ``receive`` that gives it once more."""
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
        if is_triton(scope["path"]):
            await self._unpack(scope, headers, body)
        is_bare = scope["path"].endswith(_BARE) or scope["path"].startswith(_SLOTS)
        if body or not is_bare:  # which has nothing to say
            self._check_type(scope, headers)
        unread: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Message:
            return unread.pop() if unread else await receive()

        return again

    def _counting(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Return a ``receive`` for a body that its route reads piece by piece."""
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"multipart/form-data":
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
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
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

    async def _unpack(self, scope: Scope, headers: dict[bytes, bytes], body: bytearray) -> None:
        """Take gzip or deflate from a body, and let the headers say so.

        Raises ApiError if it is broken, or longer than a body may be.
        """
        coding = headers.get(b"content-encoding", b"").lower()
        if coding not in (b"gzip", b"deflate"):
            return
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
            raise ApiError(400, f"the body is not whole {coding.decode()}")
        body[:] = data
        del headers[b"content-encoding"]
        _replace(scope, b"content-encoding", b"identity")
        _replace(scope, b"content-length", str(len(data)).encode())

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._max_body_bytes} bytes (--max-body)")


def too_long(max_file_bytes: int) -> ApiError:
    """Return the error about a file that is too long."""
    return ApiError(413, f"the file is longer than {max_file_bytes} bytes (--max-file)")


async def client_left(receive: Receive) -> None:
    """Wait until the client of a request whose body was read has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def check_operator(state: State) -> None:
    """Raise ApiError 403 unless a request's key is an operator's."""
    if not state.is_operator:
        message = "this needs an operator's key: one marked admin in --api-key-file, or one from "
        raise ApiError(403, f"{message}--admin-api-key", code="not_allowed")


def own_view(state: State) -> str | None:
    """Return the label of the key whose requests alone a caller may see; None sees all."""
    return None if state.is_operator else state.tenant


async def refuse(send: Send, error: ApiError, shown: dict[str, Any]) -> None:
    """Send an error as a whole response, in the form ``shown``."""
    body = json.dumps(shown).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    pairs = [(k.encode(), v.encode()) for k, v in (error.headers | headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _first(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers; if one is repeated, the first counts."""
    return dict(reversed(scope["headers"]))


def _replace(scope: Scope, name: bytes, value: bytes) -> None:
    """Let a header have another value."""
    others = [pair for pair in scope["headers"] if pair[0] != name]
    scope["headers"] = [*others, (name, value)]


def _foreign(headers: dict[bytes, bytes]) -> str:
    """Say that pages of an origin are not let in."""
    origin = headers.get(b"origin", b"").decode("latin-1")
    return f"pages of {origin[:80]!r} may not call this: see --cors-origin"


def _is_among(name: str, hosts: Collection[str]) -> bool:
    """Whether a name is one of ``hosts``, or below one that begins with ``*.``."""
    return name in hosts or any(one[0] == "*" and name.endswith(one[1:]) for one in hosts)


def _name(host: str) -> str:
    """Return a Host header's value without the port."""
    name, _, port = host.rpartition(":")
    return name.lower() if name and port.isdigit() and not host.endswith("]") else host.lower()
