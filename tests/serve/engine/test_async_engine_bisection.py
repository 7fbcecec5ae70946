"""A step that fails is halved until only the guilty fail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, StepOutput, TokenLogprobs, Work
from ridgeline.serve.engine.async_engine import BisectingRunner, StepLost
from ridgeline.system.machine import DeviceLost

PLAIN = Sampling(SamplingParams(), 1, ())


class Brittle:
    """A runner that raises if any of some sequences is in the step, and notes what ran."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.done: list[int] = []

    def execute(self, step: Step) -> StepOutput:
        ids = tuple(work.seq_id[0] for work in step.work)
        if self.bad & set(ids):
            raise RuntimeError(f"{self.bad & set(ids)}")
        self.done += ids
        ranked = {i: (TokenLogprobs(100 + n, 0.0, 1, ()),) for i, n in enumerate(ids)}
        return StepOutput(tuple((100 + n,) for n in ids), ranked, ranked, {})


@given(st.integers(1, 17), st.sets(st.integers(0, 16)))
def test_exactly_the_guilty_fail_and_everything_stays_in_its_place(
    size: int, bad: set[int]
) -> None:
    bad &= set(range(size))
    work = tuple(Work((i, 0), 0, (i,), (i,), (0,), PLAIN, (), ()) for i in range(size))
    runner, errors = Brittle(bad), list[Exception]()
    output = BisectingRunner(runner, errors.append).execute(Step(work, (), (), (), ()))
    assert set(output.errors) == bad
    assert len(errors) == len(bad)
    good = [i for i in range(size) if i not in bad]
    assert output.tokens == tuple((100 + i,) if i in good else () for i in range(size))
    assert [output.logprobs[i][0].token for i in good] == [100 + i for i in good]
    assert output.prompt_logprobs == output.logprobs
    assert runner.done == good  # each once, in order


def test_a_device_that_is_lost_is_not_asked_again() -> None:
    class Lost(Brittle):
        def execute(self, step: Step) -> StepOutput:
            self.done.append(len(step.work))
            raise DeviceLost("the GPU failed")

    work = tuple(Work((i, 0), 0, (i,), (i,), (0,), PLAIN, (), ()) for i in range(4))
    runner, errors = Lost(set()), list[BaseException]()
    with pytest.raises(DeviceLost, match="the GPU failed"):
        BisectingRunner(runner, errors.append).execute(Step(work, (), (), (), ()))
    assert runner.done == [4]
    assert not errors


def test_a_step_with_copies_is_not_repeated() -> None:
    """The source of a copy may belong to another sequence of the same step by now."""
    work = tuple(Work((i, 0), 0, (i,), (i,), (0,), PLAIN, (), ()) for i in range(2))
    runner = Brittle({1})
    with pytest.raises(StepLost):
        BisectingRunner(runner, lambda error: None).execute(Step(work, ((0, 1),), (), (), ()))
    of_states = Step(work, (), (), (), (), ((0, 1),))
    with pytest.raises(StepLost):
        BisectingRunner(runner, lambda error: None).execute(of_states)
    assert not runner.done
