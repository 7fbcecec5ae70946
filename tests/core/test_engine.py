"""The engine: events and records, aborts at any moment, failures that stay where they happen."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeVar

import pytest

from ridgeline.core.commit import abort
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record, RequestRecord, StepRecord
from ridgeline.core.scheduling.policies import Load, Queue, SplitFuse, Static, TokenRequest
from ridgeline.core.step import FinishReason
from tests.core.harness import (
    expected,
    finish,
    make_engine,
    make_scheduler,
    reasons_of,
    tokens_of,
)

Kind = TypeVar("Kind")
ABORT, ERROR, LENGTH = FinishReason.ABORT, FinishReason.ERROR, FinishReason.LENGTH


def params(max_tokens: int = 4, n: int = 1, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, **others)  # type: ignore[arg-type]


def of_kind(records: list[Record], kind: type[Kind]) -> list[Kind]:
    return [record for record in records if isinstance(record, kind)]


# --- events and requests -----------------------------------------------------------------------


def test_each_step_brings_a_token_of_each_sequence_and_the_end() -> None:
    engine, _ = make_engine()
    first, second = engine.add((1, 2), params(2)), engine.add((3,), params(1))
    assert (first, second) == (0, 1)
    assert engine.has_work()
    events = engine.step()
    assert [(e.seq_id, e.finish_reason) for e in events] == [((0, 0), None), ((1, 0), LENGTH)]
    assert list(engine.requests) == [0]
    events = engine.step()
    assert [(e.seq_id, e.finish_reason) for e in events] == [((0, 0), LENGTH)]
    assert not engine.has_work()
    assert engine.step() == []


def test_how_full_the_engine_is_by_the_names_of_metrics() -> None:
    engine, _ = make_engine(make_scheduler(budget=4, seats=2, block_size=2, num_blocks=10))
    empty = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
    assert engine.gauges() == empty
    first = engine.add((1, 2, 3), params())
    engine.add((4,), params())
    engine.add((5,), params())
    engine.step()  # which has seats for two, and needs two blocks and one
    full = {"num_requests_running": 2, "num_requests_waiting": 1}
    assert engine.gauges() == full | {"kv_cache_usage_perc": pytest.approx(0.3)}
    engine.pause(first)
    assert engine.gauges()["num_requests_waiting"] == 2
    engine.resume(first)
    finish(engine)
    assert engine.gauges() == empty


def test_a_request_that_can_never_run_leaves_no_trace() -> None:
    records: list[Record] = []
    engine, _ = make_engine(make_scheduler(2, 4), listeners=[records.append])
    with pytest.raises(ValueError, match="3 blocks of 4"):
        engine.add((1,) * 5, params(4))
    with pytest.raises(ValueError, match="empty"):
        engine.add((), params())
    assert not engine.has_work()
    assert engine.add((1,), params(1)) == 0
    finish(engine)
    assert of_kind(records, StepRecord)[0].arrived == (0,)


def test_requests_without_a_seed_differ_and_the_same_engine_repeats_itself() -> None:
    def seeds(engine_seed: int) -> list[tuple[int, ...]]:
        engine, _ = make_engine()
        engine.seed = engine_seed
        ids = [engine.add((1,), params(n=3)) for _ in range(50)]
        return [engine.requests[i].sequences[0].seeds for i in ids]

    assert seeds(0) == seeds(0)
    assert len({seed for many in (*seeds(0), *seeds(1)) for seed in many}) == 2 * 50 * 3


def test_eos_ids_of_the_engine_end_answers() -> None:
    engine, _ = make_engine(eos_ids=(2,))
    for i in range(8):
        engine.add((i,), params(40))
    answers = [tokens for i in range(8) for tokens in expected(engine.requests[i]).values()]
    assert [2 in tokens for tokens in answers] == [True] * 8
    assert list(tokens_of(finish(engine)).values()) == answers


def test_steps_follow_each_other_on_the_clock() -> None:
    records: list[Record] = []
    engine, _ = make_engine(listeners=[records.append])
    engine.add((1,), params(5))
    finish(engine)
    steps = of_kind(records, StepRecord)
    assert [step.duration_s for step in steps] == [3.0] * 5  # the clock counts how often it is read
    for step, following in pairwise(steps):
        assert step.start_s + step.duration_s == step.end_s <= following.start_s


# --- abort -------------------------------------------------------------------------------------


def test_abort_of_the_unknown_or_finished_is_nothing() -> None:
    records: list[Record] = []
    engine, _ = make_engine(listeners=[records.append])
    assert engine.abort(7) == []
    request_id = engine.add((1,), params(1))
    finish(engine)
    assert engine.abort(request_id) == []
    assert len(of_kind(records, RequestRecord)) == 1


def test_abort_before_the_first_step() -> None:
    engine, _ = make_engine()
    gone, other = engine.add((1, 2), params()), engine.add((1, 2), params())
    answer = expected(engine.requests[other])
    (event,) = engine.abort(gone)
    assert (event.seq_id, event.token, event.finish_reason) == ((0, 0), None, ABORT)
    engine.check()
    assert tokens_of(finish(engine)) == answer


def test_abort_in_the_middle_of_a_prompt_and_of_answers() -> None:
    engine, _ = make_engine(make_scheduler(budget=4, seats=4, block_size=2))
    chunked = engine.add(tuple(range(9)), params())
    engine.step()
    assert engine.scheduler.queues.running[0].num_computed == 4
    assert len(engine.abort(chunked)) == 1
    engine.check()
    forked = engine.add((1, 2, 3), params(n=3))
    engine.step()
    assert [event.seq_id for event in engine.abort(forked)] == [(1, 0), (1, 1), (1, 2)]
    engine.check()
    assert not any(engine.scheduler.queues.kv.pool.refs)


def test_abort_spares_answers_that_have_ended() -> None:
    engine, _ = make_engine(vocab_size=3)
    request_id = engine.add((5,), params(30, n=8, stop_token_ids=[2]))
    ended: dict[tuple[int, int], FinishReason] = {}
    while not ended:
        ended = reasons_of(engine.step())
    assert len(ended) < 8
    assert {event.seq_id for event in engine.abort(request_id)}.isdisjoint(ended)


def test_abort_of_a_preempted_request() -> None:
    engine, runner = make_engine(make_scheduler(3, 4))
    old, young = engine.add((1,) * 4, params(8)), engine.add((2,) * 4, params(8))
    answer = expected(engine.requests[old])
    events = engine.step()
    while not runner.steps[-1].preempted:
        events += engine.step()
    assert [event.finish_reason for event in engine.abort(young)] == [ABORT]
    engine.check()
    events += finish(engine)
    assert tokens_of(events)[old, 0] == answer[old, 0]


def test_abort_while_the_step_is_computed() -> None:
    scheduler = make_scheduler(block_size=2)
    engine, runner = make_engine(scheduler)
    gone, other = engine.add((1, 2, 3), params(n=2)), engine.add((1, 2, 3), params())
    answer = expected(engine.requests[other])
    request = engine.requests[gone]
    runner.during = lambda: abort(scheduler.queues, request) and engine.check()
    events = engine.step()
    assert [event.seq_id for event in events] == [(other, 0)]
    assert request.is_finished
    engine.check()
    runner.during = lambda: None
    engine.abort(gone)
    assert tokens_of(events + finish(engine)) == answer


# --- failures ------------------------------------------------------------------------------------


def test_an_error_of_one_item_ends_that_request_alone() -> None:
    records: list[Record] = []
    engine, runner = make_engine(listeners=[records.append])
    ids = [engine.add((i, i), params()) for i in range(3)]
    answers = expected(engine.requests[0]) | expected(engine.requests[2])
    runner.ledger.fail[ids[1]] = "its numbers are not finite"
    events = engine.step()
    assert reasons_of(events) == {(1, 0): ERROR}
    assert (events[1].error, events[1].token) == ("its numbers are not finite", None)
    events += finish(engine)
    assert {seq_id: t for seq_id, t in tokens_of(events).items() if t} == answers
    errors = {record.request_id: record.error for record in of_kind(records, RequestRecord)}
    assert errors == {0: None, 1: "its numbers are not finite", 2: None}


def test_an_error_of_one_answer_is_kept_until_the_request_ends() -> None:
    records: list[Record] = []
    engine, runner = make_engine(make_scheduler(seats=1), listeners=[records.append])
    request_id = engine.add((1, 2), params(3, n=2))
    engine.step()
    runner.ledger.fail[request_id] = "first"
    engine.step()
    runner.ledger.fail.clear()
    finish(engine)
    (record,) = of_kind(records, RequestRecord)
    assert record.error == "first"
    assert record.finish_reasons == ("error", "length")
    assert record.num_generated == (1, 3)


def test_of_the_errors_of_several_answers_the_first_is_kept() -> None:
    records: list[Record] = []
    engine, runner = make_engine(make_scheduler(seats=1), listeners=[records.append])
    request_id = engine.add((1, 2), params(3, n=2))
    engine.step()
    for error in ("first", "second"):
        runner.ledger.fail[request_id] = error
        engine.step()
    (record,) = of_kind(records, RequestRecord)
    assert record.error == "first"
    assert record.finish_reasons == ("error", "error")


class Broken(Exception):
    """What a backend may raise."""


@pytest.mark.parametrize("when", ["during", "after"])
@pytest.mark.parametrize("fails_at", [0, 1, 2, 3, 4, 6])
def test_after_an_exception_of_the_backend_the_answers_are_the_same(
    when: str, fails_at: int
) -> None:
    engine, runner = make_engine(make_scheduler(9, 2, budget=6, seats=4))
    for i, n in enumerate((3, 1, 2)):
        engine.add((1, 2, 3, i, 1), params(6, n=n))
    answers = {k: v for request in engine.requests.values() for k, v in expected(request).items()}
    events = [event for _ in range(fails_at) for event in engine.step()]

    def fail() -> None:
        raise Broken

    setattr(runner, when, fail)
    for _ in range(2):
        with pytest.raises(Broken):
            engine.step()
        engine.check()
        assert not engine.scheduler.queues.running
    setattr(runner, when, lambda: None)
    assert tokens_of(events + finish(engine)) == answers


class OldestLast(SplitFuse):
    """Asks for the oldest after all others."""

    def token_requests(
        self, running: Queue, waiting: Queue, load: Load, budget: int
    ) -> Iterator[TokenRequest]:
        yield from super().token_requests([*running[1:], *running[:1]], waiting, load, budget)


def test_a_copy_is_not_repeated_when_its_source_has_another_owner() -> None:
    engine, runner = make_engine(make_scheduler(3, 4, policy=OldestLast()))
    engine.add((9, 9, 9), params(6))
    answers = expected(engine.requests[0])
    events = engine.step()
    engine.add((1, 2), params(3, n=2))
    answers |= expected(engine.requests[1])
    events += engine.step()

    def fail() -> None:
        raise Broken

    runner.after = fail
    with pytest.raises(Broken):
        engine.step()
    # One answer copied the block that both shared, then the oldest took it from the other.
    (step,) = runner.steps[2:]
    assert step.preempted == ((1, 1),)
    assert [old for old, _ in step.copies] == [step.work[1].table[1]]
    runner.after = lambda: None
    assert tokens_of(events + finish(engine)) == answers


# --- records -------------------------------------------------------------------------------------


def test_the_engine_describes_itself_first() -> None:
    records: list[Record] = []
    scheduler = make_scheduler(
        8, 4, policy=Static(), budget=50, seats=5, caching=False, looks_ahead=True
    )
    make_engine(scheduler, max_model_len=40, eos_ids=(3,), listeners=[records.append])
    assert records == [
        EngineRecord(
            policy="static",
            block_size=4,
            num_blocks=8,
            max_num_batched_tokens=50,
            max_num_seqs=5,
            max_model_len=40,
            enable_prefix_caching=False,
            seed=0,
            eos_ids=(3,),
            looks_ahead=True,
            reserve_full=True,
        )
    ]


def test_who_hears_of_ends_alone_hears_what_the_others_hear_of_them() -> None:
    records: list[Record] = []
    ends: list[RequestRecord] = []
    engine, _ = make_engine(listeners=[records.append])
    lean, _ = make_engine()
    for one in (engine, lean):
        one.end_listeners.append(ends.append)
        one.add((1, 2), params(2))
        one.add((3,), params(3))
        finish(one)
    heard = of_kind(records, RequestRecord)
    assert ends[:2] == heard
    # Its clock counts looks, and no record of a step looked at it.
    assert [end.num_generated for end in ends[2:]] == [end.num_generated for end in heard]
    assert of_kind(records, StepRecord)


def test_a_request_record_tells_times_and_numbers() -> None:
    records: list[Record] = []
    engine, _ = make_engine(make_scheduler(budget=4, seats=4), listeners=[records.append])
    engine.add((1, 2, 3, 4, 5, 6), params(2), name="chat-7", cache_root=b"\n\x0b")  # arrives at 1
    finish(engine)
    steps = of_kind(records, StepRecord)
    # Each step looks at the clock four times: begun, scheduled, executed, committed.
    assert [(s.start_s, s.schedule_s, s.execute_s, s.commit_s) for s in steps] == [
        (2.0, 1.0, 1.0, 1.0),
        (6.0, 1.0, 1.0, 1.0),
        (10.0, 1.0, 1.0, 1.0),
    ]
    assert of_kind(records, RequestRecord) == [
        RequestRecord(
            request_id=0,
            name="chat-7",
            cache_root="0a0b",
            prompt_token_ids=(1, 2, 3, 4, 5, 6),
            params={"max_tokens": 2},
            arrival_s=1.0,
            scheduled_s=3.0,
            first_token_s=8.0,
            finish_s=12.0,
            num_cached_tokens=0,
            num_preemptions=0,
            num_generated=(2,),
            finish_reasons=("length",),
            num_drafts=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            error=None,
        )
    ]


def test_a_request_that_never_ran_has_no_times_but_its_end() -> None:
    records: list[Record] = []
    engine, _ = make_engine(listeners=[records.append])
    engine.abort(engine.add((1,), params(n=2, stop=["x"], seed=3)))
    (record,) = of_kind(records, RequestRecord)
    assert (record.arrival_s, record.scheduled_s, record.first_token_s) == (1.0, None, None)
    assert (record.finish_s, record.finish_reasons, record.num_generated) == (2.0, ("abort",), (0,))
    assert record.params == {"n": 2, "max_tokens": 4, "stop": ("x",), "seed": 3}


def test_a_request_may_have_arrived_before_it_was_added() -> None:
    records: list[Record] = []
    engine, _ = make_engine(listeners=[records.append])
    engine.abort(engine.add((1,), params(), arrival_s=-7.5))
    assert of_kind(records, RequestRecord)[0].arrival_s == -7.5


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    records: list[Record] = []
    engine, runner = make_engine(make_scheduler(5, 4), listeners=[records.append])
    engine.add((1,) * 9, params(1))
    finish(engine)
    engine.add((2,) * 4, params(12))
    engine.add((1,) * 6, params(6))
    finish(engine)
    first, second, third = of_kind(records, RequestRecord)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert third.num_cached_tokens == 4
    assert third.num_preemptions > 0
    assert sum(((2, 0) in dict(step.admitted)) for step in runner.steps) > 1


def test_step_records_tell_what_happened() -> None:
    records: list[Record] = []
    engine, _ = make_engine(make_scheduler(8, 4, budget=6, seats=2), listeners=[records.append])
    engine.add((1, 2, 3, 4, 5), params(2, n=2))
    gone = engine.add((6, 7), params())
    engine.abort(gone)
    engine.add((8,), params(2))
    tokens = tokens_of(finish(engine))
    first, second, third = of_kind(records, StepRecord)
    assert (first.number, first.arrived, first.aborted) == (0, (0, 1, 2), (1,))
    assert first.work == (((0, 0), 0, 5), ((2, 0), 0, 1))
    assert first.sampled == ((tokens[0, 0][0], tokens[0, 1][0]), (tokens[2, 0][0],))
    assert first.admitted == (((0, 0), 0), ((2, 0), 0))
    assert (first.num_running, first.num_waiting, first.blocks_used) == (2, 0, 3)
    assert (first.blocks_indexed, first.num_copies, first.preempted, first.waits) == (0, 0, (), ())
    assert second.work == (((0, 0), 5, 1), ((2, 0), 1, 1))
    assert (second.number, second.arrived, second.aborted) == (1, (), ())
    assert second.waits == (((0, 1), "max_num_seqs"),)
    assert (second.num_running, second.num_waiting, second.blocks_indexed) == (2, 1, 1)
    assert third.admitted == (((0, 1), 4),)


def test_a_failed_item_is_recorded_with_its_error_and_without_samples() -> None:
    records: list[Record] = []
    engine, runner = make_engine(listeners=[records.append])
    engine.add((1, 2), params(1))
    engine.add((3, 4), params(1, n=2))
    engine.add((5, 6), params(1))
    runner.ledger.fail[1] = "its numbers are not finite"
    tokens = tokens_of(finish(engine))
    (step,) = of_kind(records, StepRecord)
    assert step.sampled == (tuple(tokens[0, 0]), (), tuple(tokens[2, 0]))
    assert step.errors == (((1, 0), "its numbers are not finite"),)


def test_a_failed_step_is_recorded_without_samples() -> None:
    records: list[Record] = []
    engine, runner = make_engine(listeners=[records.append])
    engine.add((1, 2), params(1))

    def fail() -> None:
        raise Broken

    runner.during = fail
    with pytest.raises(Broken):
        engine.step()
    runner.during = lambda: None
    finish(engine)
    failed, done = of_kind(records, StepRecord)
    assert (failed.number, failed.arrived, failed.sampled) == (0, (0,), ())
    assert (done.number, done.arrived, done.work) == (1, (), failed.work)
    assert len(done.sampled) == 1
    (record,) = of_kind(records, RequestRecord)
    assert (record.scheduled_s, record.num_preemptions) == (3.0, 1)


def test_without_a_listener_nothing_is_recorded() -> None:
    engine, _ = make_engine()
    engine.add((1,), params())
    finish(engine)
    assert engine.listeners == []


class Mute(SplitFuse):
    """Asks for nothing."""

    def token_requests(
        self, running: Queue, waiting: Queue, load: Load, budget: int
    ) -> Iterator[TokenRequest]:
        return iter(())


def test_an_engine_with_work_that_cannot_run_says_so() -> None:
    engine, _ = make_engine()
    engine.add((1,), params())
    engine.scheduler.policy = Mute()
    with pytest.raises(RuntimeError, match="nothing can run"):
        engine.step()
