"""An explanation as people read it: sentences, a table, Markdown, JSON, a picture, advice."""

from __future__ import annotations

import json
import re
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.records import EngineRecord
from ridgeline.foresight.explain import CAUSES, Explanation, explain
from ridgeline.foresight.explain_report import (
    as_dict,
    explain_svg,
    markdown,
    sentences,
    table,
)
from ridgeline.foresight.simulator.run import SimRequest, TimeModel, simulate
from ridgeline.foresight.step_time.features import Reach
from ridgeline.foresight.structure import to_json
from ridgeline.foresight.suggestions import would_help
from ridgeline.model.cost.costs import Features
from tests.foresight.runs import recorded
from tests.foresight.simulator.test_run import SETTINGS, TIMES
from tests.foresight.test_explain import ENGINE, REQUEST, explained, step

GOLDEN = Path(__file__).with_name("explain.svg")
Json = dict[str, Any]


def by_hand() -> Explanation:
    """A request of two tokens beside another, on a machine that was slow."""
    steps = [
        step(7, 0.0, work=[[[1, 0], 8, 1]], sampled=[[6]]),
        step(8, 2.0, arrived=[0], work=[[[0, 0], 0, 4], [[1, 0], 9, 1]]),
        step(9, 4.5),
    ]
    request = REQUEST | {
        "name": "mine", "num_generated": [2], "finish_reasons": ["length"], "first_token_s": 3.0,
        "error": None, "num_cached_tokens": 0,
    }  # fmt: skip
    engine = ENGINE | {"policy": "splitfuse", "block_size": 4}
    return explain(engine, request, steps, lambda one: 0.3 * len(one["work"]))


def test_a_life_in_words() -> None:
    assert sentences(by_hand()) == [
        "Request 0 took 5.00 s from its arrival until it reached its maximum length; its first "
        "token came after 2.50 s.",
        "For 500 ms (10%) it waited for the step that was under way when it came.",
        "Its prompt of 4 tokens took 600 ms (12%) in 1 step; alone it would have taken 300 ms.",
        "Computing its answer of 2 tokens took 600 ms (12%), 600 ms a token; alone it would have "
        "taken 300 ms.",
        "In 2 steps the machine was slower than it usually is, by 800 ms (16%).",
        "Between steps, 2.50 s (50%) went into committing tokens and sending text.",
    ]


def test_a_vector_is_no_token() -> None:
    found = by_hand()
    found = changed(found, request={**found.request, "num_generated": [0]})
    assert sentences(found)[0].endswith("; its vector came after 2.50 s.")


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_whatever_happened_is_told_in_one_to_six_sentences(seed: int) -> None:
    for found in explained(recorded(seed)):
        told = sentences(found)
        assert 1 <= len(told) <= 6
        assert len(told) >= 2 or found.request["scheduled_s"] is None or len(found.causes_ns()) < 2
        for one in told:
            assert re.fullmatch(r"[A-Z].*\.", one)
            assert "{" not in one
            assert "None" not in one
        document = as_dict(found, *would_help(found))
        total = sum(round(1e9 * one["seconds"]) for one in document["pieces"])
        assert total == found.duration_ns == round(1e9 * document["seconds"])
        assert sum(round(1e9 * one["seconds"]) for one in document["timeline"]) == total
        assert json.loads(json.dumps(document)) == document
        assert explain_svg(found).count("<rect") > len(found.causes_ns())
        assert markdown(found, *would_help(found)).count("\n| ") == len(table(found).rows) + 1


def test_the_picture_is_the_one_that_was_looked_at() -> None:
    assert explain_svg(by_hand()) == GOLDEN.read_text(encoding="utf-8")


def test_every_cause_has_a_colour_and_words() -> None:
    found = by_hand()
    for cause in CAUSES:
        pieces = tuple(piece._replace(cause=cause) for piece in found.pieces)
        assert CAUSES[cause] in explain_svg(changed(found, pieces=pieces))


def slowest_of(
    setup: EngineRecord, num_new: int, times: TimeModel = TIMES
) -> tuple[Explanation, list[Json]]:
    """Return the slowest of eight requests that come at once, and the trace of them all."""
    load = [SimRequest(prompt=(3, 4, 5, i), num_new=(num_new,), arrival_s=0.0) for i in range(8)]
    records = [json.loads(json.dumps(to_json(one))) for one in simulate(load, setup, times)]
    return max(explained(records), key=lambda found: found.duration_ns), records


def test_what_would_have_helped_is_simulated() -> None:
    """Where blocks are the limit more of them help, and the gain is that of the simulation."""
    short = changed(SETTINGS, max_num_seqs=4, num_blocks=20)
    last, records = slowest_of(short, 30)
    (told,) = would_help(last, records).helpful
    assert (told["cause"], told["set"]) == ("wait_blocks", "num_blocks=40")
    _, again = slowest_of(changed(short, num_blocks=40), 30)
    ends = {one["request_id"]: one["finish_s"] for one in again if one["type"] == "request"}
    gain_s = last.request["finish_s"] - ends[last.request["request_id"]]
    assert told["gain_s"] == pytest.approx(gain_s, rel=0.01)  # the model of time is fitted
    assert told["num_others"] == 7
    assert 0 < told["error_s"] < 0.01 * gain_s
    assert "kv-cache-memory: simulated, this request ends 313 ms sooner" in told["text"]
    assert told["text"].endswith("; the simulation misses the recorded times by 0.08 ms")
    text = markdown(last, *would_help(last, records))
    assert f"What would have helped:\n\n- {told['text']}\n" in text


def test_no_advice_where_steps_would_be_larger_than_those_measured() -> None:
    """How long a step of four takes is not known of steps of two; the way out is named."""
    last, records = slowest_of(changed(SETTINGS, max_num_seqs=2), 16)
    suggestions = would_help(last, records)
    assert suggestions.helpful == []
    (one,) = suggestions.not_foreseen
    assert (one["cause"], one["set"]) == ("queue_max_num_seqs", "max_num_seqs=4")
    assert "4 sequences (measured: 2)" in one["reason"]
    assert not {"gain_s", "others_gain_s"} & one.keys()
    text = markdown(last, *suggestions)
    assert "What would have helped" not in text
    assert f"- --max-num-seqs 4: {one['reason']}\n" in text


def test_steps_that_are_a_little_larger_are_foreseen() -> None:
    """Five rows are near four, six are not: half as far as where the next knot begins."""
    fitted = Reach(num_tokens=40, num_seqs=4, num_rows=4)
    assert Reach(50, 5, 5).exceeds(fitted) == {}
    assert Reach(51, 5, 6).exceeds(fitted) == {"num_tokens": (51, 40), "num_rows": (6, 4)}


def test_a_gain_within_the_error_of_the_simulation_is_no_advice() -> None:
    """The machine was fast at first and slow later, which no model of steps' sizes can see."""

    class Tiring:
        windows = ()
        num_steps = 0

        def seconds(self, features: Features) -> float:
            self.num_steps += 1
            return TIMES.seconds(features) * (1 if self.num_steps < 60 else 10)

        def after(self, num_rows: int, num_ended: int) -> float:
            return TIMES.after(num_rows, num_ended)

    last, records = slowest_of(changed(SETTINGS, max_num_seqs=4, num_blocks=20), 30, Tiring())
    suggestions = would_help(last, records)
    assert "num_blocks=40" not in [one["set"] for one in suggestions.helpful]
    (one,) = [one for one in suggestions.not_foreseen if one["set"] == "num_blocks=40"]
    assert re.fullmatch(r"its gain of .* is within .*, the error of the simulation", one["reason"])


def test_a_setting_that_was_not_simulated_is_no_advice() -> None:
    last, records = slowest_of(changed(SETTINGS, max_num_seqs=2), 16)
    short = [one for one in records if one["type"] != "step" or one["number"] < 20]
    for of, reason in (([], "only where one request"), (short, "at least 50 are needed")):
        suggestions = would_help(last, of)
        assert suggestions.helpful == []
        assert reason in suggestions.not_foreseen[0]["reason"]


def test_advice_says_that_drafts_are_not_simulated() -> None:
    last, records = slowest_of(changed(SETTINGS, max_num_seqs=4, num_blocks=20), 30)
    assert would_help(last, records).helpful[0]["warnings"] == []
    step = next(one for one in records if one["type"] == "step" and one["number"] == 9)
    step["drafts"] = [[step["work"][0][0], [7]]]
    (told,) = would_help(last, records).helpful
    assert told["warnings"] == ["drafts, which the recording has, are not simulated"]
    assert told["text"].endswith(f"; {told['warnings'][0]}")


def test_a_long_prompt_is_told_how_many_passed_it() -> None:
    """One slot, and fair queueing: of what waits, short prompts come first."""
    load = [
        SimRequest(prompt=(3 + i,) * length, num_new=(8,), arrival_s=0.001 * i)
        for i, length in enumerate((4, 24, 4, 4, 4))
    ]
    records = [
        json.loads(json.dumps(to_json(one)))
        for one in simulate(load, changed(SETTINGS, max_num_seqs=1), TIMES)
    ]
    (long,) = [one for one in explained(records) if one.request["num_prompt_tokens"] == 24]
    assert long.request["request_id"] == 4
    assert max(long.causes_ns(), key=long.causes_ns().__getitem__) == "queue_overtaken"
    (told,) = [one for one in sentences(long) if "overtaken" in one]
    assert "because it was overtaken by 3 later requests: " in told
    first = would_help(long, records).helpful[0]
    assert (first["cause"], first["set"]) == ("queue_overtaken", None)
    assert first["text"].startswith("a shorter prompt, or a deadline: ")
