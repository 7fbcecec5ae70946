"""A trace as Chrome's trace events: what Perfetto needs to draw it, and no text."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.foresight.explain_report import timeline
from tests.foresight.runs import recorded

Json = dict[str, Any]


def drawn(records: list[Json], **options: Any) -> list[Json]:
    engine, *others = records
    steps = [one for one in others if one["type"] == "step"]
    requests = [
        one | {"num_prompt_tokens": len(one["prompt_token_ids"])}
        for one in others
        if one["type"] == "request"
    ]
    return [dict(event) for event in timeline(engine, steps, requests, **options)]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_every_track_holds_one_thing_at_a_time(seed: int) -> None:
    records = recorded(seed)
    events = drawn(records)
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track in slices.values():
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(sorted(track)))
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert named >= set(slices)
    steps = [one for one in records if one["type"] == "step"]
    parts = Counter(event["cat"] for event in events if event["ph"] == "X")
    assert parts["schedule"] == parts["execute"] == parts["commit"] == len(steps)
    computed = sum(count for step in steps for _, _, count in step["work"])
    shown = [e for e in events if e["ph"] == "X" and e["cat"] in ("prompt", "answer")]
    assert sum(event["args"]["tokens"] for event in shown) == computed


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_an_arrow_leads_from_each_preemption_to_its_victim(seed: int) -> None:
    records = recorded(seed)
    events = drawn(records)
    taken = [
        (step["number"], seq[0])
        for step in records
        if step["type"] == "step"
        for seq in step["preempted"]
    ]
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    assert ends.keys() == begins.keys()
    victims = [e for e in events if e["ph"] == "X" and e["cat"] == "preemption"]
    shown = sorted((event["args"]["step"], event["args"]["request"]) for event in victims)
    assert len(ends) == len(shown)
    assert set(shown) <= set(taken)  # one that was admitted and taken in a step was never seen
    for victim in victims:
        assert any(
            end["tid"] == victim["tid"]
            and victim["ts"] <= end["ts"] <= victim["ts"] + victim["dur"]
            for end in ends.values()
        )


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_what_a_step_took_stands_beside_what_was_predicted(seed: int) -> None:
    records = recorded(seed)
    steps = [one for one in records if one["type"] == "step"]
    events = drawn(records, predict=lambda step: 1e-3 * step["number"])
    shown = defaultdict(list)
    for event in events:
        if event["ph"] == "C" and event["name"].endswith(" ms"):
            shown[event["name"]].append((event["ts"], event["args"][event["name"]]))
    took = [round(1e3 * (one["schedule_s"] + one["execute_s"]), 3) for one in steps]
    assert [value for _, value in shown["actual ms"]] == took
    assert [value for _, value in shown["predicted ms"]] == [
        s["number"] for s in steps if s["work"]
    ]
    begins = [round(1e6 * (one["start_s"] - steps[0]["start_s"]), 3) for one in steps]
    assert [at for at, _ in shown["actual ms"]] == begins


def test_requests_that_are_not_shown_have_no_slots() -> None:
    records = recorded(3)
    slots = [
        {e["args"]["request"] for e in events if e["ph"] == "X" and "request" in e["args"]}
        for events in (drawn(records), drawn(records, is_shown={1, 2}.__contains__))
    ]
    assert slots[0] > slots[1] == {1, 2}
    arrows = [e for e in drawn(records, is_shown=lambda request: False) if e["ph"] in "sf"]
    assert not arrows


def test_two_runs_stand_side_by_side_and_say_no_text() -> None:
    records = recorded(3)
    events = [*drawn(records, name="before"), *drawn(records, process=2, name="after")]
    assert {event["pid"] for event in events} == {1, 2}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["before", "after"]
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"running", "waiting", "blocks", "actual ms"}
    keys = {key for event in events for key in event.get("args", {})}
    assert keys <= {"name", "step", "sequences", "tokens", "request", "steps", *counters}
    json.dumps(events)
