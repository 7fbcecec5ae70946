"""What a line of the audit log says of a request, and the middleware that has it written.

It stands around the edge, so a request that the edge refuses has a line too. With
``--audit-strict`` the end of an answer waits until its line is on the disk. ``GET /v1/audit/head``
says where the log ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from ridgeline.core.params import SamplingParams
from ridgeline.serve.answer.response_builder import message_of
from ridgeline.serve.answer.stages import Answers, PreparedRequest
from ridgeline.serve.http.errors import ApiError, refuse
from ridgeline.serve.http.request_state import (
    OPEN_PATHS,
    RequestState,
    check_operator,
    client_left,
)
from ridgeline.serve.http.web_server import FrontApp
from ridgeline.trust.audit.log import AuditLog

if TYPE_CHECKING:
    from ridgeline.trust.rules.policy_file import RequestPolicy

_FIELDS = (  # of a line of the log, which may have texts as well
    *("id", "key", "trace_id", "method", "path", "status", "rules", "hits", "prompt_tokens"),
    *("cached_tokens", "completion_tokens", "finish", "promise", "total_ms", "batch"),
)
_CONTENT = {"messages", "prompt", "suffix", "input_prefix", "input_suffix", "input_extra"}
_CONTENT |= {"input", "text_input", "query", "documents", "text_1", "text_2"}
_FROM_CLIENTS = {"user", "safety_identifier", "prompt_cache_key", "metadata"}
_NO_TEXT = ("role", "type")  # fields whose values are words of the API


@dataclass
class AuditEntry:
    """What is to be known of one request.

    Attributes:
        identity: of how it is answered: the model, and what its answers hang on.
        params: of the engine.
        body: what was asked, and ``answers`` what came of it, if their texts are kept.
        rules: those for the request, if there are any.
    """

    identity: dict[str, Any] | None = None
    params: SamplingParams | None = None
    body: BaseModel | None = None
    answers: Answers | None = None
    rules: RequestPolicy | None = None

    @property
    def keeps(self) -> str:
        """What is kept of texts: none, hash or text."""
        return self.rules.key.audit if self.rules else "none"

    def take(self, rules: RequestPolicy | None, request: PreparedRequest) -> None:
        """Take what a request asks for that was prepared, and the rules for it."""
        self.rules, self.params, self.identity = rules, request.params, {"model": request.model}
        self.identity |= {"fingerprint": request.fingerprint} if request.fingerprint else {}
        if self.keeps == "none":
            return
        self.body, self.answers = request.body, request.answers
        for one in request.answers.choices if request.answers else ():
            one.shown_pieces = []

    def fields(self, line: Mapping[str, Any], code: str | None) -> dict[str, Any]:
        """Return the fields of the line, from those of the log's; ``code`` is of an error."""
        fields = {name: line[name] for name in _FIELDS if line.get(name) is not None}
        fields |= {"code": code} if code else {}
        return {"event": "request", **fields, **(self.identity or {})}

    def more(self, line: Mapping[str, Any], keyed_hash: Callable[[str], str]) -> dict[str, Any]:
        """Return further fields: a digest of the parameters, and what is kept of texts."""
        digest = sha256(repr(self.params).encode()).hexdigest()[:32]
        return ({"params": digest} if self.params else {}) | self._texts(line, keyed_hash)

    def _texts(self, line: Mapping[str, Any], keyed_hash: Callable[[str], str]) -> dict[str, Any]:
        if self.keeps == "none":
            return {}
        texts: dict[str, Any] = {"error": line["error"]} if line.get("error") else {}
        if self.body is not None:
            request = self.body.model_dump(include=_CONTENT | _FROM_CLIENTS, exclude_none=True)
            texts["asked"] = self.rules.as_read(request) if self.rules else request
        if self.answers is not None:
            name = partial(self.answers.new_id, "call_")
            shown = [(one.index, one.shown_pieces) for one in self.answers.choices]
            texts["answers"] = [message_of(parts, partial(name, i)) for i, parts in shown if parts]
        if self.keeps == "hash":
            texts = {name: _hashed(value, keyed_hash) for name, value in texts.items()}
        return texts


def _hashed(value: Any, keyed_hash: Callable[[str], str]) -> Any:
    """Return JSON with the hash of each text in it."""
    if isinstance(value, str):
        return keyed_hash(value)
    if isinstance(value, dict):
        return {
            name: one if name in _NO_TEXT else _hashed(one, keyed_hash)
            for name, one in value.items()
        }
    if isinstance(value, list | tuple) and not _are_ids(value):
        return [_hashed(one, keyed_hash) for one in value]
    return value if value is None else keyed_hash(json.dumps(value))


def _are_ids(values: list[Any] | tuple[Any, ...]) -> bool:
    return bool(values) and all(isinstance(one, int) for one in values)


class AuditObserver:
    """Has a line of an audit log written about each request.

    Attributes:
        log: that has the lines.
    """

    def __init__(self, log: AuditLog) -> None:
        """Write to ``log``."""
        self.log = log

    @property
    def num_lost(self) -> int:
        """Lines that could not be written."""
        return self.log.num_lost

    def loss(self) -> str | None:
        """Return what is to be said of these lines, if there are any."""
        return self.log.loss()

    def watch(self, edge: FrontApp) -> Audited:
        """Return the middleware that sees all requests that come over HTTP."""
        return Audited(edge, self)

    def begin(self, state: RequestState) -> None:
        """Let a request have a line; ``state`` is its own until its end."""
        state["audit"] = AuditEntry()

    def take(self, state: RequestState, request: PreparedRequest) -> None:
        """Take what a request asks for, before it is answered."""
        entry: AuditEntry | None = state.get("audit")
        if entry is not None:
            entry.take(state.get("rules"), request)

    async def finished(self, state: RequestState, line: Mapping[str, Any]) -> ApiError | None:
        """Have a request's line written; a strict log is waited for. Return why it may not end.

        ``state`` has its entry, and the code of its error; ``line`` is what the server's own log
        says of it.
        """
        entry: AuditEntry = state["audit"]
        fields, more = entry.fields(line, state.get("code")), partial(entry.more, line)
        num_tokens = line.get("prompt_tokens", 0) + line.get("completion_tokens", 0)
        submission = fields, more, num_tokens if entry.body else 0
        if not self.log.is_strict:
            self.log.submit(*submission)
        elif not await self.log.is_kept(*submission):
            return self.unkept()
        return None

    def unkept(self) -> ApiError:
        """Return the error of a request whose line cannot be written."""
        trouble = self.log.trouble
        message = f"the audit log cannot be written ({trouble}), and no request goes without it"
        return ApiError(503, message, code="audit_failed", headers={"retry-after": "5"})

    def add_routes(self, app: FastAPI) -> None:
        """Add the route that says where the log ends."""

        @app.get("/v1/audit/head")
        async def head(request: Request) -> dict[str, Any]:
            """Return the number and the hash of the audit log's last line on the disk.

            For operators.
            """
            check_operator(request.state)
            return self.log.head()


class Audited:
    """ASGI middleware around an edge."""

    def __init__(self, edge: FrontApp, observer: AuditObserver) -> None:
        """Have a line for each request that ``edge`` lets through or refuses."""
        self._edge, self._observer, self._log = edge, observer, observer.log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request be answered, and have its line written."""
        if scope["type"] != "http":
            await self._edge(scope, receive, send)
            return
        state = scope["state"]
        self._observer.begin(state)
        state["closed"] = self._closed()
        pending: list[Message] = []

        async def hold(message: Message) -> None:
            """Send a message, but for the end of an answer."""
            pending.append(message)
            if message.get("more_body", False):
                await _send_all(pending, send)

        await self._edge(scope, receive, hold if self._log.is_strict else send)
        line = state["line"]
        if line.get("passed_on") or (line["path"] in OPEN_PATHS and line["status"] < 400):
            await _send_all(pending, send)  # it has a line elsewhere, or needs none
            return
        error = await self._observer.finished(state, line)
        if error is None or line["status"] >= 400:
            await _send_all(pending, send)
        else:
            await _refuse(error, pending, scope, receive, send)

    def _closed(self) -> ApiError | None:
        """Return why no request is taken now, if so."""
        if not self._log.is_strict or self._log.trouble is None:
            return None
        return self._observer.unkept()

    def on_refused(self, status: int, reason: str, method: str, path: str) -> dict[str, Any]:
        """Have a line written about what the protocol has refused; return the log's."""
        line = self._edge.on_refused(status, reason, method, path)
        self._log.submit(AuditEntry().fields(line, None))
        return line


async def _refuse(
    error: ApiError, pending: list[Message], scope: Scope, receive: Receive, send: Send
) -> None:
    """Refuse what has no line; an answer that has begun is cut."""
    state = scope["state"]
    if pending and pending[0]["type"] == "http.response.start":
        await refuse(send, error, state)
    elif pending:
        state["cut"]()
        await client_left(receive)  # uvicorn takes it for a bug otherwise


async def _send_all(pending: list[Message], send: Send) -> None:
    messages = pending[:]
    pending.clear()
    for message in messages:
        await send(message)
