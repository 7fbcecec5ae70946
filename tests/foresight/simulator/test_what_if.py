"""Requests of a trace, served again with other settings."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.front import QUIET_S
from ridgeline.core.records import EngineRecord, Record, RequestRecord, StepRecord
from ridgeline.foresight.simulator import what_if
from ridgeline.foresight.simulator.replay_times import settings_of
from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.foresight.structure import to_json
from tests.foresight.simulator.test_run import SETTINGS, TIMES, loads, setups

few = settings(max_examples=20, deadline=None)


def as_read(records: list[Record]) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(to_json(record))) for record in records]


@st.composite
def all_kinds(draw: st.DrawFn) -> list[SimRequest]:
    """Requests of several keys, some of a batch, some promised, some with several prompts."""
    load = []
    for i, asked in enumerate(draw(loads())):
        kind = draw(st.sampled_from(("plain", "plain", "background", "promised")))
        due_s = (asked.arrival_s or 0.0) + 0.5 if kind == "promised" else inf
        first = replace(
            asked, is_read=True, is_background=kind == "background", due_s=due_s, push=i
        )
        num_prompts = draw(st.sampled_from((1, 1, 3)))
        load += [replace(first, prompt=first.prompt[j:] or (9,)) for j in range(num_prompts)]
    return load


@few
@given(all_kinds(), setups)
def test_the_same_settings_give_the_same_run(load: list[SimRequest], setup: EngineRecord) -> None:
    """Numbers, times and decisions are those of the trace, whose own clock is the model's."""
    then = simulate(load, setup, TIMES)
    lines = as_read(then)
    assert what_if.run_as_recorded(lines).difference is None
    again = what_if.run(what_if.load_of(lines), settings_of(lines), TIMES)
    assert what_if.first_difference(then, again) is None
    ends, ends_again = (
        {r.request_id: r.finish_s for r in side if isinstance(r, RequestRecord)}
        for side in (then, again)
    )
    assert ends_again == pytest.approx(ends)


def test_a_batch_gives_way_in_a_what_if_as_it_did() -> None:
    """Four requests fill the engine; who asks meanwhile waits for the step under way alone."""
    settings = what_if.changed(SETTINGS, ["max_num_seqs=2"])
    times = StepTime((1,), (0.01,), 0.0, 0.0, 0.0, 0.0, 0.0)
    load = [
        SimRequest(prompt=(i,) * 9, num_new=(40,), arrival_s=0.0, is_background=True)
        for i in range(4)
    ]
    load.append(SimRequest(prompt=(9, 9), num_new=(5,), arrival_s=0.2))
    lines = as_read(simulate(load, settings, times))
    records = what_if.run(what_if.load_of(lines), settings, times)
    ended = [record for record in records if isinstance(record, RequestRecord)]
    [person] = [record for record in ended if not record.is_background]
    assert person.first_token_s is not None
    assert person.first_token_s - person.arrival_s < 0.03
    rest = [step for step in steps_of(records) if step.start_s >= person.finish_s]
    assert rest[0].resumed
    assert rest[0].start_s - person.finish_s == pytest.approx(QUIET_S, abs=0.02)
    plain = [replace(asked, is_background=False) for asked in what_if.load_of(lines)]
    found = what_if.first_difference(records, what_if.run(plain, settings, times))
    assert found is not None, "without a background it is another run"


def test_what_another_setting_changes_first_is_said_in_words() -> None:
    load = [SimRequest(prompt=(3,) * 20, num_new=(8,), arrival_s=0.001 * i) for i in range(9)]
    lines = as_read(simulate(load, SETTINGS, TIMES))
    asked = what_if.load_of(lines)
    wide = what_if.changed(SETTINGS, ["max-num-seqs=9"])
    before, after = what_if.run(asked, SETTINGS, TIMES), what_if.run(asked, wide, TIMES)
    found = what_if.first_difference(before, after)
    assert found is not None
    first = next(
        step.number
        for step, other in zip(steps_of(before), steps_of(after), strict=False)
        if (step.work, step.waits) != (other.work, other.waits)
    )
    assert found.number == first
    assert "request 6: " in found.reasons[0]
    assert "before, not in the engine" in found.reasons[0]


def test_a_client_that_left_leaves_again() -> None:
    load = [SimRequest(prompt=(3,) * 9, num_new=(40,), arrival_s=0.0) for _ in range(3)]
    load[1] = replace(load[1], gone_s=0.2, name="leaves")
    records = simulate(load, SETTINGS, TIMES)
    left = [r for r in records if isinstance(r, RequestRecord) and r.name == "leaves"]
    assert [r.finish_reasons for r in left] == [("abort",)]
    assert 0.2 <= left[0].finish_s < 0.3
    again = what_if.run(what_if.load_of(as_read(records)), SETTINGS, TIMES)
    assert what_if.first_difference(records, again) is None
    reasons = {r.request_id: r.finish_reasons for r in again if isinstance(r, RequestRecord)}
    assert [reasons[i] for i in range(3)].count(("abort",)) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("max_seqs=8", "no setting 'max_seqs'; did you mean max_num_seqs"),
        ("zzz=8", "there are policy, block_size"),
        ("seed=8", "seed cannot be changed: the answers of the trace are known"),
        ("eos-ids=8", "eos-ids cannot be changed: it is the model's"),
        ("windows=5", "windows cannot be changed: it is the model's"),
        ("looks_ahead=yes", "looks_ahead cannot be changed: it is the backend's"),
        ("num_checkpoints=5", "num_checkpoints cannot be changed: it is the model's"),
        ("window=5", "no setting 'window'; there are policy, .* reserve_full$"),
        ("max_num_seqs", "write NAME=VALUE"),
        ("max_num_seqs=many", "a whole number above 0"),
        ("max_num_seqs=0", "a whole number above 0"),
        ("num_blocks=1000001", r"num_blocks \(1000001\) must be at most 1,000,000"),
        ("policy=fifo", "one of static, orca, splitfuse"),
        ("enable_prefix_caching=1", "true or false"),
        ("max_num_seqs=100", r"max_num_batched_tokens \(32\) must be at least max_num_seqs"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(change: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        what_if.changed(SETTINGS, [change])


def test_settings_are_taken_as_flags_spell_them() -> None:
    changes = ["--max-num-seqs=4", "policy=orca", "enable_prefix_caching=false", "num_blocks=9"]
    found = what_if.changed(SETTINGS, changes)
    wanted = {"max_num_seqs": 4, "policy": "orca", "enable_prefix_caching": False, "num_blocks": 9}
    assert found == replace(SETTINGS, **wanted)


def test_another_policy_takes_blocks_in_its_own_way_unless_more_is_said() -> None:
    paged = replace(SETTINGS, reserve_full=False)
    assert what_if.changed(paged, ["policy=orca"]).reserve_full is None
    found = what_if.changed(paged, ["policy=orca", "reserve-full=true"])
    assert (found.policy, found.reserve_full) == ("orca", True)


def test_searches_are_not_simulated() -> None:
    lines = as_read(
        simulate([SimRequest(prompt=(3,), num_new=(2,), arrival_s=0.0)], SETTINGS, TIMES)
    )
    for line in lines:
        if line["type"] == "request":
            line["params"]["use_beam_search"] = True
    with pytest.raises(ValueError, match="request 0 asks for use_beam_search"):
        what_if.load_of(lines)


def steps_of(records: list[Record]) -> list[StepRecord]:
    return [record for record in records if isinstance(record, StepRecord)]
