"""Takes what a router says beside a request, and frames the streamed answer that it gets.

It stands inside the edge. A request without the header passes unchanged; one whose sender does not
know the key is refused.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.keys import ANYONE
from ridgeline.serve.tunnel.resume_log import ResumeLog, frame, spent_line

HEADER = b"x-ridgeline-fleet"  # of a router's request, and of an answer in frames
FINGERPRINT = b"x-ridgeline-fingerprint"  # of an answer to a router: what answers depend on
SPENT = b"x-ridgeline-spent"  # of an answer to a router: tokens of its key since the start
NOTES = "ridgeline.journal"  # what a message's bytes were made of: lines of a journal


def header_value(
    key: str,
    seed: int,
    created: datetime,
    journal: bytes,
    batch: tuple[str, int] | None = None,
    *,
    is_own: bool = False,
    only_reads: bool = False,
) -> bytes:
    """Return what a router says in the header; the journal's lines go in front of the body.

    A request of a ``batch`` comes from the key with this label; the router does not have that key,
    and vouches for the label. The seed beside it is for a body without one. A request that
    ``is_own`` is the router's, which may do what operators may. One that ``only_reads`` ends as
    soon as the server could go on behind the journal.
    """
    said = {"key": key, "seed": seed, "created": created.isoformat(), "journal": len(journal)}
    said |= {"own": True} if is_own else {}
    said |= {"reads": True} if only_reads else {}
    return json.dumps(said | {"batch": batch} if batch else said).encode()


class Tunnel:
    """ASGI middleware."""

    def __init__(
        self, app: ASGIApp, key: str, fingerprint: Callable[[], str], spent: Mapping[str, int]
    ) -> None:
        """Let those who know the ``key`` ask ``app`` as a router does.

        It is told the ``fingerprint``, and how many tokens the caller's key has ``spent`` here.
        """
        self._app, self._key, self._fingerprint, self._spent = app, key, fingerprint, spent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through. Raises ApiError."""
        said = next((value for name, value in scope["headers"] if name == HEADER), None)
        if said is None:
            await self._app(scope, receive, send)
            return
        fields = self._read(said)
        lines, receive = await _opened(receive, fields["journal"])
        try:
            journal = ResumeLog(lines, fields["seed"], only_reads=fields["reads"])
        except ValueError as error:
            raise _bad(str(error)) from None
        scope["state"] |= {"journal": journal, "created": fields["created"]}
        if batch := fields["batch"]:
            scope["state"] |= {"seed": batch[1], "is_background": True}
            scope["state"]["note"]["batch"] = True
        scope["state"]["is_operator"] |= fields["own"]
        is_framed = False

        async def framed(message: Message) -> None:
            nonlocal is_framed
            if message["type"] == "http.response.start":
                is_framed = any(name == HEADER for name, _ in message["headers"])
                spent = str(self._spent.get(scope["state"]["tenant"], 0)).encode()
                own = (FINGERPRINT, self._fingerprint().encode()), (SPENT, spent)
                message = {**message, "headers": [*message["headers"], *own]}
            elif is_framed:
                whole = frame(message.get(NOTES, b""), message.get("body", b""))
                if not message.get("more_body"):
                    whole += frame(spent_line(self._spent.get(scope["state"]["tenant"], 0)), b"")
                message = {**message, "body": whole}
            await send(message)

        await self._app(scope, receive, framed)

    def vouched(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the label of the key that a router vouches for; none if it vouches for nobody.

        Return None if it is no router that asks. Raises ApiError.
        """
        said = headers.get(HEADER)
        if said is None:
            return None
        fields = self._read(said)
        return fields["batch"][0] if fields["batch"] else ANYONE if fields["own"] else ""

    def _read(self, said: bytes) -> dict[str, Any]:
        """Return what the header says. Raises ApiError."""
        try:
            fields = json.loads(said)
            key = str(fields["key"])
            created = datetime.fromisoformat(fields["created"])
            content = {"seed": int(fields["seed"]), "journal": int(fields["journal"])}
            label, seed = fields.get("batch") or (None, 0)
            batch = (str(label), int(seed)) if label is not None else None
        except (ValueError, TypeError, LookupError, RecursionError):
            raise _bad("it is not what a router says") from None
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            message = f"{HEADER.decode()}: this is not a router of ours"
            raise ApiError(403, message, code="not_allowed")
        if min(content.values()) < 0 or created.tzinfo is None:
            raise _bad("it is not what a router says")
        content |= {name: fields.get(name) is True for name in ("own", "reads")}
        return content | {"created": created, "batch": batch}


def _bad(why: str) -> ApiError:
    return ApiError(400, f"{HEADER.decode()}: {why}", code="invalid_value")


async def _opened(receive: Receive, num_bytes: int) -> tuple[bytes, Receive]:
    """Return the journal in front of a body, and what receives the rest."""
    if not num_bytes:
        return b"", receive
    data, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ApiError(499, "the client left")
        data += message.get("body", b"")
        more = message.get("more_body", False)
    rest: list[Message] = [{"type": "http.request", "body": bytes(data[num_bytes:])}]

    async def again() -> Message:
        return rest.pop() if rest else await receive()

    return bytes(data[:num_bytes]), again
