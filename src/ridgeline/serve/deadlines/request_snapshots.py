"""Prompts that are not in the engine yet, in lengths: what forecasts are asked for."""

from __future__ import annotations

from ridgeline.foresight.simulator.forecast import RequestSnapshot, new_snapshot
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.engine.request_stream import RequestStream


def snapshot_of(
    engine: EngineClient, stream: RequestStream, index: int, number: int
) -> RequestSnapshot:
    """Return a prompt that is not in the engine, whose answer is as long as it may become."""
    num_prompt, max_tokens = len(stream.prompts[index]), stream.params.max_tokens
    longest = max(1, engine.settings.max_model_len - num_prompt)
    num_new = longest if max_tokens is None else min(max_tokens, longest)
    num_seqs = stream.params.num_seqs
    return new_snapshot(number, num_prompt, num_new, num_answers=num_seqs, owner=stream.tenant)


def with_cached(
    engine: EngineClient, stream: RequestStream, index: int, snapshot: RequestSnapshot
) -> RequestSnapshot:
    """Return a prompt that is not in the engine, with what the prefix cache has of it."""
    num_cached = engine.num_cached(stream, index)
    answers = tuple(answer._replace(num_cached=num_cached) for answer in snapshot.answers)
    return snapshot._replace(answers=answers)
