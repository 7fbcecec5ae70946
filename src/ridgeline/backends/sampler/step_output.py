"""After the last layer, for every backend: the logits a step needs, and the results they give.

Backends differ only in ``Head``: how they make logits of their rows, draw from them and rank. It
knows nothing of layers, caches and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ridgeline.backends.sampler.penalties import forbidden, repeats
from ridgeline.backends.sampler.rule import Floats, Row, rank_draw, rank_tokens, sample
from ridgeline.core.step import (
    MASKED_OUT,
    RULED_OUT,
    Candidates,
    StepOutput,
    TokenLogprobs,
    Work,
    sampled_from,
)

Pick = tuple[int | None, TokenLogprobs | None]  # a token, None for none; and its rank, if wanted

_NOT_FINITE = "logits are not finite"
PROMPT_ROWS = 64  # most rows of logits at once that rank a prompt


class LogitsRequest(NamedTuple):
    """What is needed of the logits after one token of a step.

    Attributes:
        token: which one, in the order of the work.
        draws: one for each token to draw; they differ in their seeds. If there is none, ``target``
            is ranked.
        target: the token that follows in the prompt, or any where only the likeliest are wanted.
        num_top: how many likeliest tokens to report beside the ranked one; None ranks nothing.
        mask: without draws, a bit for each id that may be among the likeliest; none allows all.
    """

    token: int
    draws: tuple[Row, ...]
    target: int
    num_top: int | None
    mask: bytes = b""

    @property
    def is_plain(self) -> bool:
        """Whether only ``answered`` can answer it, of logits that a backend gives."""
        if not self.draws:
            return bool(self.mask)
        params, _, _, rules = self.draws[0].sampling
        return bool(rules.texts or params.post_sampling_probs)


class Sampled(NamedTuple):
    """The result: one pick for each draw, or one for the target."""

    picks: list[Pick]
    is_finite: bool  # whether all logits are numbers


Head = Callable[[list[LogitsRequest]], list[Sampled]]


def finish(
    items: tuple[Work, ...], head: Head, damaged: Callable[[], Iterable[tuple[int, int]]]
) -> StepOutput:
    """Return the output of a step.

    Args:
        items: the step's work.
        head: answers asks, in their order. It is called first with all draws, even if there are
            none, then with the prompt tokens to rank, some at a time.
        damaged: returns the items whose keys or values are not finite, with the index of the first
            such token; called after the draws.

    Draws behind a wrong draft are returned too: the engine counts none, but guesses from them. What
    is wrong with a draft is not the item's fault: the result ends before it, and its token, if it
    is drawn, fails in the next step.
    """
    ends = list(accumulate(len(work.tokens) for work in items))
    requests = [(i, j, ask) for i, work in enumerate(items) for j, ask in _draws(work, ends[i])]
    answers = head([ask for _, _, ask in requests])
    errors: dict[int, str] = {}
    num_sound: dict[int, int] = {}  # draws before the first draft that is damaged
    for i, first in damaged():
        num_sound[i] = first - sampled_from(items[i])
        if num_sound[i] <= 0 or items[i].pool:
            errors[i] = "K/V of this sequence is not finite"
    tokens: list[tuple[int, ...]] = [()] * len(items)
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    top: dict[int, Candidates] = {}
    for (i, j, ask), (picks, is_finite) in zip(requests, answers, strict=True):
        if j and not len(tokens[i]) == j < num_sound.get(i, j + 1):
            continue
        drawn = tuple(token for token, _ in picks if token is not None)
        ranks = _ranks(picks) if items[i].top else ()
        if not is_finite or len(drawn) < len(ask.draws) or any(not one.top for one in ranks):
            if not j:
                ruled_out = MASKED_OUT if items[i].masks else RULED_OUT
                errors.setdefault(i, ruled_out if is_finite else _NOT_FINITE)
            continue
        if items[i].top:
            top[i] = ranks[0].top
            continue
        tokens[i] += drawn
        if ask.num_top is not None:
            logprobs[i] = logprobs.get(i, ()) + _ranks(picks)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    for i, work in enumerate(items):
        if work.targets:
            prompt_answers = list(_prompt(work, ends[i] - len(work.tokens), head))
            prompt_logprobs[i] = tuple(
                rank for answer in prompt_answers for rank in _ranks(answer.picks)
            )
            if not all(answer.is_finite for answer in prompt_answers):
                errors.setdefault(i, "logits of the prompt are not finite")
    return StepOutput(
        tuple(() if i in errors else drawn for i, drawn in enumerate(tokens)),
        logprobs,
        prompt_logprobs,
        errors,
        {i: candidates for i, candidates in top.items() if i not in errors},
    )


def answered(logits: Floats, ask: LogitsRequest) -> Sampled:
    """Answer an ask by the rule of ``backends.sampler.rule``, from its row of logits."""
    of_row = logits[None]
    tokens = sample(of_row, np.zeros(len(ask.draws), np.intp), ask.draws)
    targets = [token for token in tokens if token is not None] if ask.draws else [ask.target]
    ranks: list[TokenLogprobs | None] = [None] * len(targets)
    if ask.num_top is not None and ask.draws and ask.draws[0].sampling.params.post_sampling_probs:
        drawn = [(row, one) for row, one in zip(ask.draws, tokens, strict=True) if one is not None]
        ranks = [rank_draw(logits, row, token, ask.num_top) for row, token in drawn]
    elif ask.num_top is not None:
        rows = of_row.repeat(len(targets), axis=0)
        ranks = list(rank_tokens(rows, targets, ask.num_top, ask.mask))
    return Sampled(list(zip(targets, ranks, strict=True)), bool(np.isfinite(of_row).all()))


def _draws(work: Work, end: int) -> Iterator[tuple[int, LogitsRequest]]:
    """Number the draws of an item whose last token is the one before ``end``."""
    if work.pool:
        return
    if work.top:
        mask = work.masks[0] if work.masks else b""
        # Any token: the likeliest are asked for.
        yield 0, LogitsRequest(end - 1, (), 0, work.top, mask)
        return
    first, sampling = sampled_from(work), work.sampling
    params, prompt_len, _, rules = sampling
    num_top = params.logprobs
    if num_top is None and params.num_answers > params.n:
        num_top = 0  # to choose the likeliest answers
    for j in range(len(work.tokens) - first):
        history = work.history
        if j and history:
            history += work.tokens[first + 1 : first + 1 + j]
        position = work.start + first + j + 1
        mask = _both(work.masks[j] if work.masks else b"", rules.allowed)
        banned = forbidden(history, prompt_len, rules) if params.bad_words else ()
        again = repeats(history, params, rules) if params.uses_dry else ()
        rows = tuple(
            Row(sampling, seed, position, history, mask, banned, again) for seed in work.seeds
        )
        yield j, LogitsRequest(end - len(work.tokens) + first + j, rows, -1, num_top)


def _both(mask: bytes, other: bytes) -> bytes:
    """Return the mask of ids that two masks have; an empty one has all."""
    if not mask or not other:
        return mask or other
    bits = int.from_bytes(mask, "little") & int.from_bytes(other, "little")
    return bits.to_bytes(len(mask), "little")


def _prompt(work: Work, begin: int, head: Head) -> Iterator[Sampled]:
    """Rank the prompt token that follows each of an item's tokens; ``begin`` is the first."""
    num_top = work.sampling.params.prompt_logprobs or 0
    asks = [LogitsRequest(begin + j, (), target, num_top) for j, target in enumerate(work.targets)]
    for low in range(0, len(asks), PROMPT_ROWS):
        yield from head(asks[low : low + PROMPT_ROWS])


def _ranks(picks: list[Pick]) -> tuple[TokenLogprobs, ...]:
    return tuple(ranks for _, ranks in picks if ranks is not None)
