"""What must hold whatever happens: eight oracles around a running server (O1 to O8).

`watched` serves a model, sends canary requests all the while, lets a row do its worst, and then
checks ledger, blocks, neighbours, health, resources, metrics, logs and bodies.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import http.client
import json
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ridgeline.core.records import Record, RequestRecord
from tests.serve.serving import JSON, Served, serving, without_signs
from tests.waiting import PATIENCE_S, eventually

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
MARK = "zebra7431"  # in prompts and keys; never in a log or an error
LEAKS = re.compile(r"(?<![\w.])/(?:work|tmp|usr|home|root|opt)/|0x[0-9a-f]{6,}|Traceback|\.py\b")
CANARIES: list[dict[str, Any]] = [
    {"prompt": f"{MARK} one", "max_tokens": 6, "ignore_eos": True, "temperature": 0},
    {"prompt": [40, 41, 42], "max_tokens": 8, "ignore_eos": True, "seed": 3, "temperature": 1},
]
PROBES = ("/health", "/ready", "/metrics")
# Names of threads that come with the first who needs them and stay: a few each.
POOLS = (
    "arrivals",
    "asyncio",
    "bodies",
    "forecast",
    "grammars",
    "plans",
    "prompts",
    "reports",
)
# Beside thousands of other tests a process's memory moves by itself; in the runner it does not.
_OTHERS_MIB = 256 if "PYTEST_VERSION" in os.environ else 0
_IDLE_S = 30.0  # clients keep a connection for less than the server, which closes after 65 s
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Unreachable(Exception):
    """A row cannot be run here, and why."""


def check_body(status: int, body: bytes) -> None:
    """O8: what is not a success is an error object of OpenAI's shape, and tells nothing of us.

    On Anthropic's routes it has Anthropic's shape, which says its type beside it; on Ollama's it is
    a text.
    """
    if status < 300:
        return
    answer = json.loads(body)
    error = answer["error"]
    if isinstance(error, str):
        assert set(answer) == {"error"}, body
        error = {"message": error, "type": "", "param": None, "code": None}
    if answer.get("type") == "error":
        assert set(answer) == {"type", "error", "request_id"}, body
        assert set(error) == {"message", "type"}, body
    else:
        counts = {"n_prompt_tokens", "n_ctx"}  # in llama.cpp's form
        assert set(error) - counts == {"message", "type", "param", "code"}, body
        found = error["param"], error["code"]
        assert all(value is None or isinstance(value, str) for value in found)
    assert isinstance(error["message"], str)
    assert error["message"]
    assert not LEAKS.search(error["message"]), body
    assert MARK not in error["message"]


class Lines(logging.Handler):
    """Keeps what any logger says at level ERROR and above: bugs and tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class Watch:
    """A server under observation, and the requests that a row sends it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.records: list[RequestRecord] = []
        self.ended_at: dict[int, int] = {}  # steps that the engine had begun then, by request
        self.statuses: Counter[int] = Counter()  # of answers that were read to their end
        self.num_left = 0  # requests whose answer nobody waited for
        self.may_refuse = False  # a canary may get 429 or 503
        self.num_canaries = 0
        self.failures: list[str] = []
        self.lines = Lines()
        self._connections: list[http.client.HTTPConnection] = []
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        served.running.async_engine.listeners.append(self._on_record)

    def _on_record(self, record: Record) -> None:
        if isinstance(record, RequestRecord):
            self.ended_at[record.request_id] = self.served.valve.num_steps
            self.records.append(record)

    # --- requests of rows ----------------------------------------------------------------------

    def send(self, path: str, data: bytes | None, **headers: str) -> tuple[int, bytes]:
        """Send on this thread's connection; return status and body, which O8 has seen."""
        if not hasattr(self._mine, "connection"):
            connection = http.client.HTTPConnection(
                "127.0.0.1", self.served.port, timeout=PATIENCE_S
            )
            self._mine.connection = connection
            self._connections.append(connection)
        elif time.monotonic() > self._mine.used_s + _IDLE_S:
            self._mine.connection.close()  # the next request opens it again
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        given = (JSON if data is not None else {}) | given
        method = given.pop("method", "GET" if data is None else "POST")
        try:
            self._mine.connection.request(method, path, data, given)
        except ConnectionError:  # the server has closed it behind its last answer
            self._mine.connection.close()
            self._mine.connection.request(method, path, data, given)
        response = self._mine.connection.getresponse()
        body = response.read()
        self._mine.used_s = time.monotonic()
        if path not in PROBES:
            with self._lock:
                self.statuses[response.status] += 1
            check_body(response.status, body)
        return response.status, body

    def ask(self, body: Any, path: str = COMPLETE, **headers: str) -> tuple[int, Any]:
        """Send JSON; return status and answer; streams as the list of their chunks."""
        status, text = self.send(path, json.dumps(body).encode(), **headers)
        if status == 200 and isinstance(body, dict) and body.get("stream") is True:
            return status, chunks_of(text)
        return status, json.loads(text)

    def text(self, body: dict[str, Any], path: str = COMPLETE) -> str:
        """Ask, and return the first answer's text; it must come."""
        status, answer = self.ask(body, path)
        assert status == 200, answer
        return joined(answer) if isinstance(answer, list) else text_of(answer["choices"][0])

    # --- canaries ------------------------------------------------------------------------------

    def _sing(self, golden: list[str]) -> None:
        number = 0
        while not self._stop.wait(0.01):
            number += 1
            which, stream = number % len(CANARIES), number % 3 == 0
            try:
                status, answer = self.ask(CANARIES[which] | {"stream": stream})
                if status in (429, 503) and self.may_refuse:
                    continue
                found = joined(answer) if stream else text_of(answer["choices"][0])
                if (status, found) != (200, golden[which]):
                    raise AssertionError(f"O3: {found!r} is not {golden[which]!r}")
                self.num_canaries += 1
            except Exception as error:
                self.failures.append(f"canary {which}: {error!r}")
                return

    @contextmanager
    def singing(self) -> Iterator[None]:
        """Send canaries until the block ends; each must get its golden bytes (O3)."""
        golden = [self.text(body) for body in CANARIES]
        thread = threading.Thread(target=self._sing, args=(golden,))
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(PATIENCE_S)
        assert [self.text(body) for body in CANARIES] == golden

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def resources(self) -> dict[str, int]:
        """O5: what could leak beside blocks: descriptors, threads, tasks, memory in bytes.

        Memory that was freed and that the C library keeps for later is given back first: after
        thousands of other tests in this process there is much of it.
        """
        gc.collect()
        with suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
        threads = [t for t in threading.enumerate() if not t.name.startswith(POOLS)]
        status = Path("/proc/self/status").read_text()
        kib = {name: int(size) for name, size in re.findall(r"(\w+):\s+(\d+) kB", status)}
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": len(threads),
            "tasks": self._num_tasks(),
            "bytes": (kib["RssAnon"] + kib["VmSwap"]) << 10,
        }

    def _num_tasks(self) -> int:
        with suppress(RuntimeError):  # it changed while we counted
            return len(asyncio.all_tasks(self.served.loop))
        return self._num_tasks()


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def chunks_of(text: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a whole stream of server-sent events."""
    frames = without_signs(text).decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""], frames[-2:]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def joined(chunks: list[dict[str, Any]]) -> str:
    """Return the first answer's text in a stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if not choice["index"]]
    return "".join(
        choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        for choice in choices
    )


@contextmanager
def watched(
    model: Path,
    engine: dict[str, Any] | None = None,
    *,
    has_faults: bool = False,
    counts_all: bool = True,
    growth_mib: int = 60,
    **options: Any,
) -> Iterator[Watch]:
    """Serve ``model``; let the block do its worst; then hold all oracles against the server.

    Args:
        model: a directory.
        engine: flags of the engine.
        has_faults: the row breaks steps, so the log may say so.
        counts_all: the row reads or announces every answer, so statuses are compared as well.
        growth_mib: how much memory the process may gain.
        **options: flags of the server.
    """
    with serving(model, engine, **options) as served:
        if renderer := served.llm.text.chat_template._renderer:
            for child in renderer._children._idle:  # its processes are no leak
                child.start()
        watch = Watch(served)
        logging.getLogger().addHandler(watch.lines)
        try:
            with watch.singing():
                first_line = len(served.lines)
                base = watch.resources()
                yield watch
            watch.close()
            assert not watch.failures, watch.failures  # O3
            _check(watch, base, has_faults, growth_mib)
            if counts_all:
                _check_statuses(watch)
            _check_log(watch, first_line)
        finally:
            served.valve.before = lambda step: None
            watch.close()
            logging.getLogger().removeHandler(watch.lines)


def _check(watch: Watch, base: dict[str, int], has_faults: bool, mib: int) -> None:
    served = watch.served
    served.valve.before = lambda step: None
    served.assert_idle()  # O2
    ids = sorted(record.request_id for record in watch.records)
    assert ids == list(range(ids[0], ids[0] + len(ids)))  # O1: none lost, none twice
    for path in ("/health", "/ready"):  # O4; the canary after the row was answered
        assert served.call(path)[0] == 200
    eventually(lambda: not any(served.metrics()[f"ridgeline:{one}"] for one in GAUGES))  # O6
    now = served.metrics()
    ends = Counter(reason for record in watch.records for reason in record.finish_reasons)
    for reason in ("stop", "length", "abort", "error"):
        name = f'ridgeline:request_success_total{{finished_reason="{reason}"}}'
        assert now[name] == ends[reason], (reason, now[name], ends)
    generated = sum(sum(record.num_generated) for record in watch.records)
    assert now["ridgeline:generation_tokens_total"] == generated
    end_s = time.monotonic() + PATIENCE_S
    while over := _over(watch.resources(), base, mib):  # O5
        assert time.monotonic() < end_s, over
        time.sleep(0.05)
    said = "\n".join(watch.lines.lines)  # O7
    assert has_faults or not said, said
    assert MARK not in said


def _over(now: dict[str, int], base: dict[str, int], mib: int) -> dict[str, tuple[int, int]]:
    """Return what there is more of than before, beyond the slack for memory."""
    slack = {"bytes": mib + _OTHERS_MIB << 20}
    return {n: (base[n], now[n]) for n in base if now[n] > base[n] + slack.get(n, 0)}


def _check_statuses(watch: Watch) -> None:
    """O1: every answer that was counted was seen by a client, and the other way round."""

    def counted() -> Counter[int]:
        found: Counter[int] = Counter()
        for name, value in watch.served.metrics().items():
            handler = name.partition('handler="')[2].partition('"')[0]
            if name.startswith("http_requests_total") and handler not in PROBES:
                found[int(name.split('status="')[1][:3])] += int(value)
        return found

    seen = watch.statuses
    eventually(lambda: sum(counted().values()) >= sum(seen.values()))
    server = counted()
    left = sum(server.values()) - sum(seen.values())
    assert 0 <= left <= watch.num_left, (server, seen, watch.num_left)
    for status in set(server) | set(seen):
        assert status in (200, 499) or server[status] == seen[status], (status, server, seen)


def _check_log(watch: Watch, start: int) -> None:
    """O1 and O7: a line for each request that came, and nobody's words."""

    def num_counted() -> float:
        counts = watch.served.metrics().items()
        is_quiet = re.compile(r'.*handler="/health".*status="200"')  # a probe that is well
        return sum(
            value
            for name, value in counts
            if name.startswith("http_requests_total") and not is_quiet.match(name)
        )

    eventually(lambda: len(watch.served.lines) == num_counted())
    lines = watch.served.lines[start:]
    assert not any(MARK in line or "Traceback" in line for line in lines)
    assert not any(ord(letter) < 32 for line in lines for letter in line)
