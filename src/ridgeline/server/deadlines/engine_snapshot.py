"""What forecasts begin with: the engine and its queue, copied in lengths."""

from __future__ import annotations

import time
from typing import NamedTuple

from ridgeline.core.engine import Engine
from ridgeline.core.request import Request
from ridgeline.foresight.simulator.forecast import Standing, State, new_standing, state_of
from ridgeline.server.engine.async_engine import Bridge
from ridgeline.server.engine.request_stream import Stream


class Copy(NamedTuple):
    """What a forecast begins with, copied in the engine's thread between two steps."""

    now_s: float
    state: State
    numbers: dict[Stream, list[int]]  # in the engine
    waiting: list[tuple[Stream, int]]  # before it


def copy_of(bridge: Bridge) -> Copy:
    """Copy what a forecast needs; call it in the engine's thread alone."""
    engine = bridge.engine
    numbers: dict[Stream, list[int]] = {}
    is_read = False
    for number, (stream, _) in bridge.entered().items():
        numbers.setdefault(stream, []).append(number)
        is_read = is_read or stream.is_read
    state = state_of(engine.describe(), engine.scheduler, is_read)
    return Copy(time.monotonic(), state, numbers, bridge.waiting())


def standing_of(engine: Engine, stream: Stream, index: int, number: int) -> Standing:
    """Return a prompt that is not in the engine, whose answer is as long as it may become."""
    num_prompt, max_tokens = len(stream.prompts[index]), stream.params.max_tokens
    longest = max(1, engine.max_model_len - num_prompt)
    num_new = longest if max_tokens is None else min(max_tokens, longest)
    num_seqs = stream.params.num_seqs
    return new_standing(number, num_prompt, num_new, num_answers=num_seqs, owner=stream.tenant)


def with_cached(engine: Engine, stream: Stream, index: int, standing: Standing) -> Standing:
    """Return a prompt that is not in the engine, with what the prefix cache has of it."""
    request = Request(
        0,
        stream.prompts[index],
        stream.params,
        max_model_len=engine.max_model_len,
        cache_root=stream.cache_root,
        adapter=stream.adapter,
    )
    # Meanwhile the engine may change what is cached: it is only asked for single blocks.
    num_cached = engine.scheduler.queues.kv.num_cached(request.sequences[0])
    answers = tuple(answer._replace(num_cached=num_cached) for answer in standing.answers)
    return standing._replace(answers=answers)
