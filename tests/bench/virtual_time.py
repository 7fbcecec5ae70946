"""A script that answers in virtual time: what a client measures of it is exact on any machine.

The client, its event loop and its HTTP library are the real ones, in this process. But requests go
to the script, and not over a network, and clocks stand still while anything can run: when all wait,
they jump to the next timer.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import httpx2
import pytest

from tests.bench.script_server import Script, Server, encoded


class _Clock:
    """Seconds since it began."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Selector(selectors.SelectSelector):
    """Lets the time pass at once in which nothing comes."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "all wait, and for no timer"
            self._clock.now_s += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: _Clock) -> None:
        super().__init__(_Selector(clock))
        self.time = clock  # type: ignore[method-assign]


class _Body(httpx2.AsyncByteStream):
    """What a script streams; it ends when it is read or broken off."""

    def __init__(self, parts: Iterator[Any], seen: Server) -> None:
        self._parts, self._seen = parts, seen

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                yield encoded(part)

    async def aclose(self) -> None:
        self._seen.running -= 1


@contextmanager
def answering(script: Script) -> Iterator[Server]:
    """Answer all requests of this process by a script, which may wait before a whole body, too.

    ``time.perf_counter`` is the virtual clock, and ``asyncio.run`` runs by it.
    """
    clock, seen = _Clock(), Server("http://scripted")

    async def handle(_: object, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(await request.aread())
        number = len(seen.bodies)
        seen.arrived_s.append(clock.now_s)
        seen.bodies.append(body)
        seen.headers.append(dict(request.headers))
        seen.paths.append(request.url.path)
        seen.running += 1
        seen.peak = max(seen.peak, seen.running)
        parts = script(number, body)
        while isinstance(first := next(parts), float):
            await asyncio.sleep(first)
        if isinstance(first, tuple):
            status, text = first
            parts, kind = iter([text]), "application/json"
        else:
            status, parts, kind = 200, chain([first], parts), "text/event-stream"
        return httpx2.Response(status, headers={"Content-Type": kind}, stream=_Body(parts, seen))

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=lambda: _Loop(clock)) as runner:
            return runner.run(main)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", handle)
        patch.setattr(time, "perf_counter", clock)
        patch.setattr(asyncio, "run", run)
        yield seen
