"""Bytes on a socket: what is slow, huge or no HTTP is answered or cut, and others go on."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ridgeline.serve.page import FILES
from tests.serve.serving import JSON, Served, hold, serving
from tests.waiting import PATIENCE_S, connected, eventually

OK = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKS = b'21\r\n{"prompt":"hello","max_tokens":1}\r\n0\r\n\r\n'


ARRIVAL_S = 40.0  # within which a request must have arrived, by a clock that tests move


@pytest.fixture(scope="module")
def timed(model: Path) -> Iterator[Served]:
    with serving(model, receive_timeout=ARRIVAL_S) as served:
        yield served


class Slow:
    """A client that sends in pieces, to a server that has read each before the next is sent."""

    def __init__(self, served: Served) -> None:
        self.connection = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
        self._protocol = served.protocol_of(self.connection)
        self._num_read, read = 0, self._protocol.data_received

        def noted(data: bytes) -> None:
            read(data)
            self._num_read += len(data)

        self._protocol.data_received = noted  # type: ignore[method-assign]

    def send(self, piece: bytes) -> None:
        """Send a piece; return when it was read."""
        wanted = self._num_read + len(piece)
        self.connection.sendall(piece)
        eventually(lambda: self._num_read >= wanted)

    def is_answering(self) -> bool:
        """Whether the server still answers a request."""
        return self._protocol._is_answering()

    def is_open(self) -> bool:
        """Whether the server has not hung up."""
        return not self._protocol.transport.is_closing()

    def rest(self) -> bytes:
        """Return all that came back: the server has hung up by now."""
        assert not self.is_open()
        with self.connection:
            return received_from(self.connection)


def talk(port: int, *pieces: bytes) -> bytes:
    """Send pieces, and return all that comes back until the server hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        with suppress(ConnectionResetError, BrokenPipeError):
            for piece in pieces:
                connection.sendall(piece)
        return received_from(connection)


def received_from(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            received += data
    return received


def status_of(answer: bytes) -> int:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if status >= 400:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    return status


@pytest.mark.parametrize(
    "sent",
    [
        OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        OK.replace(b"1.1", b"1.0"),
        b"no HTTP\r\n\r\n",
        POST + b"connection: close\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n"
        + CHUNKS,
    ],
    ids=["answer", "HTTP/1.0", "refused", "after an interim response"],
)  # fmt: skip
def test_names_of_headers_have_the_usual_spelling(timed: Served, sent: bytes) -> None:
    """Not all clients know that their case means nothing."""
    head = talk(timed.port, sent).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = head.partition(b"\r\n\r\n")
    names = [line.partition(b":")[0] for line in head.splitlines()[1:]]
    assert {b"Content-Type", b"Content-Length"} <= {*names}
    assert names == [name.title() for name in names]
    assert json.loads(body), "which stays as it is"


@pytest.mark.parametrize(
    "pieces",
    [
        (b"",),
        (b"GET /heal",),
        (b"\r\n",) * 10,
        (b"GET /health HTTP/1.1\r\nx: ", *[b"x"] * 9),
        (POST + b"content-length: 100\r\n\r\n{",),
        (POST + b"content-length: 100\r\n\r\n", *[b" "] * 9),
        (POST + b"transfer-encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 9),
    ],
)
def test_who_sends_too_slowly_is_cut(timed: Served, pieces: tuple[bytes, ...]) -> None:
    """However often a piece comes, the whole request has the same time."""
    slow = Slow(timed)
    for number in range(10):
        slow.send(b"".join(pieces[number : number + 1]))
        assert slow.is_open()
        timed.pass_time(0.05 * ARRIVAL_S)
    timed.pass_time(0.5 * ARRIVAL_S)
    assert status_of(slow.rest()) == 408
    assert timed.call("/health")[0] == 200


def test_a_slow_second_request_is_cut_too(timed: Served) -> None:
    slow = Slow(timed)
    slow.send(OK)
    eventually(lambda: not slow.is_answering())
    timed.pass_time(0.75 * ARRIVAL_S)  # the second has its own time, from its first byte on
    slow.send(b"GET /he")
    timed.pass_time(0.75 * ARRIVAL_S)
    assert slow.is_open()
    timed.pass_time(0.25 * ARRIVAL_S)
    answers = slow.rest()
    assert answers.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in answers


def test_an_idle_connection_may_stay_for_a_while(timed: Served) -> None:
    with socket.create_connection(("127.0.0.1", timed.port), timeout=PATIENCE_S) as connection:
        for _ in range(2):
            connection.sendall(OK)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            timed.pass_time(1.2 * ARRIVAL_S)


def test_a_connection_that_is_used_again_waits_for_no_acknowledgement(served: Served) -> None:
    """Head and body of an answer are two packets: without TCP_NODELAY the second takes 40 ms."""
    with connected(served.port) as connection:
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        assert options_to(connection.sock.getsockname()) == [1]


def options_to(address: tuple[str, int]) -> list[int]:
    """Return TCP_NODELAY of the sockets of this process, where the server is too, to an address."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it has gone, is no socket, or has no peer
            if entry.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    if one.getpeername() == address:
                        found.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    return found


def test_a_long_answer_is_not_cut_by_the_deadline_for_requests(timed: Served) -> None:
    timed.valve.before = lambda step: timed.pass_time(0.2 * ARRIVAL_S)
    body = {"prompt": "hello", "max_tokens": 15, "ignore_eos": True}
    assert timed.call("/v1/completions", body)[0] == 200
    timed.valve.before = lambda step: None


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 3000 + b"\r\n", 431),
        (b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost : localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n folded\r\n\r\n", 400),
        (POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400),
        (POST + b"content-length: -1\r\n\r\n", 400),
        (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET http://evil/health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 403),
        (b"GET http://evil HTTP/1.0\r\n\r\n", 400),
        (b"GET http://a b/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nHost: localhost\r\n\r\n" + OK, 400),
        (POST + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS + OK, 501),
        (POST + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS, 501),
        (POST + b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\n", 501),
        (POST + b"transfer-encoding: chunked, chunked\r\n\r\n" + CHUNKS, 400),
        (POST.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS, 400),
    ],
)
def test_what_is_no_request_is_answered_and_hung_up_on(
    served: Served, request_bytes: bytes, status: int
) -> None:
    answer = talk(served.port, request_bytes)
    assert status_of(answer) == status
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("request_bytes", "line", "handler"),
    [
        (b"nonsense\r\n\r\n", 'status=400 error="this is not a valid HTTP request"', "other"),
        (
            b"GET /health?key=x HTTP/1.1\r\n\r\n",
            'method=GET path=/health status=400 error="the request has 0 Host headers: it must '
            'have one"',
            "/health",
        ),
        (
            POST + b"transfer-encoding: gzip\r\n\r\n",
            "method=POST path=/v1/completions status=501 error="
            '"the only Transfer-Encoding that is understood is chunked"',
            "/v1/completions",
        ),
        (
            b"GET /version HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
            'method=GET path=/version status=431 error="the head of the request exceeds 65536 '
            'bytes"',
            "/version",
        ),
    ],
)
def test_each_refusal_is_logged_with_its_reason_and_counted(
    served: Served,
    request_bytes: bytes,
    line: str,
    handler: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_before = served.num_lines()
    status = status_of(talk(served.port, request_bytes))
    eventually(lambda: any(one.endswith(line) for one in served.lines[num_before:]))
    assert sum(f"status={status} " in one for one in served.lines[num_before:]) == 1
    method = line.partition("method=")[2].partition(" ")[0] or "other"
    label = f'handler="{handler}",method="{method}",status="{status}"'
    assert any(label in name for name in served.metrics())
    assert not caplog.records, "uvicorn says it once more"


def test_who_is_too_slow_is_in_the_log_once(timed: Served) -> None:
    head = POST + b"content-length: 100\r\n\r\n{"
    reason = 'error="the request took more than 40 s to arrive"'
    for sent, start in (
        (head, "method=POST path=/v1/completions status=408"),
        (b"GE", "status=408"),
    ):
        num_before, slow = timed.num_lines(), Slow(timed)
        slow.send(sent)
        timed.pass_time(1.1 * ARRIVAL_S)
        assert status_of(slow.rest()) == 408
        *ours, _ = timed.lines[num_before : timed.num_lines()]  # the last is of the count itself
        (line,) = ours
        assert f"{start} {reason}" in line


def test_nothing_behind_a_refused_head_is_run(served: Served) -> None:
    num_lines = served.num_lines()
    two_hosts = b"GET /health HTTP/1.1\r\nhost: a\r\nhost: localhost\r\n\r\n"
    assert status_of(talk(served.port, two_hosts + OK)) == 400
    served.call("/version")
    eventually(lambda: any("path=/version" in line for line in served.lines[num_lines:]))
    assert [" status=200 " in line for line in served.lines[num_lines:]] == [False, True]


def test_a_chunked_body_is_taken(served: Served) -> None:
    close = POST + b"connection: close\r\n"
    for coding in (b"chunked", b"Chunked", b"\tchunked "):
        answer = talk(served.port, close + b"transfer-encoding: " + coding + b"\r\n\r\n" + CHUNKS)
        assert status_of(answer) == 200


@pytest.mark.parametrize("pieces", [1, 2])
def test_an_offer_of_http_2_is_not_taken_and_costs_nothing(served: Served, pieces: int) -> None:
    """As Java's HttpClient makes it with its first request, body and all."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    body = b'{"prompt":"hello","max_tokens":1}'
    head = POST + offer + b"content-length: %d\r\n\r\n" % len(body)
    close = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    slow = Slow(served)
    with slow.connection as connection:
        for piece in [head + body] if pieces == 1 else [head, body]:
            slow.send(piece)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 1)
        connection.sendall(close)  # the connection goes on
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.read() == b'{"status":"ok"}'
    assert status_of(talk(served.port, head + b'{"pro', body[5:] + close)) == 200
    get = OK[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
    many = talk(served.port, get * 3000)  # requests behind the first are not taken, as ever
    assert status_of(many) == 200
    assert many.count(b"HTTP/1.1 ") == 1
    assert status_of(talk(served.port, b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n" + OK)) == 400


def test_http_1_0_needs_no_host(served: Served) -> None:
    """It has no Host header; on loopback it cannot show that a name is ours, so it is refused."""
    assert status_of(talk(served.port, b"GET /health HTTP/1.0\r\n\r\n")) == 403
    answer = talk(served.port, b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n")
    assert status_of(answer) == 200


def test_who_shuts_a_connection_of_http_1_0_before_the_answer_is_told(served: Served) -> None:
    """Whether such a client has left cannot be found out: nothing more is computed for it."""
    body = b'{"prompt": "a", "max_tokens": 100}'
    head = POST.replace(b"1.1", b"1.0") + b"content-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert status_of(answer) == 400
    assert b"shut before the answer: use HTTP/1.1" in answer
    assert answer.count(b"HTTP/1.1 ") == 1
    served.assert_idle()


@pytest.mark.parametrize("line", [b"GET  /health HTTP/1.1", b"GET /health   HTTP/1.1"])
def test_more_spaces_in_a_request_line_count_as_one(served: Served, line: bytes) -> None:
    """RFC 9112, 3 allows it."""
    answer = talk(served.port, line + b"\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert status_of(answer) == 200
    assert answer.endswith(b'{"status":"ok"}')


def test_a_chunked_body_is_bounded(model: Path) -> None:
    with serving(model, max_body="1KiB") as served:
        close = POST + b"connection: close\r\n"
        chunk = b"100\r\n" + b" " * 256 + b"\r\n"
        answer = talk(served.port, close + b"transfer-encoding: chunked\r\n\r\n" + chunk * 5)
        assert status_of(answer) == 413
        status, error = served.refused("/v1/completions", {"prompt": "x" * 2000})
        assert (status, "1024" in error["message"]) == (413, True)


def test_many_slow_senders_hurt_nobody(timed: Served) -> None:
    crowd = [Slow(timed) for _ in range(200)]
    for slow in crowd:
        slow.send(POST)
    for _ in range(5):
        body = {"prompt": "hello", "max_tokens": 3}
        assert timed.call("/v1/completions", body)[0] == 200
    assert all(slow.is_open() for slow in crowd)
    timed.pass_time(ARRIVAL_S)
    assert all(status_of(slow.rest()) == 408 for slow in crowd)
    eventually(lambda: len(timed.running.server.server_state.connections) == 0)


def test_the_host_of_an_absolute_target_counts(served: Served) -> None:
    for target in ("http://localhost/health", f"http://127.0.0.1:{served.port}/health"):
        head = f"GET {target} HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n"
        assert status_of(talk(served.port, head.encode())) == 200


def test_who_asks_gets_the_place_of_who_has_long_not_asked(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = served.running.server.config.http_protocol_class
    monkeypatch.setattr(protocol, "most_connections", 20)
    go_on = hold(served, after=1)
    address, num_steps = ("127.0.0.1", served.port), served.valve.num_steps
    with connected(served.port) as answering, ExitStack() as stack:
        answering.request("POST", "/v1/completions", b'{"prompt": [40], "max_tokens": 4}', JSON)
        eventually(lambda: served.valve.num_steps > num_steps)
        crowd = []
        for i in range(60):
            one = socket.create_connection(address, timeout=PATIENCE_S)
            crowd.append(stack.enter_context(one))
            one.sendall(OK[: i % len(OK)])
            assert served.call("/health")[0] == 200
        assert crowd[0].recv(12) == b"HTTP/1.1 503", "the oldest has gone"
        crowd[-1].sendall(OK[59 % len(OK) :])
        assert crowd[-1].recv(12) == b"HTTP/1.1 200", "the youngest has not"
        go_on.set()
        assert answering.getresponse().status == 200, "nor has one that is answered"


def test_who_has_sent_half_a_request_when_the_server_ends_is_told(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(model) as served:
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
        connection.sendall(POST + b"content-length: 100\r\n\r\n{")
        eventually(lambda: served.running.server.server_state.tasks)
    with connection, connection.makefile("rb") as answer:
        assert status_of(answer.read()) == 503
    assert "Exception in ASGI" not in caplog.text
    eventually(lambda: any("status=503" in line for line in served.lines))


def test_bodies_of_those_without_a_key_are_bounded_together(model: Path) -> None:
    """Also where no key is needed; whoever has one sends as much as ever."""
    head = b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n\r\n"
    with serving(model, api_key=["mine"]) as served:
        served.running.server.strangers.bytes._most = 1_500_000
        crowd = [Slow(served) for _ in range(4)]
        for slow in crowd:
            slow.send(head + b"x" * 600_000)
        assert [slow.is_open() for slow in crowd] == [False, False, True, True]
        assert [status_of(slow.rest()) for slow in crowd[:2]] == [503, 503]
        padded = b'{"prompt": "hello", "max_tokens": 1}' + b" " * 200_000
        assert served.call("/v1/completions", padded, authorization="Bearer mine")[0] == 200
        assert [slow.is_open() for slow in crowd[2:]] == [True, True]
        for slow in crowd[2:]:
            slow.connection.close()


def test_who_has_brought_a_key_keeps_its_place(model: Path) -> None:
    with serving(model, api_key=["mine"]) as served:
        served.running.server.strangers.places._most = 5
        member = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)

        def ask() -> int:
            member.request("GET", "/v1/models", headers={"authorization": "Bearer mine"})
            response = member.getresponse()
            response.read()
            return response.status

        assert ask() == 200
        used = member.sock
        crowd = [Slow(served) for _ in range(12)]
        eventually(lambda: not crowd[6].is_open())
        assert [slow.is_open() for slow in crowd] == [False] * 7 + [True] * 5
        assert ask() == 200
        assert member.sock is used, "it was not closed"
        member.close()
        for slow in crowd:
            slow.connection.close()


def test_what_a_stranger_does_not_read_counts(model: Path) -> None:
    page = max(FILES, key=lambda path: len(FILES[path].body))
    ask = b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % page.encode()
    with serving(model, api_key=["mine"]) as served:
        served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        served.running.server.strangers.bytes._most = 3_000_000
        crowd = []
        for _ in range(4):
            crowd.append(slow := Slow(served))
            slow.send(ask)
            eventually(lambda slow=slow: not slow.is_open() or not slow.is_answering())
        eventually(lambda: not crowd[0].is_open())
        assert crowd[-1].is_open()
        for slow in crowd:
            slow.connection.close()
