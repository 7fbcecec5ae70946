"""Bytes on a socket: framings, crowds, foreign pages, forms, links: T07, T23, T31, T32, T39."""

from __future__ import annotations

import http.client
import json
import random
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.engine.test_llm import HELLO
from tests.faults.oracles import CHAT, COMPLETE, Watch, check_body, watched
from tests.faults.process import process
from tests.serve.http.test_connection import talk
from tests.waiting import PATIENCE_S, eventually

HOST = b"host: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"content-type: application/json\r\n"
BODY = b'{"prompt":"a","max_tokens":1}'
TAIL = b"GET /smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
# Two readers could disagree about where such a request ends.
LENGTHS = (b"%d, %d", b"+%d", b"%d_0", b"0x%x", b"-%d", b"%d;", b" %d 0", b'"%d"', b"%d.0")
CODINGS = (
    *(b"xchunked", b"\x0bchunked", b'"chunked"', b"chunked, chunked", b"chunked, identity"),
    *(b"identity, chunked x", b"\r\n chunked", b"gzip", b"chunked\x00"),
)
SIZES = (b"0x1d", b"+1d", b"-1", b"1" + b"0" * 16 + b"1d", b"1d\x0b", b"g", b" 1d", b"1_d")


def _framed(rng: random.Random) -> bytes:
    """Return a request with two readings, and a second one behind it."""
    kind = rng.randrange(7)
    if kind == 0:
        both = [LENGTH, CHUNKED]
        rng.shuffle(both)
        return POST + b"".join(both) + b"\r\n0\r\n\r\n"
    if kind == 1:
        return POST + LENGTH + b"content-length: %d\r\n\r\n" % rng.randrange(20) + BODY
    if kind == 2:
        form = rng.choice(LENGTHS)
        number = form % ((len(BODY),) * form.count(b"%"))
        return POST + b"content-length: " + number + b"\r\n\r\n" + BODY
    if kind == 3:
        return POST + b"transfer-encoding: " + rng.choice(CODINGS) + b"\r\n\r\n0\r\n\r\n"
    if kind == 4:
        return POST + CHUNKED + b"\r\n" + rng.choice(SIZES) + b"\r\n" + BODY + b"\r\n0\r\n\r\n"
    if kind == 5:
        name = rng.choice([b"content-length ", b"content\tlength", b" content-length", b""])
        return POST + name + b": %d\r\n\r\n" % len(BODY) + BODY
    name = rng.choice([b"x: a\rcontent-length: 0", b"x: a\x00b", b"x: a\r\n b", b"no colon"])
    return POST + name + b"\r\n" + LENGTH + b"\r\n" + BODY


def t07(model: Path, count: int, rng: random.Random) -> str:
    with watched(model, counts_all=False) as watch:
        served, refused = watch.served, 0
        for _ in range(count):
            raw = _framed(rng)
            answer = talk(served.port, raw + TAIL, b"")
            heads = answer.count(b"HTTP/1.1 ")
            assert heads == 1, (raw, answer)
            status = int(answer.split()[1])
            assert 400 <= status < 500 or status == 501, (raw, answer)
            refused += 1
        assert not any("smuggled" in line for line in served.lines)
    return f"{refused}/{count} framings refused; no second request was read"


def t23(model: Path, count: int, rng: random.Random) -> str:
    """``count`` clients stay connected, each with an answer; then there are too few descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 3 * count + 500)), hard))
    try:
        with process(model, "--max-queued-requests", str(count)) as (server, port):
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (count + 200, count + 200))
            crowd = [
                socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in range(count)
            ]
            for one in crowd:
                one.sendall(POST + LENGTH + b"\r\n" + BODY)
            for one in crowd:
                _read(one)
            few = len(list(Path(f"/proc/{server.pid}/fd").iterdir())) + 8
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (few, few))
            more = [socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in range(40)]
            crowd[0].sendall(POST + LENGTH + b"\r\n" + BODY)  # who is in goes on
            _read(crowd[0])
            before_s = _cpu_s(server.pid)
            time.sleep(1)
            spun_s = _cpu_s(server.pid) - before_s
            assert spun_s < 0.5, "it asks for descriptors again and again"
            for one in (*crowd, *more):
                one.close()
            eventually(
                lambda: talk(port, b"GET /health HTTP/1.0\r\n" + HOST + b"\r\n")[9:12] == b"200"
            )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return f"{count}/{count} connected at once were answered; with no descriptors left it waits"


def _read(connection: socket.socket) -> None:
    """Read one whole answer, which must be a success."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    assert (response.status, bool(response.read())) == (200, True)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


HOSTS = (
    *("evil.example", "localhost.evil.example", "localhost@evil.example", "evil.example:127.0.0.1"),
    *(
        "localhost/?x=",
        "127.0.0.1.evil.example",
        "a" * 300,
        "evil.example#localhost",
        "localhost\\",
    ),
)
ORIGINS = ("http://evil.example", "https://localhost.evil.example", "null", "file://", "http://[x")


def t31(model: Path, count: int, rng: random.Random) -> str:
    """Pages of other sites, and names that lead to loopback: nothing is answered or allowed."""
    with watched(model) as watch:
        for number in range(count):
            path, body = rng.choice([("/v1/models", None), (COMPLETE, BODY), ("/v1/memory", None)])
            name = "host" if number % 2 else "origin"
            value = rng.choice(HOSTS if number % 2 else ORIGINS)
            status, _, headers = _call(watch, path, body, **{name: value})
            assert status in (400, 403), (name, value, status)
            assert "access-control-allow-origin" not in headers
    return f"{count}/{count} of other sites and names refused, none allowed by a header"


FORMS = (
    *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"),
    *("text/json", "application/xml", "*/*", "application", "text/plain; application/json"),
)


def t32(model: Path, count: int, rng: random.Random) -> str:
    """What a page, one of ours too, may send without asking: what does not say it is JSON."""
    with watched(model) as watch:
        for _ in range(count):
            path = rng.choice([COMPLETE, CHAT, "/tokenize"])
            form = rng.choice(FORMS)
            status, _, _ = _call(watch, path, BODY, content_type=form, origin="http://localhost")
            assert status == 415, (form, status)
    return f"{count}/{count} bodies that do not say they are JSON refused with 415"


def _call(
    watch: Watch, path: str, body: bytes | None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    status, answer, found = watch.served.call(path, body, **headers)
    watch.statuses[status] += 1
    check_body(status, json.dumps(answer).encode())
    return status, answer, found


def t39(model: Path, count: int, rng: random.Random) -> str:
    """Links wherever a client can write one; whoever follows one is heard."""
    with socket.create_server(("127.0.0.1", 0)) as trap, watched(model) as watch:
        trap.setblocking(False)
        address = f"127.0.0.1:{trap.getsockname()[1]}"
        for _ in range(count):
            link = rng.choice(["http://{}/x.png", "https://{}/", "//{}/a", "ftp://{}/x", "{}"])
            link = link.format(address)
            path, body = rng.choice(_linking(link))
            status, _ = watch.ask(body, path)
            assert status in (200, 400, 404), (body, status)
            with suppress(BlockingIOError):
                trap.accept()
                raise AssertionError(f"somebody followed the link in {body}")
    return f"{count}/{count} links: 0 connections"


def _linking(link: str) -> list[tuple[str, Any]]:
    chat = {"messages": HELLO, "max_tokens": 1}

    def said(part: dict[str, Any]) -> tuple[str, Any]:
        return CHAT, chat | {"messages": [{"role": "user", "content": [part]}]}

    schema = {"$ref": link, "$schema": link, "$id": link}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": link}}}
    return [
        said({"type": "image_url", "image_url": {"url": link}}),
        said({"type": "input_audio", "input_audio": {"data": link, "format": "wav"}}),
        said({"type": "file", "file": {"file_data": link}}),
        said({"type": "text", "text": f"![x]({link})"}),
        (
            CHAT,
            chat
            | {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": schema},
                }
            },
        ),
        (CHAT, chat | {"tools": [tool]}),
        (CHAT, chat | {"tools": [{"type": "mcp", "server_url": link}]}),
        (COMPLETE, {"prompt": link, "max_tokens": 1, "api_base": link}),
        (COMPLETE, {"prompt": "a", "max_tokens": 1, "model": link}),
        (COMPLETE, {"prompt": "a", "max_tokens": 1, "user": link}),
        ("/v1/plan", {"model": link}),
        ("/tokenize", {"prompt": link}),
    ]
