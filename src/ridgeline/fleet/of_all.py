"""The routes that all servers of a model answer together, or the one of them that can."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol

import httpx2
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from pydantic import TypeAdapter
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.fleet.passed_on import PassedOn
from ridgeline.fleet.pool import Pool
from ridgeline.fleet.servers.adapters import LOAD, UNLOAD, NotLoaded
from ridgeline.fleet.servers.slot import Slot
from ridgeline.fleet.servers.worker import STATUS_S, Worker
from ridgeline.serve.http.gate import check_operator
from ridgeline.serve.http.json_body import in_turn


class RunningServers(Protocol):
    """What is known of the servers of models."""

    pool: Pool

    async def asked(self, request: Request, named: Any = None) -> tuple[Slot, Worker]:
        """Return the server of a loaded model that a query names, or one. Raises ApiError."""


_FIELDS = TypeAdapter[dict[str, Any]](dict[str, Any])


def add_of_all_servers(app: FastAPI, router: RunningServers) -> None:
    """Add the routes to an application."""

    async def sleep(request: Request) -> Response:
        """Put all servers of a model to sleep, or wake them."""
        body = await request.body()
        fields = await in_turn(request.app.state.work, _FIELDS, body) if body else {}
        slot, worker = await router.asked(request, fields.get("model"))
        path = f"{request.scope['state']['path']}?{request.url.query}"
        for one in list(slot.workers.values()):
            if one is not worker:
                with contextlib.suppress(httpx2.HTTPError):  # it has ended: another one starts
                    await one.client.post(path, content=body, headers=key_of(request))
        return PassedOn(router.pool, lambda: contextlib.nullcontext(slot), body, only=worker)

    async def adapters(request: Request) -> Response:
        """Load or unload an adapter on all servers of the model."""
        check_operator(request.state)
        fields = await in_turn(request.app.state.work, _FIELDS, await request.body())
        slot, worker = await router.asked(request)
        others = [one for one in slot.workers.values() if one is not worker]
        path = request.url.path
        try:
            await router.pool.adapters.change(path, fields, [worker, *others])
        except NotLoaded as error:
            answer = error.answer
            if answer is None:
                raise router.pool.refusal(slot) from None
            return Response(answer.content, answer.status_code, media_type="application/json")
        done = "added" if path == LOAD else "removed"
        name = fields["lora_name"]
        return PlainTextResponse(f"Success: LoRA adapter '{name}' {done} successfully.")

    async def explain(request: Request) -> Response:
        """Pass on what is said by the server that answered a request."""
        slot, worker = await router.asked(request)
        for one in [one for one in slot.workers.values() if not one.trouble]:
            with contextlib.suppress(httpx2.HTTPError, TimeoutError):  # it has ended, or hangs
                async with asyncio.timeout(STATUS_S):
                    path = request.scope["state"]["path"]
                    answer = await one.client.head(path, headers=key_of(request))
                worker = one if answer.is_success else worker
        return PassedOn(router.pool, lambda: contextlib.nullcontext(slot), only=worker)

    for path in (LOAD, UNLOAD):
        app.router.routes.append(Route(path, adapters, methods=["POST"]))
    for path in ("/v1/sleep", "/v1/wake", "/sleep", "/wake_up"):
        app.router.routes.append(Route(path, sleep, methods=["POST"]))
    app.router.routes.append(Route("/v1/requests/{name}/explain", explain, methods=["GET"]))


def key_of(request: Request) -> dict[str, str]:
    """Return the headers by which servers know whose key this is."""
    names = ("authorization", "x-api-key")
    return {name: request.headers[name] for name in names if name in request.headers}
