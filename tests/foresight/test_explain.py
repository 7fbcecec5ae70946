"""Where a request's time went: pieces that sum to it, each with the cause that the steps show."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.foresight.explain import (
    CAUSES,
    Explanation,
    TimePiece,
    explain,
    overtakers_of,
)
from tests.foresight.runs import recorded

Json = dict[str, Any]
COMPUTING = ("prompt", "decode", "again")
SEEDS = st.integers(0, 10_000)


def explained(records: list[Json], predict: Any = None) -> list[Explanation]:
    """Explain each request of a trace, with the steps that overlap its life and one more."""
    engine, *others = records
    steps = [one for one in others if one["type"] == "step"]
    found = []
    for request in (one for one in others if one["type"] == "request"):
        mine = [
            i
            for i, step in enumerate(steps)
            if step["start_s"] <= request["finish_s"] and ends_s(step) >= request["arrival_s"]
        ]
        of_life = steps[mine[0] : mine[-1] + 2] if mine else []
        request["num_prompt_tokens"] = len(request["prompt_token_ids"])
        passed = overtakers_of(request, (one for one in others if one["type"] == "request"))
        found.append(explain(engine, request, of_life, predict, overtakers=passed))
    return found


def ends_s(step: Json) -> float:
    return float(step["start_s"] + step["schedule_s"] + step["execute_s"])


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def cause_at(found: Explanation, time_ns: int) -> str:
    return next(p.cause for p in found.pieces if p.start_ns <= time_ns < p.end_ns)


@settings(deadline=None, max_examples=25)
@given(SEEDS)
def test_the_pieces_sum_to_the_time_of_the_request(seed: int) -> None:
    for found in explained(recorded(seed)):
        request = found.request
        assert sum(end - start for _, start, end, _ in found.pieces) == found.duration_ns
        assert sum(found.causes_ns().values()) == found.duration_ns
        assert {piece.cause for piece in found.pieces} <= set(CAUSES)
        assert all(piece.end_ns > piece.start_ns for piece in found.pieces)
        assert all(a.end_ns == b.start_ns and a.cause != b.cause for a, b in pairwise(found.pieces))
        if found.pieces:
            assert found.pieces[0].start_ns == ns(request["arrival_s"])
            assert found.pieces[-1].end_ns == ns(request["finish_s"])


@settings(deadline=None, max_examples=15)
@given(SEEDS)
def test_every_step_of_a_life_has_the_cause_that_its_record_says(seed: int) -> None:
    """Requests with one answer: their sequence computes or waits, and the record says why."""
    for found in explained(recorded(seed, plain=True)):
        me = [found.request["request_id"], 0]
        arrived = False
        computed_s = 0.0
        for step in found.steps:
            arrived = arrived or me[0] in step["arrived"]
            if step["start_s"] >= found.request["finish_s"]:
                continue
            middle_ns = ns((step["start_s"] + ends_s(step)) / 2)
            is_in = step["start_s"] >= found.request["arrival_s"]
            waits = [why for seq, why in step["waits"] if seq == me]
            if me in [seq for seq, _, _ in step["work"]]:
                assert cause_at(found, middle_ns) in COMPUTING
                computed_s += ends_s(step) - step["start_s"]
            elif waits:
                want = "client" if waits == ["paused"] else f"wait_{waits[0]}".replace(" ", "_")
                assert cause_at(found, middle_ns) == want
            elif is_in and not arrived:
                assert cause_at(found, middle_ns).startswith("queue_")
        total = sum(found.causes_ns().get(cause, 0) for cause in COMPUTING)
        assert total == ns(computed_s)


@settings(deadline=None, max_examples=15)
@given(SEEDS)
def test_again_is_what_was_computed_before(seed: int) -> None:
    """Requests with one answer: a position that is computed twice, and no other."""
    for found in explained(recorded(seed, plain=True)):
        me, seen = [found.request["request_id"], 0], 0
        for step in found.steps:
            guessed = sum(len(tokens) for seq, tokens in step["drafts"] if seq == me)
            for (seq, start, count), tokens in zip(
                step["work"], step["sampled"] or [[]] * len(step["work"]), strict=True
            ):
                if seq == me:
                    is_again = cause_at(found, ns(step["start_s"])) == "again"
                    assert is_again == (start < seen)
                    right = max(len(tokens) - 1, 0) if guessed else 0
                    seen = max(seen, start + count - guessed + right)
        if not found.request["num_preemptions"] and "client" not in found.causes_ns():
            assert "again" not in found.causes_ns()


@settings(deadline=None, max_examples=15)
@given(SEEDS, st.sampled_from((0.25, 1.0, 4.0)))
def test_a_model_of_time_divides_computing_and_nothing_else(seed: int, usual_s: float) -> None:
    """Steps take 2 s on the harness's clock; the model says ``usual_s`` for each sequence."""
    records = recorded(seed)
    pairs = zip(
        explained(records),
        explained(records, lambda step: usual_s * len(step["work"])),
        strict=True,
    )
    for plain, divided in pairs:
        assert sum(divided.causes_ns().values()) == plain.duration_ns
        whole, parts = plain.causes_ns(), divided.causes_ns()
        for cause in whole.keys() - set(COMPUTING):
            assert parts[cause] == whole[cause]
        if usual_s == 4.0:
            assert "slow_machine" not in parts


def test_the_runs_have_a_bit_of_everything() -> None:
    found = [one for seed in range(25) for one in _all(seed)]
    seen = {cause for one in found for cause in one.causes_ns()}
    assert seen == {cause for cause in CAUSES if not cause.endswith(("_alone", "_shared"))} - {
        "slow_machine",
        "queue_overtaken",  # they enter as they come
    }


@cache
def _all(seed: int) -> list[Explanation]:
    return explained(recorded(seed))


def step(number: int, start_s: float, **changes: Any) -> Json:
    """A step of 1 s that computes a token of request 0 and one of request 1."""
    base: Json = {
        "number": number, "start_s": start_s, "schedule_s": 0.25, "execute_s": 0.75,
        "commit_s": 0.5,
        "arrived": [], "aborted": [], "paused": [], "resumed": [], "drafts": [], "waits": [],
        "work": [[[0, 0], 4, 1], [[1, 0], 9, 1]], "sampled": [[5], [6]], "ranked": [],
        "similarities": [], "errors": [], "admitted": [], "preempted": [], "num_running": 2,
        "num_waiting": 0, "blocks_used": 2,
    }  # fmt: skip
    return base | changes


ENGINE = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 8}
REQUEST = {
    "request_id": 0, "num_prompt_tokens": 4, "arrival_s": 0.5, "scheduled_s": 2.25, "finish_s": 5.5,
}  # fmt: skip


def test_who_is_overtaken_waits_for_the_order_from_then_on() -> None:
    """The first step's slots were taken; then another had the one that became free."""
    queued = {"work": [[[1, 0], 9, 1]], "sampled": [[6]], "num_running": 2}
    steps = [
        step(7, 1.0, **queued),
        step(8, 2.0, arrived=[3], **queued),
        step(9, 3.0, **queued),
        step(10, 4.0, arrived=[4], work=[[[4, 0], 0, 4]], sampled=[[5]]),
    ]
    request = REQUEST | {"request_id": 4, "scheduled_s": 4.25, "finish_s": 5.0}
    others = [
        {"request_id": 1, "arrival_s": 0.1},  # before it
        {"request_id": 3, "arrival_s": 0.9},
        {"request_id": 5, "arrival_s": 0.8},  # behind it
        request,
    ]
    passed = overtakers_of(request, others)
    assert passed == {3}
    found = explain(ENGINE, request, steps, overtakers=passed)
    assert found.num_overtakers == 1
    assert [(piece.cause, piece.start_ns, piece.end_ns) for piece in found.pieces][1:] == [
        ("queue_max_num_seqs", ns(1.0), ns(2.0)),
        ("queue_overtaken", ns(2.0), ns(4.0)),
        ("prompt", ns(4.0), ns(5.0)),
    ]
    alone = explain(ENGINE, request, steps)
    assert alone.causes_ns()["queue_max_num_seqs"] == ns(3.0)


def test_a_life_by_hand() -> None:
    """A step under way, the prompt, the hand-over, a token: with the times that one reads off."""
    steps = [
        step(7, 0.0, work=[[[1, 0], 8, 1]], sampled=[[6]]),
        step(8, 2.0, arrived=[0], work=[[[0, 0], 0, 4], [[1, 0], 9, 1]]),
        step(9, 4.5),
    ]
    found = explain(ENGINE, REQUEST, steps, lambda one: 0.3 * len(one["work"]))
    s = 10**9
    assert found.pieces == (
        TimePiece("step_under_way", s // 2, s, 7),
        TimePiece("between_steps", s, 2 * s, 7),
        TimePiece("prompt_alone", 2 * s, 23 * s // 10, 8),
        TimePiece("prompt_shared", 23 * s // 10, 26 * s // 10, 8),
        TimePiece("slow_machine", 26 * s // 10, 3 * s, 8),
        TimePiece("between_steps", 3 * s, 9 * s // 2, 8),
        TimePiece("decode_alone", 9 * s // 2, 48 * s // 10, 9),
        TimePiece("decode_shared", 48 * s // 10, 51 * s // 10, 9),
        TimePiece("slow_machine", 51 * s // 10, 55 * s // 10, 9),
    )


def test_a_trace_with_a_hole_is_refused() -> None:
    steps = [step(8, 2.0, arrived=[0]), step(10, 4.5)]
    with pytest.raises(ValueError, match="hole in the life of request 0: step 10 follows step 8"):
        explain(ENGINE, REQUEST, steps)
    with pytest.raises(ValueError, match="request 0 arrived is not in the trace"):
        explain(ENGINE, REQUEST, steps[1:])


def test_a_step_a_little_slower_than_usual_is_no_slow_machine() -> None:
    """What is within noise of the model is divided as the model divides it."""
    only = REQUEST | {"arrival_s": 4.5}
    steps = [step(9, 4.5, arrived=[0])]
    usual = explain(ENGINE, only, steps, lambda one: 0.41 * len(one["work"])).causes_ns()
    assert usual == {"decode_alone": 500_000_000, "decode_shared": 500_000_000}
    slow = explain(ENGINE, only, steps, lambda one: 0.35 * len(one["work"])).causes_ns()
    assert slow["slow_machine"] == 300_000_000
    later = only | {"finish_s": 6.0}
    odd = explain(ENGINE, later, steps, lambda one: 3.0 - len(one["work"])).causes_ns()
    assert odd == {"decode_alone": 1_000_000_000, "between_steps": 500_000_000}  # not 2 s


def test_of_several_answers_the_one_that_ends_last_counts() -> None:
    """Answer 1 waits for a slot while answer 0 is computed, and then computes the prompt again."""
    prompt = {"arrived": [0], "work": [[[0, 0], 0, 4]], "sampled": [[5, 6]]}
    waiting = {"waits": [[[0, 1], "max_num_seqs"]], "work": [[[0, 0], 4, 1]], "sampled": [[5]]}
    steps = [
        step(0, 0.0, **prompt),
        step(1, 1.5, **waiting),
        step(2, 3.0, work=[[[0, 1], 0, 5]], sampled=[[6]]),
        step(3, 4.5, work=[[[0, 1], 5, 1]], sampled=[[6]]),
    ]
    request = REQUEST | {"arrival_s": 0.0, "scheduled_s": 0.25}
    found = explain(ENGINE, request, steps)
    kinds = [piece.cause for piece in found.pieces if piece.cause != "between_steps"]
    assert kinds == ["prompt", "wait_max_num_seqs", "again", "decode"]


def test_right_drafts_that_a_state_has_not_seen_are_not_computed_again() -> None:
    """Without states a position that was right is never computed twice."""
    steps = [
        step(0, 0.0, arrived=[0], work=[[[0, 0], 0, 4]], sampled=[[5]]),
        step(1, 1.5, work=[[[0, 0], 4, 4]], drafts=[[[0, 0], [7, 8, 9]]], sampled=[[7, 8, 4]]),
        step(2, 3.0, work=[[[0, 0], 5, 3]], sampled=[[6]]),
    ]
    request = REQUEST | {"arrival_s": 0.0, "scheduled_s": 0.25, "finish_s": 4.0}
    for num_checkpoints, last in ((2, "decode"), (None, "again")):
        found = explain(ENGINE | {"num_checkpoints": num_checkpoints}, request, steps)
        kinds = [piece.cause for piece in found.pieces if piece.cause != "between_steps"]
        assert kinds == ["prompt", "decode", last]
