"""An operator's routes: loading adapters, and letting the engine sleep.

``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter`` are vLLM's. They take files of this
machine, so they are off unless a folder is given that all of these lie in. ``POST /v1/sleep`` and
``/v1/wake`` are ours, ``/sleep``, ``/wake_up`` and ``/is_sleeping`` vLLM's. What they do concerns
every key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field, TypeAdapter
from starlette.responses import PlainTextResponse, Response

from ridgeline.serve.adapters import Loras
from ridgeline.serve.answer import fields
from ridgeline.serve.http.request_body import RequestModel, in_turn
from ridgeline.serve.http.request_state import check_operator
from ridgeline.serve.sleep_state import SleepState
from ridgeline.system.machine import memory_of


class LoadLora(RequestModel):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLora(RequestModel):
    """POST /v1/unload_lora_adapter; the number that vLLM also takes says nothing here."""

    extras = fields.LORA

    lora_name: str


class SleepRequest(RequestModel):
    """POST /v1/sleep, in its body or its query; a router reads the name of the model."""

    model: str | None = None
    level: Annotated[int, Field(ge=1, le=2)] = 1
    wait: bool = False


_BODY = TypeAdapter(SleepRequest)


def add_lora(app: FastAPI, loras: Loras, check_open: Callable[[None], None]) -> None:
    """Add the routes to an application; ``check_open`` raises ApiError at the server's end."""

    @app.post("/v1/load_lora_adapter", include_in_schema=False)
    async def load(body: LoadLora, request: Request) -> PlainTextResponse:
        check_operator(request.state)
        check_open(None)
        await loras.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", include_in_schema=False)
    async def unload(body: UnloadLora, request: Request) -> PlainTextResponse:
        check_operator(request.state)
        loras.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def add_sleep(app: FastAPI, sleep_state: SleepState) -> None:
    """Add the routes to an application."""

    @app.post("/v1/sleep", include_in_schema=False)
    async def sleep(request: Request) -> dict[str, Any]:
        """Give memory back until the next request: 1 the cache's, 2 also that of weights."""
        check_operator(request.state)
        sleep_request = await _sleep_request(request)
        given = await sleep_state.sleep(sleep_request.level, wait=sleep_request.wait)
        return _sleep_status(sleep_state) | {"given_back_bytes": given}

    @app.post("/v1/wake", include_in_schema=False)
    async def wake(request: Request) -> dict[str, Any]:
        """Be awake, without a request."""
        check_operator(request.state)
        await sleep_state.wake()
        return _sleep_status(sleep_state)

    @app.post("/sleep", include_in_schema=False)
    async def sleep_as_vllm(request: Request) -> Response:
        await sleep(request)
        return Response()

    @app.post("/wake_up", include_in_schema=False)
    async def wake_up(request: Request) -> Response:
        await wake(request)
        return Response()

    @app.get("/is_sleeping", include_in_schema=False)
    async def is_sleeping(request: Request) -> dict[str, bool]:
        check_operator(request.state)
        return {"is_sleeping": sleep_state.level > 0}


async def _sleep_request(request: Request) -> SleepRequest:
    """Return what a request asks for, in its body or, as vLLM's, in its query."""
    body = await request.body()
    if not body:
        query: dict[str, Any] = dict(request.query_params)
        for name in {"level", "wait"} & {*query}:
            with suppress(ValueError, RecursionError):  # as it is then, it is refused by its name
                query[name] = json.loads(query[name])
        body = json.dumps(query).encode()
    sleep_request: SleepRequest = await in_turn(request.app.state.work, _BODY, body)
    return sleep_request


def _sleep_status(sleep_state: SleepState) -> dict[str, Any]:
    return {"level": sleep_state.level, "resident_bytes": memory_of(os.getpid()).resident_bytes}
