"""Drafts in a step of any runner: the draws are those of steps without them.

On the cpu backend bit for bit; on the others rounding depends on what a step has beside them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, StepOutput, TokenLogprobs, Work
from tests.backends.runners import (
    CPU_FORMATS,
    EXACT,
    FORMATS,
    GREEDY,
    TOKENS,
    VOCAB,
    Make,
    Runner,
    forget,
    make,
    step,
    work,
)
from tests.tiny import PLAIN, checkpoint, random_arrays

__all__ = ["make"]  # a fixture

TABLE = (2, 5, 11, 7)
PROMPT = TOKENS[:37]
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.4, logprobs=2
)
NUM_NEW = 18

Said = list[tuple[int, TokenLogprobs | None]]


def item(tokens: tuple[int, ...], drafts: tuple[int, ...], params: SamplingParams) -> Work:
    """The last token of a sequence, with guesses behind it."""
    sampling = Sampling(params, len(PROMPT), ())
    history = tokens if params.penalises else ()
    start = len(tokens) - 1
    return Work(
        (2, 0), start, (tokens[-1], *drafts), TABLE, (7,), sampling, history, (), len(drafts)
    )


def drawn(output: StepOutput, i: int = 0) -> Said:
    ranks = output.logprobs.get(i, (None,) * len(output.tokens[i]))
    return list(zip(output.tokens[i], ranks, strict=True))


def agree(said: Said, wanted: Said, kind: str) -> bool:
    """Whether the same was drawn, with the same logprobs as far as the backend promises."""
    if kind in CPU_FORMATS:
        return said == wanted
    ranks, others = ([one.logprob for _, one in drawn if one] for drawn in (said, wanted))
    return [token for token, _ in said] == [token for token, _ in wanted] and (
        ranks == pytest.approx(others, abs=1e-4)
    )


def alone(runner: Runner, params: SamplingParams) -> Said:
    """What is drawn one token a step."""
    said = drawn(runner.execute(step(prompt(params))))
    while len(said) < NUM_NEW:
        tokens = PROMPT + tuple(token for token, _ in said)
        said += drawn(runner.execute(step(item(tokens, (), params))))
    return said


def prompt(params: SamplingParams) -> Work:
    sampling = Sampling(params, len(PROMPT), ())
    return Work((2, 0), 0, PROMPT, TABLE, (7,), sampling, PROMPT, ())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", FORMATS)
def test_draws_behind_drafts(make: Make, kind: str, params: SamplingParams) -> None:
    """Right drafts and wrong ones, alone and beside prompts and other streams."""
    runner = make("plain", kind)
    wanted = alone(runner, params)
    truth = tuple(token for token, _ in wanted)
    others = [
        (),
        (work(TOKENS[:90], (12, 13, 14, 15, 16, 17)),),  # more rows than are split by outputs
        tuple(work(TOKENS[i : i + 9], (i + 18,), start=8) for i in range(5)),
    ]
    for number, beside in enumerate(others):
        forget(runner)
        said = drawn(runner.execute(step(prompt(params))))
        for other in beside:  # the caches of streams
            runner.execute(step(replace_start(other)))
        while len(said) < NUM_NEW - 8:
            right = (2 * len(said) + number) % 6
            right_drafts = truth[len(said) : len(said) + right]
            wrong = tuple((token + 1) % VOCAB for token in truth[len(said) + right :][:2])
            tokens = PROMPT + tuple(token for token, _ in said)
            items = (*beside, item(tokens, right_drafts + wrong, params))
            new = drawn(runner.execute(step(*items)), len(beside))
            assert len(new) == right + 1 + len(wrong)  # the engine counts none behind a wrong one
            said += new[: right + 1]
        assert agree(said, wanted[: len(said)], kind)


def replace_start(other: Work) -> Work:
    """The tokens of a stream before those of this item."""
    if not other.start:
        return other
    return other._replace(start=0, tokens=TOKENS[: other.start], seeds=())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_wrong_token_leaves_no_trace_in_the_cache(make: Make, kind: str) -> None:
    """Speculation hangs on it: what is written again is as if nothing had been there."""
    runner = make("plain", kind)
    forget(runner)
    said = drawn(runner.execute(step(prompt(GREEDY))))
    while len(said) < NUM_NEW:
        tokens = PROMPT + tuple(token for token, _ in said)
        wrong = tuple((tokens[-1] + 1 + i) % VOCAB for i in range(4))
        said += drawn(runner.execute(step(item(tokens, wrong, GREEDY))))[:1]
    last = len(PROMPT) + NUM_NEW - 1  # tokens whose keys and values are final
    clean = make("plain", kind)
    forget(clean)
    assert agree(said, alone(clean, GREEDY), kind)
    assert same_up_to(runner, clean, last, kind)


def same_up_to(one: Runner, other: Runner, num_tokens: int, kind: str) -> bool:
    """Whether what a next token would read is equal: its logits depend on every byte of it."""
    tokens = TOKENS[:1]
    at = work((*TOKENS[:num_tokens], *tokens), TABLE, start=num_tokens)
    mine, theirs = (drawn(runner.execute(step(at))) for runner in (one, other))
    return agree(mine, theirs, kind)


@pytest.mark.parametrize("kind", EXACT)
def test_a_draft_that_fails_fails_nobody(make: Make, kind: str) -> None:
    arrays = random_arrays(PLAIN)
    poison = next(token for token in range(VOCAB) if token not in PROMPT)
    arrays["embed"][poison] = np.nan
    runner = make(checkpoint(PLAIN, arrays), kind)
    params = replace(GREEDY, logit_bias={poison: -100.0})
    (first,) = drawn(runner.execute(step(prompt(params))))
    output = runner.execute(step(item((*PROMPT, first[0]), (poison, 3, 4), params)))
    assert not output.errors
    assert len(output.tokens[0]) == 1
    output = runner.execute(step(item((*PROMPT, poison), (3, 4), params)))
    assert list(output.errors) == [0]
