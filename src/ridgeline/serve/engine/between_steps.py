"""Work that waits for its moment in the engine's thread, and its result on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.http.errors import ApiError

Result = TypeVar("Result")


async def between_steps(engine: EngineClient, work: Callable[[], Result]) -> Result:
    """Return what ``work`` returns, or raise what it raises, in the engine's thread.

    Raises ApiError if that is no more.
    """
    if why := engine.trouble():
        raise ApiError(503, why, code="engine_stopped")
    done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def run() -> None:
        try:
            engine.call(_settle, done, work(), None)
        except Exception as error:
            engine.call(_settle, done, None, error)

    engine.between_steps(run)
    return await done


def _settle(done: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if not done.done():  # else the waiting request has left
        done.set_result(value) if error is None else done.set_exception(error)
