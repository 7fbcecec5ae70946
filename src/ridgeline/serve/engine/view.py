"""The state of an engine between two steps: ids and numbers, never the text of a prompt.

To be called in the thread that runs the engine. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ridgeline.core.cache.kvcache import held_blocks
from ridgeline.core.engine import Engine
from ridgeline.core.request import Sequence, Status
from ridgeline.core.scheduling.queues import Queues

_MAX_SHOWN = 128  # sequences; the counts include the others


def view(engine: Engine, owner: str | None = None) -> dict[str, Any]:
    """Return the queues, the sequences with their progress, and a map of the KV cache.

    Of one owner's requests alone, if one is given; then what others hold looks free.
    """
    queues = engine.scheduler.queues
    everyone = [
        seq
        for seq in (*queues.running, *queues.waiting, *queues.paused)
        if owner in (None, seq.request.owner)
    ]
    running = [seq for seq in everyone if seq.status is Status.RUNNING]
    return {
        "num_running": len(running),
        "num_waiting": len(everyone) - len(running),
        "block_size": queues.kv.block_size,
        "blocks": _map(queues, running, shows_cached=owner is None),
        "sequences": [_shown(seq) for seq in everyone[:_MAX_SHOWN]],
    }


def _map(queues: Queues, running: Iterable[Sequence], *, shows_cached: bool) -> str:
    """Return runs of blocks, such as ``s2u1f9``: free, cached and free, used by one, shared."""
    pool = queues.kv.pool
    blocks = bytearray(b"f") * len(pool.refs)
    for index in pool.index if shows_cached else ():
        for block in index.values():
            blocks[block] = ord("c")
    for seq in running:
        for block in held_blocks(seq):
            blocks[block] = ord("s" if pool.refs[block] > 1 else "u")
    return re.sub(r"(.)\1*", lambda run: f"{run[1]}{len(run[0])}", blocks.decode())


def _shown(seq: Sequence) -> dict[str, Any]:
    prompt_len = len(seq.request.prompt)
    return {
        "id": seq.id,
        "status": seq.status.name.lower(),
        "prompt_tokens": prompt_len,
        "computed_tokens": min(seq.num_computed, prompt_len),
        "cached_tokens": seq.request.num_cached_tokens,
        "generated_tokens": seq.num_generated,
        "max_tokens": seq.request.max_len - prompt_len,
        "num_blocks": len(held_blocks(seq)),
    }
