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
from ridgeline.serve.answer.response_builder import ResponseBuilder, message_of
from ridgeline.serve.http.errors import ApiError, refuse
from ridgeline.serve.http.request_state import OPEN_PATHS, check_operator, client_left
from ridgeline.serve.http.web_server import FrontApp
from ridgeline.trust.audit.log import AuditLog

if TYPE_CHECKING:
    from ridgeline.trust.rules.policy_file import RequestPolicy

_TOLD = (  # of a line of the log, which may have texts as well
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
        told: of how it is answered: the model, and what its answers hang on.
        params: of the engine.
        body: what was asked, and ``answers`` what came of it, if their texts are kept.
        rules: those for the request, if there are any.
    """

    told: dict[str, Any] | None = None
    params: SamplingParams | None = None
    body: BaseModel | None = None
    answers: ResponseBuilder | None = None
    rules: RequestPolicy | None = None

    @property
    def keeps(self) -> str:
        """What is kept of texts: none, hash or text."""
        return self.rules.key.audit if self.rules else "none"

    def take(
        self,
        body: BaseModel,
        model: str,
        fingerprint: str | None = None,
        params: SamplingParams | None = None,
        answers: ResponseBuilder | None = None,
    ) -> None:
        """Take what a request that was prepared asks for, and its answers, which are to come."""
        self.told, self.params = {"model": model}, params
        self.told |= {"fingerprint": fingerprint} if fingerprint else {}
        if self.keeps == "none":
            return
        self.body, self.answers = body, answers
        for one in answers.choices if answers else ():
            one.kept = []

    def fields(self, line: Mapping[str, Any], code: str | None) -> dict[str, Any]:
        """Return the fields of the line, from those of the log's; ``code`` is of an error."""
        found = {name: line[name] for name in _TOLD if line.get(name) is not None}
        found |= {"code": code} if code else {}
        return {"event": "request", **found, **(self.told or {})}

    def more(self, line: Mapping[str, Any], keyed_hash: Callable[[str], str]) -> dict[str, Any]:
        """Return further fields: a digest of the parameters, and what is kept of texts."""
        digest = sha256(repr(self.params).encode()).hexdigest()[:32]
        return ({"params": digest} if self.params else {}) | self._texts(line, keyed_hash)

    def _texts(self, line: Mapping[str, Any], keyed_hash: Callable[[str], str]) -> dict[str, Any]:
        if self.keeps == "none":
            return {}
        texts: dict[str, Any] = {"error": line["error"]} if line.get("error") else {}
        if self.body is not None:
            asked = self.body.model_dump(include=_CONTENT | _FROM_CLIENTS, exclude_none=True)
            texts["asked"] = self.rules.as_read(asked) if self.rules else asked
        if self.answers is not None:
            name = partial(self.answers.new_id, "call_")
            kept = [(one.kept, one.index) for one in self.answers.choices if one.kept]
            texts["answers"] = [message_of(pieces, partial(name, index)) for pieces, index in kept]
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


class Audited:
    """ASGI middleware around an edge."""

    def __init__(self, edge: FrontApp, log: AuditLog) -> None:
        """Write a line to ``log`` for each request that ``edge`` lets through or refuses."""
        self._edge, self._log = edge, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request be answered, and have its line written."""
        if scope["type"] != "http":
            await self._edge(scope, receive, send)
            return
        state = scope["state"]
        state["audit"], state["closed"] = AuditEntry(), self._closed()
        held: list[Message] = []

        async def hold(message: Message) -> None:
            """Send a message, but for the end of an answer."""
            held.append(message)
            if message.get("more_body", False):
                await _send_all(held, send)

        await self._edge(scope, receive, hold if self._log.is_strict else send)
        line = state["line"]
        if line.get("passed_on") or (line["path"] in OPEN_PATHS and line["status"] < 400):
            await _send_all(held, send)  # it has a line elsewhere, or needs none
            return
        if await is_kept(self._log, state, line) or line["status"] >= 400:
            await _send_all(held, send)
        else:
            await self._refuse(held, scope, receive, send)

    async def _refuse(
        self, held: list[Message], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Refuse what has no line; an answer that has begun is cut."""
        state = scope["state"]
        if held and held[0]["type"] == "http.response.start":
            error = unkept(self._log.trouble)
            await refuse(send, error, state)
        elif held:
            state["cut"]()
            await client_left(receive)  # uvicorn takes it for a bug otherwise

    def _closed(self) -> ApiError | None:
        """Return why no request is taken now, if so."""
        if not self._log.is_strict or self._log.trouble is None:
            return None
        return unkept(self._log.trouble)

    def on_refused(self, status: int, reason: str, method: str, path: str) -> dict[str, Any]:
        """Have a line written about what the protocol has refused; return the log's."""
        line = self._edge.on_refused(status, reason, method, path)
        self._log.submit(AuditEntry().fields(line, None))
        return line


async def is_kept(log: AuditLog, state: dict[str, Any], line: Mapping[str, Any]) -> bool:
    """Have a request's line written; a strict log is waited for. Return whether it may end.

    ``state`` has the request's entry, and the code of its error; ``line`` is what the server's own
    log says of it.
    """
    entry: AuditEntry = state["audit"]
    fields, more = entry.fields(line, state.get("code")), partial(entry.more, line)
    num_tokens = line.get("prompt_tokens", 0) + line.get("completion_tokens", 0)
    held = fields, more, num_tokens if entry.body else 0
    if log.is_strict:
        return await log.is_kept(*held)
    log.submit(*held)
    return True


def unkept(trouble: str | None) -> ApiError:
    """Return the error of a request whose line cannot be written."""
    message = f"the audit log cannot be written ({trouble}), and no request goes without it"
    return ApiError(503, message, code="audit_failed", headers={"retry-after": "5"})


async def _send_all(held: list[Message], send: Send) -> None:
    messages = held[:]
    held.clear()
    for message in messages:
        await send(message)


def add_audit(app: FastAPI, log: AuditLog) -> None:
    """Add the route."""

    @app.get("/v1/audit/head")
    async def head(request: Request) -> dict[str, Any]:
        """Return the number and the hash of the audit log's last line on the disk.

        For operators.
        """
        check_operator(request.state)
        return log.head()
