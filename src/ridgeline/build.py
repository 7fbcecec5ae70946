"""The concrete classes, put together: a backend, a cache, a scheduler, an engine.

Only this module says which backend a configuration means.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.reference import ReferenceRunner
from ridgeline.config import EngineConfig, default_home, why_unwritable
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
    home = default_home()
    is_kept = _warn_of(home)
    return CpuRunner(
        checkpoint,
        dtype=config.dtype,
        cache_dtype=config.kv_cache_dtype,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kernel_cache=home / "kernels",
        weights_cache=home / "packed",
        progress=report,
        announce=lambda: say(f"compiling kernels{' (once)' if is_kept else ''}"),
        **shape,
    )


@cache  # once per process
def _warn_of(home: Path) -> bool:
    """Return whether kernels and packed weights can be kept, and say it if they cannot."""
    problem = why_unwritable(home / "kernels")
    if problem:
        say(
            f"kernels cannot be kept in {home} ({problem}), nor packed weights: each start makes "
            f"them anew; set RIDGELINE_HOME to a directory that can be written"
        )
    return problem is None


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
