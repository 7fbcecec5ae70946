"""Streams and the engine's thread: who leaves frees everything, who fails fails alone, nobody
hangs. The valve holds steps up, so that each thing happens at a known moment."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Event, Step
from ridgeline.serve.engine.request_stream import RequestStream, StreamCaller, StreamError
from ridgeline.system.machine import DeviceLost
from tests.engine.test_llm import POISON
from tests.serve.serving import Served, serving
from tests.waiting import PATIENCE_S, eventually

COMPLETE = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [40, 41], "max_tokens": 100, "ignore_eos": True, "seed": 1}


def post(
    port: int,
    body: dict[str, Any],
    rcvbuf: int = 0,
    close: bool = True,
    version: bytes = b"1.1",
) -> socket.socket:
    """Send a request and leave the answer on the socket."""
    connection = socket.socket()
    if rcvbuf:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    connection.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = b"POST %b HTTP/%b\r\nhost: localhost\r\n" % (COMPLETE.encode(), version)
    head += b"content-type: application/json\r\n" + (b"connection: close\r\n" if close else b"")
    connection.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
    return connection


def rest(connection: socket.socket) -> bytes:
    """Return what comes until the end."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


LEAVE: dict[str, Callable[[socket.socket], None]] = {"fin": socket.socket.close, "rst": reset}
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("how", LEAVE)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at_step", [0, 1, 5])
def test_a_client_that_leaves_is_forgotten_within_a_step(
    served: Served, how: str, stream: bool, at_step: int
) -> None:
    reached, go_on = threading.Event(), served.valve.gate()
    first = served.valve.num_steps
    aborted = served.metrics()['ridgeline:request_success_total{finished_reason="abort"}']

    def before(step: Step) -> None:
        if served.valve.num_steps - first > at_step and not reached.is_set():
            reached.set()
            go_on.wait(PATIENCE_S)

    served.valve.before = before
    connection = post(served.port, LONG | {"stream": stream})
    assert reached.wait(PATIENCE_S)
    LEAVE[how](connection)
    eventually(lambda: not served.running.async_engine.num_streams)  # while the step is computed
    go_on.set()
    served.assert_idle()
    assert served.valve.num_steps - first == at_step + 1
    now = served.metrics()['ridgeline:request_success_total{finished_reason="abort"}']
    assert now == aborted + 1
    connection.close()


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_who_shuts_only_its_sending_side_is_answered(
    served: Served, stream: bool, stays: bool
) -> None:
    held = served.valve.hold()
    connection = post(served.port, LONG | {"stream": stream}, close=False)
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(PATIENCE_S)
    try:
        assert connection.recv(len(INTERIM)) == INTERIM  # it was noticed
        if not stays:
            connection.close()
            eventually(lambda: not served.running.async_engine.num_streams)
            return
        held.set()
        answer = rest(connection).split(INTERIM)[-1]
    finally:
        held.set()
        connection.close()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in answer.partition(b"\r\n\r\n")[0].lower()
    assert b'"finish_reason":"length"' in answer
    assert stream == (b"data: [DONE]\n\n" in answer)


@pytest.mark.parametrize(("version", "stream"), [(b"1.1", True), (b"1.0", False)])
def test_who_shuts_its_sending_side_where_no_probe_can_be_sent_has_left(
    served: Served, version: bytes, stream: bool
) -> None:
    reached, go_on = threading.Event(), served.valve.gate()
    first = served.valve.num_steps

    def before(step: Step) -> None:
        if served.valve.num_steps - first > 5:
            reached.set()
            go_on.wait(PATIENCE_S)

    served.valve.before = before
    connection = post(served.port, LONG | {"stream": stream}, version=version)
    if stream:
        assert connection.recv(10) == b"HTTP/1.1 2"
    assert reached.wait(PATIENCE_S)
    connection.shutdown(socket.SHUT_WR)
    eventually(lambda: not served.running.async_engine.num_streams)
    go_on.set()
    served.assert_idle()
    connection.close()


def test_a_client_that_leaves_while_it_is_queued(model: Path) -> None:
    with serving(model, {"max_num_seqs": 1}) as served:
        held = served.valve.hold()
        first = post(served.port, LONG)
        eventually(lambda: served.valve.num_steps == 1)
        second = post(served.port, LONG | {"prompt": [[50], [51]]})
        eventually(lambda: served.running.async_engine.num_queued == 2)
        second.close()
        eventually(lambda: served.running.async_engine.num_streams == 1)
        held.set()
        assert b'"finish_reason":"length"' in rest(first)
        first.close()
        served.assert_idle()
        ends = served.metrics()
        assert ends['ridgeline:request_success_total{finished_reason="abort"}'] == 2
        assert served.valve.num_steps == 100  # nothing was computed for who had left


@pytest.mark.parametrize(("stream", "second"), [(True, 4 + 64), (False, 200)])
def test_prompts_come_first_while_nobody_reads_along(
    model: Path, stream: bool, second: int
) -> None:
    """Whoever streams is not held up by others' prompts; who waits for the end only gains."""
    sizes: list[int] = []
    with serving(model, {"max_num_batched_tokens": 200}) as served:
        served.valve.before = lambda step: sizes.append(sum(len(w.tokens) for w in step.work))
        body = LONG | {"prompt": [[40 + i] * 50 for i in range(8)], "stream": stream}
        connection = post(served.port, body | {"max_tokens": 20})
        rest(connection)
        connection.close()
    assert sizes[:2] == [200, second]


def test_pipelined_requests_of_a_client_that_leaves_all_end(served: Served) -> None:
    held = served.valve.hold()
    connection = post(served.port, LONG | {"stream": True}, close=False)
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    eventually(lambda: served.running.async_engine.num_streams == 1)
    protocol = served.protocol_of(connection)
    eventually(lambda: protocol._is_ignored)  # it has read the second
    connection.close()
    eventually(lambda: not served.running.async_engine.num_streams)
    held.set()
    served.assert_idle()


BIG: dict[str, Any] = LONG | {"stream": True, "logprobs": 5, "n": 8, "max_tokens": 120}


def test_who_reads_slowly_rests_and_then_goes_on(model: Path) -> None:
    """The socket's buffers fill, then the stream's; then its requests cost nothing until it reads.

    What it gets in the end is what a fast reader gets.
    """
    with serving(model, {"max_num_seqs": 64}) as served:
        served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        scheduler = served.llm.engine.scheduler
        reader = post(served.port, BIG)
        swift = rest(reader)
        sleeper = post(served.port, BIG, rcvbuf=4096)
        eventually(lambda: len(scheduler.queues.paused) == 8)
        flow = served.protocol_of(sleeper).flow
        eventually(lambda: flow.write_paused and len(scheduler.queues.paused) == 8)
        assert len(scheduler.queues.kv.pool.free) == len(scheduler.queues.kv.pool.refs)
        assert served.metrics()["ridgeline:num_requests_waiting"] == 8
        served.catch_up()
        num_steps = served.valve.num_steps
        neighbour = post(served.port, LONG)
        assert b'"finish_reason":"length"' in rest(neighbour)
        assert served.valve.num_steps == num_steps + 100  # of its own tokens, and of no other's
        slow = rest(sleeper)
        for connection in (reader, sleeper, neighbour):
            connection.close()
        served.assert_idle()
    assert slow.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert chunks_of(slow) == chunks_of(swift)


def chunks_of(answer: bytes) -> dict[int, list[Any]]:
    """Return what a stream says of each choice, in order."""
    found: dict[int, list[Any]] = {}
    for line in answer.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found.setdefault(choice["index"], []).append(choice)
    return found


def test_who_does_not_read_at_all_is_cut(model: Path) -> None:
    with serving(model, {"max_num_seqs": 64}, stall_timeout=0.5) as served:
        served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        held = served.valve.hold()
        sleepers = [post(served.port, BIG, rcvbuf=4096) for _ in range(3)]
        eventually(lambda: served.running.async_engine.num_streams == 3)
        reader = post(served.port, LONG)
        eventually(lambda: served.running.async_engine.num_streams == 4)
        held.set()
        assert b'"finish_reason":"length"' in rest(reader)
        eventually(lambda: len(served.lines) == 4)
        assert sum("reads too slowly" in line for line in served.lines) == 3
        for connection in sleepers:
            assert not rest(connection).endswith(b"0\r\n\r\n")  # it does not look complete
        for connection in (*sleepers, reader):
            connection.close()
        served.assert_idle()


def test_a_stream_is_behind_at_its_bound(served: Served) -> None:
    """A reader that stands still in the middle, and one that fails, get what there is."""

    async def check() -> None:
        stream = RequestStream([(1,)], SamplingParams(), lambda p, s: None, StreamCaller("-"))  # type: ignore[arg-type, return-value]
        event = Event((0, 0), 5, "x", None, None, None, None)
        kept = 0
        while stream.deliver([(0, event)]):
            kept += 1
        assert kept == stream._max_behind
        stream.end(StreamError("broken"))
        assert stream.deliver([(0, event)])  # and takes no more
        assert len(await stream.events()) == kept + 1
        with pytest.raises(StreamError, match="broken"):
            await stream.events()

    asyncio.run(check())


def test_the_engine_changes_nothing_that_the_loop_reads(model: Path) -> None:
    """A stream lives on the loop: while the loop stands still, so does the stream."""
    with serving(model, {"max_num_seqs": 1}) as served:
        at_second, held = threading.Event(), threading.Event()

        def before(step: Step) -> None:
            if served.valve.num_steps == 11:  # the first prompt is answered, the second was added
                at_second.set()

        served.valve.before = before
        go = threading.Event()
        served.running.async_engine.between_steps(lambda: go.wait(PATIENCE_S) and None)
        connection = post(served.port, LONG | {"prompt": [[40], [50]], "max_tokens": 10})
        eventually(lambda: served.running.async_engine.num_streams == 1)
        (stream,) = served.running.async_engine._streams
        served.loop.call_soon_threadsafe(held.wait, PATIENCE_S)
        state = vars(stream).items()
        was = {name: copy(v) if isinstance(v, dict | list) else v for name, v in state}
        go.set()
        assert at_second.wait(PATIENCE_S)
        assert vars(stream) == was
        held.set()
        assert rest(connection).count(b'"finish_reason":"length"') == 2
        connection.close()
        served.assert_idle()


# --- faults in a step ---------------------------------------------------------------------------


def ask(served: Served, prompt: list[int], **more: Any) -> tuple[int, Any]:
    status, answer, _ = served.call(COMPLETE, LONG | {"prompt": prompt, "max_tokens": 20} | more)
    return status, answer


def texts(served: Served, prompts: list[list[int]], **more: Any) -> list[tuple[int, Any]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(served, prompt, **more), prompts))


def answer_of(found: tuple[int, Any]) -> str:
    status, answer = found
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


GOOD = [[40 + i, 60, 70 + i] for i in range(6)]


class Panic(BaseException):
    """As those of libraries in Rust, which no `except Exception` catches."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
@pytest.mark.parametrize("guilty", [0, 3, 6])
def test_an_exception_in_a_step_fails_only_who_causes_it(
    served: Served, guilty: int, kind: type[BaseException]
) -> None:
    wanted = [answer_of(found) for found in texts(served, GOOD)]
    bad = [99, 98, 97]

    def before(step: Step) -> None:
        for work in step.work:
            position = work.start + len(work.tokens)
            if work.tokens[:3] == tuple(bad) or (position >= 5 and work.tokens == (96,)):
                raise kind("kernel exploded at /some/path")

    served.valve.before = before
    prompts = [*GOOD[:guilty], bad, *GOOD[guilty:]]
    found = texts(served, prompts)
    status, answer = found.pop(guilty)
    assert status == 500
    assert "path" not in json.dumps(answer)
    assert answer["error"]["code"] == "generation_failed"
    assert [answer_of(one) for one in found] == wanted


def test_a_fault_that_passes_fails_nobody(served: Served) -> None:
    """Whatever call of the backend fails once: all answers are as they should be."""
    wanted = [answer_of(found) for found in texts(served, GOOD[:3])]
    for k in range(1, 25, 3):
        first = served.valve.num_steps

        def before(step: Step, fail_at: int = first + k) -> None:
            if served.valve.num_steps == fail_at:
                raise MemoryError("no room")

        served.valve.before = before
        found = texts(served, GOOD[:3])
        served.valve.before = lambda step: None
        if any(status == 500 for status, _ in found):  # it ran alone: nobody else could be tried
            assert sum(status == 500 for status, _ in found) == 1
        for one, text in zip(found, wanted, strict=True):
            assert one[0] == 500 or answer_of(one) == text


@pytest.mark.parametrize("broken_for", [1, 3])
def test_a_fault_while_blocks_are_copied_changes_no_answer(served: Served, broken_for: int) -> None:
    """Answers that fork from one prompt copy its last block in their first step."""
    prompt, wish = [40, 41, 42], {"n": 3, "temperature": 1}
    wanted = ask(served, prompt, **wish)[1]["choices"]
    failed: list[Step] = []

    def before(step: Step) -> None:
        if step.copies and len(failed) < broken_for:
            failed.append(step)
            raise RuntimeError("in the middle of copies")

    served.valve.before = before
    assert ask(served, prompt, **wish)[1]["choices"] == wanted
    assert failed


def test_a_backend_that_is_broken_fails_everybody_and_hangs_nobody(served: Served) -> None:
    def before(step: Step) -> None:
        raise OSError("gone")

    served.valve.before = before
    assert [status for status, _ in texts(served, GOOD)] == [500] * 6
    assert served.call("/health")[0] == 200


def test_a_row_that_is_not_finite_fails_alone(served: Served) -> None:
    wanted = [answer_of(found) for found in texts(served, GOOD[:3])]
    found = texts(served, [*GOOD[:3], [40, POISON, 41]])
    status, answer = found.pop()
    assert (status, "finite" in answer["error"]["message"]) == (500, True)
    assert [answer_of(one) for one in found] == wanted


def test_a_stream_that_fails_midway_ends_with_an_error_and_not_with_done(served: Served) -> None:
    first = served.valve.num_steps

    def before(step: Step) -> None:
        if served.valve.num_steps - first > 5:
            raise RuntimeError("later")

    served.valve.before = before
    status, body, _ = served.call(COMPLETE, LONG | {"stream": True})
    frames = body.decode().strip().split("\n\n")
    assert status == 200
    assert json.loads(frames[-1].removeprefix("data: "))["error"]["code"] == "generation_failed"
    assert not any("[DONE]" in frame for frame in frames)
    assert all(json.loads(f[6:])["choices"][0]["finish_reason"] is None for f in frames[:-1])


def test_under_pressure_of_memory_every_answer_is_right(model: Path) -> None:
    prompts = [[40 + i % 50, 41 + i % 7, 50 + i % 11] for i in range(40)]
    with serving(model) as served:
        wanted = [answer_of(ask(served, prompt, max_tokens=80)) for prompt in prompts]
    with serving(model, {"kv_cache_memory": 10 * 16 * 512}) as served:
        num_blocks = len(served.llm.engine.scheduler.queues.kv.pool.refs)
        assert num_blocks < 40
        found = texts(served, prompts, max_tokens=80)
        assert [answer_of(one) for one in found] == wanted
        assert served.metrics()["ridgeline:num_preemptions_total"] > 0
        served.assert_idle()


def test_a_device_that_is_lost_ends_the_server_with_its_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "the GPU failed: unspecified launch failure"
    ends: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda end: ends.append(end.exc_value))

    def before(step: Step) -> None:
        raise DeviceLost(line)

    with serving(model) as served:
        served.valve.before = before
        status, answer, _ = served.call(COMPLETE, LONG)
        assert (status, answer["error"]["message"]) == (503, line)
        served.thread.join(PATIENCE_S)
        assert not served.thread.is_alive()
    (end,) = ends
    assert isinstance(end, DeviceLost)
    assert str(end) == line
