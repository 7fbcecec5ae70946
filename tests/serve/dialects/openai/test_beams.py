"""Beam search and best_of through the server: what is chosen, counted and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.foresight.simulator.replay import replay
from tests.engine.test_llm import HELLO
from tests.serve.serving import Served, serving

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
GO_ON: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True}
ASK: dict[str, Any] = {"messages": HELLO, "max_tokens": 12, "ignore_eos": True}
BEAMS: dict[str, Any] = {"use_beam_search": True, "best_of": 4, "n": 2}


def params_of(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{name: fields[name] for name in fields if name != "prompt"})


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def test_beams_are_those_of_the_python_api(model: Path, served: Served) -> None:
    body = GO_ON | BEAMS | {"logprobs": 2}
    status, answer, _ = served.call(COMPLETE, body)
    assert status == 200
    with LLM(model, kv_cache_memory="1MiB", threads=1) as llm:
        (expected,) = llm.generate(GO_ON["prompt"], params_of(body))
    assert texts(answer) == [out.text for out in expected.outputs]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 24, "the answers count, not the beams"
    for choice, out in zip(answer["choices"], expected.outputs, strict=True):
        total = sum(choice["logprobs"]["token_logprobs"])
        assert total == pytest.approx(out.cumulative_logprob, abs=1e-4)
        assert choice["finish_reason"] == "length"
    scores = [out.cumulative_logprob for out in expected.outputs]
    assert scores == sorted(scores, reverse=True)


def test_beams_in_a_chat(served: Served) -> None:
    status, answer, _ = served.call(CHAT, ASK | BEAMS | {"logprobs": True, "top_logprobs": 1})
    assert status == 200
    messages = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(messages)) == 2
    assert len(answer["choices"][0]["logprobs"]["content"]) == 12
    one = {"use_beam_search": True, "temperature": 0}
    greedy = served.call(CHAT, ASK | {"temperature": 0})[1]["choices"][0]["message"]
    assert served.call(CHAT, ASK | one)[1]["choices"][0]["message"] == greedy


def test_several_prompts_at_once_each_get_their_best(served: Served) -> None:
    alone = [served.call(COMPLETE, GO_ON | BEAMS | {"prompt": text})[1] for text in ("A", "The")]
    both = served.call(COMPLETE, GO_ON | BEAMS | {"prompt": ["A", "The"]})[1]
    assert texts(both) == texts(alone[0]) + texts(alone[1])
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("names", [1, 2], ids=["one prompt", "two prompts"])
def test_best_of_returns_the_likeliest_per_token_and_counts_all(served: Served, names: int) -> None:
    ask = GO_ON | {"prompt": ["A", "The"][:names], "temperature": 1, "seed": 7, "logprobs": 0}
    every = served.call(COMPLETE, ask | {"n": 5})[1]
    best = served.call(COMPLETE, ask | {"n": 2, "best_of": 5})[1]
    wanted: list[str] = []
    for first in range(0, 5 * names, 5):
        choices = every["choices"][first : first + 5]
        choices.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        wanted += [choice["text"] for choice in choices[:2]]
    assert texts(best) == wanted
    assert [choice["index"] for choice in best["choices"]] == list(range(2 * names))
    assert best["usage"] == every["usage"]
    assert best["usage"]["completion_tokens"] == 60 * names
    hidden = served.call(COMPLETE, {**ask, "n": 2, "best_of": 5, "logprobs": None})[1]
    assert texts(hidden) == wanted
    assert [choice["logprobs"] for choice in hidden["choices"]] == [None] * (2 * names)


def test_beams_of_a_form(served: Served) -> None:
    choices = ["good", "bad", "neither"]
    body = {"prompt": "This film is", "max_tokens": 20, "guided_choice": choices}
    status, answer, _ = served.call(COMPLETE, body | BEAMS)
    assert status == 200, answer
    assert set(texts(answer)) <= set(choices)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]


def test_more_answers_than_a_form_has_are_refused_by_name(served: Served) -> None:
    body = {"prompt": "x", "use_beam_search": True, "n": 2, "guided_regex": "7"}
    status, error = served.refused(COMPLETE, body)
    assert status == 400
    assert error["message"].startswith("n asks for more answers than there are of the form")


@pytest.mark.parametrize(
    "fields", [{"temperature": 1}, {"top_k": -1}, {"top_p": 1}, {"logit_bias": {}}, {"stop": []}]
)
def test_what_changes_nothing_is_let_pass(served: Served, fields: dict[str, Any]) -> None:
    plain = served.call(COMPLETE, GO_ON | BEAMS)[1]
    status, answer, _ = served.call(COMPLETE, GO_ON | BEAMS | fields)
    assert status == 200
    assert texts(answer) == texts(plain)


def test_all_of_best_of_may_be_streamed(served: Served) -> None:
    with served.client().completions.create(
        model="tiny", prompt="A", n=2, extra_body={"best_of": 2}, max_tokens=3, stream=True
    ) as chunks:
        assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_more_beams_than_the_server_can_run_are_refused_with_the_numbers(model: Path) -> None:
    with serving(model, {"max_num_seqs": 4}, max_n=6) as served:
        wide = {"use_beam_search": True, "best_of": 7}
        error = served.refused_for("best_of", COMPLETE, GO_ON | wide)
        assert error["message"] == "best_of asks for 7: this server allows at most 6"
        error = served.refused_for("best_of", COMPLETE, GO_ON | wide | {"best_of": 5})
        assert "best_of asks for 5 at once, but at most 4 sequences run" in error["message"]
        assert served.call(COMPLETE, GO_ON | wide | {"best_of": 4})[0] == 200


def test_a_width_that_the_cache_cannot_hold_is_refused_with_the_numbers(model: Path) -> None:
    with serving(model, {"kv_cache_memory": "20KiB"}) as served:
        wide = GO_ON | {"use_beam_search": True, "best_of": 16, "max_tokens": 30}
        error = served.refused_for("best_of", COMPLETE, wide)
        assert error["message"].startswith("best_of is 16: for each, prompt and answer need")


def test_beams_in_the_trace_and_the_metrics(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with serving(model, {"trace": trace}) as served:
        assert served.call(COMPLETE, GO_ON | BEAMS)[0] == 200
        body = served.call(COMPLETE, GO_ON | {"include_timings": True} | BEAMS)[1]
        assert body["metrics"]["time_to_first_token_ms"] > 0
        served.assert_idle()
        counts = served.metrics()
    assert counts["ridgeline:generation_tokens_total"] == 48
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(len(record["ranked"]) for record in records if record["type"] == "step") > 80
    found = replay(records)
    assert found.num_requests == 2
    assert (found.difference, found.unfinished) == (None, None)
