"""Drafts change no answer, take nothing from anyone, and stay away where they do not pay."""

from __future__ import annotations

import random

import pytest

from ridgeline.core.commit import commit
from ridgeline.core.decoding.drafts.depth import Depth
from ridgeline.core.decoding.drafts.jacobi import Lookahead
from ridgeline.core.decoding.drafts.suffix import SuffixLookup
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.core.scheduling.policies import Policy
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.core.step import FinishReason, StepOutput
from tests.core.harness import (
    POLICIES,
    Oracle,
    Reciter,
    expected,
    finish,
    make_engine,
    make_request,
    make_scheduler,
    reasons_of,
    run_step,
    tokens_of,
)
from tests.core.test_workloads import MAX_LEN, serve, workload
from tests.fakes import Ledger


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_answers_are_those_without_drafts(policy: Policy) -> None:
    num_drafts = num_steps = num_plain_steps = 0
    for number in range(120):
        dice = random.Random(number)
        block_size = number % 7 + 1
        settings = {
            "policy": policy,
            "budget": 64 if policy.whole_prompts else dice.choice((8, 16, 64)),
            "seats": dice.randint(1, 8),
            "caching": dice.random() < 0.8,
        }
        num_blocks = -(-MAX_LEN // block_size) + dice.choice((0, 1, 4, 30))
        wishes = workload(dice, dice.randint(1, 6))
        plain, runner = serve(wishes, num_blocks, block_size, **settings)  # type: ignore[arg-type]
        num_plain_steps += len(runner.steps)
        accuracy = dice.choice((0.0, 0.3, 0.7, 1.0))
        speculation = Speculation(Oracle(accuracy, dice))
        drafted, runner = serve(
            wishes,
            num_blocks,
            block_size,
            speculation=speculation,
            **settings,  # type: ignore[arg-type]
        )
        assert drafted == plain
        num_steps += len(runner.steps)
        num_drafts += sum(work.drafts for step in runner.steps for work in step.work)
    assert num_drafts > 1000
    assert num_steps < 0.9 * num_plain_steps


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_with_states_answers_are_those_without_drafts(policy: Policy) -> None:
    """Right drafts before a wrong one are computed again; the ledger looks at each state."""
    num_drafts = num_again = num_on_top = num_cached = num_preempted = 0
    for number in range(120):
        dice = random.Random(number)
        block_size = number % 7 + 1
        _, runner = serve(
            workload(dice, dice.randint(1, 8)),
            -(-MAX_LEN // block_size) + dice.choice((0, 1, 4, 30)),
            block_size,
            policy=policy,
            budget=64 if policy.whole_prompts else dice.choice((8, 16, 64)),
            seats=dice.randint(1, 8),
            caching=dice.random() < 0.8,
            arrivals=dice,
            speculation=Speculation(Oracle(dice.choice((0.3, 0.7, 0.9)), dice)),
            checkpoints=dice.choice((0, 1, 2, 8)),
        )  # which compares with what a lone sequence gets
        for step in runner.steps:
            num_cached += sum(length for _, length in step.admitted)
            num_preempted += len(step.preempted)
            for work in step.work:
                num_drafts += work.drafts
                is_again = len(work.tokens) - work.drafts > 1
                is_again = is_again and work.start >= work.sampling.prompt_len
                num_again += is_again
                num_on_top += is_again and work.drafts > 0
                num_sure = len(work.tokens) - work.drafts
                assert not work.drafts or work.save[-1][0] == num_sure
    assert num_drafts > 1000
    assert num_again > 100
    assert num_on_top > 50
    assert num_cached > 100
    assert num_preempted > 20 or policy.whole_prompts


def test_behind_a_wrong_draft_right_ones_are_pending_again() -> None:
    drafter = Reciter({(0, 0): [5, 7, 8, 9, 6, 3]})
    scheduler = make_scheduler(speculation=Speculation(drafter), checkpoints=1)
    scheduler.add(make_request(0, (1, 2, 3), max_tokens=9))
    run_step(scheduler, {(0, 0): (5,)})
    [seq] = scheduler.queues.running
    [work] = run_step(scheduler, {(0, 0): (7, 8, 4)}).work
    assert (work.tokens, work.drafts) == ((5, 7, 8, 9, 6, 3), 5)
    [(num_sure, slot)] = work.save
    assert (num_sure, slot) == (1, seq.state) != (1, work.state)
    assert seq.tokens == [1, 2, 3, 5, 7, 8, 4]
    assert (seq.num_computed, seq.num_pending) == (4, 3)
    [again] = run_step(scheduler, {(0, 0): (6, 3, 1)}).work
    assert (again.start, again.tokens, again.drafts) == (4, (7, 8, 4, 6, 3), 2)
    assert again.save == ((3, work.state),)
    assert (seq.state, seq.num_computed, seq.num_pending) == (slot, 9, 1)


def test_earlier_answers_change_no_answer() -> None:
    """Whatever is asked again gets what it got, in far fewer steps; with pools of any size."""
    num_steps = {"first": 0, "again": 0}
    for number in range(60):
        dice = random.Random(number)
        block_size = number % 7 + 1
        num_blocks = -(-MAX_LEN // block_size) + dice.choice((0, 1, 4, 30))
        wishes = workload(dice, dice.randint(1, 6))
        speculation = Speculation(SuffixLookup(most_tokens=dice.choice((50, 1 << 20))))
        answers = {}
        for when in num_steps:
            answers[when], runner = serve(
                wishes, num_blocks, block_size, policy=POLICIES[2], speculation=speculation
            )  # which compares with what a lone sequence gets
            num_steps[when] += len(runner.steps)
        assert answers["again"] == answers["first"]
    assert num_steps["again"] < 0.8 * num_steps["first"]


def test_lookahead_changes_no_answer() -> None:
    num_drafts = 0
    for number in range(60):
        dice = random.Random(number)
        num_blocks = -(-MAX_LEN // 4) + dice.choice((0, 1, 4, 30))
        speculation = Speculation(drafter := Lookahead())
        _, runner = serve(
            workload(dice, dice.randint(1, 6)),
            num_blocks,
            4,
            policy=POLICIES[number % 3],
            speculation=speculation,
        )  # which compares with what a lone sequence gets
        assert not drafter._rounds
        num_drafts += sum(work.drafts for step in runner.steps for work in step.work)
    assert num_drafts > 1000


def test_right_drafts_are_worth_a_step_each() -> None:
    scheduler = make_scheduler(speculation=Speculation(Oracle(1.0, Always())))
    engine, runner = make_engine(scheduler)
    request_id = engine.add((1, 2, 3), SamplingParams(max_tokens=17, seed=1))
    wanted = expected(engine.requests[request_id])
    assert tokens_of(finish(engine)) == wanted
    assert [work.drafts for step in runner.steps for work in step.work] == [0, 15]


def test_a_stop_among_the_drafts_ends_the_answer() -> None:
    records: list[Record] = []
    for seed in range(40):
        speculation = Speculation(Oracle(1.0, Always()))
        engine, _ = make_engine(make_scheduler(speculation=speculation), listeners=[records.append])
        params = SamplingParams(max_tokens=40, seed=seed, stop_token_ids=(3,))
        request_id = engine.add((1, 2), params)
        wanted = expected(engine.requests[request_id])
        events = finish(engine)
        assert tokens_of(events) == wanted
        stopped = wanted[request_id, 0][-1] == 3
        assert reasons_of(events)[request_id, 0] is (
            FinishReason.STOP if stopped else FinishReason.LENGTH
        )
        steps = [record for record in records if isinstance(record, StepRecord)]
        sampled = [token for step in steps for tokens in step.sampled for token in tokens]
        assert sampled == wanted[request_id, 0], "records have what was kept, and no more"
        records.clear()


def test_records_count_guesses_and_right_ones() -> None:
    records: list[Record] = []
    speculation = Speculation(Oracle(0.5, random.Random(1)))
    engine, _ = make_engine(make_scheduler(speculation=speculation), listeners=[records.append])
    engine.add((1, 2, 3), SamplingParams(max_tokens=60, seed=4))
    finish(engine)
    steps = [record for record in records if isinstance(record, StepRecord)]
    (request,) = [record for record in records if isinstance(record, RequestRecord)]
    num_drafts = sum(len(tokens) for step in steps for _, tokens in step.drafts)
    num_right = sum(len(step.sampled[0]) - 1 for step in steps)
    assert request.num_draft_tokens == num_drafts > 20
    assert request.num_accepted_tokens == num_right > 5
    assert all(step.num_prompt_tokens == 0 for step in steps[1:])


def test_a_runner_may_stop_before_a_draft_that_is_right() -> None:
    """It must not count as computed: the runner says nothing of what is behind it."""
    scheduler = make_scheduler(speculation=Speculation(Oracle(1.0, Always())))
    engine, runner = make_engine(scheduler)
    execute = runner.ledger.execute
    runner.ledger.execute = lambda step: _cut(execute(step))  # type: ignore[method-assign]
    request_id = engine.add((1, 2, 3), SamplingParams(max_tokens=30, seed=1))
    wanted = expected(engine.requests[request_id])
    assert tokens_of(finish(engine)) == wanted


def _cut(output: StepOutput) -> StepOutput:
    return output._replace(tokens=tuple(tokens[:3] for tokens in output.tokens))


def test_no_drafts_beside_a_prompt() -> None:
    scheduler = make_scheduler(speculation=Speculation(Oracle(1.0, Always())))
    engine, runner = make_engine(scheduler)
    engine.add((1, 2, 3), SamplingParams(max_tokens=40))
    engine.step()
    engine.add((2, 2, 2), SamplingParams(max_tokens=2))
    engine.step()
    assert [work.drafts for work in runner.steps[-1].work] == [0, 0]


def test_drafts_keep_to_what_is_left_of_a_step() -> None:
    speculation = Speculation(Oracle(1.0, Always()))
    scheduler = make_scheduler(budget=12, speculation=speculation, seats=12)
    engine, runner = make_engine(scheduler)
    for seed in range(3):
        engine.add((seed,), SamplingParams(max_tokens=30, seed=seed))
    finish(engine)
    rows = [sum(len(work.tokens) for work in step.work) for step in runner.steps]
    assert max(rows) == 12


# --- how many pay ---------------------------------------------------------------------------------


def virtual_s(num_streams: int, accuracy: float, slope: float, depth: Depth | None) -> list[float]:
    """Return the virtual seconds of each step of streams with 200 tokens.

    A row more costs ``slope`` of a lone one, and the clock is off by up to a fifth.
    """
    dice = random.Random(7)
    oracle = Oracle(accuracy, random.Random(3), 1 << 30)
    speculation = Speculation(oracle, most=7, depth=depth) if depth else None
    scheduler = make_scheduler(4000, 16, budget=4096, seats=64, speculation=speculation)
    ledger = Ledger(4000, 16, 1 << 30)
    for seed in range(num_streams):
        scheduler.add(make_request(seed, (seed, 1, 2), max_tokens=200, seed=seed))
    steps_s: list[float] = []
    while scheduler.queues.has_work():
        step = scheduler.schedule()
        rows = sum(len(work.tokens) for work in step.work)
        seconds = 1 + slope * (rows - 1)
        output = ledger.execute(step)
        if speculation:
            speculation.note_step(step, output, seconds * dice.uniform(0.8, 1.2))
        commit(scheduler.queues, step, output)
        steps_s.append(seconds)
    return steps_s


@pytest.mark.parametrize("slope", [0.05, 0.15, 0.4, 1.0])
@pytest.mark.parametrize("num_streams", [1, 2, 4, 16])
def test_what_does_not_pay_costs_next_to_nothing(num_streams: int, slope: float) -> None:
    plain_s = sum(virtual_s(num_streams, 0.0, slope, None))
    assert plain_s >= 0.98 * sum(virtual_s(num_streams, 0.0, slope, Depth()))
    if slope == 1.0:  # a row costs as much as a step: the best drafts are none, once that is known
        depth = Depth()
        virtual_s(num_streams, 0.6, slope, depth)
        assert plain_s >= 0.98 * sum(virtual_s(num_streams, 0.6, slope, depth))


@pytest.mark.parametrize(
    ("accuracy", "slope", "gain"), [(0.5, 0.1, 1.3), (0.9, 0.1, 2.2), (0.9, 0.3, 1.4)]
)
def test_what_pays_is_done(accuracy: float, slope: float, gain: float) -> None:
    plain_s = sum(virtual_s(1, 0.0, slope, None))
    assert plain_s > gain * sum(virtual_s(1, accuracy, slope, Depth()))


def test_guesses_that_are_always_wrong_end_soon() -> None:
    steps_s = virtual_s(1, 0.0, 0.15, Depth())
    assert len([s for s in steps_s[:64] if s > 1]) < 30
    assert len([s for s in steps_s[64:] if s > 1]) <= 6, "nearly"


def test_nothing_is_kept_of_what_has_ended() -> None:
    depth = Depth()
    oracle = Oracle(0.5, random.Random(2))
    engine, _ = make_engine(make_scheduler(speculation=Speculation(oracle, depth=depth)))
    for seed in range(3):
        engine.add((1, seed), SamplingParams(max_tokens=20, seed=seed, n=2))
    finish(engine)
    assert not depth._records


def test_many_streams_are_left_alone() -> None:
    assert all(s == pytest.approx(1 + 0.1 * 39) for s in virtual_s(40, 1.0, 0.1, Depth())[1:150])


class Always(random.Random):
    """Dice that fall as high as they can, and chances that always come true."""

    def randint(self, a: int, b: int) -> int:
        return b

    def random(self) -> float:
        return 0.0
