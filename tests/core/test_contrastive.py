"""Contrastive search in the engine: candidates computed side by side, one of them settled."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ridgeline.core.decoding.text import TextStream
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.core.scheduling.policies import Policy
from ridgeline.core.step import Event, FinishReason, SeqId
from ridgeline.foresight.simulator.replay import replay
from ridgeline.foresight.structure import to_json
from tests.core.decoding.letters import Letters
from tests.core.harness import (
    POLICIES,
    YoungestFirst,
    expected,
    finish,
    make_engine,
    make_scheduler,
    reasons_of,
    searched,
    tokens_of,
)

PROMPT = tuple(range(10))


def contrastive(top_k: int, **more: Any) -> SamplingParams:
    return SamplingParams(penalty_alpha=0.6, top_k=top_k, **more)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_answers_are_those_of_the_search_alone(policy: Policy) -> None:
    engine, _ = make_engine(make_scheduler(policy=policy, seats=9), vocab_size=6)
    wanted = {}
    for top_k, stops in [(2, ()), (3, (2,)), (4, (1, 2))]:
        params = contrastive(top_k, max_tokens=12, min_tokens=2, stop_token_ids=stops)
        wanted |= expected(engine.requests[engine.add(PROMPT[top_k:], params)], 6)
    events = finish(engine)
    assert tokens_of(events) == wanted
    assert {*reasons_of(events).values()} == {FinishReason.LENGTH, FinishReason.STOP}


def test_each_token_is_said_when_it_is_settled() -> None:
    """Round by round: the prompt's candidates, then one token each, with text and logprobs."""
    engine, _ = make_engine(vocab_size=6)
    params = contrastive(3, max_tokens=4, logprobs=2)
    engine.add(PROMPT, params, new_text=lambda: TextStream(Letters()))
    assert engine.step() == []
    for i in range(4):
        (event,) = engine.step()
        assert event.seq_id == (0, 0)
        assert event.logprobs is not None
        assert event.logprobs.token == event.token
        assert len(event.logprobs.top) == 2
        assert event.text == Letters()(event.token)
        assert event.finish_reason is (FinishReason.LENGTH if i == 3 else None)
    assert not engine.has_work()


def test_a_stop_string_ends_it() -> None:
    engine, _ = make_engine(vocab_size=6)
    tokens = searched(engine.requests[engine.add(PROMPT, contrastive(3, max_tokens=9))], 6)[0]
    finish(engine)
    stop = Letters()(tokens[4])
    engine.add(
        PROMPT,
        contrastive(3, max_tokens=9, stop=stop),
        new_text=lambda: TextStream(Letters(), stop=(stop,)),
    )
    events = finish(engine)
    assert events[-1].stop_reason == stop
    assert [event.token for event in events] == tokens[: tokens.index(tokens[4]) + 1]


def test_it_takes_nothing_from_the_prefix_cache_and_leaves_nothing() -> None:
    """Others' blocks have no states: the ledger would notice one that is compared."""
    engine, _ = make_engine(make_scheduler(64, 4), vocab_size=6)
    plain = SamplingParams(max_tokens=3)
    engine.add(tuple(range(40)), plain)
    finish(engine)
    blocks = engine.scheduler.queues.kv.pool.num_indexed
    assert blocks
    request = engine.requests[engine.add(tuple(range(40)), contrastive(3, max_tokens=6))]
    finish(engine)
    assert request.num_cached_tokens == 0
    assert engine.scheduler.queues.kv.pool.num_indexed == blocks


@pytest.mark.parametrize("policy", [*POLICIES, YoungestFirst()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("seed", range(12))
def test_crowded_preempted_and_in_pieces(policy: Policy, seed: int) -> None:
    """Searches, beams and plain answers that take each other's blocks answer as if alone."""
    dice = random.Random(seed)
    scheduler = make_scheduler(dice.choice((20, 26)), 4, policy=policy, seats=6, budget=24)
    engine, _ = make_engine(scheduler, vocab_size=6)
    wanted: dict[SeqId, list[int]] = {}
    said: list[Event] = []
    for _ in range(6):
        most = dice.randint(2, 9)
        params = dice.choice((
            contrastive(dice.randint(2, 4), max_tokens=most),
            contrastive(dice.randint(2, 4), max_tokens=most),
            SamplingParams(use_beam_search=True, best_of=2, max_tokens=most),
            SamplingParams(max_tokens=most, n=2),
        ))  # fmt: skip
        prompt = tuple(dice.choices(range(6), k=dice.randint(1, 12)))
        wanted |= expected(engine.requests[engine.add(prompt, params)], 6)
        if dice.random() < 0.5:
            said += engine.step()
            engine.check()
            for request in [*engine.requests.values()]:
                if dice.random() < 0.3:
                    engine.pause(request.id)
                    engine.check()
                    engine.resume(request.id)
    assert tokens_of([*said, *finish(engine)]) == wanted


def run(engine: Any, num_steps: int) -> list[Event]:
    return [event for _ in range(num_steps) for event in engine.step()]


def test_an_aborted_answer_keeps_what_was_said() -> None:
    records: list[Record] = []
    engine, _ = make_engine(vocab_size=6, listeners=[records.append])
    engine.add(PROMPT, contrastive(3, max_tokens=9), new_text=lambda: TextStream(Letters()))
    said = run(engine, 4)
    assert len(said) == 3
    (event,) = engine.abort(0)
    assert (event.seq_id, event.finish_reason) == ((0, 0), FinishReason.ABORT)
    assert not engine.has_work()
    engine.check()
    assert not any(engine.scheduler.queues.kv.pool.refs)
    (record,) = (record for record in records if isinstance(record, RequestRecord))
    assert record.num_generated == (3,)


def test_an_error_ends_it_once() -> None:
    engine, runner = make_engine(vocab_size=6)
    engine.add(PROMPT, contrastive(3, max_tokens=9))
    assert len(run(engine, 3)) == 2
    runner.ledger.fail[0] = "broken"
    (event,) = engine.step()
    assert (event.finish_reason, event.error) == (FinishReason.ERROR, "broken")
    assert not finish(engine)


def test_it_is_replayed_from_its_records() -> None:
    records: list[Record] = []
    scheduler = make_scheduler(16, 4, seats=6)
    engine, _ = make_engine(scheduler, vocab_size=6, eos_ids=(3,), listeners=[records.append])
    for top_k in (2, 3):
        engine.add(PROMPT[top_k:], contrastive(top_k, max_tokens=9))
        engine.add(PROMPT[top_k:], SamplingParams(max_tokens=9, n=2))
    finish(engine)
    lines = [json.loads(json.dumps(to_json(record))) for record in records]
    assert sum(len(line.similarities) for line in records if isinstance(line, StepRecord)) > 20
    found = replay(lines)
    assert (found.difference, found.unfinished) == (None, None)
    num_different = 0
    for seed in range(8):  # as if other candidates were like the text before
        dice = random.Random(seed)
        for line in lines:
            for pair in line.get("similarities", ()):
                pair[1] = dice.random()
        num_different += replay(lines).difference is not None
    assert num_different > 0
