"""The live view's events and the page's files, without a browser."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ridgeline.core.step import Step
from ridgeline.serve.observe.live import _PERIOD_S
from ridgeline.serve.page import FILES
from tests.serve.serving import Served, serving
from tests.waiting import PATIENCE_S, connected, eventually

SECRET = "zebra"
ASK = {"prompt": SECRET * 8, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "n": 2}


@contextmanager
def watching(served: Served) -> Iterator[Iterator[dict[str, Any]]]:
    with connected(served.port) as connection:
        connection.request("GET", "/v1/live")
        response = connection.getresponse()
        assert response.getheader("content-type", "").startswith("text/event-stream")
        yield views(response)
        response.close()


def views(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        assert SECRET.encode() not in line
        assert response.readline() == b"\n"
        yield json.loads(line.removeprefix(b"data: "))


def blocks_of(view: dict[str, Any]) -> dict[str, int]:
    found = dict.fromkeys("fcus", 0)
    for kind, count in re.findall(r"([fcus])(\d+)", view["blocks"]):
        found[kind] += int(count)
    return found


def test_a_watcher_sees_what_runs(served: Served) -> None:
    pool = served.llm.engine.scheduler.queues.kv.pool
    async_engine, view_of_all = served.running.async_engine, served.running.model_server.live
    middle = served.valve.num_steps + 12

    def before(step: Step) -> None:
        time.sleep(0.03)
        if served.valve.num_steps == middle:  # a view of both was taken just now, or is next
            eventually(lambda: async_engine._callbacks or not view_of_all._is_due)

    served.valve.before = before
    began_s = time.monotonic()
    with watching(served) as live:
        idle = next(live)
        assert (idle["num_running"], idle["sequences"], idle["steps"]) == (0, [], [])
        asking = threading.Thread(target=served.call, args=("/v1/completions", ASK))
        asking.start()
        seen = []
        for view in live:
            seen.append(view)
            assert sum(blocks_of(view).values()) == len(pool.refs)
            if not view["num_running"] and view["steps"]:
                break
        asking.join()
    assert len(seen) * _PERIOD_S <= time.monotonic() - began_s, "more views than there is time for"
    steps = [step for view in seen for step in view["steps"]]
    prompt_len = len(served.llm.tokenizer.encode(SECRET * 8))
    assert sum(step[1] for step in steps) == prompt_len
    assert sum(step[2] for step in steps) == 48
    assert all(step[0] > 25 for step in steps)
    assert all(step[3] > 0 for step in steps), "nothing was foreseen"
    assert seen[-1]["speed"] > 0
    assert isinstance(seen[-1]["is_calibrated"], bool)
    busy = [view for view in seen if view["num_running"] == 2]
    grown = [view["sequences"][0]["generated_tokens"] for view in busy]
    assert grown == sorted(set(grown))
    first = busy[0]["sequences"]
    assert [one["id"][1] for one in first] == [0, 1]
    for one in first:
        assert (one["status"], one["max_tokens"]) == ("running", 24)
        assert one["prompt_tokens"] == one["computed_tokens"] == prompt_len
    held = blocks_of(busy[-1])
    assert held["s"] >= prompt_len // 16 > 0  # both answers share the prompt
    assert sum(one["num_blocks"] for one in busy[-1]["sequences"]) == held["u"] + 2 * held["s"]
    done = blocks_of(seen[-1])
    assert (done["u"], done["s"]) == (0, 0)
    assert done["c"] >= held["s"]


def test_nothing_is_done_when_nobody_looks(served: Served) -> None:
    async_engine, live = served.running.async_engine, served.running.model_server.live
    eventually(
        lambda: len(async_engine.listeners) == 5
    )  # engine, monitor, metrics, trace buffer, counts
    with watching(served) as one, watching(served) as other:
        assert next(one)["num_running"] == next(other)["num_running"] == 0
        assert len(async_engine.listeners) == 6
    eventually(lambda: len(async_engine.listeners) == 5)
    assert not live._watchers
    served.catch_up()  # with the views that were asked for
    served.call("/v1/completions", ASK | {"prompt": "of no other test, as it is cached"})
    served.catch_up()
    assert live._views == {}
    assert live._steps == []
    assert not live._is_due


def test_a_watcher_does_not_delay_the_end(model: Path) -> None:
    with serving(model, shutdown_timeout=600) as served, watching(served) as live:
        next(live)
        served.loop.call_soon_threadsafe(served.running.stop)
        assert list(live) == []  # else its client gives up after a minute without a word
        served.thread.join(PATIENCE_S)
        assert not served.thread.is_alive()


def test_the_page_loads_nothing_from_elsewhere(served: Served) -> None:
    page = served.call("/")
    assert page[2]["content-type"].startswith("text/html")
    assert not re.search(rb"https?://|<script>|<style|style=| on\w+=", page[1])
    files = {path: served.call(path) for path in FILES}
    names = ["/" + name for name in re.findall(r'"(page/.*?)"', page[1].decode())]
    for path, (_, text, _) in files.items():
        if path.endswith(".js") and not path.startswith("/page/vendor/"):
            names += ["/page/" + name for name in re.findall(r"'\./(.*?)'", text.decode())]
    assert {"/page/page.js", "/page/page.css", "/page/markdown.js"} <= set(names) <= set(files)
    for path, (status, text, headers) in files.items():
        assert status == 200
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        if path.startswith("/page/vendor/"):  # the page asks it for no HTML
            continue
        assert not re.search(rb"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text)
    assert served.call("/page/../app.py")[0] == served.call("/page/none.js")[0] == 404
