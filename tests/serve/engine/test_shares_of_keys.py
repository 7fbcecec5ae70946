"""Whatever one key sends, a short request of another gets its tokens within a few steps."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Step
from ridgeline.foresight.simulator.replay import replay
from ridgeline.foresight.simulator.replay_times import serve_again
from ridgeline.serve.engine.request_stream import ClientGone, RequestStream, StreamCaller
from tests.serve.serving import Served, serving
from tests.waiting import PATIENCE_S, eventually

KEYS = {"a": "a" * 16, "v": "v" * 16}
SEATS = 12
SHORT = {"prompt": [40, 41], "max_tokens": 8, "ignore_eos": True}
LONG = {"max_tokens": 100, "ignore_eos": True}
FLOODS: dict[str, list[dict[str, Any]]] = {
    "many answers": [LONG | {"prompt": [60 + i, 61, 62], "n": 100} for i in range(16)],
    "best of many": [
        LONG | {"prompt": [60 + i, 61, 62], "best_of": SEATS, "n": 1} for i in range(16)
    ],
    "many prompts": [LONG | {"prompt": [[60 + i, 61, 62] for i in range(30)]}] * 3,
    "many requests": [LONG | {"prompt": [60 + i, 61, 62]} for i in range(39)],
}


def ask(served: Served, key: str, body: dict[str, Any]) -> tuple[int, Any]:
    status, answer, _ = served.call("/v1/completions", body, authorization=f"Bearer {KEYS[key]}")
    return status, answer


class Counted:
    """Steps, and of each whether it has the short prompt's sequence."""

    def __init__(self, served: Served, stop_at: int) -> None:
        self.has_short: list[bool] = []
        self.reached, self.go = threading.Event(), served.valve.gate()
        self._stop_at = stop_at
        served.valve.before = self.before

    def before(self, step: Step) -> None:
        is_short = [work.sampling.prompt_len == 2 for work in step.work]
        self.has_short.append(any(is_short))
        if len(self.has_short) == self._stop_at:
            self.reached.set()
            assert self.go.wait(PATIENCE_S)


def leave(served: Served) -> None:
    """Give up all that is asked."""
    async_engine = served.running.async_engine
    served.loop.call_soon_threadsafe(
        lambda: [
            async_engine.abandon(stream, ClientGone()) for stream in list(async_engine._streams)
        ]
    )


def check(served: Served, counted: Counted, pool: ThreadPoolExecutor, num_streams: int) -> None:
    """Ask for a short answer while the engine stands still, and count the steps until its end."""
    assert counted.reached.wait(PATIENCE_S)
    async_engine = served.running.async_engine
    eventually(lambda: async_engine.num_streams == num_streams)
    short = pool.submit(ask, served, "v", SHORT)
    eventually(lambda: async_engine.num_streams == num_streams + 1)
    counted.go.set()
    status, answer = short.result()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
    after = counted.has_short[counted._stop_at :]
    assert after.index(True) <= 2
    last = max(i for i, has_short in enumerate(after) if has_short)
    assert last - after.index(True) <= 9


@pytest.mark.parametrize("bodies", FLOODS.values(), ids=FLOODS)
def test_a_short_request_waits_for_a_few_steps(model: Path, bodies: list[dict[str, Any]]) -> None:
    engine = {"max_num_seqs": SEATS, "max_num_batched_tokens": 32}
    with serving(model, engine, api_key=[*KEYS.values()]) as served, ThreadPoolExecutor(50) as pool:
        counted = Counted(served, 9)
        for body in bodies:
            pool.submit(ask, served, "a", body)
        check(served, counted, pool, len(bodies))
        leave(served)
        served.assert_idle()


def test_promises_to_one_key_do_not_hold_back_another(model: Path) -> None:
    """They are due, all of them enter at once, and nobody else is permitted to."""
    engine = {"max_num_seqs": SEATS, "max_num_batched_tokens": 32}
    with serving(model, engine, api_key=[*KEYS.values()]) as served, ThreadPoolExecutor(2) as pool:
        counted, async_engine = Counted(served, 9), served.running.async_engine

        def promise(number: int) -> None:
            params = SamplingParams(max_tokens=100, n=4, ignore_eos=True)
            prompts, text = [(60 + number, 61, 62)], served.llm.text
            stream = RequestStream(prompts, params, text.new_text, StreamCaller("key1"))
            stream.due_s = 1e9 + number
            async_engine.submit(stream)
            async_engine.permit(0)

        for number in range(24):
            served.loop.call_soon_threadsafe(promise, number)
        check(served, counted, pool, 24)
        leave(served)
        served.assert_idle()


def test_a_trace_of_several_keys_is_decided_again_the_same(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "trace": path}
    bodies = [
        (
            "av"[i % 3 == 0],
            {"prompt": [40 + i % 5] * (1 + i % 30), "n": 1 + i % 4, "max_tokens": 20},
        )
        for i in range(40)
    ]
    with serving(model, engine, api_key=[*KEYS.values()]) as served, ThreadPoolExecutor(20) as pool:
        go_on = served.valve.hold()
        asked = pool.map(lambda pair: ask(served, *pair), bodies)
        eventually(lambda: served.running.async_engine.num_streams == 20)
        go_on.set()
        assert {status for status, _ in asked} == {200}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {r["owner"] for r in records if r["type"] == "request"} == {"key1", "key2"}
    assert any(r["preempted"] for r in records if r["type"] == "step"), "nobody gave way"
    found = replay(records)
    assert found.difference is None
    again = serve_again(records)
    assert again.difference is None
    assert again.num_equal == again.num_steps == found.num_steps
