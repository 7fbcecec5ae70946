"""Requests of a batch, asked of the application as if they had come over HTTP, without a socket.

So a batch's request is read, checked and answered by the code of its route, and by nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from ridgeline.serve.answer.stages import Observer
from ridgeline.serve.batch_files.run import ItemRequest, ItemResponse, Stopped
from ridgeline.serve.http.fair_pool import in_thread
from ridgeline.serve.http.request_body import CAPPED, IGNORED
from ridgeline.serve.http.request_state import CALLER, STATE, RequestState, local_scope

_log = logging.getLogger("ridgeline.serve")
_MOST_PAUSE_S = 5.0
# What is answered with 503 though others can be answered: the model is not there, or a server has
# ended twice by this request. A server that hangs is started again, and so is a helper process.
_FINAL, _PASSING = ("model_not_loaded", "model_ended"), ("model_hung", "no_process")
_NOTES = {"ignored": IGNORED, "capped": CAPPED}  # by what lines of output call it


class LocalClient:
    """Asks an application on behalf of one caller."""

    def __init__(
        self,
        app: ASGIApp,
        tenant: str,
        *,
        is_background: bool,
        renamed: Callable[[str], str | None] = lambda model: model,
        observer: Observer | None = None,
    ) -> None:
        """Ask ``app`` as ``tenant``, the label of a key.

        Args:
            app: the application, behind the edge.
            tenant: whose use it is, and whose limits hold.
            is_background: whether requests that people wait for go first.
            renamed: which model is asked where a request names one; None is the server's own.
            observer: is told of each request.
        """
        self._observer = observer
        self._app, self._tenant = app, tenant
        self._caller = f"{tenant} batch" if is_background else tenant  # has turns of its own
        self._is_background, self._renamed = is_background, renamed

    async def __call__(self, request: ItemRequest) -> ItemResponse:
        """Return the answer to a request; while there is no room for it, wait and ask again.

        Raises Stopped if the server takes no requests any more, or one could not be noted.
        """
        body = dict(request.body)
        if isinstance(body.get("model"), str):
            body["model"] = self._renamed(body["model"])
        data = await in_thread(lambda: json.dumps(body).encode())  # it may be long
        while True:
            reply = await self._once(request, data)
            code = reply.code if reply.status == 503 else None
            if reply.status == 503 and code not in (*_FINAL, *_PASSING):
                raise Stopped(reply.message)
            if reply.status != 429 and code not in _PASSING:
                notes = {name: reply.headers[h] for name, h in _NOTES.items() if h in reply.headers}
                return ItemResponse(reply.status, bytes(reply.body), notes)
            pause_s = float(reply.headers.get("retry-after", _MOST_PAUSE_S))
            await asyncio.sleep(min(pause_s, _MOST_PAUSE_S))

    async def _once(self, request: ItemRequest, body: bytes) -> _CollectedResponse:
        CALLER.set(self._caller)
        reply, unread = _CollectedResponse(), [body]
        state: RequestState = {
            "note": {},
            "request_id": request.request_id,
            "arrived_s": time.monotonic(),
            "created": datetime.fromtimestamp(time.time()).astimezone(),
            "path": request.url,
            "tenant": self._tenant,
            "is_operator": False,
            "is_background": self._is_background,
            "seed": request.seed,
            "journal": None,
        }
        headers = {"host": "localhost", "content-type": "application/json"}
        scope = local_scope("POST", request.url, headers, state)
        STATE.set(state)
        if self._observer:
            return await self._observed(self._observer, scope, reply, unread)
        await self._ask(scope, reply, unread)
        return reply

    async def _observed(
        self, observer: Observer, scope: Scope, reply: _CollectedResponse, unread: list[bytes]
    ) -> _CollectedResponse:
        """Ask, and let it be noted unless the request will be asked again."""
        state = scope["state"]
        observer.begin(state)
        try:
            await self._ask(scope, reply, unread)
        finally:
            line = {"id": state["request_id"], "key": self._tenant, "method": "POST"}
            line |= {"path": state["path"], "status": reply.status or 499, "batch": True}
            total_ms = round(1e3 * (time.monotonic() - state["arrived_s"]), 1)
            line |= {**state["note"], "total_ms": total_ms}
            is_asked_again = reply.status == 429 or (reply.status == 503 and reply.code in _PASSING)
            is_elsewhere = is_asked_again or line.get("passed_on")
            error = None if is_elsewhere else await observer.finished(state, line)
        if error is not None:
            raise Stopped(str(error))
        return reply

    async def _ask(self, scope: Scope, reply: _CollectedResponse, unread: list[bytes]) -> None:
        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # this client never leaves: it is cancelled
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        try:
            await self._app(scope, receive, reply.take)
        except Exception:
            if not reply.status:
                raise
            _log.exception("a request of a batch failed")  # its answer says no more than that


class _CollectedResponse:
    """A response as it comes."""

    def __init__(self) -> None:
        self.status, self.body = 0, bytearray()
        self.headers: dict[str, str] = {}

    async def take(self, message: Message) -> None:
        """Take a message of the application."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            pairs = message.get("headers", ())
            self.headers = {name.decode().lower(): value.decode() for name, value in pairs}
        self.body += message.get("body", b"")

    @property
    def message(self) -> str:
        """What an error says."""
        return str(self._error["message"])

    @property
    def code(self) -> str:
        """What kind of error it is."""
        return str(self._error["code"])

    @property
    def _error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error
