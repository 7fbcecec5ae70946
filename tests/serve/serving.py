"""A server in a thread, on a real socket, over a model whose steps a test can hold up or break."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI
from pydantic import TypeAdapter

from ridgeline import LLM
from ridgeline.core.step import Runner, Step, StepOutput
from ridgeline.serve.compose import ServerParts, compose
from ridgeline.serve.engine import async_engine, request_stream
from ridgeline.serve.http.edge.connection import BoundedProtocol
from ridgeline.serve.http.keys import Keys
from ridgeline.serve.http.listening import bind
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.main import ServerProcess
from ridgeline.trust.audit.requests import AuditObserver
from ridgeline.trust.stages import ServerStages, observing
from tests.waiting import PATIENCE_S, connected, eventually

JSON = {"content-type": "application/json"}
_SIGN = re.compile(rb"^(?:: ping|event: ping\ndata: .*)\n\n", re.MULTILINE)


def without_signs(stream: bytes) -> bytes:
    """Return a stream without signs of life: a busy machine has them, and clients pass over."""
    return _SIGN.sub(b"", stream)


def first_of(response: http.client.HTTPResponse) -> bytes:
    """Return the first line of a stream, behind signs of life."""
    while (line := response.readline()).startswith((b": ", b"\n")):
        pass
    assert line.startswith(b"data: "), line
    return line


class Valve:
    """A runner around the model's: counts steps, and does to each what a test wants."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.num_steps = 0
        self.before: Callable[[Step], object] = lambda step: None
        self._gates: list[threading.Event] = []

    def gate(self) -> threading.Event:
        """Return what a step may wait for; ``free`` opens it, if a test has not."""
        self._gates.append(gate := threading.Event())
        return gate

    def hold(self) -> threading.Event:
        """Let no step begin until what is returned is set."""
        gate = self.gate()
        self.before = lambda step: gate.wait(PATIENCE_S)
        return gate

    def free(self) -> None:
        """Hold up no step any more, also where a test has failed meanwhile."""
        self.before = lambda step: None
        while self._gates:
            self._gates.pop().set()

    def execute(self, step: Step) -> StepOutput:
        self.num_steps += 1
        self.before(step)
        return self.runner.execute(step)


class StepClock:
    """A clock that goes on by what tests say that steps take, and by next to nothing else.

    What waits for a time, as the background does for a quiet moment, waits for such steps.
    """

    def __init__(self) -> None:
        self._now_s, self._lock = 1000.0, threading.Lock()

    def __call__(self) -> float:
        """Return the seconds; a microsecond passes, as nothing is done in no time."""
        return self.pass_by(1e-6)

    def pass_by(self, seconds: float) -> float:
        """Let so much time pass, and return the seconds."""
        with self._lock:
            self._now_s += seconds
            return self._now_s

    @contextmanager
    def of(self, served: Served) -> Iterator[None]:
        """Let the times of a server's records, and of arrivals, be of this clock."""
        served.llm.engine.clock = self
        with pytest.MonkeyPatch.context() as patch:
            for module in (async_engine, request_stream):
                patch.setattr(module, "time", SimpleNamespace(monotonic=self, time=time.time))
            yield


class Served:
    """A running server."""

    def __init__(
        self,
        llm: LLM,
        options: ServeOptions,
        home: Path | None = None,
        observer: AuditObserver | None = None,
        guards: Mapping[str, LLM] | None = None,
    ) -> None:
        self.llm = llm
        self.valve = Valve(llm.engine.runner)
        llm.engine.runner = self.valve
        self.listener = bind("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.lines: list[str] = []
        keys = Keys(options.api_key or (), options.api_key_file, options.admin_api_key or ())
        stages = ServerStages(options, keys, observer, guards)
        parts = compose(llm, "tiny", options, keys, stages, home)
        self.running = ServerProcess(parts, options, keys, self.lines.append)
        self.loop = asyncio.new_event_loop()
        self._ahead_s = 0.0  # of the loop's clock
        self.loop.time = lambda: time.monotonic() + self._ahead_s  # type: ignore[method-assign]
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self.running.run(self.listener, self.ready.set))
        finally:
            self.ready.set()  # who waits for a server that could not start is told so at once
            self.loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def call(
        self, path: str, body: Any = None, method: str | None = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Send one request; return status, body (parsed if it is JSON) and headers."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        method = method or ("GET" if data is None else "POST")
        with connected(self.port) as connection:
            connection.request(method, path, data, (JSON if data is not None else {}) | given)
            response = connection.getresponse()
            text = without_signs(response.read())
        found = {name.lower(): value for name, value in response.getheaders()}
        is_json = found.get("content-type") == "application/json" and text
        return response.status, json.loads(text) if is_json else text, found

    def refused(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Send what must be refused; return status and error object, which must be complete."""
        status, answer, _ = self.call(path, body, **headers)
        error: dict[str, Any] = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] is None or isinstance(error["code"], str)
        return status, error

    def refused_for(self, param: str, path: str, body: Any, **headers: str) -> dict[str, Any]:
        """Send what must be refused because of a field; return the error object."""
        status, error = self.refused(path, body, **headers)
        assert (status, error["param"]) == (404 if param == "model" else 400, param), error
        return error

    def num_lines(self) -> int:
        """Return how many lines the log has once those of all earlier answers are in it."""
        mark = f"mark-{uuid.uuid4().hex}"
        self.call("/ready", x_request_id=mark)
        eventually(lambda: any(mark in line for line in self.lines))
        return len(self.lines)

    def metrics(self) -> dict[str, float]:
        """Return all samples, by name and labels other than the model's."""
        lines = self.call("/metrics")[1].decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {
            name.replace('model_name="tiny"', "")
            .replace("{}", "")
            .replace(",}", "}")
            .replace("{,", "{"): float(value)
            for name, value in samples
        }

    def protocol_of(self, client: socket.socket) -> BoundedProtocol:
        """Return the server's end of a connection, once it is there."""
        connections = self.running.server.server_state.connections

        def ends() -> list[Any]:
            return [one for one in [*connections] if one.client == client.getsockname()]

        eventually(ends)
        (protocol,) = ends()
        assert isinstance(protocol, BoundedProtocol)
        return protocol

    def pass_time(self, seconds: float) -> None:
        """Set the clock of the event loop ahead; return when all timers due by then have run."""
        done = threading.Event()
        self._ahead_s += seconds
        self.loop.call_soon_threadsafe(self.loop.call_soon, done.set)
        assert done.wait(PATIENCE_S)

    def stop_clock_of_limits(self) -> None:
        """Let no minute pass for what a key may use in one, however long its requests take."""
        self.running.model_server.limits._clock = lambda: 0.0

    def catch_up(self) -> None:
        """Return once the engine's thread, and then the loop, have done what they had to do."""
        done, engine = threading.Event(), self.running.async_engine
        engine.between_steps(lambda: engine.call(done.set))
        assert done.wait(PATIENCE_S)

    def assert_idle(self) -> None:
        """All requests are gone, and every block is free."""
        engine = self.llm.engine
        eventually(lambda: not engine.requests and not self.running.async_engine.num_streams)
        pool = engine.scheduler.queues.kv.pool
        eventually(lambda: len(pool.free) == len(pool.refs))
        eventually(lambda: not self.running.async_engine._owners)  # behind the step that ended them
        engine.check()


def composed(
    llm: LLM,
    options: ServeOptions,
    keys: Keys | None = None,
    *,
    name: str = "tiny",
    guards: Mapping[str, LLM] | None = None,
) -> ServerParts:
    """Return a server that is put together, and neither started nor reached."""
    keys = keys or Keys((), None)
    return compose(llm, name, options, keys, ServerStages(options, keys, None, guards))


@contextmanager
def serving(
    model: Path,
    engine: dict[str, Any] | None = None,
    home: Path | None = None,
    guards: Mapping[str, LLM] | None = None,
    **options: Any,
) -> Iterator[Served]:
    """Serve a model until the block ends; then it must be idle, and stop cleanly."""
    # Without drafts, whose number depends on the clock: tests count steps.
    base = {"kv_cache_memory": "1MiB", "threads": 1, "speculative_config": "off"}
    patient = {"receive_timeout": PATIENCE_S, "stall_timeout": PATIENCE_S}
    flags = ServeOptions(**patient | {"step_timeout": 2 * PATIENCE_S} | options)
    with (
        LLM(model, **base | (engine or {})) as llm,
        observing(flags) as observer,
    ):
        served = Served(llm, flags, home, observer, guards)
        served.thread.start()
        assert served.ready.wait(PATIENCE_S)
        assert served.thread.is_alive(), "the server could not start"
        try:
            yield served
        finally:
            served.valve.free()
            if served.thread.is_alive():
                served.loop.call_soon_threadsafe(served.running.stop)
            served.thread.join(PATIENCE_S)
        assert not served.thread.is_alive()


def check_shape(kind: Any, answer: Any) -> None:
    """Raise ValueError unless an answer has the shape that the OpenAPI document says of it."""
    TypeAdapter(kind).validate_python(answer, strict=True)


def hold(served: Served, after: int, pace_s: float = 0.0) -> threading.Event:
    """Let so many more steps run, each so slowly, and then none until what is returned is set."""
    first, go_on = served.valve.num_steps, served.valve.gate()

    def before(step: Step) -> None:
        time.sleep(pace_s)
        if served.valve.num_steps > first + after:
            go_on.wait(PATIENCE_S)

    served.valve.before = before
    return go_on
