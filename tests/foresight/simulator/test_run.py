"""A simulation: what goes in decides what comes out, and every request ends once."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record, RequestRecord, StepRecord
from ridgeline.foresight.simulator.replay import replay
from ridgeline.foresight.simulator.replay_times import serve_again
from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.foresight.step_time.features import StepTime, of_record
from ridgeline.foresight.structure import to_json

few = settings(max_examples=30)
SETTINGS = EngineRecord(
    policy="splitfuse",
    block_size=4,
    num_blocks=40,
    max_num_batched_tokens=32,
    max_num_seqs=6,
    max_model_len=64,
    enable_prefix_caching=True,
    seed=0,
    eos_ids=(2,),
)
TIMES = StepTime((1, 4, 32), (0.01, 0.012, 0.05), 0.002, 1e-4, 2e-4, 1e-6, 1e-7, 1e-3, 1e-5, 1e-4)


def steps_of(records: list[Record]) -> list[StepRecord]:
    return [record for record in records if isinstance(record, StepRecord)]


def requests_of(records: list[Record]) -> list[RequestRecord]:
    return [record for record in records if isinstance(record, RequestRecord)]


@st.composite
def loads(draw: st.DrawFn) -> list[SimRequest]:
    """Requests of all sizes, some with a common beginning, some with two answers."""
    load = []
    for _ in range(draw(st.integers(1, 12))):
        length = draw(st.integers(1, 40))
        kind = draw(st.integers(3, 5))
        num_new = tuple(draw(st.lists(st.integers(1, 16), min_size=1, max_size=2)))
        most = max(num_new) + draw(st.sampled_from((0, 3)))
        load.append(
            SimRequest(
                prompt=tuple([kind] * length),
                num_new=num_new,
                arrival_s=draw(st.floats(0, 1)),
                params=SamplingParams(temperature=0, max_tokens=most, n=len(num_new)),
                tenant=draw(st.sampled_from(("", "a", "b"))),
                is_read=draw(st.booleans()),
            )
        )
    return load


setups = st.builds(
    lambda policy, blocks, caching: replace(
        SETTINGS,
        policy=policy,
        num_blocks=blocks,
        enable_prefix_caching=caching,
        max_num_batched_tokens=64 if policy != "splitfuse" else 32,
    ),
    st.sampled_from(("splitfuse", "orca", "static")),
    st.integers(32, 60),
    st.booleans(),
)


@few
@given(loads(), setups)
def test_every_request_ends_once_with_the_tokens_that_it_was_to_have(
    load: list[SimRequest], setup: EngineRecord
) -> None:
    records = simulate(load, setup, TIMES)
    ended = requests_of(records)
    assert sorted(record.request_id for record in ended) == list(range(len(load)))
    key = sorted((asked.arrival_s, asked.prompt, asked.num_new) for asked in load)
    found = sorted((r.arrival_s, r.prompt_token_ids, r.num_generated) for r in ended)
    assert found == key
    for record in ended:
        most = record.params.get("max_tokens", SamplingParams().max_tokens)
        whys = ["length" if num == most else "stop" for num in record.num_generated]
        assert list(record.finish_reasons) == whys
        assert record.scheduled_s is not None
        assert record.first_token_s is not None
        assert record.arrival_s <= record.scheduled_s < record.first_token_s <= record.finish_s


@few
@given(loads(), setups)
def test_a_simulation_is_a_function_of_what_goes_in(
    load: list[SimRequest], setup: EngineRecord
) -> None:
    assert simulate(load, setup, TIMES) == simulate(load, setup, TIMES)


@few
@given(loads(), setups)
def test_time_passes_as_the_model_says_and_no_otherwise(
    load: list[SimRequest], setup: EngineRecord
) -> None:
    steps = steps_of(simulate(load, setup, TIMES))
    for step in steps:
        assert step.schedule_s == 0.0
        assert step.execute_s == pytest.approx(TIMES.seconds(of_record(step)))
    for before, after in pairwise(steps):
        assert after.start_s > before.end_s


@few
@given(loads())
def test_a_slower_machine_ends_later(load: list[SimRequest]) -> None:
    at_once = [replace(asked, arrival_s=0.0) for asked in load]
    fast, slow = (simulate(at_once, SETTINGS, TIMES.scaled(by)) for by in (1.0, 2.0))
    ends = [max(r.finish_s for r in requests_of(records)) for records in (fast, slow)]
    assert ends[1] == pytest.approx(2 * ends[0])


def test_a_simulated_run_is_decided_again_the_same() -> None:
    dice = random.Random(3)
    load = [
        SimRequest(
            prompt=tuple(dice.choices(range(3, 9), k=dice.randint(1, 40))),
            num_new=(dice.randint(1, 20),),
            arrival_s=dice.random() * 2,
        )
        for _ in range(60)
    ]
    records = simulate(load, SETTINGS, TIMES)
    lines = [json.loads(json.dumps(to_json(record))) for record in records]
    found = replay(lines)
    assert found.difference is None
    assert found.num_steps == len(steps_of(records)) > 100


def test_a_closed_loop_keeps_so_many_requests_at_work() -> None:
    load = [SimRequest(prompt=(3, 4, 5, i), num_new=(1 + i % 7,)) for i in range(20)]
    records = simulate(load, SETTINGS, TIMES, concurrency=3)
    ended = requests_of(records)
    assert len(ended) == 20
    assert max(step.num_running + step.num_waiting for step in steps_of(records)) == 3
    arrivals = sorted(record.arrival_s for record in ended)
    assert arrivals[:3] == [0.0, 0.0, 0.0]
    ends = sorted(record.finish_s for record in ended)
    # Each further request comes just after one has ended, and no earlier.
    for arrival_s, end_s in zip(arrivals[3:], ends, strict=False):
        assert end_s < arrival_s < end_s + 0.01


def test_tenants_take_turns_as_in_a_server() -> None:
    """The one who asks for little does not wait behind the other's many prompts."""
    many = [
        SimRequest(prompt=(3,) * 30, num_new=(8,), arrival_s=0.0, tenant="a") for _ in range(20)
    ]
    one = SimRequest(prompt=(4,) * 30, num_new=(8,), arrival_s=0.001, tenant="b", name="the one")
    ended = requests_of(simulate([*many, one], SETTINGS, TIMES))
    place = [record.name for record in sorted(ended, key=lambda r: r.finish_s)].index("the one")
    assert place < 10


def test_a_request_that_can_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="max-model-len"):
        simulate([SimRequest(prompt=(3,) * 64, num_new=(1,), arrival_s=0.0)], SETTINGS, TIMES)


def test_turns_of_a_session_ask_on_behind_the_answers_before() -> None:
    """Prompts grow by what was said, come after a pause, and find what was said in the cache."""
    turns = [
        SimRequest(
            prompt=(3 + turn,) * 9,
            num_new=(5,),
            arrival_s=None if turn else 1.0,
            turn=turn,
            think_s=0.5 if turn else 0.0,
        )
        for turn in range(3)
    ]
    ended = requests_of(simulate(turns, SETTINGS, TIMES))
    assert [len(record.prompt_token_ids) for record in ended] == [9, 9 + 5 + 9, 9 + 5 + 9 + 5 + 9]
    assert [record.num_cached_tokens for record in ended] == [0, 12, 24]
    assert ended[0].arrival_s == 1.0
    for before, after in pairwise(ended):
        assert after.prompt_token_ids[:9] == before.prompt_token_ids[:9]
        gap_s = after.arrival_s - before.finish_s
        assert 0.5 < gap_s < 0.51


def test_a_client_of_a_closed_loop_stays_with_its_session() -> None:
    load = [
        SimRequest(prompt=(3 + i,) * 4, num_new=(3,), turn=turn, think_s=0.2 * turn)
        for i in range(5)
        for turn in range(2)
    ]
    records = simulate(load, SETTINGS, TIMES, concurrency=1)
    ended = requests_of(records)
    assert [record.prompt_token_ids[0] for record in ended] == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7]


def test_warm_up_requests_come_first_and_fill_the_cache() -> None:
    warm = [SimRequest(prompt=(3,) * 20, num_new=(2,)) for _ in range(2)]
    load = [SimRequest(prompt=(3,) * 20, num_new=(2,), arrival_s=0.25)]
    ended = requests_of(simulate(load, SETTINGS, TIMES, warmups=warm))
    assert [record.num_cached_tokens for record in ended] == [0, 0, 16]
    behind_s = ended[2].arrival_s - max(record.finish_s for record in ended[:2])
    assert 0.25 < behind_s < 0.26


def test_answers_that_have_begun_go_on_and_a_trace_of_them_is_decided_again() -> None:
    begun = SimRequest(
        prompt=(1, 2) * 10, num_new=(9, 4, 7), num_before=(5, 4, 0), arrival_s=0.0, name="begun"
    )
    whole = SimRequest(prompt=(1, 2) * 10, num_new=(9, 4, 7), arrival_s=0.0, name="whole")
    records = simulate([begun, whole], SETTINGS, TIMES)
    ended = {record.name: record for record in requests_of(records)}
    assert ended["begun"].num_generated == (4, 0, 7)
    assert ended["whole"].num_generated == (9, 4, 7)
    assert ended["begun"].finish_s < ended["whole"].finish_s
    trace = [json.loads(json.dumps(to_json(record))) for record in records]
    assert replay(trace).difference is None
    again = serve_again(trace)
    assert again.difference is None
    assert again.num_equal == again.num_steps > 4
    assert {r.request_id: r.num_generated for r in requests_of(again.records)} == {
        r.request_id: r.num_generated for r in requests_of(records)
    }
