"""The times of a request, from the records of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.core.records import RequestRecord
from ridgeline.serve.engine.request_stream import PromptProgress


def timings_of(
    records: Sequence[RequestRecord], arrival_s: float, num_cached: int
) -> dict[str, Any]:
    """Return the engine's times, nothing if no token came.

    For several prompts: until the last began, until the first token of any, until all ended.
    """
    firsts = [r.first_token_s for r in records if r.first_token_s is not None]
    starts = [r.scheduled_s for r in records if r.scheduled_s is not None]
    if not firsts or not starts:
        return {}
    end_s = max(r.finish_s for r in records)
    generation_s = end_s - min(firsts)
    num_gaps = max(max(r.num_generated) for r in records) - 1
    num_generated = sum(sum(r.num_generated) for r in records)
    return {
        "queue_time_ms": 1e3 * (max(starts) - arrival_s),
        "time_to_first_token_ms": 1e3 * (min(firsts) - arrival_s),
        "generation_time_ms": 1e3 * generation_s,
        "mean_itl_ms": 1e3 * generation_s / num_gaps if num_gaps > 0 else None,
        "tokens_per_second": num_generated / (end_s - min(starts)),
        "cached_tokens": num_cached,
        "num_preemptions": sum(r.num_preemptions for r in records),
        "speculative_decoding": {
            name: sum(getattr(r, name) for r in records)
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        },
    }


def pace_of(name: str, count: int, time_s: float) -> dict[str, Any]:
    """Return a number of tokens, the time that they took, and the ratios of the two."""
    return {
        f"{name}_n": count,
        f"{name}_ms": 1e3 * time_s,
        f"{name}_per_token_ms": 1e3 * time_s / count if count else None,
        f"{name}_per_second": count / time_s if time_s else None,
    }


def progress_of(progress: PromptProgress) -> dict[str, Any]:
    """Return how far a prompt is computed, in llama.cpp's names."""
    return {
        "total": progress.num_tokens,
        "cache": progress.num_cached,
        "processed": progress.num_computed,
        "time_ms": 1e3 * progress.time_s,
    }
