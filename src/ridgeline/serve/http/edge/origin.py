"""The second in the row: names that are ours, and web pages that may call.

A web page may have made its own name point to us, so names count as much as pages do.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serve.http.errors import ApiError, refuse
from ridgeline.serve.http.request_state import RequestState, first_headers

_ANY = "*"  # of origins
OWN = "localhost"  # in place of an origin
_OWN_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"


class OriginCheck:
    """ASGI middleware: refuses what Host and Origin forbid.

    It answers all ApiErrors from behind it too, since pages that may call may read them.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str]
    ) -> None:
        """Stand before ``app``.

        Args:
            app: what takes a request that may come.
            hosts: names that a Host header may have, perhaps as ``*.example.org``; None allows any.
            origins: web origins that may call besides our own pages; "*" is any, and ``OWN`` any
                page of this machine.
        """
        self._app, self._hosts, self._origins = app, hosts, frozenset(origins)
        self._own_pages = _OWN_PAGES if OWN in origins else None
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        headers = first_headers(scope)
        enter = self._of_pages if b"origin" in headers else self._enter
        if scope["method"] != "OPTIONS":
            await enter(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 400:
                # A foreign page asked. Without the header of permission it may not call.
                scope["state"]["note"].setdefault("error", _foreign(headers))
                message["status"] = 200
            await send(message)

        await enter(scope, receive, answer)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(first_headers(scope))
            await self._app(scope, receive, send)
        except ApiError as error:
            state: RequestState = scope["state"]
            state["note"].setdefault("error", str(error))
            state["code"] = error.code
            if error.status != 499:  # the client left
                await refuse(send, error, state)

    def _check(self, headers: dict[bytes, bytes]) -> None:
        """Raise ApiError 403 if a name or a page is not allowed."""
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


def _foreign(headers: dict[bytes, bytes]) -> str:
    origin = headers.get(b"origin", b"").decode("latin-1")
    return f"pages of {origin[:80]!r} may not call this: see --cors-origin"


def _is_among(name: str, hosts: Collection[str]) -> bool:
    """Whether a name is one of ``hosts``, or below one that begins with ``*.``."""
    return name in hosts or any(one[0] == "*" and name.endswith(one[1:]) for one in hosts)


def _name(host: str) -> str:
    """Return a Host header's value without the port."""
    name, _, port = host.rpartition(":")
    return name.lower() if name and port.isdigit() and not host.endswith("]") else host.lower()
