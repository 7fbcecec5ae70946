"""What files have of a prompt, read before it waits for the engine: no step waits for a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ridgeline.server.engine.between_steps import between_steps
from ridgeline.server.engine.interface import EngineClient
from ridgeline.server.engine.request_stream import RequestStream
from ridgeline.server.http.turns import in_thread


class KeptBlocks(Protocol):
    """Blocks of the cache in files (``kv_disk.tier.Tier``)."""

    def pieces(self, tokens: Sequence[int], root: bytes) -> Iterator[Callable[[], int]]:
        """Read what is worth it of a prompt behind a root; yield what puts it into the cache.

        That returns how many blocks it put there, and is called in the engine's thread.
        """


async def load(engine: EngineClient, kept: KeptBlocks | None, stream: RequestStream) -> None:
    """Put what files have of a stream's prompts into the engine's cache."""
    if kept is None or stream.params.prompt_logprobs is not None:  # these are computed whole
        return
    root = stream.cache_root + stream.adapter.digest
    for prompt in stream.prompts:
        pieces = kept.pieces(prompt, root)
        while (place := await in_thread(next, pieces, None)) is not None:
            if not await between_steps(engine, place):
                break
