"""Beams in the engine: rounds over sequences, shared blocks, and who waits for whom."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ridgeline.core.commit import commit
from ridgeline.core.decoding.text import TextStream
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.core.request import Request, Status
from ridgeline.core.scheduling.policies import Policy
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.step import Event, FinishReason, SeqId, Step, StepOutput, Wait
from ridgeline.foresight.simulator.replay import replay
from ridgeline.foresight.structure import to_json
from tests.core.decoding.letters import Letters
from tests.core.harness import (
    POLICIES,
    YoungestFirst,
    expected,
    finish,
    make_engine,
    make_request,
    make_scheduler,
    reasons_of,
    searched,
    sizes_of,
    tokens_of,
)
from tests.fakes import candidates

PROMPT = tuple(range(10))


def beams_of(width: int, **more: Any) -> SamplingParams:
    return SamplingParams(use_beam_search=True, best_of=width, **more)


def add(scheduler: Scheduler, request_id: int, width: int, **params: Any) -> Request:
    """Add a request for ``width`` beams, for one plain answer where it is 0."""
    prompt = PROMPT[: params.pop("prompt_len", 4)]
    wishes: dict[str, Any] = {"use_beam_search": True, "best_of": width} if width else {}
    request = make_request(request_id, prompt, **wishes, **params)
    scheduler.add(request)
    return request


def run(scheduler: Scheduler, vocab_size: int = 8) -> Step:
    """Schedule and commit a step, with candidates that depend on the sequence and its length."""
    step = scheduler.schedule()
    top = {
        i: candidates(hash((work.seq_id, work.start)), work.top, vocab_size)
        for i, work in enumerate(step.work)
        if work.top
    }
    tokens = tuple((7,) * len(work.seeds) for work in step.work)
    commit(scheduler.queues, step, StepOutput(tokens, top=top))
    scheduler.queues.check()
    return step


# --- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_answers_are_those_of_the_search_alone(policy: Policy) -> None:
    engine, _ = make_engine(make_scheduler(policy=policy, seats=8), vocab_size=6)
    expected: dict[SeqId, list[int]] = {}
    has_stopped: dict[SeqId, bool] = {}
    for width, stops in [(1, ()), (3, (2,)), (4, (1, 2))]:
        params = beams_of(width, n=min(width, 2), max_tokens=9, stop_token_ids=stops)
        request = engine.requests[engine.add(PROMPT, params)]
        for i, tokens in enumerate(searched(request, 6)):
            expected[request.id, i] = tokens
            has_stopped[request.id, i] = tokens[-1] in stops
    events = finish(engine)
    assert len(expected) == 5
    assert tokens_of(events) == expected
    for seq_id, reason in reasons_of(events).items():
        assert reason is (FinishReason.STOP if has_stopped[seq_id] else FinishReason.LENGTH)
    assert set(has_stopped.values()) == {True, False}


def test_nothing_is_said_before_the_end_and_then_all_with_text_and_logprobs() -> None:
    engine, _ = make_engine(vocab_size=6)
    params = beams_of(3, n=2, max_tokens=4, logprobs=2)
    engine.add(PROMPT, params, new_text=lambda: TextStream(Letters()))
    for _ in range(3):
        assert engine.step() == []
    events = engine.step()
    assert [event.seq_id for event in events] == [(0, 0)] * 4 + [(0, 1)] * 4
    for event in events:
        assert event.logprobs is not None
        assert event.logprobs.token == event.token
        assert len(event.logprobs.top) == 2
        assert event.text == Letters()(event.token)
    assert not engine.has_work()


def test_as_beams_diverge_they_share_what_they_have_in_common() -> None:
    """Three beams behind a prompt of ten blocks take ten blocks and a few of their own."""
    records: list[Record] = []
    scheduler = make_scheduler(64, 4)
    engine, _ = make_engine(scheduler, vocab_size=6, listeners=[records.append])
    engine.add(tuple(range(40)), beams_of(3, max_tokens=8))
    finish(engine)  # the ledger checks every read
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert len(steps) == 8
    assert max(len(step.work) for step in steps) == 3
    assert max(step.blocks_used for step in steps) <= 10 + 2 * 3
    assert sum(step.num_copies for step in steps) > 0
    assert sum(len(step.ranked) for step in steps) == 1 + 7 * 3
    assert all(tokens == () for step in steps for tokens in step.sampled)


def test_a_prompt_in_pieces_is_ranked_at_its_end() -> None:
    engine, runner = make_engine(make_scheduler(budget=8, seats=3), vocab_size=6)
    request = engine.requests[engine.add(PROMPT, beams_of(2, max_tokens=5))]
    expected_tokens = searched(request, 6)
    assert [*tokens_of(finish(engine)).values()] == expected_tokens
    assert [(len(work.tokens), work.top) for step in runner.steps[:2] for work in step.work] == [
        (8, 0),
        (2, 2),
    ]


def test_a_beam_keeps_its_id_and_forks_take_the_lowest_free() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, 0, 3, max_tokens=9)
    run(scheduler)
    assert [beam.id for beam in request.sequences] == [(0, 0), (0, 1), (0, 2)]
    step = scheduler.schedule()
    ranked = [((1, -9.0), (2, -9.5), (3, -9.9)), ((4, -0.1), (5, -0.2), (6, -0.3))]
    top = {0: ranked[0], 1: ranked[1], 2: ranked[0]}
    commit(scheduler.queues, step, StepOutput(((),) * 3, top=top))
    scheduler.queues.check()
    beams = request.sequences
    assert [beam.id for beam in beams] == [(0, 1), (0, 0), (0, 2)]
    assert [beam.tokens[-1] for beam in beams] == [4, 5, 6]
    assert len({tuple(beam.tokens[:-1]) for beam in beams}) == 1
    assert not any(seq.seeds for seq in beams)


# --- slots, blocks, waiting --------------------------------------------------------------------


def test_a_request_takes_a_slot_for_each_beam_from_its_start() -> None:
    scheduler = make_scheduler(seats=4)
    add(scheduler, 0, 3, max_tokens=9)
    for request_id in (1, 2):
        add(scheduler, request_id, 0, max_tokens=9)
    assert scheduler.room().num_seqs == 4 - 3 - 2
    step = run(scheduler)
    assert sizes_of(step) == {(0, 0): 4, (1, 0): 4}
    assert dict(step.waits) == {(2, 0): Wait.MAX_NUM_SEQS}
    assert sorted(sizes_of(run(scheduler))) == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_more_beams_than_slots_or_blocks_are_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(6, 4, seats=4)
    with pytest.raises(ValueError, match=r"^best_of asks for 5 at once, but at most 4 sequences"):
        add(scheduler, 0, 5, max_tokens=1)
    with pytest.raises(
        ValueError, match=r"^best_of is 4: for each, .* 8 tokens = 2 blocks of 4, .* 6:"
    ):
        add(scheduler, 1, 4, max_tokens=4)
    add(scheduler, 2, 3, max_tokens=4)
    assert [seq.id for seq in scheduler.queues.waiting] == [(2, 0)]
    assert list(scheduler.queues.searching) == [2]


def preempted_beams() -> tuple[Scheduler, Request, Request]:
    """A plain answer of 4 + 12 tokens that has taken the blocks of one of two beams."""
    scheduler = make_scheduler(7, 4, caching=False)
    old = add(scheduler, 0, 0, max_tokens=12)
    young = add(scheduler, 1, 2, max_tokens=8)
    while not any(beam.status is Status.PREEMPTED for beam in young.sequences):
        run(scheduler)
    return scheduler, old, young


def test_a_beam_with_candidates_waits_for_one_that_was_preempted() -> None:
    scheduler, old, young = preempted_beams()
    first, second = sorted(young.sequences, key=lambda beam: beam.id)
    assert (first.status, second.status) == (Status.RUNNING, Status.PREEMPTED)
    tokens = list(first.tokens)
    run(scheduler)
    assert first.candidates
    while old.sequences[0].status is Status.RUNNING:
        step = run(scheduler)
        assert dict(step.waits) == {first.id: Wait.BEAMS, second.id: Wait.BLOCKS}
        assert first.table, "it keeps its blocks"
        assert first.tokens == tokens
    assert sizes_of(run(scheduler)) == {second.id: len(tokens)}
    assert len(sizes_of(run(scheduler))) == 2, "then both go on"
    assert young.num_preemptions == 1


@pytest.mark.parametrize("what_lacks", ["blocks", "slots"])
def test_who_waits_may_take_from_idle_beams_of_younger_requests(what_lacks: str) -> None:
    """Two searches, each with a beam that has what the other's lacks, do not wait for ever."""
    scheduler = make_scheduler(8 if what_lacks == "blocks" else 16, 4, caching=False)
    old, young = (add(scheduler, i, 2, max_tokens=10) for i in range(2))
    run(scheduler)
    queues = scheduler.queues
    # As if older requests had come and gone: of each search one beam waits without blocks.
    for request in (old, young):
        beam = request.sequences[1]
        queues.preempt(beam)
        beam.tokens += [7] * 7  # so that it needs more blocks than are free
        beam.num_pending += 7
        request.sequences[0].candidates = ((1, -1.0), (2, -2.0), (3, -3.0))
        request.sequences[0].tokens.pop()
        request.sequences[0].num_pending -= 1
    queues.sort()
    other = add(scheduler, 2, 0, max_tokens=2, prompt_len=4)
    queues.check()
    if what_lacks == "blocks":
        for beam in (old.sequences[0], young.sequences[0]):
            queues.kv.reserve(beam, 12)
    else:
        queues.max_num_seqs = 2  # as if others ran
    queues.check()
    step = scheduler.schedule()
    assert step.preempted == ((1, 0),)
    assert sizes_of(step) == {(0, 1): 12}
    assert dict(step.waits) == {
        (0, 0): Wait.BEAMS,
        (1, 0): Wait.BEAMS,
        (1, 1): Wait.BLOCKS,
        (2, 0): Wait.BLOCKS,
    }
    queues.check()
    assert other.sequences[0].status is Status.WAITING


def test_a_fork_of_a_preempted_beam_waits_and_finds_what_it_shares() -> None:
    scheduler = make_scheduler(16, 4)
    request = add(scheduler, 0, 2, max_tokens=9, prompt_len=9)
    run(scheduler)
    beam = request.sequences[0]
    queues = scheduler.queues
    step = scheduler.schedule()
    queues.preempt(beam)
    queues.sort()
    beam.candidates = ((1, -0.1), (2, -0.2))
    work = tuple(item for item in step.work if item.seq_id != beam.id)
    commit(queues, step._replace(work=work), StepOutput(((),), top={0: ((1, -5.0), (2, -6.0))}))
    queues.check()
    assert [seq.tokens[-1] for seq in request.sequences] == [1, 2]
    assert [seq.id for seq in request.sequences] == [(0, 0), (0, 1)]
    assert [seq.status for seq in request.sequences] == [Status.PREEMPTED, Status.WAITING]
    step = run(scheduler)
    assert dict(step.admitted) == {(0, 0): 8, (0, 1): 8}


@pytest.mark.parametrize(
    "policy", [*POLICIES, YoungestFirst()], ids=lambda policy: type(policy).__name__
)
def test_any_crowd_of_searches_comes_to_its_end(policy: Policy) -> None:
    """In pools and slots for little more than the widest, whatever else comes and goes."""
    for seed in range(40):
        dice = random.Random(seed)
        block_size, widest = dice.choice((1, 2, 4)), dice.randint(2, 4)
        longest = 16
        scheduler = make_scheduler(
            -(-longest // block_size) * widest + dice.randint(0, 4),
            block_size,
            policy=policy,
            budget=dice.randint(longest, 40),
            seats=widest + dice.choice((0, 0, 1, 3)),
            caching=dice.random() < 0.5,
        )
        engine, _ = make_engine(scheduler, max_model_len=longest, vocab_size=6)
        wanted: dict[SeqId, list[int]] = {}
        said: list[Event] = []
        for _ in range(dice.randint(3, 9)):
            prompt = tuple(dice.choices((0, 1), k=dice.randint(1, 8)))
            wishes: dict[str, Any] = {"max_tokens": dice.randint(1, 8)}
            if dice.random() < 0.7:
                wishes |= {"use_beam_search": True, "best_of": dice.randint(1, widest)}
            request = engine.requests[engine.add(prompt, SamplingParams(**wishes))]
            wanted |= expected(request, 6)
            for _ in range(dice.choice((0, 0, 1, 4))):
                said += engine.step()
                engine.check()
        assert tokens_of([*said, *finish(engine)]) == wanted


# --- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_aborted_search_ends_each_answer_without_a_token(num_steps: int) -> None:
    engine, _ = make_engine(vocab_size=6)
    request_id = engine.add(PROMPT, beams_of(3, n=2, max_tokens=9))
    for _ in range(num_steps):
        engine.step()
    events = engine.abort(request_id)
    engine.check()
    assert tokens_of(events) == {(0, 0): [], (0, 1): []}
    assert set(reasons_of(events).values()) == {FinishReason.ABORT}
    assert not any(engine.scheduler.queues.kv.pool.refs)
    assert not engine.scheduler.queues.searching


def test_a_beam_that_fails_ends_its_whole_request_and_no_other() -> None:
    records: list[Record] = []
    engine, runner = make_engine(vocab_size=6, listeners=[records.append])
    engine.add(PROMPT, beams_of(3, n=2, max_tokens=9))
    engine.add(PROMPT, beams_of(2, max_tokens=9))
    expected = searched(engine.requests[1], 6)
    for _ in range(3):
        engine.step()
    runner.ledger.fail = {0: "broken"}
    events = engine.step()
    runner.ledger.fail = {}
    engine.check()
    assert [(event.seq_id, event.error) for event in events] == [
        ((0, 0), "broken"),
        ((0, 1), "broken"),
    ]
    assert tokens_of(finish(engine)) == {(1, 0): expected[0]}
    first = next(record for record in records if isinstance(record, RequestRecord))
    assert (first.error, first.num_generated) == ("broken", (0, 0))


def test_a_paused_search_goes_on_as_if_nothing_had_been() -> None:
    engine, _ = make_engine(vocab_size=6)
    request_id = engine.add(PROMPT, beams_of(3, n=3, max_tokens=9))
    expected = searched(engine.requests[request_id], 6)
    for _ in range(3):
        engine.step()
    engine.pause(request_id)
    engine.check()
    assert not engine.has_work()
    engine.resume(request_id)
    assert [*tokens_of(finish(engine)).values()] == expected


# --- records -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_search_is_replayed_from_its_records(policy: Policy) -> None:
    records: list[Record] = []
    scheduler = make_scheduler(16, 4, policy=policy, seats=6)
    engine, _ = make_engine(scheduler, vocab_size=6, eos_ids=(3,), listeners=[records.append])
    for width in (3, 1, 2):
        engine.add(PROMPT[width:], beams_of(width, max_tokens=9, logprobs=4))
        engine.add(PROMPT[width:], SamplingParams(max_tokens=9, n=2))
    finish(engine)
    lines = [json.loads(json.dumps(to_json(record))) for record in records]
    found = replay(lines)
    assert found.num_steps > 9
    assert (found.difference, found.unfinished) == (None, None)
    for line in lines:  # as if only what follows the first beam of a step were likely
        for place, (_, likeliest) in enumerate(line.get("ranked", ())):
            likeliest[:] = [(token, logprob - 50 * place) for token, logprob in likeliest]
    assert replay(lines).difference is not None
