"""A draft model: shadows that follow answers, and guesses as long as they pay."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.commit import commit
from ridgeline.core.decoding.drafts.draft_model import DraftModel
from ridgeline.core.decoding.drafts.pace import Pace
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, RequestRecord
from ridgeline.core.request import Request
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.core.step import Step, StepOutput
from tests.core.harness import (
    POLICIES,
    expected,
    finish,
    make_engine,
    make_scheduler,
    tokens_of,
)
from tests.core.test_workloads import MAX_LEN, serve, workload
from tests.fakes import Ledger


class Small:
    """A small model that draws as the large one does, but now and then another token."""

    def __init__(self, num_blocks: int, block_size: int, accuracy: float, vocab_size: int = 4):
        self.ledger = Ledger(num_blocks, block_size, vocab_size)
        self.accuracy = accuracy
        self.dice = random.Random(7)
        self.steps: list[Step] = []
        self.during: Callable[[], None] = lambda: None
        self.errors: dict[int, str] = {}

    def execute(self, step: Step) -> StepOutput:
        self.during()
        self.steps.append(step)
        output = self.ledger.execute(step)
        tokens = tuple(tuple(map(self._maybe_wrong, drawn)) for drawn in output.tokens)
        return output._replace(tokens=tokens, errors=self.errors)

    def _maybe_wrong(self, token: int) -> int:
        is_right = self.dice.random() < self.accuracy
        return token if is_right else (token + 1) % self.ledger.vocab_size


def make_drafter(
    num_blocks: int = 64,
    block_size: int = 4,
    accuracy: float = 1.0,
    budget: int = 64,
    max_model_len: int = MAX_LEN + 16,
    pace: Pace | None = None,
    vocab_size: int = 4,
) -> tuple[DraftModel, Small]:
    small = Small(num_blocks, block_size, accuracy, vocab_size)
    drafter = DraftModel(
        small,
        KVCache(num_blocks, block_size),
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        pace=pace,
    )
    small.during = lambda: drafter.kv.check(drafter.shadows.values())
    return drafter, small


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_answers_are_those_without_drafts(policy: object) -> None:
    num_drafts = 0
    for number in range(60):
        dice = random.Random(number)
        block_size = number % 7 + 1
        num_blocks = -(-MAX_LEN // block_size) + dice.choice((0, 1, 4, 30))
        drafter, _small = make_drafter(
            dice.choice((2, 8, 64)),
            dice.randint(1, 5),
            dice.choice((0.0, 0.5, 0.9)),
            dice.choice((3, 64)),
            dice.choice((MAX_LEN // 2, MAX_LEN + 16)),
        )
        speculation = Speculation(drafter, most=dice.randint(1, 5))
        _, runner = serve(
            workload(dice, dice.randint(1, 6)),
            num_blocks,
            block_size,
            policy=policy,  # type: ignore[arg-type]
            caching=dice.random() < 0.8,
            speculation=speculation,
        )  # which compares with what a lone sequence gets
        num_drafts += sum(work.drafts for step in runner.steps for work in step.work)
        assert not drafter.shadows, "whatever has ended is forgotten"
        drafter.kv.check(())
    assert num_drafts > 200


@pytest.mark.parametrize("num_answers", [1, 3])
def test_a_model_that_draws_alike_is_always_right(num_answers: int) -> None:
    """So each shadow computes what its answer says, behind guesses that were not all taken."""
    drafter, _small = make_drafter()
    engine, _ = make_engine(make_scheduler(speculation=Speculation(drafter, most=3)))
    params = SamplingParams(max_tokens=24, seed=5, n=num_answers, temperature=1.0)
    request = engine.requests[engine.add(tuple(range(9)), params)]
    want = expected(request)
    assert tokens_of(finish(engine)) == want
    assert request.num_draft_tokens == request.num_accepted_tokens >= 17 * num_answers


def test_it_is_right_again_behind_a_wrong_guess() -> None:
    drafter, _small = make_drafter(accuracy=0.7, max_model_len=300, vocab_size=1 << 20)
    scheduler = make_scheduler(speculation=Speculation(drafter, most=3))
    engine, _ = make_engine(scheduler, vocab_size=1 << 20)
    request = engine.requests[engine.add((1, 2, 3), SamplingParams(max_tokens=200, seed=5))]
    finish(engine)
    share = request.num_accepted_tokens / request.num_draft_tokens
    assert share == pytest.approx((0.7 + 0.7**2 + 0.7**3) / 3, abs=0.08)


def test_what_was_computed_once_is_not_computed_again() -> None:
    drafter, small = make_drafter(accuracy=0.5)
    engine, _ = make_engine(make_scheduler(speculation=Speculation(drafter, most=3)))
    engine.add(tuple(range(20)), SamplingParams(max_tokens=16, seed=5))
    finish(engine)
    assert len(small.steps[0].work[0].tokens) == 21
    assert all(len(step.work[0].tokens) <= 2 for step in small.steps[1:])
    num_steps = len(small.steps)
    engine.add(tuple(range(20)), SamplingParams(max_tokens=16, seed=6))
    finish(engine)
    assert small.steps[num_steps].work[0].start == 20, "the cache of the first is used"


def test_catching_up_is_cut_by_the_budget_and_hurts_nobody() -> None:
    drafter, small = make_drafter(budget=8)
    engine, _ = make_engine(make_scheduler(speculation=Speculation(drafter, most=3)))
    request = engine.requests[engine.add(tuple(range(20)), SamplingParams(max_tokens=16, seed=5))]
    finish(engine)
    assert all(sum(len(work.tokens) for work in step.work) <= 8 for step in small.steps)
    assert [len(step.work[0].tokens) for step in small.steps[:3]] == [8, 8, 7]
    assert request.num_accepted_tokens == request.num_draft_tokens > 6


def test_where_its_cache_is_full_there_are_no_drafts() -> None:
    drafter, _small = make_drafter(num_blocks=7)
    engine, _ = make_engine(make_scheduler(speculation=Speculation(drafter, most=2)))
    first, second = (
        engine.requests[engine.add((seed,) * 12, SamplingParams(max_tokens=10, seed=seed))]
        for seed in (1, 2)
    )
    finish(engine)
    assert first.num_draft_tokens > second.num_draft_tokens
    third = engine.requests[engine.add((3,) * 12, SamplingParams(max_tokens=10, seed=3))]
    finish(engine)
    assert third.num_draft_tokens > 0


def test_who_waits_gives_his_blocks_to_who_runs() -> None:
    drafter, _small = make_drafter(num_blocks=7)
    engine, _ = make_engine(make_scheduler(speculation=Speculation(drafter, most=2)))
    first = engine.add((1,) * 12, SamplingParams(max_tokens=10, seed=1))
    for _ in range(2):
        engine.step()
    assert len(drafter.shadows) == 1
    engine.pause(first)
    second = engine.requests[engine.add((2,) * 12, SamplingParams(max_tokens=10, seed=2))]
    finish_one = [engine.step() for _ in range(8)]
    assert finish_one
    assert second.num_accepted_tokens > 0
    engine.resume(first)
    finish(engine)
    assert not drafter.shadows


def test_an_item_that_fails_ends_its_guess_alone() -> None:
    drafter, small = make_drafter()
    small.errors = {0: "broken"}
    engine, _ = make_engine(make_scheduler(speculation=Speculation(drafter, most=2)))
    bad, good = (
        engine.requests[engine.add((seed,) * 5, SamplingParams(max_tokens=10, seed=seed))]
        for seed in (1, 2)
    )
    want = expected(bad) | expected(good)
    assert tokens_of(finish(engine)) == want
    assert bad.num_draft_tokens == 0 < good.num_draft_tokens


def failing_once(runner: object, name: str) -> Callable[[], None]:
    """Return what raises, and puts a call that does nothing in its own place."""

    def fail() -> None:
        setattr(runner, name, lambda: None)
        raise OSError("no more memory")

    return fail


def test_its_exceptions_pass_through_and_nothing_is_lost() -> None:
    drafter, small = make_drafter()
    engine, _ = make_engine(make_scheduler(speculation=Speculation(drafter, most=2)))
    request = engine.requests[engine.add((1, 2, 3), SamplingParams(max_tokens=10, seed=1))]
    want = expected(request)
    events = engine.step()

    small.during = failing_once(small, "during")
    with pytest.raises(OSError, match="no more memory"):
        engine.step()
    engine.check()
    assert tokens_of(events + finish(engine)) == want


def test_who_was_admitted_when_it_failed_is_admitted_again() -> None:
    """A prompt that is cached but for its last token gets drafts in its first step."""
    drafter, small = make_drafter()
    records: list[Record] = []
    scheduler = make_scheduler(speculation=Speculation(drafter, most=2))
    engine, _ = make_engine(scheduler, listeners=[records.append])
    engine.add(tuple(range(9)), SamplingParams(max_tokens=2, seed=1))
    finish(engine)
    engine.add(tuple(range(9)), SamplingParams(max_tokens=8, seed=2))

    small.during = failing_once(small, "during")
    with pytest.raises(OSError, match="no more memory"):
        engine.step()
    finish(engine)
    ended = [record for record in records if isinstance(record, RequestRecord)]
    assert [record.scheduled_s is not None for record in ended] == [True, True]


def test_a_step_that_failed_leaves_guesses_as_right_as_before() -> None:
    drafter, _ = make_drafter()
    engine, runner = make_engine(make_scheduler(speculation=Speculation(drafter, most=3)))
    request = engine.requests[engine.add((1, 2, 3), SamplingParams(max_tokens=20, seed=1))]
    want = expected(request)
    events = engine.step()

    runner.after = failing_once(runner, "after")
    with pytest.raises(OSError, match="no more memory"):
        engine.step()
    num_failed = len(runner.steps)
    assert tokens_of(events + finish(engine)) == want
    plain, *rest = [step.work[0] for step in runner.steps[num_failed:]]
    assert plain.drafts == 0
    assert [work.drafts for work in rest[:3]] == [3, 3, 3]


# --- how many pay ---------------------------------------------------------------------------------


def virtual_s(
    accuracy: float,
    cost: float,
    num_tokens: int,
    pace: Pace | None,
    most: int,
    prompt_len: int = 2,
) -> float:
    """Return the virtual seconds of a stream.

    A guess costs this part of a step, a row more of either model 0.1 and 0.02 of one.
    """
    dice = random.Random(7)
    drafter, small = make_drafter(
        2000, 16, accuracy, 4096, max_model_len=1 << 20, pace=pace, vocab_size=1 << 20
    )
    speculation = Speculation(drafter, most=most, depth=pace) if pace else None
    scheduler = make_scheduler(2000, 16, budget=4096, speculation=speculation)
    ledger = Ledger(2000, 16, 1 << 20)
    params = SamplingParams(max_tokens=num_tokens, seed=1)
    scheduler.add(Request(0, (1,) * prompt_len, params, max_model_len=1 << 20))
    commit(scheduler.queues, step := scheduler.schedule(), ledger.execute(step))  # the prompt
    total_s = 0.0
    while scheduler.queues.has_work():
        before = len(small.steps)
        step = scheduler.schedule()
        (work,) = step.work
        rows = [len(one.work[0].tokens) - 1 for one in small.steps[before:]]
        seconds = 1 + 0.1 * (len(work.tokens) - 1) + cost * len(rows) + 0.02 * sum(rows)
        output = ledger.execute(step)
        if speculation:
            speculation.note_step(step, output, seconds * dice.uniform(0.85, 1.15))
        commit(scheduler.queues, step, output)
        total_s += seconds
    return total_s


@pytest.mark.parametrize(
    ("accuracy", "cost", "most", "gain"),
    [(0.9, 0.1, 4, 2.0), (0.75, 0.36, 3, 1.1), (0.9, 0.36, 7, 1.25), (1.0, 0.05, 15, 4)],
)
def test_what_pays_is_done(accuracy: float, cost: float, most: int, gain: float) -> None:
    plain_s = virtual_s(0.0, 0.0, 1000, None, 0)
    assert plain_s > gain * virtual_s(accuracy, cost, 1000, Pace(most), most)


@pytest.mark.parametrize(("accuracy", "cost"), [(0.0, 0.1), (0.3, 0.4), (0.9, 1.5), (0.0, 1.0)])
def test_what_does_not_pay_rests(accuracy: float, cost: float) -> None:
    plain_s = virtual_s(0.0, 0.0, 1500, None, 0)
    assert plain_s >= 0.98 * virtual_s(accuracy, cost, 1500, Pace(5), 5)


@pytest.mark.parametrize("num_tokens", [50, 100, 200, 400, 2000])
def test_a_long_prompt_is_caught_up_with_where_the_answer_is_long(num_tokens: int) -> None:
    pace = Pace(4)
    virtual_s(0.8, 0.3, 400, pace, 4)
    plain_s = virtual_s(0.0, 0.0, num_tokens, None, 0, prompt_len=1000)
    found_s = virtual_s(0.8, 0.3, num_tokens, pace, 4, prompt_len=1000)
    assert plain_s >= (1.15 if num_tokens == 2000 else 0.9) * found_s
    if num_tokens <= 100:
        assert plain_s >= 0.98 * found_s


def test_it_is_tried_again_when_texts_change() -> None:
    pace = Pace(4)
    virtual_s(0.0, 0.1, 1000, pace, 4)
    plain_s = virtual_s(0.0, 0.0, 3000, None, 0)
    assert plain_s > 1.3 * virtual_s(0.9, 0.1, 3000, pace, 4)
