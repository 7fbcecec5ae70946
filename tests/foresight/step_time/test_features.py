"""The model of time: more work never takes less, and a record says the same as its step."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, StepRecord
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.foresight.step_time.features import (
    StepTime,
    in_the_mean,
    of_items,
    of_record,
    of_step,
    windows_of,
)
from ridgeline.foresight.structure import typed
from ridgeline.model.cost import costs
from ridgeline.model.cost.costs import Features
from tests.core.harness import Oracle, finish, make_engine, make_scheduler
from tests.tiny import ARCHS, PLAIN

rates = st.floats(0, 1e-3)


@st.composite
def models(draw: st.DrawFn) -> StepTime:
    knots = sorted(draw(st.sets(st.integers(1, 3000), min_size=1, max_size=8)))
    rises = [draw(st.floats(0, 0.1)) for _ in knots]
    rises[0] += 1e-6  # a step takes time
    table = tuple(sum(rises[: i + 1]) for i in range(len(knots)))
    return StepTime(tuple(knots), table, *(draw(rates) for _ in range(8)))


features = st.builds(
    Features,
    st.integers(1, 5000),
    st.integers(1, 256),
    st.integers(0, 256),
    st.floats(1, 1e6),
    st.floats(1, 1e9),
)


@given(models(), features, st.integers(0, 4), st.integers(1, 500))
def test_more_of_anything_never_takes_less(
    model: StepTime, some: Features, which: int, more: int
) -> None:
    greater = some._replace(**{some._fields[which]: some[which] + more})
    assert model.seconds(greater) >= model.seconds(some) >= 0


@given(models(), features)
def test_what_is_read_back_from_json_says_the_same(model: StepTime, some: Features) -> None:
    again = typed(json.loads(json.dumps(asdict(model))), StepTime)
    assert again == model
    assert again.seconds(some) == model.seconds(some)


@given(models(), features)
def test_a_machine_of_half_the_speed_takes_twice_as_long(model: StepTime, some: Features) -> None:
    slow = model.scaled(2.0)
    assert slow.seconds(some) == pytest.approx(2 * model.seconds(some))
    assert slow.after(3, 1) == pytest.approx(2 * model.after(3, 1))


def test_the_table_is_linear_between_its_knots() -> None:
    model = StepTime((1, 5, 9), (1.0, 3.0, 4.0), 0.5, 0, 0, 0, 0)
    found = {num: model.seconds(Features(num, 0, 0, 0, 0)) for num in (0, 1, 2, 5, 7, 9, 13)}
    assert found == {0: 1.0, 1: 1.0, 2: 1.5, 5: 3.0, 7: 3.5, 9: 4.0, 13: 6.0}


@pytest.mark.parametrize(
    "change",
    [
        {"table_s": (2.0, 1.0)},
        {"knots": (5, 1)},
        {"knots": (1, 1)},
        {"per_row_s": -1e-9},
        {"after_s": float("nan")},
        {"knots": (), "table_s": ()},
        {"table_s": (1.0,)},
    ],
)
def test_what_would_reward_work_is_refused(change: dict[str, object]) -> None:
    model = StepTime((1, 5), (1.0, 3.0), 0.5, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="a table that rises"):
        replace(model, **change)


@pytest.mark.parametrize("seed", range(4))
def test_a_step_and_its_record_have_the_same_features(seed: int) -> None:
    """With drafts, answers that fork, beams, pieces of prompts and preemptions."""
    dice = random.Random(seed)
    records: list[Record] = []
    engine, runner = make_engine(
        make_scheduler(30, 3, budget=24, seats=6, speculation=Speculation(Oracle(0.7, dice))),
        max_model_len=40,
        listeners=[records.append],
    )
    for number in range(12):
        beams = number % 4 == 3
        engine.add(
            tuple(dice.choices((1, 2), k=dice.randint(1, 20))),
            SamplingParams(
                max_tokens=dice.randint(1, 12), n=dice.randint(1, 2), use_beam_search=beams,
                temperature=0 if beams else 1, best_of=2 if beams else None,
            ),
        )  # fmt: skip
    finish(engine)
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert any(step.drafts for step in steps)
    assert any(step.ranked for step in steps)
    windows = ((5, 0.25), (9, 0.5))
    for step, record in zip(runner.steps, steps, strict=True):
        assert of_step(step) == of_record(record)
        assert of_step(step, windows) == of_record(record, windows)
        assert of_record(record).num_tokens == sum(len(work.tokens) for work in step.work)


@pytest.mark.parametrize("name", ["plain", "window", "mixed windows"])
@given(start=st.integers(0, 30), count=st.integers(1, 30))
def test_positions_and_pairs_are_those_of_the_formulas(name: str, start: int, count: int) -> None:
    """``model.cost.costs`` counts bytes and operations; here are the counts behind them."""
    arch = ARCHS[name]
    record = _record(((0, 0), start, count))
    found = of_record(record, windows_of(arch))
    bytes_per_position = costs.kv_read_bytes(PLAIN, 0, 1, 2)
    assert found.num_positions * bytes_per_position == pytest.approx(
        costs.kv_read_bytes(arch, start, count, 2)
    )
    flops_per_pair = costs.attention_flops(PLAIN, 0, 1)
    assert found.num_pairs * flops_per_pair == pytest.approx(
        costs.attention_flops(arch, start, count)
    )


def test_a_mean_step_of_whole_numbers_is_that_step() -> None:
    windows = ((16, 0.5),)
    answer, prompt = (99, 1, 1), (0, 40, 1)
    parts = [(3.0, of_items([answer], windows)), (1.0, of_items([prompt], windows))]
    assert in_the_mean(parts) == of_items([answer] * 3 + [prompt], windows)
    half = in_the_mean([(1.5, of_items([answer], windows)), (0.5, of_items([prompt], windows))])
    assert half.num_pairs == in_the_mean(parts).num_pairs / 2
    assert in_the_mean([(0.0, of_items([prompt]))]) == Features(1, 1, 1, 0, 0)


def _record(*work: tuple[tuple[int, int], int, int]) -> StepRecord:
    nothing: tuple[()] = ()
    return StepRecord(
        number=0, start_s=0, schedule_s=0, execute_s=0, commit_s=0, arrived=nothing,
        aborted=nothing, paused=nothing, resumed=nothing, work=work, drafts=nothing,
        sampled=((7,),) * len(work), ranked=nothing, similarities=nothing, errors=nothing,
        admitted=nothing, preempted=nothing, waits=nothing, num_copies=0, num_running=1,
        num_waiting=0, num_outside=0, is_read=True, blocks_used=1, blocks_indexed=0,
    )  # fmt: skip
