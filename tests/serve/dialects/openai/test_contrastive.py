"""Contrastive search through the server: whole and streamed, counted, recorded and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
SEARCH: dict[str, Any] = {"penalty_alpha": 0.6, "top_k": 4}


@pytest.fixture(scope="module")
def searching(model: Path) -> Iterator[Served]:
    with serving(model, {"enable_contrastive_search": True}) as served:
        yield served


def test_it_is_the_answer_of_the_python_api(model: Path, searching: Served) -> None:
    status, answer, _ = searching.call(COMPLETE, GO_ON | SEARCH | {"logprobs": 2})
    assert status == 200
    fields = {name: value for name, value in (GO_ON | SEARCH).items() if name != "prompt"}
    with LLM(model, kv_cache_memory="1MiB", threads=1) as llm:
        (expected,) = llm.generate(GO_ON["prompt"], SamplingParams(**fields, logprobs=2))
        (greedy,) = llm.generate(GO_ON["prompt"], SamplingParams(temperature=0, max_tokens=12))
    (choice,) = answer["choices"]
    assert choice["text"] == expected.outputs[0].text != greedy.outputs[0].text
    assert answer["usage"]["completion_tokens"] == 12, "the answer counts, not what was tried"
    total = sum(choice["logprobs"]["token_logprobs"])
    assert total == pytest.approx(expected.outputs[0].cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("fields", [{}, {"stop": "e"}, {"logprobs": True, "top_logprobs": 2}])
def test_it_streams_what_it_says_whole(searching: Served, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 20}
    extra = {"extra_body": {"ignore_eos": True} | SEARCH} | fields
    client = searching.client().chat.completions
    whole = client.create(**body, **extra).choices[0]
    pieces = [c.choices[0] for c in client.create(**body, **extra, stream=True) if c.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].finish_reason == whole.finish_reason
    if "logprobs" in fields:
        rows = [row for piece in pieces if piece.logprobs for row in piece.logprobs.content]
        assert rows == whole.logprobs.content
        assert len(pieces) > 5, "a token is sent when it is settled"


def test_alpha_0_is_greedy(searching: Served) -> None:
    greedy = searching.call(COMPLETE, GO_ON | {"temperature": 0})[1]["choices"]
    status, answer, _ = searching.call(COMPLETE, GO_ON | {"penalty_alpha": 0})
    assert (status, answer["choices"]) == (200, greedy)


def test_a_server_that_keeps_no_states_names_the_option(model: Path) -> None:
    with serving(model, {"enable_contrastive_search": False}) as served:
        for path, ask in ((CHAT, ASK), (COMPLETE, GO_ON)):
            error = served.refused_for("penalty_alpha", path, ask | SEARCH)
            assert "--enable-contrastive-search" in error["message"]
        assert served.call(COMPLETE, GO_ON | {"penalty_alpha": 0})[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": None}, "penalty_alpha"),
        ({"top_k": 1}, "penalty_alpha"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"min_p": 0.1}, "min_p"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True, "top_k": None}, "penalty_alpha"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"guided_regex": "[a-z]"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"penalty_alpha": 1.1}, "penalty_alpha"),
        ({"penalty_alpha": -0.1}, "penalty_alpha"),
        ({"penalty_alpha": 0, "temperature": 0.7}, "temperature"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_what_it_excludes_is_refused_by_name(
    searching: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    ask = ASK if path == CHAT else GO_ON
    searching.refused_for(param, path, ask | SEARCH | fields)


def test_more_candidates_than_sequences_are_refused_with_the_numbers(model: Path) -> None:
    options = {"max_num_seqs": 4, "enable_contrastive_search": True}
    with serving(model, options) as served:
        error = served.refused_for("top_k", COMPLETE, GO_ON | SEARCH | {"top_k": 5})
        assert "top_k asks for 5" in error["message"]
        assert served.call(COMPLETE, GO_ON | SEARCH)[0] == 200


def test_it_is_in_the_trace_and_replays(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with serving(model, {"trace": trace, "enable_contrastive_search": True}) as served:
        assert served.call(COMPLETE, GO_ON | SEARCH)[0] == 200
        served.assert_idle()
        assert served.metrics()["ridgeline:generation_tokens_total"] == 12
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(len(r["similarities"]) for r in records if r["type"] == "step") >= 44
    found = replay(records)
    assert (found.num_requests, found.difference, found.unfinished) == (1, None, None)
