"""The first in the row: the name of each request, its line in the log, and its count."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime
from email.utils import formatdate
from typing import Any

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serve.http.errors import SHORT, STOPPING, ApiError, refuse
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.request_state import RequestState, first_headers
from ridgeline.system.log_writer import log_line

_log = logging.getLogger("ridgeline.serve")
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})


class RequestLog:
    """ASGI middleware: whatever becomes of a request, it gets an answer, a line and a count."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[BaseRoute],
        options: ServeOptions,
        write: Callable[[str], object],
        count: Callable[[str, str, int], None],
    ) -> None:
        """Stand before ``app``, which has ``routes``; requests for other paths count as one.

        ``write`` takes the lines, and ``count`` path, method and status of each request.
        """
        self._app, self._paths = app, frozenset(getattr(one, "path", "") for one in routes)
        self._root_path, self._form = options.root_path, options.log_format
        self._write, self._count = write, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, and see to its end."""
        if scope["type"] != "http":
            return  # no lifespan, no websockets
        state = self._begin(scope)
        status = 499  # the client left before there was an answer
        is_head, is_over = scope["method"] == "HEAD", False
        own = {"x-request-id": state["request_id"], "date": formatdate(usegmt=True)}

        async def answer(message: Message) -> None:
            nonlocal status, is_over
            if is_over:
                return
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = own | state.get("left", dict)()
                pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
                message["headers"] = [*message.get("headers", ()), *pairs]
            elif is_head:  # some bodies have no end
                message, is_over = {"type": "http.response.body"}, True
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except (KeyboardInterrupt, SystemExit):
            raise
        except asyncio.CancelledError:  # at the server's end: its body is still to come, or rests
            if status == 499:
                await _fail(answer, state, ApiError(503, STOPPING, code="stopping"))
        except BaseException:  # panics of compiled libraries are no Exceptions
            _log.exception("a request failed")
            if status == 499:
                why = "something went wrong; the server's log says what"
                await _fail(answer, state, ApiError(500, why))
            elif status < 500:
                state.get("cut", lambda: None)()
        finally:
            self._end(scope, status)

    def _begin(self, scope: Scope) -> RequestState:
        """Give a request its name, and its path as routes know it; return its state."""
        sent_id = first_headers(scope).get(b"x-request-id", b"")
        is_sane = _SANE_ID.fullmatch(sent_id)
        path = scope["path"]
        if self._root_path and path.startswith(f"{self._root_path}/"):
            path = path.removeprefix(self._root_path)
        path = path.rstrip("/") or "/"
        scope["path"] = f"/v1{path}" if path in SHORT else path
        state: RequestState = scope["state"]
        state["note"], state["path"] = {}, path
        state["request_id"] = sent_id.decode() if is_sane else uuid.uuid4().hex
        state["arrived_s"] = time.monotonic()
        state["created"] = datetime.fromtimestamp(time.time()).astimezone()
        return state

    def _end(self, scope: Scope, status: int) -> None:
        state: RequestState = scope["state"]
        if refused := state.get("refused"):
            status = refused[0] if status == 499 else status
            state["note"]["error"] = refused[1]
        if ended := state.get("ended"):
            ended(status)
        line: dict[str, Any] = {"id": state["request_id"], "key": state.get("tenant")}
        if trace := _TRACE.fullmatch(first_headers(scope).get(b"traceparent", b"")):
            line["trace_id"] = trace[1].decode()  # W3C's Trace Context
        line |= {"method": scope["method"], "path": scope["path"][:256]}
        line |= {"status": status, **state["note"]}
        line |= {"total_ms": round(1e3 * (time.monotonic() - state["arrived_s"]), 1)}
        state["line"] = line  # for what stands around the row
        self._note(scope["method"], scope["path"], line)

    def on_refused(self, status: int, reason: str, method: str, path: str) -> dict[str, Any]:
        """Log and count what the protocol has refused before it was a request; return the line.

        ``method`` and ``path`` are empty where they are not known.
        """
        line: dict[str, Any] = {"method": method or None, "path": path[:256] or None}
        line |= {"status": status, "error": reason}
        self._note(method, path, line)
        return line

    def _note(self, method: str, path: str, line: dict[str, Any]) -> None:
        path = path if path in self._paths else "other"
        self._count(path, method if method in _METHODS else "other", line["status"])
        is_well = line["path"] == "/health" and line["status"] == 200  # probes ask each second
        is_told = line.get("passed_on") or line.get("polled")  # to a process with a line, or
        if not is_well and not is_told:  # again and again by a page
            self._write(log_line(line, self._form))


async def _fail(send: Send, state: RequestState, error: ApiError) -> None:
    state["note"]["error"] = str(error)
    await refuse(send, error, state)
