"""Whatever one client sends, a short request gets its first token within a few steps.

All requests here come from the same client; between clients it is ``scheduling.admission`` alone.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.step import Step
from tests.serve.engine.test_async_engine import post, rest
from tests.serve.serving import serving
from tests.waiting import PATIENCE_S, eventually

BUDGET, SEATS = 32, 12
LONG = [50 + i % 40 for i in range(110)]  # almost four steps
SHORT = {"prompt": [40, 41], "max_tokens": 2, "ignore_eos": True}
MORE = {"max_tokens": 3, "ignore_eos": True}
OTHERS: dict[str, list[dict[str, Any]]] = {
    "one request of many long prompts": [MORE | {"prompt": [LONG] * 20}],
    "the same, ranked": [MORE | {"prompt": [LONG] * 20, "echo": True, "logprobs": 2}],
    "many requests of a long prompt": [MORE | {"prompt": [i, *LONG]} for i in range(60, 80)],
    "many answers to each of many prompts": [
        {
            "prompt": [[i, 61, 62] for i in range(60, 80)],
            "n": 4,
            "max_tokens": 100,
            "ignore_eos": True,
        }
    ],
    "long answers to many prompts": [
        {"prompt": [[i, 61, 62] for i in range(60, 80)], "max_tokens": 100, "ignore_eos": True}
    ],
    "many answers": [{"prompt": [60, 61, 62], "n": 8, "max_tokens": 100, "ignore_eos": True}],
    "long answers and long prompts": [
        *[{"prompt": [i, 60, 61], "max_tokens": 100, "ignore_eos": True} for i in range(60, 68)],
        *[MORE | {"prompt": [i, *LONG]} for i in range(68, 80)],
    ],
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_a_short_request_waits_for_a_few_steps(
    model: Path, others: list[dict[str, Any]], stream: bool
) -> None:
    steps: list[Step] = []
    held = {1: threading.Event(), 9: threading.Event()}  # steps at which the engine stands still
    go = {number: threading.Event() for number in held}

    def before(step: Step) -> None:
        steps.append(step)
        if len(steps) in held:
            held[len(steps)].set()
            assert go[len(steps)].wait(PATIENCE_S)

    engine = {"max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET}
    with serving(model, engine) as served:
        served.valve.before = before
        async_engine = served.running.async_engine
        connections = [post(served.port, body | {"stream": stream}) for body in others]
        assert held[1].wait(PATIENCE_S)
        eventually(lambda: async_engine.num_streams == len(others))
        go[1].set()
        assert held[9].wait(PATIENCE_S)
        num_queued = async_engine.num_queued
        short = post(served.port, SHORT | {"stream": stream})
        eventually(lambda: async_engine.num_queued == num_queued + 1)
        go[9].set()
        assert b'"finish_reason":"length"' in rest(short).replace(b'": "', b'":"')
        first = next(
            i
            for i, step in enumerate(steps)
            if any(work.seeds and work.sampling.prompt_len == 2 for work in step.work)
        )
        assert first - 9 <= 5
        for connection in (short, *connections):
            connection.close()
        served.assert_idle()
