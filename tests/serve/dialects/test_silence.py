"""A stream that waits: its head comes, and then signs of life, in the form of each API."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest

from ridgeline.core.step import Step
from tests.engine.test_llm import HELLO
from tests.serve.serving import JSON, Served, hold
from tests.waiting import PATIENCE_S, connected, eventually

NAME = {"model": "tiny"}
ROUTES: dict[str, tuple[dict[str, Any], bytes]] = {  # a body, and how a sign of life begins
    "/v1/chat/completions": ({"messages": HELLO, "max_tokens": 3, "stream": True}, b": ping"),
    "/v1/completions": ({"prompt": "a", "max_tokens": 3, "stream": True}, b": ping"),
    "/v1/responses": ({"input": "a", "max_output_tokens": 3, "stream": True}, b": ping"),
    "/v1/messages": (
        NAME | {"messages": HELLO, "max_tokens": 3, "stream": True},
        b"event: ping",
    ),
    "/api/chat": (NAME | {"messages": HELLO, "options": {"num_predict": 3}}, b""),
    "/api/generate": (NAME | {"prompt": "a", "options": {"num_predict": 3}}, b""),
}
# The first and the last line of a stream that went well.
ENDS = {
    "/v1/chat/completions": (b"data: {", b"data: [DONE]"),
    "/v1/completions": (b"data: {", b"data: [DONE]"),
    "/v1/responses": (b"event: response.created", b"data: {"),
    "/v1/messages": (b"event: message_start", b'data: {"type":"message_stop"}'),
    "/api/chat": (b"{", b"{"),
    "/api/generate": (b"{", b"{"),
}


@contextmanager
def asked(served: Served, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """Send a request, and yield its response when the head is there."""
    with connected(served.port) as connection:
        connection.request("POST", path, json.dumps(body), JSON)
        with closing(connection.getresponse()) as response:
            yield response


def test_a_head_and_signs_of_life_come_before_the_first_token(served: Served) -> None:
    """The engine does nothing until each client has what it waits for."""
    go_on = hold(served, after=0)

    def read(path: str) -> list[bytes]:
        body, ping = ROUTES[path]
        with asked(served, path, body) as response:
            assert response.status == 200
            assert not ping or response.readline().strip() == ping
            waiting.release()
            return [line.strip() for line in response.read().splitlines() if line.strip()]

    waiting = threading.Semaphore(0)
    with ThreadPoolExecutor(len(ROUTES)) as pool:
        answers = {path: pool.submit(read, path) for path in ROUTES}
        for _ in ROUTES:
            assert waiting.acquire(timeout=PATIENCE_S)
        go_on.set()
        for path, answer in answers.items():
            lines = answer.result()
            lines = [one for one in lines if b"ping" not in one]
            first, last = ENDS[path]
            assert lines[0].startswith(first)
            assert lines[-1].startswith(last)


def test_pieces_of_a_stream_share_a_timer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer for each piece would cost more of the event loop's time than the piece."""
    loop, set_timers = served.loop, list[Any]()
    call_at = loop.call_at

    def counted(when: float, callback: Any, *arguments: Any, **options: Any) -> Any:
        set_timers.append(callback)
        return call_at(when, callback, *arguments, **options)

    def wait_for_loop(step: Step) -> None:
        """A piece a step: the loop has had all the turns that it takes to send the last one."""
        for _ in range(20):
            has_turn = threading.Event()
            loop.call_soon_threadsafe(has_turn.set)
            has_turn.wait(PATIENCE_S)

    monkeypatch.setattr(loop, "call_at", counted)
    served.valve.before = wait_for_loop
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with asked(served, "/v1/completions", body) as response:
        num_pieces = sum(line.startswith(b"data: ") for line in response)
    assert num_pieces > 40
    assert 0 < len(set_timers) < num_pieces / 2


def test_who_waits_in_the_queue_gets_a_head_too(served: Served) -> None:
    go_on = hold(served, after=2)
    slots = served.llm.config.max_num_seqs
    body = ROUTES["/v1/completions"][0]
    with (
        asked(served, "/v1/completions", body | {"n": min(slots, 128)}) as first,
        asked(served, "/v1/completions", body) as second,
    ):
        assert (first.status, second.status) == (200, 200)
        go_on.set()
        assert first.read().endswith(b"data: [DONE]\n\n")
        assert second.read().endswith(b"data: [DONE]\n\n")


def test_what_fails_behind_the_head_is_told_as_the_last_event(served: Served) -> None:
    go_on = served.valve.gate()

    def fail(step: object) -> None:
        go_on.wait(PATIENCE_S)
        raise RuntimeError("boom")

    served.valve.before = fail
    with asked(served, "/v1/completions", ROUTES["/v1/completions"][0]) as response:
        assert response.status == 200
        go_on.set()
        last = response.read().split(b"data: ")[-1]
    assert json.loads(last)["error"]["type"] == "server_error"


def test_a_client_that_leaves_while_it_waits_is_seen(served: Served) -> None:
    go_on = hold(served, after=0)
    with asked(served, "/v1/completions", ROUTES["/v1/completions"][0]):
        assert served.running.async_engine.num_streams == 1
    eventually(lambda: not served.running.async_engine.num_streams)
    go_on.set()


@pytest.mark.parametrize("path", ROUTES)
def test_http_1_0_gets_no_chunks(served: Served, path: str) -> None:
    """Its body ends with the connection, streamed or whole (RFC 9112, 6.1)."""
    body = ROUTES[path][0]
    for sent in (body, body | {"stream": False}):
        data = json.dumps(sent).encode()
        head = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\nConnection: keep-alive\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as connection:
            connection.sendall(head.encode() + data)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        start, _, text = answer.partition(b"\r\n\r\n")
        assert b" 200 " in start
        assert b"transfer-encoding" not in start.lower()
        if sent is body:
            lines = [line for line in text.splitlines() if line]
            first, last = ENDS[path]
            assert lines[0].startswith(first)
            assert lines[-1].startswith(last)
        else:
            assert f"content-length: {len(text)}".encode() in start.lower()
            json.loads(text)
