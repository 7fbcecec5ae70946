"""The engine's thread cannot die or hang unseen: what fails in it ends requests with an error."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ridgeline.core import commit
from tests.serve.engine.test_async_engine import (
    COMPLETE,
    GOOD,
    LONG,
    Panic,
    answer_of,
    ask,
    post,
    texts,
)
from tests.serve.serving import Served, hold, serving
from tests.waiting import PATIENCE_S, eventually


@pytest.mark.parametrize("kind", [AssertionError, Panic, SystemExit])
def test_a_bug_in_the_engine_ends_all_and_leaves_it_able(
    served: Served, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def failing(*arguments: object) -> None:
        raise kind("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(commit, "commit", failing)
        assert [status for status, _ in texts(served, GOOD)] == [500] * 6
    assert answer_of(ask(served, GOOD[0]))
    assert served.call("/health")[0] == served.call("/ready")[0] == 200


def test_an_engine_that_cannot_go_on_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model) as served:

        def broken(*arguments: object) -> None:
            raise AssertionError("a bug of ours")

        monkeypatch.setattr(commit, "commit", broken)
        monkeypatch.setattr(served.llm.engine, "check", broken)
        assert ask(served, [40])[0] == 500
        for path in ("/health", "/ready"):
            status, answer, _ = served.call(path)
            assert (status, answer["status"]) == (503, "no")
        status, error = served.refused(COMPLETE, LONG)
        assert (status, error["code"]) == (503, "engine_stopped")


def test_what_hits_the_thread_while_it_waits_does_not_end_it(served: Served) -> None:
    async_engine = served.running.async_engine
    raise_in, thread_id = ctypes.pythonapi.PyThreadState_SetAsyncExc, async_engine._thread.ident
    looks = []
    assert raise_in(ctypes.c_ulong(thread_id or 0), ctypes.py_object(Panic)) == 1
    async_engine.between_steps(lambda: looks.append(1))
    eventually(lambda: looks)  # who waits for a look at the engine gets it; by then all is cleared
    assert answer_of(ask(served, GOOD[0]))


def test_a_look_at_the_engine_that_fails_hurts_nobody(served: Served) -> None:
    def look() -> None:
        raise Panic("a bug of ours")

    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(ask, served, GOOD[0])
        served.running.async_engine.between_steps(look)
        assert answer_of(answering.result())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stream", [True, False])
def test_if_the_thread_ends_all_the_same_nobody_waits_for_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with serving(model) as served:

        def broken(*arguments: object) -> None:
            raise Panic("a bug of ours")

        async_engine, go_on = served.running.async_engine, hold(served, after=3)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(served.call, COMPLETE, LONG | {"stream": stream})
            eventually(lambda: served.valve.num_steps == 4)
            monkeypatch.setattr(commit, "commit", broken)
            monkeypatch.setattr(async_engine, "_clear", broken)
            go_on.set()
            status, answer, _ = asking.result()
        async_engine._thread.join(PATIENCE_S)
        for path in ("/health", "/ready"):
            assert served.call(path)[0] == 503
            assert served.call(path)[1]["reason"] == "the engine has stopped: its thread has ended"
        if stream:
            assert b"thread has ended" in answer.split(b"\n\n")[-2]
        else:
            assert (status, answer["error"]["code"]) == (503, "generation_failed")
        status, error = served.refused(COMPLETE, LONG)
        assert (status, error["code"]) == (503, "engine_stopped")


def test_nobody_waits_for_a_step_that_takes_too_long(model: Path) -> None:
    with serving(model, step_timeout=0.2) as served:
        go_on = hold(served, after=0)
        status, answer, _ = served.call(COMPLETE, LONG)  # while the step is still under way
        assert (status, answer["error"]["message"]) == (503, "a step has taken more than 0.2 s")
        status, error = served.refused(COMPLETE, LONG)
        assert (status, error["code"]) == (503, "engine_stopped")
        served.running.async_engine.step_timeout_s = 600
        go_on.set()
        eventually(lambda: served.call("/health")[0] == 200)
        assert answer_of(ask(served, GOOD[0]))
        served.assert_idle()


def test_a_step_that_takes_too_long_shows_in_health(model: Path) -> None:
    with serving(model, step_timeout=600) as served:
        held = served.valve.hold()
        connection = post(served.port, LONG)
        eventually(lambda: served.valve.num_steps == 1)
        assert served.call("/health")[0] == 200
        served.running.async_engine.step_timeout_s = 0.01
        eventually(lambda: served.call("/health")[0] == 503)
        held.set()
        eventually(lambda: served.call("/health")[0] == 200)
        connection.close()
        served.assert_idle()
