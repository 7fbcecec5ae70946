"""A real HTTP server that answers each request by a script."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JSON = dict[str, Any]
# What a script yields: seconds to wait, an event's JSON, raw text for the stream, or (first) a
# status with a body. It ends the connection in the middle of the stream by raising OSError.
Script = Callable[[int, JSON], Iterator[float | JSON | str | tuple[int, str]]]


class Server:
    """What the scripted server saw: requests in order, and how many there were at a time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.lock = threading.Lock()
        self.bodies: list[JSON] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.arrived_s: list[float] = []
        self.connections: set[Any] = set()
        self.running = self.peak = 0
        self.files = {"/v1/models": b'{"data": [{"id": "scripted"}]}'}  # by GET


class _Quiet(ThreadingHTTPServer):
    """Says nothing of clients that go away, which is what a search lets some of its own do."""

    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, *arguments: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*arguments)


def encoded(part: JSON | str) -> bytes:
    """Return the bytes of a part of a stream."""
    return (part if isinstance(part, str) else f"data: {json.dumps(part)}\n\n").encode()


@contextmanager
def serving(script: Script, port: int = 0) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            found = seen.files.get(self.path)
            self.whole(200 if found else 404, found or b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with seen.lock:
                number = len(seen.bodies)
                seen.arrived_s.append(time.perf_counter())
                seen.bodies.append(body)
                seen.headers.append({k.lower(): v for k, v in self.headers.items()})
                seen.paths.append(self.path)
                seen.connections.add(self.client_address)
                seen.running += 1
                seen.peak = max(seen.peak, seen.running)
            try:
                self.answer(script(number, body))
            except OSError:
                self.close_connection = True
            finally:
                with seen.lock:
                    seen.running -= 1

        def answer(self, parts: Iterator[Any]) -> None:
            first = next(parts)
            if isinstance(first, tuple):
                self.whole(first[0], first[1].encode())
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in itertools.chain([first], parts):
                self.put(part)
            self.wfile.write(b"0\r\n\r\n")

        def whole(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def put(self, part: Any) -> None:
            if isinstance(part, float):
                time.sleep(part)
                return
            data = encoded(part)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    httpd = _Quiet(("127.0.0.1", port), Handler)
    seen = Server(f"http://127.0.0.1:{httpd.server_port}")
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield seen
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def chat(content: str | None = None, finish: str | None = None, **delta: Any) -> JSON:
    text = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": text | delta, "finish_reason": finish}]}


def usage(prompt: int, completion: int, cached: int = 0) -> JSON:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": counts | {"prompt_tokens_details": details}}


DONE = "data: [DONE]\n\n"
