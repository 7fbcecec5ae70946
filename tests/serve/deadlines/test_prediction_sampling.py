"""One request of fifty is foreseen when it comes, and compared with what it got."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.step import Step
from ridgeline.foresight.simulator.forecast import forecast
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.serve.deadlines.prediction_sampling import EVERY, Arrivals
from tests.serve.serving import Served, StepClock, serving
from tests.waiting import eventually

ASK: dict[str, Any] = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
STEP_S = 0.03
ERROR = 'ridgeline:prediction_mean_abs_error_ratio{of="%s_at_arrival"}'


@pytest.fixture
def knowing(model: Path) -> Iterator[Served]:
    """A server of one sequence at a time, whose steps take 30 milliseconds, as it knows."""
    clock = StepClock()
    with serving(model, {"max_num_seqs": 1}) as served, clock.of(served):
        served.valve.before = lambda step: clock.pass_by(STEP_S) and None
        monitor = served.running.model_server.metrics.monitor
        times = StepTime((1, 64), (STEP_S, STEP_S), 0.0, 0.0, 0.0, 0.0, 0.0)
        monitor.calibration = replace(monitor.calibration, source="measured", times=times)
        monitor._times, monitor.factor = times, 1.0
        yield served
        served.assert_idle()


def ask(served: Served, **changes: Any) -> None:
    assert served.call("/v1/completions", ASK | changes)[0] == 200


def found(served: Served) -> tuple[float, float | None, float | None]:
    """Return how many were foreseen, and by how much first token and end were off."""
    metrics = served.metrics()
    errors = (metrics.get(ERROR % of) for of in ("ttft", "e2e"))
    return metrics["ridgeline:foreseen_requests_total"], *errors


def test_waiting_is_foreseen_too(knowing: Served) -> None:
    """One that waits for another's forty steps: without them its times would be far too short."""
    arrivals, async_engine = knowing.running.model_server.arrivals, knowing.running.async_engine
    take_time = knowing.valve.before

    def before(step: Step) -> None:
        if knowing.valve.num_steps == 3:  # the other is there by then, on any machine
            eventually(lambda: async_engine.num_queued == 1)
        take_time(step)

    knowing.valve.before = before
    first = threading.Thread(target=ask, args=(knowing,), kwargs={"max_tokens": 40})
    first.start()
    eventually(lambda: knowing.valve.num_steps > 2)
    arrivals.every = 1
    ask(knowing)
    first.join()
    eventually(lambda: found(knowing)[0] == 1)
    _, ttft_error, e2e_error = found(knowing)
    assert ttft_error is not None
    assert e2e_error is not None
    assert ttft_error < 0.01  # with its own step alone it would be 0.97
    assert e2e_error < 0.01


def test_an_answer_that_is_shorter_says_nothing_of_its_end(knowing: Served) -> None:
    status, answer, _ = knowing.call("/v1/completions", ASK | {"max_tokens": 30})
    text = answer["choices"][0]["text"]
    assert status == 200
    knowing.running.model_server.arrivals.every = 1
    ask(knowing, max_tokens=30, stop=[text[len(text) // 2 :][:3]])
    eventually(lambda: found(knowing)[0] == 1)
    assert found(knowing)[2] is None


def test_one_of_fifty_is_foreseen_and_never_one_with_several_prompts(
    knowing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = knowing.running.model_server.arrivals
    begin, num_begun = arrivals._begin, 0

    def count(*arguments: Any) -> None:
        nonlocal num_begun
        num_begun += 1
        begin(*arguments)

    monkeypatch.setattr(arrivals, "_begin", count)
    knowing.valve.before = lambda step: None
    for _ in range(EVERY - 1):
        ask(knowing, max_tokens=1)
    ask(knowing, max_tokens=1, prompt=["Once", "Twice"])
    knowing.catch_up()
    assert num_begun == 0
    ask(knowing, max_tokens=1)
    eventually(lambda: found(knowing)[0] == 1)
    arrivals._next_s = 0.0  # however long the forecast took
    for _ in range(EVERY - 1):
        ask(knowing, max_tokens=1)
    knowing.catch_up()
    assert num_begun == found(knowing)[0] == 1


def test_nothing_is_foreseen_before_anything_was_measured(model: Path) -> None:
    with serving(model) as served:
        arrivals = served.running.model_server.arrivals
        arrivals.every = 1
        for _ in range(3):
            ask(served)
        assert not arrivals._is_busy
        assert found(served) == (0, None, None)


def test_forecasts_have_a_two_hundredth_of_a_processor(
    knowing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many come: the next forecast waits until the last has paid for itself."""
    arrivals = knowing.running.model_server.arrivals
    end, ended = arrivals._end, list[tuple[float, float]]()

    def note(sample: Any, now_s: float, foreseen: Any, cost_s: float) -> None:
        ended.append((time.monotonic(), cost_s))
        end(sample, now_s, foreseen, cost_s)

    monkeypatch.setattr(arrivals, "_end", note)
    arrivals.every = 1
    ask(knowing)
    eventually(lambda: found(knowing)[0] == 1)
    ((ended_s, cost_s),) = ended
    assert cost_s > 0
    assert arrivals._next_s >= ended_s + 200 * cost_s
    arrivals._next_s = time.monotonic() + 600
    ask(knowing)
    assert not arrivals._is_busy
    assert found(knowing)[0] == 1
    arrivals._next_s = 0.0
    ask(knowing)
    eventually(lambda: found(knowing)[0] == 2)


def test_a_forecast_that_takes_too_long_is_given_up(
    knowing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.serve.deadlines.prediction_sampling._MOST_STEPS", 5)
    arrivals = knowing.running.model_server.arrivals
    arrivals.every = 1
    ask(knowing, max_tokens=8)
    eventually(lambda: not arrivals._is_busy)
    assert found(knowing)[0] == 0


def test_closing_ends_a_forecast(knowing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ridgeline.serve.deadlines.prediction_sampling._REST_S", 0.3
    )  # a hundred of these
    ended = []

    def watched(*arguments: Any, **named: Any) -> Any:
        try:
            found = forecast(*arguments, **named)
        except Exception:
            ended.append("given up")
            raise
        ended.append("whole")
        return found

    monkeypatch.setattr("ridgeline.serve.deadlines.prediction_sampling.forecast", watched)
    arrivals = Arrivals(
        knowing.running.async_engine, knowing.running.model_server.metrics.monitor, every=1
    )
    ask(knowing, max_tokens=100)
    assert arrivals._is_busy
    arrivals.close()
    arrivals._thread.shutdown(wait=True)
    assert ended in (["given up"], [])  # none if it had not begun
    ask(knowing)
    assert found(knowing)[0] == 0
