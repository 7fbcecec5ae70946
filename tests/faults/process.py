"""The process and its edges: signals, keys, source, sockets: T26, T28, T33, T34."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ridgeline
from ridgeline.serve.http.web_server import _FLUSH_S
from ridgeline.system.process import NUM_PROCESSES
from tests.faults.hostile import PATHS, mutated
from tests.faults.oracles import COMPLETE, check_body, chunks_of
from tests.faults.source import FORBIDDEN_MODULES, findings
from tests.serve.engine.test_async_engine import post, rest
from tests.serve.http.test_connection import talk
from tests.serve.serving import JSON, serving
from tests.waiting import PATIENCE_S, connected, eventually, started

_START = """
import contextlib, sys
def note(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "subprocess.Popen"):
        what = arguments[1][-1] if event == "subprocess.Popen" else ""
        with contextlib.suppress(OSError):
            print("AUDIT", event, what, file=sys.stderr, flush=True)
from ridgeline.cli.main import main
sys.addaudithook(note)
main()
"""


@contextmanager
def process(
    model: Path,
    *flags: str,
    python: tuple[str, ...] = (),
    log: Path | None = None,
    **variables: str,
) -> Iterator[Any]:
    """Run ``ridgeline serve``, which reports all that it connects to; yield it and its port.

    Its standard error goes to ``log``, if there is one; ``variables`` are of its environment.
    """
    command = [sys.executable, *python, "-c", _START, "serve", str(model), "--port", "0"]
    command += ["--kv-cache-memory", "1MiB", "--threads", "1", *flags]
    with (
        log.open("w") if log else nullcontext(subprocess.PIPE) as words,
        started(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            env=os.environ | variables,
        ) as server,
    ):
        assert server.stdout is not None
        line = server.stdout.readline()
        assert " is ready at " in line
        yield server, int(line.split(" (")[0].rsplit(":", 1)[1])


def send(port: int, path: str, data: bytes) -> tuple[int, bytes]:
    with connected(port) as connection:
        connection.request("POST", path, data, JSON)
        response = connection.getresponse()
        return response.status, response.read()


def t26(model: Path, count: int, rng: random.Random) -> str:
    """``count`` requests are in flight, half of them streams, when the signal comes."""
    body = {"prompt": [40, 41], "max_tokens": 110, "ignore_eos": True}
    with process(model, "--shutdown-timeout", "300") as (server, port):
        flying = [post(port, body | {"stream": bool(i % 2)}) for i in range(count)]
        eventually(lambda: _are_all_in(port, count))
        server.send_signal(signal.SIGTERM)
        late = 0
        with suppress(ConnectionError, http.client.HTTPException):
            status, _ = send(port, COMPLETE, json.dumps(body).encode())
            late = status
        answers = [rest(connection) for connection in flying]
        for i, (connection, answer) in enumerate(zip(flying, answers, strict=True)):
            connection.close()
            assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
            assert b'"finish_reason":"length"' in answer
            assert not i % 2 or b"data: [DONE]" in answer
        code, words = server.wait(PATIENCE_S), server.stderr.read()
    assert (code, late in (0, 503)) == (0, True), (code, late)
    assert "Traceback" not in words
    with process(model, "--shutdown-timeout", "60") as (server, port):  # now twice
        flying = [post(port, body | {"stream": True, "n": 16}) for _ in range(count)]
        eventually(lambda: _are_all_in(port, count))
        start_s = time.monotonic()
        server.send_signal(signal.SIGINT)
        time.sleep(0.1)
        server.send_signal(signal.SIGINT)
        ends = []
        for connection in flying:
            with suppress(ConnectionResetError):  # its request was not even read
                ends.append(rest(connection))
        for connection in flying:
            connection.close()
        code, words = server.wait(PATIENCE_S), server.stderr.read()
        took_s = time.monotonic() - start_s
    assert code == 0
    assert "Traceback" not in words
    if took_s < _FLUSH_S:  # last words that a very busy machine cannot send in that time are cut
        for end in ends:
            assert not end or b"[DONE]" in end or b"stopping" in end, end[-200:]
    with process(model) as (server, port):  # and with nothing to do
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
    return f"{count}/{count} in flight finished, exit 0; a second signal ends all in {took_s:.1f} s"


def _are_all_in(port: int, count: int) -> bool:
    """Whether so many requests run, wait or have ended."""
    with connected(port) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    names = r"(?:num_requests_(?:running|waiting)|request_success_total)"
    return sum(map(float, re.findall(rf"ridgeline:{names}\{{.*\}} (\S+)", text))) >= count


HEADERS = ("", "Bearer", "Bearer x", "Basic key-a", "bearer key-A", "key-a", "Bearer key-a,key-b")
SHAPES = ("{}", "/{}", "{}/", "/v1/..{}", "{}?api_key=key-a", "{}#", "/%2e{}", "{};x", "{}%00")


# Written here again on purpose: a route that opens by mistake is to be seen.
OPEN = ("/", "/plan", "/health", "/ready", "/v2/health/live", "/v2/health/ready")


def t28(model: Path, count: int, rng: random.Random) -> str:
    """Every route, method, spelling and header, of which ``count`` are drawn."""
    with serving(model, api_key=["key-a", "key-b"]) as served:
        paths = sorted({getattr(route, "path", "") for route in served.running.parts.app.routes})
        page = [path for path in paths if path.startswith("/page/")]  # static files, no more
        methods = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE"]
        hosts = ["localhost", "localhost/health", "a/?x=", "localhost:1@127.0.0.1", "/health"]
        every = [
            (shape.format(path), method, header, host)
            for path in paths
            for shape in SHAPES
            for method in methods
            for header in HEADERS
            for host in hosts
        ]
        tried = rng.sample(every, min(count, len(every)))
        opened = refused = 0
        for path, method, header, host in tried:
            lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "connection: close"]
            lines += [f"authorization: {header}"] if header else []
            if rng.random() < 0.1:
                lines += ["authorization: Bearer nothing", "upgrade: websocket"]
            answer = talk(served.port, "\r\n".join([*lines, "", ""]).encode())
            status = int(answer.split()[1])
            plain = path.split("?")[0].split("#")[0].rstrip("/") or "/"  # slashes there say nothing
            is_open = plain in (*OPEN, *page)
            assert is_open or status in (400, 401, 403), (path, method, header, host, status)
            opened += is_open
            refused += not is_open
            if method != "HEAD" and not is_open:
                check_body(status, answer.partition(b"\r\n\r\n")[2])
        served.assert_idle()
        assert served.call("/v1/models", authorization="Bearer key-b")[0] == 200
    return f"{refused}/{refused} refused of {len(every)} kinds; 0 open routes beside the probes"


def t33(model: Path, count: int, rng: random.Random) -> str:
    """The source first; then ``count`` hostile bodies for a server under ``python -O``."""
    files = sorted(Path(ridgeline.__file__).parent.rglob("*.py"))
    found = findings(Path(ridgeline.__file__).parent)
    assert not found, found
    loaded = subprocess.run(
        [sys.executable, "-c", "import ridgeline.serve.main, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not FORBIDDEN_MODULES & set(loaded) - {"pickle", "marshal"}  # the library's own
    with process(model, python=("-O",)) as (_, port):
        for _ in range(count):
            path = rng.choice(PATHS)
            status, body = send(port, path, mutated(path, rng))
            assert status in (200, 400), body
            check_body(status, body)
    return (
        f"0 findings in {len(files)} files; {count}/{count} hostile bodies refused without assert"
    )


def t34(model: Path, count: int, rng: random.Random) -> str:
    """All that the server connects to is reported by Python itself; and by the kernel's table."""
    with process(model) as (server, port):
        picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
        wishes: list[tuple[str, Any]] = [
            (COMPLETE, {"prompt": "![](http://127.0.0.1:9/x.png)", "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [picture]}]}),
            (COMPLETE, {"prompt": "x", "max_tokens": 2, "api_base": "http://127.0.0.1:9"}),
            (COMPLETE, {"prompt": "x", "max_tokens": 2, "model": "http://127.0.0.1:9/model"}),
            (COMPLETE, {"prompt": "x", "max_tokens": 2, "stream": True, "n": 3}),
        ]

        def ask(i: int) -> set[str]:
            path, body = wishes[i % len(wishes)]
            status, text = send(port, path, json.dumps(body).encode())
            assert status in (200, 400, 404)
            if body.get("stream"):
                chunks_of(text)
            return _sockets(server.pid) if i % 10 == 0 else set()

        with ThreadPoolExecutor(4) as pool:
            listening = set().union(*pool.map(ask, range(count)))
        assert listening == {f"127.0.0.1:{port}"}, listening
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
        words = server.stderr.read()
        reported = [line for line in words.splitlines() if line.startswith("AUDIT")]
    # Its own address, to listen on; and the processes that render its chat template.
    expected = {"AUDIT socket.getaddrinfo": 1, "template/process.py": NUM_PROCESSES}
    assert all(any(what in line for what in expected) for line in reported), reported
    for what, most in expected.items():
        assert sum(what in line for line in reported) <= most, reported
    return f"1 listening socket, 0 outbound connections in {count} requests"


def _sockets(pid: int) -> set[str]:
    """Return the local ends of a process's sockets: what it opens itself has another port."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split()
        for name in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {_address(row[1]) for row in rows if row[9] in inodes}


def _address(text: str) -> str:
    host, port = text.split(":")
    packed = bytes.fromhex(host)[::-1]
    return f"{socket.inet_ntoa(packed) if len(packed) == 4 else host}:{int(port, 16)}"
