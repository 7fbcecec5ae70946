"""A step in parts that stages compute one after another, so that all of them work at once.

While one stage computes a part, the one before it computes the next. Answers do not depend on what
else a step has, nor on how a prompt was cut, so the parts of a step give what the step gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ridgeline.core.step import StepOutput, Work, sampled_from

LEAST_ROWS = 8  # of a part: with fewer, weights would be read too often
_BY_ITEM = ("logprobs", "prompt_logprobs", "errors", "top", "similarity", "vectors")


class TokenSpan(NamedTuple):
    """Some of an item's tokens.

    Attributes:
        item: its number in the step.
        low: the first of them.
        high: the one behind the last.
    """

    item: int
    low: int
    high: int


def cut(work: Sequence[Work], most: int) -> list[list[TokenSpan]]:
    """Return the parts of a step, at most this many, of about equally many tokens."""
    total = sum(len(item.tokens) for item in work)
    count = max(1, min(most, total // LEAST_ROWS))
    parts: list[list[TokenSpan]] = [[]]
    done = 0
    for index, item in enumerate(work):
        low = 0
        while low < len(item.tokens):
            end = -(-total * len(parts) // count)  # of this part, in tokens of the step
            left = len(item.tokens) - low
            high = low + (min(left, end - done) if _may_be_cut(item) else left)
            if high < len(item.tokens):
                high = min(high, sampled_from(item))
            if high <= low:
                high = len(item.tokens)
            parts[-1].append(TokenSpan(index, low, high))
            done += high - low
            low = high
            if done >= end and len(parts) < count:
                parts.append([])
    return [part for part in parts if part]


def _may_be_cut(item: Work) -> bool:
    """Whether an item can be computed in pieces, of which only the last has results."""
    return not (item.targets or item.similar or item.pool)


def piece_of(item: Work, piece: TokenSpan) -> Work:
    """Return a piece of an item as an item; only the last one has its results."""
    whole = item._replace(start=item.start + piece.low, tokens=item.tokens[piece.low : piece.high])
    if piece.high == len(item.tokens):
        return whole
    return whole._replace(seeds=(), history=(), masks=(), top=0, drafts=0)


def merged(num_items: int, parts: Sequence[tuple[Sequence[TokenSpan], StepOutput]]) -> StepOutput:
    """Return the results of a step of those of its parts; of an item's errors the first."""
    tokens: list[tuple[int, ...]] = [()] * num_items
    by_name: dict[str, dict[int, Any]] = {name: {} for name in _BY_ITEM}
    for pieces, output in parts:
        for piece, drawn in zip(pieces, output.tokens, strict=True):
            tokens[piece.item] = drawn
        for name in _BY_ITEM:
            values: Mapping[int, Any] = getattr(output, name)
            for place, value in values.items():
                by_name[name].setdefault(pieces[place].item, value)
    return StepOutput(tuple(tokens), **by_name)
