"""What a router says beside a request counts, if it is ours."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.keys import ANYONE
from ridgeline.serve.tunnel.middleware import HEADER, Tunnel, header_value

CREATED = datetime(2026, 11, 27, tzinfo=UTC)


def seen(said: bytes) -> dict[str, Any]:
    """Return the state of a request with this header, as the application gets it."""
    scope: Scope = {"type": "http", "headers": [(HEADER, said)], "state": {}}
    scope["state"] |= {"is_background": False, "is_operator": False, "note": {}}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        return None

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    asyncio.run(Tunnel(app, "ours", lambda: "fp", {})(scope, receive, send))
    state: dict[str, Any] = scope["state"]
    return state


def vouched(said: bytes | None) -> str | None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    return Tunnel(app, "ours", lambda: "fp", {}).vouched({} if said is None else {HEADER: said})


def test_a_router_vouches_for_the_keys_of_its_batches() -> None:
    said = header_value("ours", 1, CREATED, b"", ("anna", 5))
    assert vouched(said) == "anna"
    state = seen(said)
    assert (state["is_background"], state["seed"], state["created"]) == (True, 5, CREATED)
    assert state["note"] == {"batch": True}


def test_other_requests_of_a_router_have_their_own_keys() -> None:
    said = header_value("ours", 1, CREATED, b"")
    assert vouched(said) == ""
    assert vouched(None) is None
    state = seen(said)
    assert state["is_background"] is False
    assert "seed" not in state


@pytest.mark.parametrize("batch", [None, ("anna", 5)])
def test_who_does_not_know_the_key_says_nothing(batch: tuple[str, int] | None) -> None:
    said = header_value("theirs", 1, CREATED, b"", batch)
    for ask in (vouched, seen):
        with pytest.raises(ApiError) as refused:
            ask(said)
        assert refused.value.status == 403


def test_a_routers_own_requests_may_do_what_operators_may() -> None:
    own = header_value("ours", 1, CREATED, b"", is_own=True)
    assert vouched(own) == ANYONE
    assert seen(own)["is_operator"] is True
    assert seen(header_value("ours", 1, CREATED, b""))["is_operator"] is False
    with pytest.raises(ApiError):
        vouched(header_value("theirs", 1, CREATED, b"", is_own=True))


def test_what_no_router_says_is_refused() -> None:
    for batch in ("x", [1], {"a": 1}, ["anna", "five"]):
        said = header_value("ours", 1, CREATED, b"", batch)  # type: ignore[arg-type]
        with pytest.raises(ApiError) as refused:
            vouched(said)
        assert refused.value.status == 400
