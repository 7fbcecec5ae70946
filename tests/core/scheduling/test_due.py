"""Requests that are due at a time go first, take what others hold, and change no answer."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, StepRecord
from ridgeline.core.request import Sequence
from ridgeline.core.scheduling.policies import Load, Orca, SplitFuse
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.step import SeqId, Wait
from tests.core.harness import (
    POLICIES,
    expected,
    finish,
    make_engine,
    make_request,
    make_scheduler,
    run_step,
    sizes_of,
)


def add(scheduler: Scheduler, request_id: int, length: int, due_s: float = inf) -> None:
    prompt = [100 * request_id + i for i in range(length)]
    scheduler.add(make_request(request_id, prompt, due_s=due_s, max_tokens=8))


def waiting(request_id: int, num_tokens: int, due_s: float = inf) -> Sequence:
    return make_request(request_id, range(num_tokens), due_s=due_s).sequences[0]


def test_of_those_that_wait_the_earliest_due_is_first() -> None:
    scheduler = make_scheduler()
    for request_id, due_s in enumerate((inf, 9.0, inf, 4.0)):
        add(scheduler, request_id, 3, due_s)
    assert [seq.id[0] for seq in scheduler.queues.waiting] == [3, 1, 0, 2]


def test_a_prompt_that_is_due_passes_older_and_shorter_ones() -> None:
    scheduler = make_scheduler(budget=20)
    add(scheduler, 0, 8)
    add(scheduler, 1, 2)
    add(scheduler, 2, 30, due_s=5.0)
    assert sizes_of(run_step(scheduler)) == {(2, 0): 20}
    assert [s.id[0] for s, _ in Orca().token_requests([], scheduler.queues.waiting, Load(), 9)] == [
        0,
        1,
    ]


def test_who_is_due_leaves_room_only_to_others_that_are() -> None:
    due, sooner, other = waiting(0, 100, 5.0), waiting(1, 20, 3.0), waiting(2, 10)

    def wanted(*seqs: Sequence) -> list[tuple[int, int]]:
        return [(s.id[0], count) for s, count in SplitFuse().token_requests([], seqs, Load(), 100)]

    assert wanted(due, other) == [(0, 100)]
    assert wanted(due, sooner, other) == [(1, 20), (0, 80)]


def test_a_full_engine_makes_a_seat_for_who_is_due() -> None:
    scheduler = make_scheduler(budget=10, seats=2)
    add(scheduler, 0, 4)
    add(scheduler, 1, 4)
    run_step(scheduler)
    add(scheduler, 2, 4)
    assert dict(run_step(scheduler).waits) == {(2, 0): Wait.MAX_NUM_SEQS}
    add(scheduler, 3, 4, due_s=1.0)
    step = run_step(scheduler)
    assert step.preempted == ((1, 0),)  # the last that came
    assert sizes_of(step) == {(0, 0): 1, (3, 0): 4}
    assert dict(step.waits) == {(1, 0): Wait.MAX_NUM_SEQS, (2, 0): Wait.BLOCKS}
    add(scheduler, 4, 4, due_s=0.5)
    assert run_step(scheduler).preempted == ((0, 0),)
    add(scheduler, 5, 4, due_s=0.1)  # nobody gives way to it who is due as well
    assert run_step(scheduler).preempted == ()


def test_the_tokens_of_who_gives_way_are_for_who_comes() -> None:
    scheduler = make_scheduler(budget=10, seats=2, policy=Orca())
    for request_id in range(2):
        scheduler.add(make_request(request_id, [request_id] * 3, max_tokens=7))
    run_step(scheduler)
    scheduler.add(make_request(2, range(9), due_s=1.0, max_tokens=1))
    assert sizes_of(run_step(scheduler)) == {(0, 0): 1, (2, 0): 9}


def test_blocks_are_taken_from_who_is_not_due() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=16)
    add(scheduler, 0, 7)
    add(scheduler, 1, 7, due_s=9.0)
    run_step(scheduler)  # both have two blocks
    run_step(scheduler)
    step = run_step(scheduler)
    assert step.preempted == ((0, 0),)
    assert sizes_of(step) == {(1, 0): 1}


@settings(max_examples=40)
@given(
    st.sampled_from(POLICIES),
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 6), st.just(inf) | st.integers(0, 5)),
        min_size=1,
        max_size=8,
    ),
)
def test_answers_are_the_same_whoever_is_due(
    policy: object, wishes: list[tuple[int, int, float]]
) -> None:
    scheduler = make_scheduler(10, 3, policy=policy, budget=30, seats=3)  # type: ignore[arg-type]
    records: list[Record] = []
    engine, _ = make_engine(scheduler, listeners=[records.append], max_model_len=30)
    answers: dict[SeqId, list[int]] = {}
    for length, num_new, due_s in wishes:
        params = SamplingParams(max_tokens=num_new)
        number = engine.add(tuple(i % 2 for i in range(length)), params, due_s=due_s)
        answers |= expected(engine.requests[number])
        engine.step()
        engine.check()
    said: dict[SeqId, list[int]] = {}
    for record in records:
        if isinstance(record, StepRecord):
            for (seq_id, _, _), tokens in zip(record.work, record.sampled, strict=True):
                said.setdefault(seq_id, []).extend(tokens)
    for event in finish(engine):
        if event.token is not None:
            said.setdefault(event.seq_id, []).append(event.token)
    assert said == answers


def test_who_runs_goes_on_while_one_due_earlier_waits_for_its_blocks() -> None:
    scheduler = make_scheduler(18, 4, seats=4, budget=10, policy=SplitFuse())
    engine, _ = make_engine(scheduler, max_model_len=400)
    greedy = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.add(tuple(range(60)), greedy, due_s=9.0)
    engine.step()
    engine.add(tuple(range(100, 130)), greedy, due_s=1.0)
    for _ in range(80):
        engine.step()
    assert not engine.has_work()
