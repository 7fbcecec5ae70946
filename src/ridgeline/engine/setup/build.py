"""The concrete classes, put together: a backend, a cache, a scheduler, an engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.backends import BACKENDS
from ridgeline.backends.interface import BackendContext, BackendRunner
from ridgeline.core.decoding.search import new_search
from ridgeline.core.engine import Engine, new_scheduler
from ridgeline.core.records import Record
from ridgeline.core.request import Request, Search
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.engine.setup.home import default_home, sweep, why_unwritable
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.progress import say
from ridgeline.engine.setup.resolve import EngineConfig
from ridgeline.model.files.tensors import Checkpoint

if TYPE_CHECKING:
    from ridgeline.engine.kv_disk.cache_tier import Tier


def new_runner(
    config: EngineConfig, checkpoint: Checkpoint, report: Callable[[int, int], None]
) -> BackendRunner:
    """Return the backend that ``config`` names, with its weights loaded."""
    has_compiled = False

    def announce() -> None:
        nonlocal has_compiled
        has_compiled = True
        say(f"compiling kernels{' (once)' if _warn_of(default_home()) else ''}")

    checkpoint.contents.start(packed_folder())
    context = BackendContext(_home, report, announce, say)
    try:
        return BACKENDS[config.backend].new_runner(checkpoint, config, context)
    except KeyboardInterrupt:
        if has_compiled:
            say("stopped: the next start compiles the missing kernels")
        raise


def packed_folder() -> Path:
    """Return where packed weights are kept, and digests of models' files."""
    return default_home() / "packed"


def _home() -> Path:
    """Return where kernels and packed weights are kept, and say it if they cannot be."""
    _warn_of(default_home())
    return default_home()


@cache  # once per process
def _warn_of(home: Path) -> bool:
    """Return whether kernels and packed weights can be kept, and say it if they cannot.

    What killed processes left there is swept away.
    """
    sweep(home)
    problem = why_unwritable(home / "kernels")
    if problem:
        say(
            f"neither kernels nor packed weights can be kept in {home} ({problem}), so each "
            "start makes them again; set RIDGELINE_HOME to a directory that can be written"
        )
    return problem is None


def new_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    runner: BackendRunner,
    listeners: Sequence[Callable[[Record], None]],
    speculation: Speculation | None,
) -> Engine:
    """Return an engine over ``runner`` with nothing to do yet; ``listeners`` get its records."""
    settings = config.settings(checkpoint.eos_ids)
    if config.uses_all_memory:
        settings = replace(settings, num_blocks=runner.num_blocks)
    return Engine(
        new_scheduler(settings, speculation=speculation),
        runner,
        time.monotonic,
        max_model_len=settings.max_model_len,
        eos_ids=settings.eos_ids,
        seed=settings.seed,
        listeners=listeners,
        new_search=partial(_new_search, config),
    )


def new_tier(
    options: Options,
    config: EngineConfig,
    runner: BackendRunner,
    engine: Engine,
    name: str,
    facts: Mapping[str, Any],
) -> Tier | None:
    """Return the files behind the cache, if there are to be some.

    ``name`` is the fingerprint, of all ``facts`` that answers depend on.

    Raises ValueError, in a line, if they cannot be had, or nothing of this model's would be there.
    """
    if (place := options.kv_disk_place) is None:
        return None
    from ridgeline.engine.kv_disk.cache_tier import Tier
    from ridgeline.engine.kv_disk.segments import (  # here: most engines have none
        RecordForm,
        Segments,
    )

    if not config.enable_prefix_caching:
        raise ValueError("--kv-disk needs prefix caching: leave out --no-enable-prefix-caching")
    try:
        blocks, states, layout = runner.cache_memory()
    except ValueError as error:
        raise ValueError(f"--kv-disk: {error}") from None
    digest = hashlib.sha256(f"{name} {layout}".encode()).hexdigest()
    sizes = [len(config.groups) * blocks[0].nbytes]
    if states:
        sizes.append(sum(array[0].nbytes for array in states))
    forms = [RecordForm(config.block_size, size) for size in sizes]
    segments = Segments(*place, digest[:32], forms, say)
    settings = {**facts, "block size": config.block_size, "layout of the cache": layout}
    least = options.kv_disk_min
    return Tier(engine, blocks, states, segments, settings=settings, least_tokens=least, say=say)


def _new_search(config: EngineConfig, request: Request) -> Search | None:
    if request.params.penalty_alpha and not config.enable_contrastive_search:
        raise ValueError(
            "penalty_alpha needs the final hidden states of all tokens: start with "
            "--enable-contrastive-search"
        )
    return new_search(request)
