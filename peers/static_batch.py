"""The steps of a static batch, which published figures are of: all prompts, then all answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ridgeline.foresight.simulator.run import TimeModel
from ridgeline.model.cost.costs import Features


def prefill_counts(batch: int, prompt: int) -> Features:
    """Return the counts of a step that reads ``batch`` whole prompts, without windows."""
    return Features(batch * prompt, batch, batch, batch * prompt, batch * prompt * (prompt + 1) / 2)


def decode_counts(batch: int, context: float) -> Features:
    """Return the counts of a step that adds a token to ``batch`` sequences, without windows."""
    return Features(batch, batch, batch, batch * context, batch * context)


def batch_steps(batch: int, prompt: int, new: int) -> Iterator[tuple[int, Features]]:
    """Yield (how many, counts) of a static batch's steps: all prompts in one, then all answers."""
    yield 1, prefill_counts(batch, prompt)
    for first, last in pairwise(_cuts(new - 1)):
        context = prompt + (first + last + 1) / 2
        yield last - first, decode_counts(batch, context)


def batch_seconds(times: TimeModel, batch: int, prompt: int, new: int) -> float:
    """Return the seconds of a static batch."""
    return sum(num * times.seconds(counts) for num, counts in batch_steps(batch, prompt, new))


def _cuts(num: int) -> Iterator[int]:
    """Yield the borders of at most eight parts of ``num`` steps, whose times are nearly linear."""
    parts = min(num, 8)
    yield from (num * i // parts for i in range(parts + 1)) if parts else ()
