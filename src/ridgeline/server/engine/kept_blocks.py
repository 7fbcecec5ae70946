"""What files have of a prompt, read before it waits for the engine: no step waits for a disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from ridgeline.server.engine.between_steps import between_steps
from ridgeline.server.engine.interface import EngineClient
from ridgeline.server.engine.request_stream import RequestStream
from ridgeline.server.http.turns import in_thread


class KeptBlocks(Protocol):
    """Blocks of the cache in files (``kv_disk.tier.Tier``)."""

    def fetch(self, tokens: Sequence[int], root: bytes) -> tuple[Any, Sequence[Any]] | None:
        """Read what is worth it of a prompt behind a root; None if nothing is."""

    def place(self, wanted: Any, records: Sequence[Any]) -> int:
        """Put into the cache what was read, in the engine's thread."""


async def load(engine: EngineClient, kept: KeptBlocks | None, stream: RequestStream) -> None:
    """Put what files have of a stream's prompts into the engine's cache."""
    if kept is None or stream.params.prompt_logprobs is not None:  # these are computed whole
        return
    root = stream.cache_root + stream.adapter.digest
    for prompt in stream.prompts:
        if found := await in_thread(kept.fetch, prompt, root):
            await between_steps(engine, partial(kept.place, *found))
