"""Sleep over HTTP: who may ask for it, when it is refused, and what wakes the engine."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import pytest

from ridgeline.serve.http.options import ServeOptions
from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.serve.serving import Served, hold, serving
from tests.waiting import eventually

ASKED = {"prompt": [5 + i % 90 for i in range(90)], "max_tokens": 4, "seed": 3, "logprobs": 2}
ENDS = 2 * mmap.PAGESIZE  # of the array of caches: others may use these pages too


def answer(served: Served) -> Any:
    status, found, _ = served.call("/v1/completions", ASKED)
    assert status == 200
    return found["choices"]


def cached(served: Served) -> int:
    _, lines, _ = served.call("/v1/memory")
    return sum(one["resident_bytes"] for one in lines["lines"] if one["name"] == "kv_cache")


def test_it_sleeps_and_a_request_wakes_it(served: Served) -> None:
    first, in_memory = answer(served), cached(served)
    status, told, _ = served.call("/v1/sleep", {"level": 2})
    assert (status, told["level"]) == (200, 2)
    assert set(told) == {"level", "resident_bytes", "given_back_bytes"}
    assert cached(served) <= ENDS < in_memory
    assert "a request wakes it" in served.call("/health")[1]["asleep"]
    assert served.call("/ready")[0] == 200
    assert served.call("/props")[1]["is_sleeping"] is True
    assert answer(served) == first
    assert served.call("/is_sleeping")[1] == {"is_sleeping": False}
    assert served.call("/health")[1] == {"status": "ok"}


def test_vllms_names(served: Served) -> None:
    assert served.call("/sleep?level=1", method="POST")[0] == 200
    assert served.call("/is_sleeping")[1] == {"is_sleeping": True}
    assert served.call("/wake_up?tags=weights", method="POST")[0] == 200
    assert served.call("/is_sleeping")[1] == {"is_sleeping": False}
    assert served.call("/v1/sleep", method="POST")[1]["level"] == 1
    assert served.call("/v1/wake", method="POST")[1]["level"] == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/sleep", {"level": 3}, "level"),
        ("/v1/sleep", {"level": True}, "level"),
        ("/v1/sleep", {"depth": 1}, "depth"),
        ("/v1/sleep?level=0", None, "level"),
        ("/v1/sleep?level=deep", None, "level"),
        ("/sleep?wait=perhaps", None, "wait"),
        ("/sleep?wait=" + "%5B" * 20_000, None, "wait"),
    ],
)
def test_what_makes_no_sense_is_refused(served: Served, path: str, body: Any, param: str) -> None:
    status, found, _ = served.call(path, body, "POST")
    assert (status, found["error"]["param"]) == (400, param)
    assert served.call("/is_sleeping")[1] == {"is_sleeping": False}


def test_it_does_not_sleep_while_requests_run(served: Served) -> None:
    go_on = hold(served, after=1)
    asking = threading.Thread(target=answer, args=(served,))
    asking.start()
    eventually(lambda: served.running.async_engine.num_streams)
    try:
        status, error = served.refused("/v1/sleep", {})
        assert (status, error["code"]) == (409, "busy")
        waiting: list[Any] = []
        sleeper = threading.Thread(
            target=lambda: waiting.append(served.call("/v1/sleep", {"wait": True}))
        )
        sleeper.start()
    finally:
        go_on.set()
    asking.join()
    sleeper.join()
    assert waiting[0][:1] == (200,)
    assert served.call("/is_sleeping")[1] == {"is_sleeping": True}
    served.call("/v1/wake", method="POST")


def test_it_sleeps_by_itself_when_idle(model: Path) -> None:  # noqa: F811
    with serving(model, idle_release="10ms") as served:
        first = answer(served)
        eventually(lambda: served.llm.sleeping.level == 2)
        assert cached(served) <= ENDS
        assert answer(served) == first
        eventually(lambda: served.llm.sleeping.level == 2)


@pytest.mark.parametrize("time", ["0", "-1", "soon"])
def test_a_time_that_is_none(time: str) -> None:
    with pytest.raises(ValueError, match="idle-release"):
        ServeOptions(idle_release=time)


@pytest.mark.parametrize("num_naps", [20, pytest.param(1000, marks=pytest.mark.full)])
def test_naps_under_load(model: Path, num_naps: int) -> None:  # noqa: F811
    with serving(model) as served:
        first, is_over = answer(served), threading.Event()
        found: list[Any] = []

        def ask() -> None:
            while not is_over.is_set():
                found.append(answer(served))

        askers = [threading.Thread(target=ask) for _ in range(3)]
        for one in askers:
            one.start()
        taken, refused = 0, 0
        while taken < num_naps:
            status, _, _ = served.call("/v1/sleep", {"level": 1 + taken % 2})
            assert status in (200, 409)
            taken, refused = taken + (status == 200), refused + (status == 409)
            if refused > 50 * (taken + 1):  # three that ask without a pause leave it no moment
                status, _, _ = served.call("/v1/sleep", {"wait": True})
                taken, refused = taken + 1, 0
        is_over.set()
        for one in askers:
            one.join()
        assert found
        assert all(one == first for one in found)
