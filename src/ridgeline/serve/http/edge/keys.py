"""The third and the fourth in the row: whose request it is, and when it may begin.

Every POST counts for its key, whatever becomes of it, and its answer says what is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.keys import ANYONE, Keys, Limits
from ridgeline.serve.http.request_state import (
    CALLER,
    OPEN_PATHS,
    STATE,
    RequestState,
    first_headers,
)

_COME_LATER = (429, 503)


class KeyCheck:
    """ASGI middleware: refuses a route without a key, unless it is known to be open."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        vouched: Callable[[Mapping[bytes, bytes]], str | None] | None = None,
    ) -> None:
        """Stand before ``app``, which ``keys`` open.

        ``vouched`` returns the label of the key that a router says is the caller's, or nothing if
        the headers say it themselves; None if it is no router that asks.
        """
        self._app, self._keys, self._vouched = app, keys, vouched or (lambda headers: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Find the caller. Raises ApiError 401."""
        state: RequestState = scope["state"]
        tenant, is_proved = self.tenant(first_headers(scope), scope["path"])
        if is_proved and (tell := state.get("proved")):
            tell()
        state["tenant"], state["owner"] = tenant, self._keys.owner_of(tenant)
        state["is_operator"] = self._keys.is_operator(tenant)
        state["seed"], state["is_background"], state["journal"] = None, False, None
        STATE.set(state)
        CALLER.set(tenant)  # of all that this request has done for it
        await self._app(scope, receive, send)

    def tenant(self, headers: dict[bytes, bytes], path: str = "") -> tuple[str, bool]:
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


class Pacing:
    """ASGI middleware: lets the requests of a key wait where others ask, and counts them."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        """Stand before ``app``; ``limits`` say what each key may send, and how soon."""
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through when it may begin. Raises ApiError 429 if it may not.

        Raises ``closed`` of the state too, which is why nothing is let through now.
        """
        state: RequestState = scope["state"]
        tenant = state["tenant"]
        state["ended"] = partial(self._note_end, tenant)
        if scope["path"] not in OPEN_PATHS and (why := state.get("closed")):
            raise why
        length = first_headers(scope).get(b"content-length", b"")
        await self.wait(tenant, int(length) if length.isdigit() else 0)
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        state["left"] = partial(self._limits.headers, tenant)
        with self._limits.counted(tenant):
            await self._app(scope, receive, send)

    def _note_end(self, tenant: str, status: int) -> None:
        """A key that goes on asking, though it was told to come later, waits longer."""
        if status in _COME_LATER:
            self._limits.pace.note_refusal(tenant)

    async def wait(self, tenant: str, num_bytes: int) -> None:
        """Wait until a request of a key may begin, with a body of this length."""
        if wait_s := self._limits.pace.wait_s(tenant, num_bytes):
            await asyncio.sleep(wait_s)
