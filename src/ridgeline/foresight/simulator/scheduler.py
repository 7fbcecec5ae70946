"""The scheduler of an engine that is known by its record, for runs that compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from ridgeline.core.cache.kvcache import KVCache, hash_block
from ridgeline.core.cache.states import new_states
from ridgeline.core.records import EngineRecord
from ridgeline.core.scheduling.policies import policy_of
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.scheduling.speculate import Speculation


def engine_of(record: Mapping[str, Any]) -> EngineRecord:
    """Return how an engine was set up, from its line in a trace.

    Raises ValueError if the line lacks something.
    """
    named = [
        field for field in fields(EngineRecord) if field.name in record or field.default is MISSING
    ]
    try:
        values = {field.name: record[field.name] for field in named}
    except KeyError as error:
        raise ValueError(f"this is not a trace of this version: {error} is missing") from None
    lists = values.keys() & {"eos_ids", "windows"}
    return EngineRecord(**(values | {name: tuple(values[name]) for name in lists}))


def new_scheduler(
    settings: EngineRecord,
    *,
    speculation: Speculation | None = None,
    keeps_states: bool = True,
    hash_block: Callable[[bytes, tuple[int, ...]], bytes] = hash_block,
) -> Scheduler:
    """Return a scheduler without requests, set up as the engine's own.

    ``keeps_states`` of recurrent layers, where the model has some. Raises LookupError for a policy
    that is not known.
    """
    num_checkpoints = settings.num_checkpoints if keeps_states else None
    kv = KVCache(
        settings.num_blocks,
        settings.block_size,
        enable_prefix_caching=settings.enable_prefix_caching,
        hash_block=hash_block,
        states=new_states(settings.max_num_seqs, num_checkpoints),
        windows=settings.windows,
    )
    return Scheduler(
        kv,
        policy_of(settings.policy, settings.least_prompt_tokens, settings.reserve_full),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        speculation=speculation,
        looks_ahead=settings.looks_ahead,
    )
