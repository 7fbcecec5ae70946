"""Letting the engine sleep: on request, and by itself after it was idle for a while.

``POST /v1/sleep`` and ``/v1/wake`` are ours, ``/sleep``, ``/wake_up`` and ``/is_sleeping`` vLLM's.
They concern every key, so they are an operator's. A request wakes the engine by being computed.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Request
from pydantic import Field, TypeAdapter
from starlette.responses import Response

from ridgeline.serve.engine.between_steps import between_steps
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_body import RequestModel, in_turn
from ridgeline.serve.http.request_state import check_operator
from ridgeline.system.machine import memory_of

_LOOK_S = 0.05  # from one look whether requests have ended to the next


class SleepRequest(RequestModel):
    """POST /v1/sleep, in its body or its query; a router reads the name of the model."""

    model: str | None = None
    level: Annotated[int, Field(ge=1, le=2)] = 1
    wait: bool = False


_BODY = TypeAdapter(SleepRequest)


class Sleeps(Protocol):
    """What sleeps (``api.sleep.Sleep``)."""

    level: int

    def begin(self, level: int) -> int:
        """Give memory back; return how much. Raises RuntimeError while requests run."""

    def end(self) -> None:
        """Be awake."""


class SleepState:
    """The sleep of one engine."""

    def __init__(self, engine: EngineClient, sleep: Sleeps, idle_s: float | None) -> None:
        """Let ``engine`` sleep by itself when it was idle for ``idle_s``; None: never."""
        self._engine, self._sleep, self._idle_s = engine, sleep, idle_s
        self._num_records = 0

    @property
    def level(self) -> int:
        """How deep it sleeps; 0 while it is awake."""
        return self._sleep.level

    async def sleep(self, level: int, *, wait: bool = False) -> int:
        """Give memory back, perhaps when the last request has ended; return how many bytes.

        Raises ApiError while there are requests, and if the backend cannot.
        """
        while True:
            try:
                if self._engine.num_streams:
                    raise RuntimeError(f"{self._engine.num_streams} requests run")
                given: int = await between_steps(self._engine, partial(self._sleep.begin, level))
                return given
            except ValueError as error:
                raise ApiError(400, str(error), param="level", code="invalid_value") from None
            except RuntimeError as error:
                if not wait:
                    message = f"{error}: ask again later, or with wait"
                    raise ApiError(409, message, code="busy") from None
                await asyncio.sleep(_LOOK_S)

    def begin(self) -> None:
        """Sleep deep, between two steps, unless there are requests then."""
        if not self._engine.num_streams:
            self._engine.between_steps(self._nap)

    async def wake(self) -> None:
        """Be awake."""
        await between_steps(self._engine, self._sleep.end)

    def start(self) -> None:
        """Begin to count idle time, if it sleeps by itself; to be called on the loop."""
        if self._idle_s is not None:
            self._engine.listeners.append(self._count)
            self._look_later(self._idle_s, -1)

    def _count(self, record: object) -> None:
        self._num_records += 1

    def _look_later(self, idle_s: float, seen: int) -> None:
        asyncio.get_running_loop().call_later(idle_s, self._look, idle_s, seen)

    def _look(self, idle_s: float, seen: int) -> None:
        """Sleep if nothing has happened since the last look, or else look again later."""
        if seen == self._num_records and not self.level:
            self.begin()
        self._look_later(idle_s, self._num_records)

    def _nap(self) -> None:
        with suppress(RuntimeError, ValueError):  # a request has come meanwhile, or it cannot
            self._sleep.begin(2)


def add_sleep(app: FastAPI, sleep_state: SleepState) -> None:
    """Add the routes to an application."""

    @app.post("/v1/sleep", include_in_schema=False)
    async def sleep(request: Request) -> dict[str, Any]:
        """Give memory back until the next request: 1 the cache's, 2 also that of weights."""
        check_operator(request.state)
        asked = await _asked(request)
        given = await sleep_state.sleep(asked.level, wait=asked.wait)
        return _told(sleep_state) | {"given_back_bytes": given}

    @app.post("/v1/wake", include_in_schema=False)
    async def wake(request: Request) -> dict[str, Any]:
        """Be awake, without a request."""
        check_operator(request.state)
        await sleep_state.wake()
        return _told(sleep_state)

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


async def _asked(request: Request) -> SleepRequest:
    """Return what a request asks for, in its body or, as vLLM's, in its query."""
    body = await request.body()
    if not body:
        query: dict[str, Any] = dict(request.query_params)
        for name in {"level", "wait"} & {*query}:
            with suppress(ValueError, RecursionError):  # as it is then, it is refused by its name
                query[name] = json.loads(query[name])
        body = json.dumps(query).encode()
    asked: SleepRequest = await in_turn(request.app.state.work, _BODY, body)
    return asked


def _told(sleep_state: SleepState) -> dict[str, Any]:
    return {"level": sleep_state.level, "resident_bytes": memory_of(os.getpid()).resident_bytes}
