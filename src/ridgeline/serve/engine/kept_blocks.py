"""What files have of a prompt, read before it waits for the engine: no step waits for a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.serve.engine.between_steps import between_steps
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.engine.request_stream import RequestStream
from ridgeline.serve.http.turns import in_thread

if TYPE_CHECKING:  # imported only where a server has such files
    from ridgeline.engine.kv_disk.tier import Tier


async def load(engine: EngineClient, kept: Tier | None, stream: RequestStream) -> None:
    """Put what files have of a stream's prompts into the engine's cache."""
    if kept is None or stream.params.prompt_logprobs is not None:  # these are computed whole
        return
    root = stream.cache_root + stream.adapter.digest
    for prompt in stream.prompts:
        await read(engine, kept, prompt, root)


async def read(
    engine: EngineClient,
    kept: Tier,
    tokens: tuple[int, ...],
    root: bytes,
    *,
    is_asked: bool = False,
) -> None:
    """Put what is worth it of a prompt into the cache, or all that files have if ``is_asked``."""
    pieces = kept.pieces(tokens, root, is_asked=is_asked)
    while (place := await in_thread(next, pieces, None)) is not None:
        if not await between_steps(engine, place):
            break


async def write(engine: EngineClient, kept: Tier, tokens: tuple[int, ...], root: bytes) -> None:
    """Have what memory has of a sequence in files."""
    pieces = kept.saving(tokens, root)
    while (keep := await in_thread(next, pieces, None)) is not None:
        await between_steps(engine, keep)
