"""The sleep of an engine: by itself after it was idle for a while, or when it is asked for.

A request wakes the engine by being computed.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Protocol

from ridgeline.serve.engine.between_steps import between_steps
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.http.errors import ApiError

_LOOK_S = 0.05  # from one look whether requests have ended to the next


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

    def _look_later(self, idle_s: float, num_records: int) -> None:
        asyncio.get_running_loop().call_later(idle_s, self._look, idle_s, num_records)

    def _look(self, idle_s: float, num_records: int) -> None:
        """Sleep if nothing has happened since the last look, or else look again later."""
        if num_records == self._num_records and not self.level:
            self.begin()
        self._look_later(idle_s, self._num_records)

    def _nap(self) -> None:
        with suppress(RuntimeError, ValueError):  # a request has come meanwhile, or it cannot
            self._sleep.begin(2)
