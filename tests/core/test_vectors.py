"""Requests that end with a vector: whatever runs beside them, in any policy, cut and cache."""

from __future__ import annotations

import json
import random
from functools import reduce
from typing import Any

import pytest

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, RequestRecord
from ridgeline.core.scheduling.policies import Policy, SplitFuse
from ridgeline.core.step import Event, FinishReason
from ridgeline.foresight.simulator.replay import Replay, replay
from ridgeline.foresight.structure import to_json
from tests.core.harness import POLICIES, YoungestFirst, finish, make_engine, make_scheduler
from tests.fakes import extend

LAST = SamplingParams(pool="last")


def vector(prompt: tuple[int, ...]) -> tuple[float, ...]:
    return (float(reduce(extend, prompt, 0)),)


def ends(events: list[Event]) -> dict[int, Event]:
    return {event.seq_id[0]: event for event in events if event.finish_reason}


def test_a_request_ends_after_its_prompt_with_a_vector() -> None:
    engine, runner = make_engine(make_scheduler(budget=4, seats=4))
    engine.add((1, 2, 3, 4, 5, 6), LAST)
    assert engine.step() == []  # four of six tokens
    (event,) = engine.step()
    assert event == Event(
        (0, 0), None, "", None, FinishReason.STOP, None, None, vector((1, 2, 3, 4, 5, 6))
    )
    assert not engine.has_work()
    assert [work.pool for step in runner.steps for work in step.work] == ["", "last"]
    assert not any(work.seeds or work.drafts for step in runner.steps for work in step.work)


def test_a_prompt_may_be_as_long_as_the_model_reads() -> None:
    engine, _ = make_engine(max_model_len=8)
    engine.add(tuple(range(8)), LAST)
    with pytest.raises(ValueError, match="the prompt has 9 tokens"):
        engine.add(tuple(range(9)), LAST)
    with pytest.raises(ValueError, match="the prompt has 8 tokens"):
        engine.add(tuple(range(8)), SamplingParams())
    (event,) = finish(engine)
    assert event.vector == vector(tuple(range(8)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "policy", [*POLICIES, YoungestFirst()], ids=lambda policy: type(policy).__name__
)
def test_beside_answers_with_shared_prefixes(policy: Policy, seed: int) -> None:
    """The ledger checks each read; the vector is that of the whole prompt, however it was cut."""
    dice = random.Random(seed)
    engine, _ = make_engine(make_scheduler(20, 3, policy=policy, budget=30, seats=4))
    wanted, events, prompts = {}, list[Event](), [(1,)]
    for _ in range(30):
        prompt = (*dice.choice(prompts), *dice.choices((1, 2), k=dice.randint(1, 9)))[-25:]
        prompts.append(prompt)
        pools = dice.random() < 0.5
        params = LAST if pools else SamplingParams(max_tokens=dice.randint(1, 5), ignore_eos=True)
        number = engine.add(prompt, params)
        wanted[number] = vector(prompt) if pools else None
        events += engine.step()
        engine.check()
    events += finish(engine)
    assert {number: event.vector for number, event in ends(events).items()} == wanted


def test_the_cache_is_used_as_by_answers() -> None:
    records: list[Record] = []
    engine, _ = make_engine(listeners=[records.append])
    prompt = tuple(range(11))
    for params in (SamplingParams(max_tokens=1), LAST, LAST):
        engine.add(prompt, params)
        finish(engine)
    ended = [record for record in records if isinstance(record, RequestRecord)]
    assert [record.num_cached_tokens for record in ended] == [0, 8, 8]
    assert ended[1].first_token_s is not None  # when the vector was there
    assert (ended[1].num_generated, ended[1].finish_reasons) == ((0,), ("stop",))


def test_an_item_that_fails_has_no_vector() -> None:
    engine, runner = make_engine()
    failing, sound = engine.add((1, 2), LAST), engine.add((1, 2), LAST)
    runner.ledger.fail = {failing: "broken"}
    found = ends(finish(engine))
    assert (found[failing].error, found[failing].vector) == ("broken", None)
    assert found[sound].vector == vector((1, 2))


@pytest.mark.parametrize(
    "wrong", [{"pool": "max"}, {"pool": "last", "n": 2}, {"pool": "cls", "best_of": 2}]
)
def test_what_is_no_pooling(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pool is"):
        SamplingParams(**wrong)


def test_a_recorded_run_is_decided_the_same_again() -> None:
    records: list[Record] = []
    scheduler = make_scheduler(14, 3, policy=SplitFuse(), budget=9, seats=4)
    engine, _ = make_engine(scheduler, listeners=[records.append])
    for i in range(8):
        engine.add(tuple(range(i, i + 3 * i + 1)), LAST)
        engine.add((7,) * (i + 1), SamplingParams(max_tokens=3, ignore_eos=True))
        engine.step()
    finish(engine)
    lines = [json.loads(json.dumps(to_json(record))) for record in records]
    num_steps = sum(record["type"] == "step" for record in lines)
    assert replay(lines) == Replay(num_steps, 16, None, None)
