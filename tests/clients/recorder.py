"""A proxy that notes what a program asks a server and what comes back.

It changes two fields of a request, which the programs have no setting for: answers are kept short,
since a small model may go on for as long as it is let, and a call of a tool may be asked for.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_ANSWER = 200  # tokens
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_OF_ONE_HOP = {"connection", "content-length", "host", "transfer-encoding"}
_PROMPT = re.compile(r'"(?:prompt_tokens|input_tokens)": ?(\d+)')
_CACHED = re.compile(r'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)')


@dataclass(frozen=True)
class Exchange:
    """A request and its answer; ``asked`` is the body, {} if it is no JSON object."""

    path: str
    asked: dict[str, Any]
    status: int
    answer: str

    @property
    def results(self) -> list[str]:
        """What tools returned, of the history that was sent, in any of the dialects."""
        found = []
        for item in (*self.asked.get("messages", ()), *_items(self.asked)):
            if item.get("role") == "tool":
                found.append(_text(item["content"]))
            elif item.get("type") == "function_call_output":
                found.append(_text(item["output"]))
            elif isinstance(content := item.get("content"), list):
                blocks = [block for block in content if block.get("type") == "tool_result"]
                found += [_text(block.get("content")) for block in blocks]
        return found

    @property
    def has_tools(self) -> bool:
        """Whether the model could call any."""
        return bool(self.asked.get("tools"))

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt, as the answer says."""
        found = [int(number) for number in _PROMPT.findall(self.answer)]
        return found[-1] + self.num_cached if "cache_read" in self.answer else max([0, *found])

    @property
    def num_cached(self) -> int:
        """How many of them were in the prefix cache."""
        return max([0, *(int(number) for number in _CACHED.findall(self.answer))])


@dataclass
class Recorder:
    """What went through the proxy so far.

    Attributes:
        url: of the proxy.
        requires_call: whether to ask for a call where no tool has returned anything yet.
    """

    url: str
    requires_call: bool = False
    exchanges: list[Exchange] = field(default_factory=list)

    def changed(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Return a request for a short answer, and perhaps for a call, in its path's dialect."""
        limit = next((name for name in _LIMITS if name in asked), "")
        if not limit:
            limit = "max_output_tokens" if "/responses" in path else "max_tokens"
        asked = asked | {limit: min(asked.get(limit) or MAX_ANSWER, MAX_ANSWER)}
        is_first = not Exchange(path, asked, 0, "").results
        if self.requires_call and asked.get("tools") and is_first:
            asked["tool_choice"] = {"type": "any"} if "/messages" in path else "required"
        return asked


@contextmanager
def recording(server: str) -> Iterator[Recorder]:
    """Run a proxy before ``server``, as http://host:port, for as long as the block lasts."""
    recorder = Recorder("")

    class Handler(_Handler):
        upstream = urllib.parse.urlsplit(server).netloc
        record = recorder

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        recorder.url = f"http://127.0.0.1:{proxy.server_port}"
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield recorder
        finally:
            proxy.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: str
    record: Recorder

    def log_message(self, *_: Any) -> None:
        """Write nothing."""

    def _pass(self) -> None:
        body = self._body()
        asked = _object(body)
        if "model" in asked and "count_tokens" not in self.path:
            asked = self.record.changed(self.path, asked)
            body = json.dumps(asked).encode()
        server = http.client.HTTPConnection(self.upstream)
        server.request(self.command, self.path, body, self._kept(self.headers.items()))
        answer = server.getresponse()
        self.send_response_only(answer.status)
        for name, value in self._kept(answer.getheaders()).items():
            self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        parts = []
        try:
            while part := answer.read1(65536):
                parts.append(part)
                self.wfile.write(part)
        except OSError:
            pass  # the program has what it wanted
        finally:
            server.close()
        text = b"".join(parts).decode(errors="replace")
        self.record.exchanges.append(Exchange(self.path, asked, answer.status, text))

    do_GET = do_POST = do_HEAD = _pass

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    @staticmethod
    def _kept(headers: Any) -> dict[str, str]:
        return {name: value for name, value in headers if name.lower() not in _OF_ONE_HOP}


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _items(asked: dict[str, Any]) -> list[dict[str, Any]]:
    items = asked.get("input")
    return items if isinstance(items, list) else []


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)
