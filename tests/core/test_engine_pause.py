"""Requests that rest: they hold nothing, cost nothing, and say the same in the end."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import FinishReason, Wait
from tests.core.harness import Watched, expected, finish, make_engine, make_scheduler, tokens_of

PROMPT = (0, 1, 0, 1, 1)


def start(*, n: int = 2, **scheduler: Any) -> tuple[Engine, Watched, int]:
    """Return an engine in which one request has said something."""
    engine, runner = make_engine(make_scheduler(**scheduler))
    request_id = engine.add(PROMPT, SamplingParams(max_tokens=9, n=n))
    for _ in range(3):
        engine.step()
    return engine, runner, request_id


@pytest.mark.parametrize("caching", [True, False])
def test_who_rests_holds_nothing_and_then_says_the_same(caching: bool) -> None:
    engine, runner = make_engine(make_scheduler(caching=caching))
    request_id = engine.add(PROMPT, SamplingParams(max_tokens=9, n=2))
    wanted = expected(engine.requests[request_id])
    events = [event for _ in range(3) for event in engine.step()]
    engine.pause(request_id)
    engine.check()
    assert not engine.has_work()
    assert not any(engine.scheduler.queues.kv.pool.refs)
    assert engine.step() == []
    other = engine.add((1, 1), SamplingParams(max_tokens=2))
    events += engine.step()
    assert dict(runner.steps[-1].waits) == {(request_id, i): Wait.PAUSED for i in (0, 1)}
    engine.resume(request_id)
    events += finish(engine)
    found = tokens_of(events)
    assert {seq_id: found[seq_id] for seq_id in wanted} == wanted
    assert len(found[other, 0]) == 2


def test_who_rests_can_be_given_up() -> None:
    engine, _, request_id = start()
    engine.pause(request_id)
    ends = [event.finish_reason for event in engine.abort(request_id)]
    assert ends == [FinishReason.ABORT] * 2
    engine.check()
    assert not engine.requests


def test_a_seat_is_free_while_its_holder_rests() -> None:
    engine, _, first = start(n=1, seats=1)
    second = engine.add((1, 0), SamplingParams(max_tokens=3))
    engine.pause(first)
    said = {event.seq_id[0] for _ in range(3) for event in engine.step()}
    assert said == {second}
    engine.resume(first)
    assert {event.seq_id[0] for event in finish(engine)} == {first}


def test_unknown_and_finished_requests_cannot_rest() -> None:
    engine, _, request_id = start()
    finish(engine)
    for gone in (request_id, 99):
        engine.pause(gone)
        engine.resume(gone)
    engine.check()
    assert not engine.has_work()
