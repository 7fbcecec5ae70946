"""Engines over tiny models on the cuda backend's twins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.backends import cuda, reference
from ridgeline.backends.cuda.loading import load_runner
from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.interface import BackendContext, Setup
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import NO_ADAPTER, Adapter
from ridgeline.core.scheduling.policies import SplitFuse
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.shape.cache_groups import cache_groups
from tests.answers.tiny_families import write_family

NOWHERE = BackendContext(lambda: Path("/nonexistent"))
IDS = np.random.default_rng(3).integers(3, 90, 200).tolist()
LONGEST, BLOCK = 64, 16
Answers = dict[tuple[int, int], list[int | None]]


def runners(
    folder: Path, name: str, *, ops: Any = twins, **settings: Any
) -> tuple[Any, Any, Setup]:
    """Return a tiny model on the cuda backend and on the reference, and their settings."""
    checkpoint = load_checkpoint(write_family(folder / name, name))
    shape = {"block_size": BLOCK, "threads": 1, "max_model_len": LONGEST, "max_num_seqs": 8}
    shape |= {"max_num_batched_tokens": 64, "num_blocks": 80, "num_states": 4}
    shape |= {"dtype": "f32", "kv_cache_dtype": "f32", "groups": cache_groups(checkpoint.arch)}
    setup = Setup(**shape | settings)
    setup = cuda.settle(setup, checkpoint.arch)
    plain = reference.new_runner(checkpoint, setup, NOWHERE)
    return load_runner(checkpoint, setup, NOWHERE, ops), plain, setup


def engine_over(
    runner: Any,
    setup: Setup,
    *,
    num_blocks: int | None = None,
    tokens: int = 64,
    seqs: int = 5,
    caches: bool = True,
) -> Engine:
    """Return an engine with nothing to do."""
    windows = tuple(group.window for group in setup.groups)
    num_blocks = num_blocks or setup.num_blocks
    kv = KVCache(num_blocks, BLOCK, enable_prefix_caching=caches, windows=windows)
    scheduler = Scheduler(
        kv,
        SplitFuse(),
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        looks_ahead=getattr(runner, "looks_ahead", False),  # the reference does not
    )
    return Engine(scheduler, runner, iter(range(10**9)).__next__, max_model_len=LONGEST)


def take_events(engine: Engine, found: Answers) -> None:
    """Run a step, and add its tokens to the answers."""
    for event in engine.step():
        assert event.error is None, event.error
        found.setdefault(event.seq_id, []).append(event.token)
    engine.check()


def answers(
    engine: Engine,
    requests: list[tuple[list[int], SamplingParams]],
    adapters: Sequence[Adapter] = (),
) -> list[list[int]]:
    """Return the tokens of requests that run side by side, in their order.

    ``adapters`` are those of the requests, if they have any.
    """
    found: Answers = {}
    given = adapters or [NO_ADAPTER] * len(requests)
    for (prompt, params), adapter in zip(requests, given, strict=True):
        engine.add(tuple(prompt), params, adapter=adapter)
    while engine.has_work():
        take_events(engine, found)
    return [found[key] for key in sorted(found)]
