"""Constrained answers: a mask for each draw, forced tokens as drafts, an end of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from ridgeline.core.params import SamplingParams
from ridgeline.core.speculate import Speculation
from ridgeline.core.step import FinishReason, SeqId
from tests.core.harness import Oracle, finish, make_engine, make_scheduler, reasons_of, tokens_of


@dataclass
class Pattern:
    """A constraint that says which of four tokens may come at each place, and when it is over."""

    places: tuple[tuple[int, ...], ...]
    at: int = 0

    @property
    def is_over(self) -> bool:
        return self.at == len(self.places)

    def masks(self, drafts: tuple[int, ...]) -> tuple[bytes, ...]:
        assert not self.is_over
        return tuple(self._mask(self.at + i) for i in range(len(drafts) + 1))

    def _mask(self, at: int) -> bytes:
        allowed = self.places[at] if at < len(self.places) else (0,)
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
