"""The concrete classes, put together: a backend, a cache, a scheduler, an engine.

Only this module says which backend a configuration means.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.reference import ReferenceRunner
from ridgeline.config import EngineConfig, default_home
from ridgeline.core.engine import Engine
from ridgeline.core.kvcache import KVCache
from ridgeline.core.scheduler import Scheduler
from ridgeline.core.step import Runner
from ridgeline.models.weights import Checkpoint
from ridgeline.progress import say
from ridgeline.records import Record


def new_runner(
    config: EngineConfig, checkpoint: Checkpoint, report: Callable[[int, int], None]
) -> CpuRunner | ReferenceRunner:
    """Return the backend that ``config`` names, with its weights loaded."""
    shape = {
        "num_blocks": config.num_blocks,
        "block_size": config.block_size,
        "max_model_len": config.max_model_len,
        "num_threads": config.threads,
    }
    if config.backend == "reference":
        return ReferenceRunner(checkpoint, progress=report, **shape)
    return CpuRunner(
        checkpoint,
        dtype=config.dtype,
        cache_dtype=config.kv_cache_dtype,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kernel_cache=default_home() / "kernels",
        weights_cache=default_home() / "packed",
        progress=report,
        announce=lambda: say("compiling kernels (once)"),
        **shape,
    )


def new_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    runner: Runner,
    on_record: Callable[[Record], None] | None,
) -> Engine:
    """Return an engine over ``runner``, with nothing to do yet."""
    kv = KVCache(
        config.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
    )
    scheduler = Scheduler(
        kv,
        config.policy,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )
    return Engine(
        scheduler,
        runner,
        time.monotonic,
        max_model_len=config.max_model_len,
        eos_ids=checkpoint.eos_ids,
        seed=config.seed,
        on_record=on_record,
    )
