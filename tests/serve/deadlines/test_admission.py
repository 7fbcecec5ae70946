"""Deadlines over a real server: promised and kept, or refused at once; and nobody else is hurt."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import openai
import pytest

from ridgeline.core.step import Step
from ridgeline.foresight.deadline import PromiseMargin
from ridgeline.serve.answer.schemas import Completion
from ridgeline.serve.deadlines import admission
from tests.serve.serving import Served, check_shape, hold, serving
from tests.waiting import PATIENCE_S, eventually

ASK: dict[str, Any] = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 8,
    "temperature": 0,
}
PROMISES = 'ridgeline:promises_total{outcome="%s"}'


def outcomes(served: Served) -> dict[str, float]:
    found = served.metrics()
    names = "kept", "broken", "in_time", "late", "refused"
    return {name: found[PROMISES % name] for name in names}


@pytest.fixture(scope="module")
def knowing(model: Path) -> Iterator[Served]:
    """A server that has measured itself, because somebody asked for a promise.

    Its steps take five milliseconds at least, so that a busy machine changes little.
    """
    with serving(model, {"max_num_seqs": 4}) as served:
        served.valve.before = pace
        status, answer, headers = served.call(
            "/v1/completions", ASK | {"deadline": {"total_ms": 60_000}}
        )
        assert (status, answer["error"]["code"]) == (503, "deadline_not_foreseeable")
        assert headers["retry-after"] == "2"
        assert "measures itself" in answer["error"]["message"]
        eventually(lambda: served.running.model_server.metrics.monitor.is_calibrated)
        served.assert_idle()  # its own requests have ended
        yield served
        served.assert_idle()


@pytest.fixture(autouse=True)
def at_pace(knowing: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of the test before runs, and a round has time for its forecasts on any machine."""
    knowing.assert_idle()
    knowing.valve.before = pace
    monkeypatch.setattr(admission, "_ROUND_S", PATIENCE_S)
    yield
    knowing.valve.free()


def pace(step: Step) -> None:
    time.sleep(0.005)


def test_a_deadline_with_ease_is_promised_and_kept(knowing: Served) -> None:
    before = outcomes(knowing)
    deadline = {"deadline": {"ttft_ms": 30_000, "total_ms": 60_000}, "include_timings": True}
    with knowing.client() as client:
        plain = client.chat.completions.create(**CHAT, extra_body={"ignore_eos": True})
        extra = {"ignore_eos": True, **deadline}
        answer = client.chat.completions.create(**CHAT, extra_body=extra)
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.model_extra is not None
    promise = answer.model_extra["metrics"]["promise"]
    assert (promise["promised"], promise["outcome"]) == (True, "kept")
    assert 0 < promise["foreseen_ttft_ms"] <= promise["foreseen_total_ms"] < 60_000
    assert outcomes(knowing) == before | {"kept": before["kept"] + 1}
    eventually(lambda: any("promise=kept" in line for line in knowing.lines))


@pytest.fixture
def soon(knowing: Served) -> dict[str, Any]:
    """A request whose deadline is far beyond what is foreseen here, and passes soon."""
    body = ASK | {"deadline": {"total_ms": 300_000}, "include_timings": True}
    status, answer, _ = knowing.call("/v1/completions", body)
    assert status == 200, answer
    foreseen_ms = answer["metrics"]["promise"]["foreseen_total_ms"]
    return body | {"deadline": {"total_ms": 1000 + 20 * foreseen_ms}}


@contextmanager
def asking(served: Served, body: dict[str, Any], found: list[Any]) -> Iterator[None]:
    """Ask beside the block; behind it steps have their pace, and ``found`` the answer."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.call, "/v1/completions", body)
        answer.add_done_callback(lambda answer: found.append(answer.result()))
        try:
            yield
        finally:
            served.valve.free()
            served.valve.before = pace


@pytest.fixture
def wide(knowing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A margin so wide that no machine is that slow, until a request has ended."""
    margin = PromiseMargin()
    margin.factor = 1e6
    monkeypatch.setattr(knowing.running.model_server.deadline_admission, "_margin", margin)


def test_in_the_band_of_the_margin_it_is_accepted_without_a_promise(
    knowing: Served, wide: None
) -> None:
    before = outcomes(knowing)
    body = ASK | {"deadline": {"total_ms": 60_000}, "include_timings": True}
    plain = knowing.call("/v1/completions", ASK)[1]["choices"]
    status, answer, headers = knowing.call("/v1/completions", body)
    assert (status, answer["choices"], headers["x-ridgeline-promise"]) == (200, plain, "unpromised")
    check_shape(Completion, answer)
    promise = answer["metrics"]["promise"]
    assert (promise["promised"], promise["outcome"]) == (False, "in_time")
    assert outcomes(knowing) == before | {"in_time": before["in_time"] + 1}
    eventually(lambda: any("promise=in_time" in line for line in knowing.lines))


def test_who_was_not_promised_is_late_and_no_promise_is_broken(
    knowing: Served, soon: dict[str, Any], wide: None
) -> None:
    before, found = outcomes(knowing), list[Any]()
    knowing.valve.hold()
    with asking(knowing, soon, found):
        eventually(lambda: outcomes(knowing)["late"] == before["late"] + 1)
    assert found[0][1]["metrics"]["promise"]["outcome"] == "late"
    after = outcomes(knowing)
    assert (after["kept"], after["broken"]) == (before["kept"], before["broken"])


def test_where_too_many_were_broken_nothing_is_promised_and_the_log_says_so(
    knowing: Served,
    soon: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    deadline_admission, margin = knowing.running.model_server.deadline_admission, PromiseMargin()
    monkeypatch.setattr(deadline_admission, "_margin", margin)
    monkeypatch.setattr(knowing.running.model_server.metrics, "margin", margin)
    assert knowing.metrics()["ridgeline:promises_made"] == 1
    assert knowing.metrics()["ridgeline:promise_margin_ratio"] == pytest.approx(margin.factor)
    for _ in range(4):
        margin.judge(is_broken=True)
    knowing.valve.hold()
    with asking(knowing, soon, []):
        eventually(lambda: not margin.are_promises_made)  # the fifth is broken
    assert "changes too much for promises" in caplog.text
    assert knowing.metrics()["ridgeline:promises_made"] == 0
    knowing.valve.before = pace
    before = outcomes(knowing)
    body = ASK | {"deadline": {"total_ms": 60_000}}
    status, _, headers = knowing.call("/v1/completions", body)
    assert (status, headers["x-ridgeline-promise"]) == (200, "unpromised")
    assert outcomes(knowing) == before | {"in_time": before["in_time"] + 1}
    while not margin.are_promises_made:
        margin.judge(is_broken=False)
    status, _, headers = knowing.call("/v1/completions", body)
    assert (status, headers["x-ridgeline-promise"]) == (200, "promised")


def test_what_cannot_be_kept_is_refused_at_once(knowing: Served) -> None:
    before, steps = outcomes(knowing), list[Step]()
    knowing.valve.before = steps.append
    with knowing.client() as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(
            **CHAT | {"max_tokens": 100}, extra_body={"deadline": {"total_ms": 2}}
        )
    assert not steps, "it was computed"
    error = caught.value
    assert (error.status_code, error.code, error.param) == (
        503,
        "deadline_cannot_be_kept",
        "deadline",
    )
    assert int(error.response.headers["retry-after"]) >= 1
    assert "(total_ms: 2)" in error.message
    assert outcomes(knowing) == before | {"refused": before["refused"] + 1}


def test_a_refusal_says_what_is_foreseen(knowing: Served) -> None:
    """A hundred steps of five milliseconds."""
    body = ASK | {"max_tokens": 100, "deadline": {"ttft_ms": 20_000, "total_ms": 500}}
    status, answer, headers = knowing.call("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (503, "deadline_cannot_be_kept")
    assert int(headers["x-foreseen-total-ms"]) > 500
    assert int(headers["x-foreseen-ttft-ms"]) < int(headers["x-foreseen-total-ms"])
    body["deadline"]["total_ms"] = 4 * int(headers["x-foreseen-total-ms"])
    assert knowing.call("/v1/completions", body)[0] == 200


def test_best_effort_gives_way_and_says_the_same(knowing: Served) -> None:
    """Four neighbours have all seats for seconds; who has a deadline gets one at once."""
    body = ASK | {"max_tokens": 100}
    alone = knowing.call("/v1/completions", body)[1]["choices"]
    before, found, is_answered = outcomes(knowing), list[Any](), threading.Event()
    knowing.valve.before = lambda step: time.sleep(0.005 if is_answered.is_set() else 0.1)
    threads = [
        threading.Thread(target=lambda: found.append(knowing.call("/v1/completions", body)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    queues = knowing.llm.engine.scheduler.queues
    eventually(lambda: len(queues.running) == 4)
    try:
        status, answer, _ = knowing.call(
            "/v1/completions",
            ASK | {"max_tokens": 4, "include_timings": True, "deadline": {"ttft_ms": 60_000}},
        )
        num_found = len(found)
    finally:
        is_answered.set()
        for thread in threads:
            thread.join()
    assert (status, answer["metrics"]["promise"]["outcome"]) == (200, "kept")
    assert num_found == 0, "it did not pass its neighbours"
    assert all(status == 200 for status, _, _ in found)
    assert all(answer["choices"] == alone for _, answer, _ in found)
    assert outcomes(knowing) == before | {"kept": before["kept"] + 1}


def test_others_enter_as_they_are_permitted_and_when_nobody_runs(knowing: Served) -> None:
    async_engine, queues = knowing.running.async_engine, knowing.llm.engine.scheduler.queues
    found: list[int] = []

    def ask(num_new: int) -> threading.Thread:
        body = ASK | {"max_tokens": num_new}
        thread = threading.Thread(
            target=lambda: found.append(knowing.call("/v1/completions", body)[0])
        )
        thread.start()
        return thread

    for is_let_in in (True, False):
        knowing.valve.before = lambda step: time.sleep(0.1)  # until all are there
        threads = [ask(100)]
        eventually(lambda: queues.running)
        async_engine.permit(1)
        threads.append(ask(100))
        eventually(lambda: len(queues.running) == 2)
        threads.append(ask(2))
        eventually(lambda: async_engine.num_queued == 1)
        num_steps = knowing.valve.num_steps
        eventually(lambda: knowing.valve.num_steps > num_steps + 2)  # noqa: B023
        assert async_engine.num_queued == 1, "more entered than were permitted"
        knowing.valve.before = pace
        if is_let_in:
            async_engine.permit(inf)
            eventually(lambda: async_engine.num_queued == 0)
        for thread in threads:
            thread.join()
    async_engine.permit(inf)
    assert found == [200] * 6


def test_a_promise_is_broken_when_its_time_has_passed(
    knowing: Served, soon: dict[str, Any]
) -> None:
    before, gate, found = outcomes(knowing), knowing.valve.gate(), list[Any]()
    served_steps: list[Step] = []

    def hold_the_third(step: Step) -> None:
        pace(step)
        served_steps.append(step)
        if len(served_steps) == 3:
            gate.wait(PATIENCE_S)

    knowing.valve.before = hold_the_third
    with asking(knowing, soon, found):
        eventually(lambda: outcomes(knowing)["broken"] == before["broken"] + 1)
        assert not found, "it is counted before the answer ends"
    status, answer, _ = found[0]
    assert (status, answer["metrics"]["promise"]["outcome"]) == (200, "broken")
    assert outcomes(knowing)["kept"] == before["kept"]


def test_a_verdict_does_not_wait_for_the_step_under_way(
    knowing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a step never ends, what cannot be kept is foreseen and refused all the same."""
    held, gate, steps = threading.Event(), knowing.valve.gate(), list[Step]()

    def hold_the_third(step: Step) -> None:
        pace(step)  # or quick steps would be fitted too, and a second a step be less
        steps.append(step)
        if len(steps) == 3:
            held.set()
            gate.wait(PATIENCE_S)

    knowing.valve.before = hold_the_third
    promised = ASK | {"deadline": {"total_ms": 60_000}}
    with asking(knowing, promised, []):
        assert held.wait(PATIENCE_S)
        monitor = knowing.running.model_server.metrics.monitor
        # A second a step or more, so a hundred in all: the verdict has its time.
        monkeypatch.setattr(monitor, "factor", 200.0)
        body = ASK | {"max_tokens": 100, "deadline": {"ttft_ms": 60_000, "total_ms": 30_000}}
        status, answer, headers = knowing.call("/v1/completions", body)
    assert status == 503, (answer, monitor.calibration)
    assert answer["error"]["code"] == "deadline_cannot_be_kept"
    assert "x-foreseen-ttft-ms" in headers, "nothing was foreseen"


def test_who_leaves_breaks_nothing(knowing: Served) -> None:
    before, go_on = outcomes(knowing), hold(knowing, after=3, pace_s=0.005)
    extra = {"ignore_eos": True, "deadline": {"total_ms": 300_000}}
    with knowing.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="Once", max_tokens=100, stream=True, extra_body=extra
        )
        next(iter(stream))
        stream.close()
        eventually(lambda: not knowing.running.async_engine.num_streams)
        go_on.set()
    knowing.assert_idle()
    assert outcomes(knowing) == before


def test_the_header_is_a_deadline_for_every_dialect(knowing: Served) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": ASK,
        "/v1/messages": {"model": "tiny", "max_tokens": 4, "messages": hello},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
        "/api/generate": {"model": "tiny", "prompt": "Hello", "stream": False},
    }
    for path, body in bodies.items():
        before = outcomes(knowing)
        status, _, headers = knowing.call(path, body, X_Deadline_Ms="0.5")
        assert (status, headers["retry-after"]) == (503, "1"), path
        assert outcomes(knowing)["refused"] == before["refused"] + 1


@pytest.mark.parametrize("value", ["soon", "-3", "0", "nan", "inf", "1e15", ""])
def test_a_wrong_header_gets_one_line(served: Served, value: str) -> None:
    served.refused_for("x-deadline-ms", "/v1/completions", ASK, X_Deadline_Ms=value)


def test_what_contradicts_is_refused(served: Served) -> None:
    body = ASK | {"deadline": {"total_ms": 5000}}
    served.refused_for("deadline", "/v1/completions", body, X_Deadline_Ms="600")
