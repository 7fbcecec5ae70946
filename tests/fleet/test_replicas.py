"""Several servers of one model: real processes, killed, stopped and crashed in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from ridgeline.cli.commands.fleet import fleet as show_fleet
from tests.fleet.test_router import ASK, LONG, Routed, routing
from tests.serve.page.browser import find, keep, texts
from tests.serve.serving import JSON, first_of
from tests.waiting import connected, eventually

WISH = LONG | {"model": "a", "n": 16, "temperature": 0.8, "seed": 5, "logprobs": 5}
Answers = dict[int, tuple[str, list[float]]]


@contextmanager
def fleet(folder: Path, log: Path, *flags: str) -> Iterator[Routed]:
    with routing(folder / "a", log, "--replicas", "2", *flags) as routed:
        yield routed


@pytest.fixture(scope="module")
def routed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    log = tmp_path_factory.mktemp("log") / "log"
    with fleet(folder, log, "--silence-timeout", "5") as running:
        yield running


@pytest.fixture(scope="module")
def whole(routed: Routed) -> Answers:
    """The answers to ``WISH`` of a server that nothing happens to."""
    return answered(routed, WISH)


def table(routed: Routed, name: str = "a") -> dict[str, Any]:
    found: dict[str, Any] = routed.call("/v1/fleet")[1]["models"][name]
    return found


def busy(routed: Routed, *but: int, name: str = "a") -> int:
    """The process that has a request, once one has; not one of ``but``."""
    found: list[int] = []

    def look() -> bool:
        servers = [one for one in table(routed, name)["replicas"] if one.get("running")]
        found[:] = [one["pid"] for one in servers if one["pid"] not in but]
        return bool(found)

    eventually(look)
    return found[0]


def are_all_ready(routed: Routed, name: str = "a") -> bool:
    return [one["state"] for one in table(routed, name)["replicas"]] == ["ready", "ready"]


def answered(routed: Routed, wish: dict[str, Any]) -> Answers:
    """Return the answers to a wish when nothing happens."""
    choices = routed.call("/v1/completions", wish | {"stream": False})[1]["choices"]
    return {one["index"]: (one["text"], one["logprobs"]["token_logprobs"]) for one in choices}


def streamed(
    routed: Routed,
    disturb: Callable[[int], object],
    *,
    wish: dict[str, Any] = WISH,
    name: str = "a",
    are_ready: bool = True,
) -> Answers:
    """Stream an answer; once it has begun, ``disturb`` the process that answers."""
    eventually(lambda: are_all_ready(routed, name) or not are_ready)
    with connected(routed.port) as connection:
        connection.request("POST", "/v1/completions", json.dumps(wish), JSON)
        response = connection.getresponse()
        first = first_of(response)
        disturb(busy(routed, name=name))
        lines = (first + response.read()).splitlines()
    *chunks, done = [one for one in lines if one.startswith(b"data:")]
    assert done == b"data: [DONE]"
    texts, logprobs = dict[int, str](), dict[int, list[float]]()
    for chunk in chunks:
        (choice,) = json.loads(chunk.removeprefix(b"data: "))["choices"]
        index, ranked = choice["index"], choice["logprobs"] or {}
        texts[index] = texts.get(index, "") + choice["text"]
        logprobs.setdefault(index, []).extend(ranked.get("token_logprobs", ()))
    return {index: (text, logprobs[index]) for index, text in texts.items()}


def test_the_start_says_what_each_server_got(routed: Routed) -> None:
    status, answer, _ = routed.call("/v1/completions", ASK)
    assert (status, answer["model"]) == (200, "a"), "one model need not be named"
    assert "2 servers, each with 1 thread and 1,021.5 KiB of KV cache" in routed.said
    assert routed.states() == {"a": "loaded"}, "before the first request"
    (shown,) = routed.call("/v1/models")[1]["data"]
    assert shown["status"]["num_servers"] == 2
    assert shown["digest"].startswith("sha256:")
    assert shown["system_fingerprint"].startswith("fp_")
    answer = routed.call("/v1/completions", ASK | {"model": "a"})[1]
    assert answer["system_fingerprint"] == shown["system_fingerprint"]
    found = table(routed)
    assert (found["wanted"], found["threads"]) == (2, 1)
    assert 1 << 19 < found["kv_cache_bytes"] <= 1 << 20
    assert {one["fingerprint"] for one in found["replicas"]} == {shown["system_fingerprint"]}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_stream_goes_on_at_another_server(
    routed: Routed, whole: Answers, end: signal.Signals
) -> None:
    """And so at once: the other one runs already, and has read it if the first was told to end."""
    before = table(routed)
    pids = {one["pid"] for one in before["replicas"]}
    num_read = before["read_first"] + (end == signal.SIGTERM)

    def disturb(pid: int) -> None:
        """Nobody reads the stream meanwhile, so that it does not end by itself."""
        os.kill(pid, end)
        eventually(lambda: table(routed)["read_first"] == num_read)

    assert streamed(routed, disturb) == whole
    after = table(routed)
    assert after["resumed"] == before["resumed"] + 1
    assert after["resumed_tokens"] > before["resumed_tokens"]
    assert after["read_first"] == num_read
    assert after["diverged"] == 0
    eventually(lambda: are_all_ready(routed))
    again = {one["pid"] for one in table(routed)["replicas"]}
    assert len(again & pids) == 1, "the other one went on; this one was started again"
    eventually(lambda: table(routed)["restarted"] == before["restarted"] + 1)


def test_a_server_that_stands_still_loses_its_streams_and_gets_others_later(
    routed: Routed, whole: Answers
) -> None:
    stopped: list[int] = []

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    deaths = sum(one["deaths"] for one in table(routed)["replicas"])
    try:
        assert streamed(routed, stop) == whole
        states = {one["pid"]: one["state"] for one in table(routed)["replicas"]}
        assert states.pop(stopped[0]) == "silent"
        assert set(states.values()) == {"ready"}
    finally:
        os.kill(stopped[0], signal.SIGCONT)
    eventually(lambda: are_all_ready(routed))
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(routed.complete, "a", max_tokens=100) for _ in range(8)]
        assert len({one.result() for one in asked}) == 1
    found = table(routed)["replicas"]
    assert stopped[0] in [one["pid"] for one in found], "it was not ended"
    assert sum(one["deaths"] for one in found) == deaths


def test_an_answer_that_is_sent_whole_is_asked_for_again(routed: Routed, whole: Answers) -> None:
    eventually(lambda: are_all_ready(routed))
    before = table(routed)["again"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(routed.call, "/v1/completions", WISH | {"stream": False})
        os.kill(busy(routed), signal.SIGKILL)
        status, answer, _ = asked.result()
    assert status == 200
    assert {one["index"]: one["text"] for one in answer["choices"]} == {
        index: text for index, (text, _) in whole.items()
    }
    assert table(routed)["again"] == before + 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_nobody_is_told_of_servers_that_were_told_to_end(
    routed: Routed, whole: Answers, is_streamed: bool
) -> None:
    """Also when the other one has just ended: a refusal of the last server is not shown."""
    eventually(lambda: are_all_ready(routed))
    pids = [one["pid"] for one in table(routed)["replicas"]]
    with ThreadPoolExecutor(8) as pool:
        body = WISH | {"stream": is_streamed, "n": 4}
        asked = [pool.submit(routed.call, "/v1/completions", body) for _ in range(8)]
        busy(routed)
        os.kill(pids[0], signal.SIGTERM)
        os.kill(pids[1], signal.SIGKILL)
        for one in asked:
            status, answer, _ = one.result()
            assert status == 200
            assert is_streamed or len(answer["choices"]) == 4 * 8
            assert not is_streamed or answer.endswith("data: [DONE]\n\n")
    eventually(lambda: not {*pids} & {one.get("pid") for one in table(routed)["replicas"]})


def test_a_request_that_ends_two_servers_is_not_tried_on_a_third(routed: Routed) -> None:
    eventually(lambda: are_all_ready(routed))
    before = sum(one["deaths"] for one in table(routed)["replicas"])
    with ThreadPoolExecutor(1) as pool:
        body = WISH | {"stream": False, "n": 64}
        asked = pool.submit(routed.call, "/v1/completions", body)
        os.kill(first := busy(routed), signal.SIGSEGV)
        os.kill(busy(routed, first), signal.SIGSEGV)
        status, answer, _ = asked.result()
    assert (status, answer["error"]["code"]) == (503, "model_ended")
    assert "this request ended two servers of a" in answer["error"]["message"]
    eventually(lambda: are_all_ready(routed))
    assert sum(one["deaths"] for one in table(routed)["replicas"]) == before + 2
    lost = 'ridgeline_fleet_lost_total{model_name="a",why="blame"} 1.0\n'
    assert lost in routed.call("/metrics")[1]
    assert routed.complete("a"), "others are answered"


def test_servers_that_were_silent_and_answer_again_were_not_ended_by_a_request(
    folder: Path, tmp_path: Path
) -> None:
    """On a slow machine both may be silent in turn; the request is answered all the same."""
    with fleet(folder, tmp_path / "log", "--silence-timeout", "1") as routed:
        eventually(lambda: are_all_ready(routed))
        whole = routed.call("/v1/completions", WISH | {"stream": False})[1]["choices"]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(routed.call, "/v1/completions", WISH | {"stream": False})
            for num in (1, 2):
                os.kill(pid := busy(routed), signal.SIGSTOP)
                try:
                    eventually(lambda num=num: table(routed)["again"] >= num)
                finally:
                    os.kill(pid, signal.SIGCONT)
                eventually(lambda: are_all_ready(routed))
            status, answer, _ = asked.result()
        assert (status, answer["choices"]) == (200, whole)
        assert 'why="blame"} 0.0\n' in routed.call("/metrics")[1]


def test_where_one_hangs_a_request_waits_for_another_that_is_being_started(routed: Routed) -> None:
    eventually(lambda: are_all_ready(routed))
    hung, ended = (one["pid"] for one in table(routed)["replicas"])
    os.kill(hung, signal.SIGSTOP)
    try:
        silent = re.compile("has not answered for ([6-9]|[0-9]{2,}) s")
        eventually(lambda: silent.search(str(routed.call("/health")[1])))
        os.kill(ended, signal.SIGKILL)
        assert routed.call("/v1/completions", ASK)[0] == 200
    finally:
        os.kill(hung, signal.SIGCONT)


def test_those_that_were_beside_one_that_crashed_a_server_are_answered(routed: Routed) -> None:
    """Each is tried apart from the others, and none of them is guilty."""
    eventually(lambda: are_all_ready(routed))
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(routed.call, "/v1/completions", WISH | {"stream": False}) for _ in range(6)
        ]
        os.kill(busy(routed), signal.SIGSEGV)
        answers = [one.result()[1]["choices"] for one in asked]
    assert all(one == answers[0] for one in answers)


def test_each_server_can_be_asked_what_it_does(routed: Routed) -> None:
    eventually(lambda: are_all_ready(routed))
    short = WISH | {"stream": False, "n": 1, "max_tokens": 8}
    with ThreadPoolExecutor(4) as pool:  # more than one server gets
        asked = [pool.submit(routed.call, "/v1/completions", short) for _ in range(4)]
        names = [one.result()[1]["id"] for one in asked]
    for name in names:
        assert routed.call(f"/v1/requests/{name}/explain")[1]["name"] == name.removeprefix("cmpl-")
    metrics = routed.call("/metrics")[1]
    for number in "12":
        assert f'ridgeline:num_requests_running{{model_name="a",replica="{number}"}} 0' in metrics
        assert routed.call(f"/v1/memory?replica={number}")[0] == 200
    assert routed.call("/v1/memory?replica=3")[0] == 404
    assert 'ridgeline_fleet_replicas{model_name="a",state="ready"} 2.0\n' in metrics
    assert 'ridgeline_fleet_wanted{model_name="a"} 2.0\n' in metrics


def test_its_table_has_servers_and_what_became_of_them(
    routed: Routed, capsys: pytest.CaptureFixture[str]
) -> None:
    eventually(lambda: are_all_ready(routed))
    eventually(lambda: [one["running"] for one in table(routed)["replicas"]] == [0, 0])
    show_fleet(f"http://127.0.0.1:{routed.port}")
    head, titles, *servers = capsys.readouterr().out.splitlines()
    found = table(routed)
    assert head.startswith("a: 2 of 2 servers, each with 1 thread and 1,021.5 KiB of KV cache; ")
    assert f"{found['resumed']} stream" in head
    assert titles.split() == [
        "server",
        "state",
        "requests",
        "moved",
        "away",
        "ended",
        "process",
        "since",
    ]
    for line, one in zip(servers, found["replicas"], strict=False):
        moved, ended, pid = str(one["moved"]), str(one["deaths"]), str(one["pid"])
        assert line.split()[:6] == [one["name"], "ready", "0", moved, ended, pid]
    events = [event["what"] for event in found["events"]]
    assert servers[-1].endswith(f"server {found['events'][-1]['server']} {events[-1]}")
    assert any("is ready" in what for what in events)


def test_the_page_shows_servers_and_that_a_stream_went_on(
    routed: Routed, browser: Chrome, whole: Answers
) -> None:
    eventually(lambda: are_all_ready(routed))
    browser.get(f"http://127.0.0.1:{routed.port}/")
    keep(browser)
    eventually(lambda: find(browser, "#servers-note").text == "2 of 2 ready")
    shown = [one.split()[:2] for one in texts(browser, "#servers-rows tr")]
    assert shown == [["1", "ready"], ["2", "ready"]]
    # Who looks on is no load.
    eventually(lambda: [one["running"] for one in table(routed)["replicas"]] == [0, 0])
    num = table(routed)["resumed"] + 1
    assert streamed(routed, lambda pid: os.kill(pid, signal.SIGKILL)) == whole
    eventually(lambda: f"{num} stream" in find(browser, "#servers-facts").text)
    eventually(lambda: "SIGKILL" in "".join(texts(browser, "#servers-events li")))
    browser.get("about:blank")


def test_several_models_have_several_servers_each(folder: Path, tmp_path: Path) -> None:
    with routing(folder, tmp_path / "log", "--replicas", "2", "--keep-alive", "1") as routed:
        first = {name: routed.complete(name) for name in "ab"}
        assert first["a"] != first["b"]
        served = routed.call("/v1/fleet")[1]["models"]
        assert [served[name]["wanted"] for name in "ab"] == [2, 2]
        eventually(lambda: set(routed.states().values()) == {"unloaded"})
        assert {name: routed.complete(name) for name in "ab"} == first


def test_a_server_that_cannot_start_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="c cannot be loaded"),
        routing(folder / "c", tmp_path / "log", "--replicas", "2"),
    ):
        pass
