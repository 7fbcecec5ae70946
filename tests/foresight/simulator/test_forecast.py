"""A forecast is what happens, where the model of time is right and nobody else comes."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record, RequestRecord
from ridgeline.core.step import Step, StepOutput
from ridgeline.foresight.simulator.forecast import PredictedTimes, forecast, new_snapshot, state_of
from ridgeline.foresight.simulator.run import Clock, new_replica
from ridgeline.foresight.step_time.features import of_step
from tests.foresight.simulator.test_run import SETTINGS, TIMES

Wish = tuple[int, int, int, float, int]
WISHES = st.lists(
    st.tuples(
        st.integers(1, 40),  # tokens of the prompt
        st.integers(1, 16),  # tokens of each answer
        st.sampled_from((1, 1, 2, 3)),  # answers
        st.sampled_from((inf, inf, 1.0, 2.0)),  # when it is due
        st.integers(0, 4),  # steps before the next comes
    ),
    min_size=1,
    max_size=10,
)
SETUPS = st.builds(
    lambda policy, blocks: replace(
        SETTINGS,
        policy=policy,
        num_blocks=blocks,
        enable_prefix_caching=False,
        max_num_batched_tokens=64 if policy != "splitfuse" else 32,
    ),
    st.sampled_from(("splitfuse", "orca", "static")),
    st.integers(16, 60),
)


class Machine:
    """An engine whose steps take just as long as the model of time says."""

    def __init__(self, setup: EngineRecord) -> None:
        self.setup, self.clock, self.records = setup, Clock(), list[Record]()
        replica, _ = new_replica(setup, self.clock, TIMES, self.records.append)
        self.engine: Engine = replica.engine
        self.engine.runner = self
        self._tokens, self._num_rows = count(1000), 0

    def execute(self, step: Step) -> StepOutput:
        features = of_step(step)
        self.clock.now_s += TIMES.seconds(features)
        self._num_rows = features.num_rows
        return StepOutput(tuple(tuple(next(self._tokens) for _ in w.seeds) for w in step.work))

    def add(self, prompt: tuple[int, ...], num_new: int, n: int = 1, due_s: float = inf) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=num_new, n=n, ignore_eos=True)
        return self.engine.add(prompt, params, due_s=due_s)

    def step(self) -> None:
        if self.engine.has_work():
            before = len(self.ended())
            self.engine.step()
            self.clock.now_s += TIMES.after(self._num_rows, len(self.ended()) - before)

    def ended(self) -> dict[int, RequestRecord]:
        return {r.request_id: r for r in self.records if isinstance(r, RequestRecord)}

    def foresee(self) -> dict[int, PredictedTimes]:
        state = state_of(self.setup, self.engine.scheduler)
        return forecast(state, TIMES, list(self.engine.requests))

    def run(self) -> dict[int, PredictedTimes]:
        """Run to the end; return what happened, as it could have been foreseen."""
        begin_s, left = self.clock.now_s, list(self.engine.requests)
        while self.engine.has_work():
            self.step()
        ended = self.ended()
        firsts = {number: ended[number].first_token_s or 0.0 for number in left}
        return {
            number: PredictedTimes(
                max(0.0, firsts[number] - begin_s), ended[number].finish_s - begin_s
            )
            for number in left
        }


def assert_alike(found: dict[int, PredictedTimes], happened: dict[int, PredictedTimes]) -> None:
    assert found.keys() == happened.keys()
    for number, (first_s, end_s) in happened.items():
        assert found[number] == pytest.approx((first_s, end_s))


@settings(max_examples=60)
@given(WISHES, SETUPS)
def test_an_engine_ends_as_foreseen_wherever_it_stands(
    wishes: list[Wish], setup: EngineRecord
) -> None:
    """Some run, some wait, some have forked, some were preempted."""
    machine = Machine(setup)
    for i, (length, num_new, num_answers, due_s, num_steps) in enumerate(wishes):
        machine.add(tuple(100 * i + j for j in range(length)), num_new, num_answers, due_s)
        for _ in range(num_steps):
            machine.step()
    found = machine.foresee()
    assert_alike(found, machine.run())


def test_a_prompt_that_is_in_the_cache_is_foreseen_to_be_quick() -> None:
    machine = Machine(replace(SETTINGS, max_num_seqs=1))
    prompt = tuple(range(30))
    machine.add(prompt, 4)
    machine.run()
    machine.add((90, 91), 8)
    machine.step()
    number = machine.add(prompt, 4)  # waits for the one seat
    found = machine.foresee()
    happened = machine.run()
    assert found[number] == pytest.approx(happened[number])


def test_who_waits_outside_comes_in_when_there_is_room() -> None:
    machine = Machine(replace(SETTINGS, max_num_seqs=2, enable_prefix_caching=False))
    machine.add((1,) * 9, 6)
    machine.add((2,) * 9, 12)
    state = state_of(machine.setup, machine.engine.scheduler)
    queued = [new_snapshot(7, 5, 3), new_snapshot(8, 5, 3)]
    found = forecast(state, TIMES, [0, 1, 7, 8], queued=queued)
    assert found[0].end_s < found[7].first_s < found[7].end_s < found[8].first_s
    assert found[8].end_s < inf


@given(WISHES, SETUPS, st.floats(0.001, 0.3))
@settings(max_examples=60)
def test_who_enters_later_is_foreseen_as_well(
    wishes: list[Wish], setup: EngineRecord, coming_s: float
) -> None:
    """They enter at the first moment between two steps that is late enough."""
    machine, begun = Machine(setup), len(wishes) // 2
    for i, (length, num_new, _, due_s, num_steps) in enumerate(wishes[:begun]):
        machine.add(tuple(100 * i + j for j in range(length)), num_new, due_s=due_s)
        for _ in range(num_steps):
            machine.step()
    begin_s, number = machine.clock.now_s, machine.engine._next_id
    coming = [
        (coming_s, new_snapshot(number + i, length, num_new, due_s=due_s))
        for i, (length, num_new, _, due_s, _) in enumerate(wishes[begun:])
    ]
    state = state_of(machine.setup, machine.engine.scheduler)
    wanted = [one.number for _, one in coming]
    found = forecast(state, TIMES, wanted, coming=coming)
    while machine.engine.has_work() and machine.clock.now_s < begin_s + coming_s:
        machine.step()
    machine.clock.wait_until(begin_s + coming_s)
    for i, (length, num_new, _, due_s, _) in enumerate(wishes[begun:]):
        machine.add(tuple(9000 + 100 * i + j for j in range(length)), num_new, due_s=due_s)
    while machine.engine.has_work():
        machine.step()
    for name, record in machine.ended().items():
        if name in found:
            assert record.first_token_s is not None
            ended = record.first_token_s - begin_s, record.finish_s - begin_s
            assert found[name] == pytest.approx(ended)


def test_what_comes_too_late_is_not_foreseen() -> None:
    machine = Machine(SETTINGS)
    machine.add((1,) * 9, 20)
    state = state_of(machine.setup, machine.engine.scheduler)
    (all_of_it,) = forecast(state, TIMES, [0]).values()
    (early,) = forecast(state, TIMES, [0], within_s=all_of_it.first_s).values()
    assert early == PredictedTimes(all_of_it.first_s, inf)


def test_what_is_paused_is_left_out() -> None:
    machine = Machine(SETTINGS)
    machine.add((1,) * 9, 20)
    machine.engine.pause(machine.add((2,) * 9, 20))
    state = state_of(machine.setup, machine.engine.scheduler)
    assert [snapshot.number for snapshot in state.requests] == [0]
