"""Speculation in a simulation: fewer steps for the same answers, as many drafts right as asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.foresight.simulator.drafts import Drafts, parse_drafts
from ridgeline.foresight.simulator.fleet import serve_fleet
from ridgeline.foresight.simulator.run import SimRequest, simulate
from tests.foresight.simulator.test_run import SETTINGS, TIMES

ROOMY = replace(SETTINGS, num_blocks=1200, max_model_len=400)
LOAD = [SimRequest(prompt=(i + 9,) * 12, num_new=(300,), arrival_s=0.9 * i) for i in range(12)]


def ended(records: list[Record]) -> list[RequestRecord]:
    found = [one for one in records if isinstance(one, RequestRecord)]
    return sorted(found, key=lambda one: one.prompt_token_ids)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9, 1.0])
def test_drafts_are_right_as_often_as_asked(acceptance: float) -> None:
    """Of four in a row, each right only if those before it are."""
    found = ended(simulate(LOAD, ROOMY, TIMES, drafts=Drafts(4, acceptance)))
    assert [one.num_generated for one in found] == [(300,)] * 12
    drafted = sum(one.num_draft_tokens for one in found)
    accepted = sum(one.num_accepted_tokens for one in found)
    expected = sum(acceptance**i for i in range(1, 5)) / 4
    assert accepted / drafted == pytest.approx(expected, abs=0.03)


def test_more_that_is_right_takes_less_time_and_what_is_wrong_costs() -> None:
    def took_s(drafts: Drafts | None) -> float:
        return max(one.finish_s for one in ended(simulate(LOAD, ROOMY, TIMES, drafts=drafts)))

    right = [took_s(Drafts(4, share)) for share in (1.0, 0.8, 0.4, 0.0)]
    assert right == sorted(right)
    assert right[0] < took_s(None) < right[-1]
    assert right[-1] == pytest.approx(took_s(Drafts(4, 0.0)))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=8),
    st.integers(1, 8),
    st.floats(0, 1),
    st.sampled_from(("splitfuse", "orca")),
)
def test_answers_are_the_same_with_drafts(
    lengths: list[tuple[int, int]], most: int, acceptance: float, policy: str
) -> None:
    setup = replace(SETTINGS, policy=policy, max_num_batched_tokens=64)
    load = [
        SimRequest(prompt=(i + 9,) * num_prompt, num_new=(num_new,), arrival_s=0.02 * i)
        for i, (num_prompt, num_new) in enumerate(lengths)
    ]
    drafts = Drafts(most, acceptance)
    records = simulate(load, setup, TIMES, drafts=drafts)
    plain, found = ended(simulate(load, setup, TIMES)), ended(records)
    assert [one.num_generated for one in found] == [one.num_generated for one in plain]
    assert [one.finish_reasons for one in found] == [one.finish_reasons for one in plain]
    assert records == simulate(load, setup, TIMES, drafts=drafts)
    steps = [one for one in records if isinstance(one, StepRecord)]
    assert sum(len(tokens) for step in steps for tokens in step.sampled) == sum(
        num for one in found for num in one.num_generated
    )
    fleet = serve_fleet(load, setup, TIMES, 1, drafts=drafts)
    assert sorted(one.finish_s for one in fleet) == pytest.approx(
        sorted(one.finish_s for one in found)
    )


@pytest.mark.parametrize("text", ["", "4", "0:0.5", "16:0.5", "4:1.5", "4:-1", "a:b", "4:nan"])
def test_what_is_no_such_parameter_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write NUMBER:SHARE, such as 4:0\.6"):
        parse_drafts(text)
    assert parse_drafts("4:0.6") == Drafts(4, 0.6)
