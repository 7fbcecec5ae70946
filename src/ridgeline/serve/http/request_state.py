"""What the parts of the server tell each other of a request, in its ASGI scope.

It knows nothing of routes, nor of what stands in the row that a request passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TypedDict

from starlette.datastructures import State
from starlette.types import Receive, Scope

from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.keys import ANYONE
from ridgeline.serve.page import FILES

# Of the request that becomes a link between a router and a server of another machine.
LINK_PATH, LINK_PROTOCOL = "/v1/fleet/join", "ridgeline-fleet"
_PROBES = ("/health", "/ready", "/v2/health/live", "/v2/health/ready")
OPEN_PATHS = frozenset({*FILES, *_PROBES, LINK_PATH})  # no key; the link has another one
CALLER: ContextVar[str] = ContextVar("caller", default=ANYONE)  # the label of the caller's key


class RequestState(TypedDict, total=False):
    """What stands at ``scope["state"]``, and at a route's ``request.state``."""

    # Of the protocol: ends the connection at once; is told that the caller has proved a key; status
    # and reason, where it ended the request itself.
    cut: Callable[[], object]
    proved: Callable[[], object]
    refused: tuple[int, str]
    # Of the request's log: its name, when it came (of the monotonic clock, and as a date), its path
    # as the client wrote it; what routes add to its line, and the line.
    request_id: str
    arrived_s: float
    created: datetime
    path: str
    note: dict[str, Any]
    line: dict[str, Any]
    # Of the keys: the label of the caller's, what names that key itself, if it is an operator's.
    tenant: str
    owner: str
    is_operator: bool
    # Of the pace: returns headers that say what is left; is told the status at the end.
    left: Callable[[], dict[str, str]]
    ended: Callable[[int], object]
    # Of a batch: a seed for a body without one. Of a router: how far the answer had come.
    seed: int | None
    is_background: bool
    journal: Any
    # Of what refused it; of the audit log: why none may pass now, and what it says; of the rules.
    code: str | None
    closed: Exception | None
    audit: Any
    rules: Any


STATE: ContextVar[RequestState | None] = ContextVar("state", default=None)  # as CALLER


def local_scope(
    method: str, path: str, headers: Mapping[str, str], state: RequestState
) -> dict[str, Any]:
    """Return the scope of a request that comes from within the process."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        "state": state,
    }


def first_headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers of a request; if one is repeated, the first counts."""
    return dict(reversed(scope["headers"]))


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
