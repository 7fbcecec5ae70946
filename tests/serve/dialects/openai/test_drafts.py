"""Drafts through the server: predictions, their counts in usage, timings and metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_llm import HELLO
from tests.serve.serving import Served, serving

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
ALWAYS = {"speculative_config": {"always": True}}


def predicting(text: str | list[dict[str, str]]) -> dict[str, Any]:
    return ASK | {"prediction": {"type": "content", "content": text}, "include_timings": True}


@pytest.mark.parametrize("changes", [{}, {"temperature": 1, "seed": 3}], ids=["greedy", "sampled"])
def test_a_prediction_changes_no_answer(model: Path, changes: dict[str, Any]) -> None:
    with serving(model, {"speculative_config": "off"}) as served:
        plain = served.call(CHAT, ASK | changes)[1]["choices"]
    with serving(model, ALWAYS) as served:
        for text in (plain[0]["message"]["content"], "something else entirely " * 5, "x"):
            status, body, _ = served.call(CHAT, predicting(text) | changes)
            assert status == 200
            assert body["choices"] == plain


def test_the_default_changes_no_answer(model: Path) -> None:
    """Whatever the clock says of drafts."""
    with serving(model, {"speculative_config": "off"}) as served:
        plain = [served.call(CHAT, ASK | {"seed": seed})[1]["choices"] for seed in range(3)]
    with serving(model, {"speculative_config": None}) as served:
        again = [served.call(CHAT, ASK | {"seed": seed})[1]["choices"] for seed in range(3)]
    assert again == plain


def test_counts_agree_everywhere(model: Path, tmp_path: Path) -> None:
    """In the usage, the timings, the metrics and the trace."""
    trace = tmp_path / "trace.jsonl"
    with serving(model, ALWAYS | {"trace": trace}) as served:
        text = served.call(CHAT, ASK)[1]["choices"][0]["message"]["content"]
        parts = [{"type": "text", "text": text[:30]}, {"type": "text", "text": text[30:]}]
        body = served.call(CHAT, predicting(parts))[1]
        details = body["usage"]["completion_tokens_details"]
        timings = body["metrics"]["speculative_decoding"]
        assert details["accepted_prediction_tokens"] == timings["num_accepted_tokens"] > 2
        both = sum(details.values())
        assert both == timings["num_draft_tokens"]
        served.assert_idle()
        now = served.metrics()
        records = [json.loads(line) for line in trace.read_text().splitlines()]
        requests = [record for record in records if record["type"] == "request"]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            total = sum(request[name] for request in requests)
            assert now[f"ridgeline:spec_decode_{name}_total"] == total, name
        by_place = "ridgeline:spec_decode_num_accepted_tokens_per_pos_total"
        found = sum(value for name, value in now.items() if name.startswith(by_place))
        assert found == sum(request["num_accepted_tokens"] for request in requests)
        generated = sum(sum(request["num_generated"]) for request in requests)
        assert now["ridgeline:generation_tokens_total"] == generated
        gaps = now["ridgeline:inter_token_latency_seconds_count"]
        assert gaps == generated - len(requests)


def test_a_stream_with_a_prediction_adds_up(served: Served) -> None:
    client = served.client()
    text = served.call(CHAT, ASK)[1]["choices"][0]["message"]["content"]
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            temperature=0,
            max_tokens=40,
            prediction={"type": "content", "content": text},
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == text
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens is not None


def test_earlier_answers_help_the_key_that_got_them_alone(model: Path) -> None:
    """Counts of drafts tell nothing of what another key was told."""
    suffix = {"speculative_config": {"method": "suffix", "always": True}}
    with serving(model, suffix, api_key=["alice", "bob"]) as served:

        def ask(key: str) -> tuple[Any, dict[str, int]]:
            body = ASK | {"include_timings": True}
            body = served.call(CHAT, body, authorization=f"Bearer {key}")[1]
            return body["choices"], body["metrics"]["speculative_decoding"]

        asked = [ask(key) for key in ("alice", "alice", "bob", "bob", "alice")]
    assert all(choices == asked[0][0] for choices, _ in asked)
    first, again, other, other_again, once_more = (counts for _, counts in asked)
    assert again["num_accepted_tokens"] >= 39 - again["num_drafts"] > first["num_accepted_tokens"]
    assert other == first
    assert other_again == again == once_more
