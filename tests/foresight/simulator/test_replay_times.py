"""A real server's run, served again by the simulation with the durations of then: all decisions of
admission and engine are the same, step by step."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.records import RequestRecord, StepRecord
from ridgeline.foresight.simulator.replay import replay
from ridgeline.foresight.simulator.replay_times import serve_again
from ridgeline.foresight.trace import read_whole
from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.serve.serving import serving
from tests.waiting import eventually

Json = dict[str, Any]


@pytest.fixture(scope="module")
def trace(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Json]:  # noqa: F811
    """The trace of a server that was asked for more than it could run at once."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "trace": path}
    dice = random.Random(5)
    bodies = [
        {
            "prompt": [40 + dice.randrange(3)] * dice.randint(1, 60),
            "max_tokens": dice.randint(1, 30),
            "ignore_eos": dice.random() < 0.5,
            "n": dice.choice((1, 1, 1, 2)),
            "stream": dice.random() < 0.7,
            "temperature": 1,
        }
        for _ in range(60)
    ]

    def ask(body: Json) -> None:
        if not body["stream"]:
            assert served.call("/v1/completions", body)[0] == 200
            return
        answer = served.client().completions.create(model="tiny", **_named(body))
        assert list(answer)

    with serving(model, options) as served, ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, bodies))
    return [json.loads(line) for line in path.read_text().splitlines()]


def _named(body: Json) -> Json:
    extra = {"ignore_eos": body["ignore_eos"]}
    return {name: body[name] for name in body if name != "ignore_eos"} | {"extra_body": extra}


def test_the_simulation_decides_every_step_as_the_server_did(trace: list[Json]) -> None:
    again = serve_again(trace)
    steps = [record for record in trace if record["type"] == "step"]
    assert again.difference is None
    assert again.num_equal == again.num_steps == len(steps) > 50
    assert any(step["num_outside"] for step in steps), "nobody had to wait before the engine"
    assert len({step["is_read"] for step in steps}) == 2


def test_requests_take_as_long_as_they_did(trace: list[Json]) -> None:
    again = serve_again(trace)
    now = {r.request_id: r for r in again.records if isinstance(r, RequestRecord)}
    then = {record["request_id"]: record for record in trace if record["type"] == "request"}
    assert now.keys() == then.keys()
    for number, record in then.items():
        assert now[number].first_token_s == pytest.approx(record["first_token_s"], abs=1e-9)
        assert now[number].finish_s == pytest.approx(record["finish_s"], abs=1e-9)
        assert list(now[number].num_generated) == record["num_generated"]
        assert list(now[number].finish_reasons) == record["finish_reasons"]
    steps = [record for record in again.records if isinstance(record, StepRecord)]
    assert sum(step.execute_s for step in steps) > 0


def test_a_decision_that_was_not_made_so_is_named(trace: list[Json]) -> None:
    """With other settings than those of the server, the first step that differs is found."""
    engine, *others = trace
    found = serve_again([engine | {"max_num_seqs": 5}, *others])
    assert found.difference is not None
    assert found.num_equal < found.num_steps
    number, then, now = found.difference
    assert then != now
    assert number < len(others)


@pytest.mark.parametrize("part", [0.2, 0.4, 0.5, 0.6, 0.8])
def test_a_trace_that_ends_early_is_served_as_far_as_it_goes(
    trace: list[Json], part: float
) -> None:
    """It lacks requests that run at its end, and prompts that wait."""
    found = serve_again(trace[: int(part * len(trace))])
    assert found.difference is None
    assert found.num_steps < part * len(trace)
    assert found.num_steps or part < 0.5


def test_in_an_older_trace_requests_enter_as_they_did(trace: list[Json], tmp_path: Path) -> None:
    """It does not say what had come before a step, nor whose prompts came together."""
    path = tmp_path / "older.jsonl"
    new = ("is_background", "pushed", "num_pushed", "num_permitted", "gives_way", "num_since")
    older = [{name: one[name] for name in one if name not in new} for one in trace]
    path.write_text("".join(json.dumps(record) + "\n" for record in older))
    again = serve_again(read_whole(path))
    assert again.difference is None
    assert again.num_equal == again.num_steps == sum(one["type"] == "step" for one in trace)
    assert replay(older).difference is None


def test_a_trace_with_deadlines_is_decided_again_the_same(
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.jsonl"
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "trace": path}
    dice = random.Random(7)
    bodies: list[Json] = [
        {"prompt": [40] * dice.randint(1, 50), "max_tokens": dice.randint(1, 20), "temperature": 1}
        for _ in range(80)
    ]
    for body in bodies[::3]:
        body["deadline"] = {"total_ms": dice.choice((50, 400, 60_000))}

    with serving(model, options) as served, ThreadPoolExecutor(12) as pool:
        served.call("/v1/completions", bodies[0])
        eventually(lambda: served.running.model_server.metrics.monitor.is_calibrated)
        statuses = [pool.submit(served.call, "/v1/completions", body) for body in bodies]
        assert {found.result()[0] for found in statuses} <= {200, 503}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    due = [r["due_s"] for r in records if r["type"] == "request" and r["due_s"] is not None]
    assert len(due) > 5, "nothing was promised"
    again = serve_again(records)
    assert again.difference is None
    assert again.num_equal == again.num_steps > 200
    found = replay(records)
    assert (found.difference, found.num_steps) == (None, again.num_steps)


@pytest.mark.parametrize(
    ("records", "words"),
    [([], "none of its lines"), ([{"type": "engine", "policy": "orca"}], "'block_size'")],
)
def test_what_is_no_trace_is_refused(records: list[Json], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        serve_again(records)
