"""Work that waits for its moment in the engine's thread, and its result on the loop.

Such work is what files have of a prompt: it is read before the prompt waits for the engine, so no
step waits for a disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.engine.request_stream import RequestStream
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.fair_pool import in_thread

if TYPE_CHECKING:  # imported only where a server has such files
    from ridgeline.engine.kv_disk.cache_tier import Tier

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


async def load(engine: EngineClient, kv_disk: Tier | None, stream: RequestStream) -> None:
    """Put what files have of a stream's prompts into the engine's cache."""
    if kv_disk is None or stream.params.prompt_logprobs is not None:  # these are computed whole
        return
    root = stream.cache_root + stream.adapter.digest
    for prompt in stream.prompts:
        await read(engine, kv_disk, prompt, root)


async def read(
    engine: EngineClient,
    kv_disk: Tier,
    tokens: tuple[int, ...],
    root: bytes,
    *,
    is_asked: bool = False,
) -> None:
    """Put what is worth it of a prompt into the cache, or all that files have if ``is_asked``."""
    pieces = kv_disk.pieces(tokens, root, is_asked=is_asked)
    while (place := await in_thread(next, pieces, None)) is not None:
        if not await between_steps(engine, place):
            break


async def write(engine: EngineClient, kv_disk: Tier, tokens: tuple[int, ...], root: bytes) -> None:
    """Have what memory has of a sequence in files."""
    pieces = kv_disk.saving(tokens, root)
    while (keep := await in_thread(next, pieces, None)) is not None:
        await between_steps(engine, keep)
