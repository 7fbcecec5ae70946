"""Streams outlive the process that answers them: real processes, killed in the middle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.test_router import ASK, LONG, Routed, routing
from tests.serve.serving import JSON, first_of
from tests.waiting import connected


@pytest.fixture(scope="module")
def routed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    with routing(folder, tmp_path_factory.mktemp("log") / "log") as running:
        yield running


def test_a_stream_outlives_the_process_that_answers(routed: Routed) -> None:
    """The model is started again, and the answers are those of one process, logprobs too."""
    wish = LONG | {"model": "a", "n": 16, "temperature": 0.8, "seed": 5, "logprobs": 5}
    answer = routed.call("/v1/completions", wish | {"stream": False})[1]
    whole = {one["index"]: (one["text"], one["logprobs"]) for one in answer["choices"]}
    with connected(routed.port) as connection:
        connection.request("POST", "/v1/completions", json.dumps(wish), JSON)
        response = connection.getresponse()
        first = first_of(response)
        for pid in routed.pids():
            os.kill(pid, signal.SIGKILL)
        lines = (first + response.read()).splitlines()
    *chunks, done = [one for one in lines if one.startswith(b"data:")]
    assert done == b"data: [DONE]"
    texts, logprobs = dict.fromkeys(whole, ""), {index: list[float]() for index in whole}
    for chunk in chunks:
        (choice,) = json.loads(chunk.removeprefix(b"data: "))["choices"]
        texts[choice["index"]] += choice["text"]
        logprobs[choice["index"]] += (choice["logprobs"] or {}).get("token_logprobs", [])
    for index, (text, ranked) in whole.items():
        assert texts[index] == text
        assert logprobs[index] == ranked["token_logprobs"]
    assert "a ended by itself" in routed.log
    metrics = routed.call("/metrics")[1]
    assert '\nridgeline_fleet_resumed_total{model_name="a"} 1.0\n' in metrics
    assert '\nridgeline_fleet_diverged_total{model_name="a"} 0.0\n' in metrics
    assert routed.complete("a")


def test_clients_cannot_speak_as_a_router(routed: Routed) -> None:
    """What they say in its name is not passed on."""
    body = ASK | {"model": "a", "stream": True}
    status, answer, headers = routed.call("/v1/completions", body, x_ridgeline_fleet="{}")
    assert status == 200
    assert answer.endswith("data: [DONE]\n\n")
    assert "x-ridgeline-fleet" not in headers
