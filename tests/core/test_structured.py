"""Constrained answers: a mask for each draw, forced tokens as drafts, an end of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest

from ridgeline.core.decoding.search import new_search
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Request
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.core.step import TOO_FEW, FinishReason, SeqId
from tests.core.harness import (
    Oracle,
    finish,
    make_engine,
    make_scheduler,
    prefixes_of,
    reasons_of,
    tokens_of,
)
from tests.fakes import candidates


@dataclass
class Pattern:
    """A constraint that says which of four tokens may come at each place, and when it is over."""

    places: tuple[tuple[int, ...], ...]
    at: int = 0
    end: int | None = None  # what ends a beam

    @property
    def is_over(self) -> bool:
        return self.at == len(self.places)

    def masks(self, drafts: tuple[int, ...]) -> tuple[bytes, ...]:
        assert self.end is not None or not self.is_over
        return tuple(self._mask(self.at + i) for i in range(len(drafts) + 1))

    def _mask(self, at: int) -> bytes:
        allowed = self.places[at] if at < len(self.places) else (self.end or 0,)
        return bytes([sum(1 << token for token in allowed)])

    def forced(self, most: int) -> tuple[int, ...]:
        found: list[int] = []
        while len(found) < most and self.at + len(found) < len(self.places):
            allowed = self.places[self.at + len(found)]
            if len(allowed) > 1:
                break
            found += allowed
        return tuple(found)

    def num_valid(self, drafts: tuple[int, ...]) -> int:
        count = 0
        for token, allowed in zip(drafts, self.places[self.at :], strict=False):
            if token not in allowed:
                break
            count += 1
        return count

    def accept(self, token: int) -> None:
        assert token in self.places[self.at]
        self.at += 1

    def fork(self) -> Pattern:
        return replace(self)


def pattern(dice: random.Random) -> tuple[tuple[int, ...], ...]:
    """Choices and runs of tokens that are forced."""
    places: list[tuple[int, ...]] = []
    while len(places) < 12:
        if dice.random() < 0.5:
            places += [(dice.randrange(4),)] * dice.randint(1, 4)
        else:
            places.append(tuple(sorted(dice.sample(range(4), dice.randint(2, 4)))))
    return tuple(places[: dice.randint(1, 14)])


def served(
    seed: int, speculation: Speculation | None, *, num_blocks: int = 60
) -> tuple[dict[SeqId, list[int]], dict[SeqId, FinishReason], int]:
    """Serve requests with patterns beside others without; return answers, ends and steps."""
    dice = random.Random(seed)
    scheduler = make_scheduler(num_blocks, 4, speculation=speculation)
    engine, runner = make_engine(scheduler, max_model_len=40)
    for number in range(5):
        prompt = tuple(dice.choices((0, 1), k=dice.randint(1, 12)))
        params = SamplingParams(max_tokens=10, n=dice.choice((1, 1, 2)), seed=number)
        new = partial(Pattern, pattern(dice)) if dice.random() < 0.7 else None
        engine.add(prompt, params, new_constraint=new)
    events = finish(engine)
    return tokens_of(events), reasons_of(events), len(runner.steps)


@pytest.mark.parametrize("seed", range(20))
def test_answers_comply_and_drafts_change_none(seed: int) -> None:
    plain, ends, num_steps = served(seed, None)
    for accuracy in (0.0, 1.0):
        speculation = Speculation(Oracle(accuracy, random.Random(seed)))
        drafted, other_ends, fewer = served(seed, speculation)
        assert (drafted, other_ends) == (plain, ends)
        assert fewer <= num_steps
    assert served(seed, None, num_blocks=10)[:2] == (plain, ends), "preempted"


def one(places: tuple[tuple[int, ...], ...], **options: int) -> tuple[list[int], FinishReason, int]:
    engine, runner = make_engine(
        make_scheduler(speculation=Speculation(Oracle(0, random.Random(1))))
    )
    new: Callable[[], Pattern] = partial(Pattern, places)
    request_id = engine.add(
        (1, 2), SamplingParams(**{"max_tokens": 30, **options}), new_constraint=new
    )
    events = finish(engine)
    key = request_id, 0
    return tokens_of(events)[key], reasons_of(events)[key], len(runner.steps)


def test_what_is_forced_takes_few_steps() -> None:
    assert one(((3,), (1,), (2,), (0,), (1,))) == ([3, 1, 2, 0, 1], FinishReason.STOP, 2)


def test_an_answer_ends_where_nothing_may_follow() -> None:
    assert one(((2,),)) == ([2], FinishReason.STOP, 1)
    assert one(((2,), (3,), (1,)), max_tokens=2)[:2] == ([2, 3], FinishReason.LENGTH)


def test_no_row_is_spent_on_a_draft_that_may_not_follow() -> None:
    speculation = Speculation(Oracle(0.5, random.Random(1)))
    engine, runner = make_engine(make_scheduler(speculation=speculation))
    new = partial(Pattern, ((0, 1),) * 20)
    engine.add((1, 2), SamplingParams(max_tokens=30), new_constraint=new)
    finish(engine)
    items = [item for step in runner.steps for item in step.work if item.drafts]
    drafts = [token for item in items for token in item.tokens[-item.drafts :]]
    assert drafts
    assert set(drafts) <= {0, 1}


# --- beams -------------------------------------------------------------------------------------

STOP = 3  # no pattern has it


def searched_within(request: Request, places: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Return what a search answers over what a pattern allows, without an engine."""
    search = new_search(request)
    assert search is not None
    texts: list[tuple[int, ...]] = [request.prompt]
    while True:
        ranked = []
        for text in texts:
            at = len(text) - len(request.prompt)
            allowed = places[at] if at < len(places) else (STOP,)
            found = candidates(prefixes_of(text)[-1], 4, 4)
            ranked.append(tuple(pair for pair in found if pair[0] in allowed))
        moves = search.advance(ranked, ())
        if not moves:
            answers = [[entry.token for entry in answer] for answer in search.answers()]
            return [[token for token in answer if token != STOP] for answer in answers]
        texts = [(*texts[parent], token) for parent, token in moves]


@pytest.mark.parametrize("num_blocks", [60, 14], ids=["roomy", "preempted"])
@pytest.mark.parametrize("seed", range(10))
def test_beams_are_those_of_the_search_over_what_is_allowed(seed: int, num_blocks: int) -> None:
    dice = random.Random(seed)
    engine, _ = make_engine(make_scheduler(num_blocks, 4, seats=6), eos_ids=(STOP,))
    expected: dict[SeqId, list[int]] = {}
    ends: dict[SeqId, FinishReason] = {}
    for number in range(4):
        places = tuple(
            tuple(sorted(dice.sample(range(3), dice.choice((1, 2, 3)))))
            for _ in range(dice.randint(3, 8))
        )
        width, most = dice.choice((1, 2, 3)), dice.choice((3, 6, 10))
        params = SamplingParams(use_beam_search=True, best_of=width, max_tokens=most)
        new = partial(Pattern, places, end=STOP)
        request = engine.requests[engine.add((1, 2, number), params, new_constraint=new)]
        (expected[number, 0],) = searched_within(request, places)
        is_whole = len(expected[number, 0]) == len(places)
        ends[number, 0] = FinishReason.STOP if is_whole else FinishReason.LENGTH
    events = finish(engine)
    assert tokens_of(events) == expected
    assert reasons_of(events) == ends


def test_answers_that_a_form_does_not_have_fail_by_name() -> None:
    engine, _ = make_engine(eos_ids=(STOP,))
    params = SamplingParams(use_beam_search=True, n=3, max_tokens=9, length_penalty=0.0)
    new = partial(Pattern, ((0,), (1, 2)), end=STOP)
    engine.add((1, 2), params, new_constraint=new)
    events = finish(engine)
    assert sorted([*tokens_of(events).values()]) == [[], [0, 1], [0, 2]]
    assert [event.error for event in events if event.error] == [TOO_FEW]
    assert reasons_of(events)[0, 2] is FinishReason.ERROR
