"""What HTTP costs: the same batch offline and over a server, in turn, in one run.

    python -m peers.overhead [MODEL] [--rounds 5] [--sampling '{"temperature": 1}']

Four questions. How many output tokens per second 64 requests get over HTTP, against the engine
alone: as streams, whose prompts come in little by little so that no answer stops for long, and as
whole answers, whose prompts come first; and how much slower running streams become beside 1,000
idle connections, and beside 500 requests that wait. The client is in this process, on the same
cores, and as lean as one can be. The last line on standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ridgeline import LLM, SamplingParams

_NUM_STREAMS, _PROMPT_TOKENS, _NEW_TOKENS = 64, 128, 128
_NUM_SEATS, _LONG_TOKENS = 16, 800  # of the server where others wait
_NUM_IDLE, _NUM_QUEUED = 1000, 500
_SETTLE_S = 0.5
_GREEDY = '{"temperature": 0}'

Sampling = dict[str, Any]  # fields of a request


def random_prompt() -> list[int]:
    """Return a prompt that no cache has seen."""
    return random.choices(range(1000, 30_000), k=_PROMPT_TOKENS)


@contextmanager
def server(model: str, *flags: str) -> Iterator[int]:
    """Run a server; yield its port."""
    program = str(Path(sys.executable).with_name("ridgeline"))
    command = [program, "serve", model, "--port", "0", "--log-format", "json", *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        matches = (re.search(r"ready at http://\S+:(\d+)", line) for line in process.stdout)
        yield int(next(match for match in matches if match)[1])
    finally:
        process.terminate()
        process.communicate()


def post(port: int, sampling: Sampling, max_tokens: int, *, stream: bool = True) -> socket.socket:
    """Send a request."""
    request = {"prompt": random_prompt(), "max_tokens": max_tokens, "ignore_eos": True}
    body = json.dumps(request | sampling | {"stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head.encode() + body)
    return connection


def watch(connections: list[socket.socket]) -> tuple[list[tuple[float, int]], list[float]]:
    """Read all streams to their ends; return when how many chunks came, and when each ended."""
    chunks: list[tuple[float, int]] = []
    lasts: list[float] = []
    with selectors.DefaultSelector() as ready:
        for connection in connections:
            ready.register(connection, selectors.EVENT_READ)
        while len(lasts) < len(connections):
            for key, _ in ready.select():
                connection = key.fileobj  # type: ignore[assignment]
                data = connection.recv(1 << 18)
                if not data:
                    raise SystemExit("a stream ended without its end: is the server alive?")
                chunks.append((time.perf_counter(), data.count(b"data: {")))
                if b"data: [DONE]" in data:
                    lasts.append(chunks[-1][0])
                    ready.unregister(connection)
                    connection.close()
    return chunks, lasts


def over_http(port: int, sampling: Sampling, *, stream: bool) -> float:
    """Return output tokens per second of 64 requests, from sending to the last token."""
    start_s = time.perf_counter()
    connections = [post(port, sampling, _NEW_TOKENS, stream=stream) for _ in range(_NUM_STREAMS)]
    if stream:
        watch(connections)
    else:
        for connection in connections:
            while connection.recv(1 << 18):
                pass
            connection.close()
    return _NUM_STREAMS * _NEW_TOKENS / (time.perf_counter() - start_s)


def offline(llm: LLM, sampling: Sampling, *, stream: bool) -> float:
    """Return the same of the engine alone."""
    params = SamplingParams(**sampling, max_tokens=_NEW_TOKENS, ignore_eos=True)
    prompts = [random_prompt() for _ in range(_NUM_STREAMS)]
    start_s = time.perf_counter()
    if stream:
        for _ in llm.stream_many(prompts, params):
            pass
    else:
        llm.generate(prompts, params, progress=False)
    return _NUM_STREAMS * _NEW_TOKENS / (time.perf_counter() - start_s)


def running(port: int, sampling: Sampling, others: Callable[[ExitStack], object]) -> float:
    """Return chunks, so nearly tokens, per second of streams on all seats beside ``others``."""
    with ExitStack() as stack:
        connections = [post(port, sampling, _LONG_TOKENS) for _ in range(_NUM_SEATS)]
        while not all(connection.recv(1, socket.MSG_PEEK) for connection in connections):
            pass
        others(stack)
        start_s = time.perf_counter() + _SETTLE_S
        chunks, lasts = watch(connections)
        seen = sum(count for when_s, count in chunks if start_s < when_s <= min(lasts))
        return seen / (min(lasts) - start_s)


def idle_connections(port: int, stack: ExitStack) -> None:
    """Open connections that have asked once and keep quiet."""
    for _ in range(_NUM_IDLE):
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        connection.recv(4096)


def queued_requests(port: int, sampling: Sampling, stack: ExitStack) -> None:
    """Send requests for which there is no seat; they are given up in the end."""
    for _ in range(_NUM_QUEUED):
        stack.enter_context(post(port, sampling, _NEW_TOKENS))


def compare(rounds: int, **ways: Callable[[], float]) -> tuple[dict[str, list[float]], float]:
    """Measure the ways in turn; return all rates, and the last one's median over the first's."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, way in ways.items():
            rate = round(way(), 1)
            if i:  # the first round fills caches
                rates[name].append(rate)
                print(f"{name:>20} {rate:8.1f} tok/s", file=sys.stderr)
    first, *_, last = map(statistics.median, rates.values())
    return rates, round(last / first, 3)


def main() -> None:
    """Answer the four questions."""
    parser = argparse.ArgumentParser(prog="python -m peers.overhead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sampling", type=json.loads, default=_GREEDY, help="JSON fields")
    options = parser.parse_args()
    sampling = options.sampling
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, most_files), most_files))
    result = {}
    with LLM(options.model) as llm, server(options.model) as port:
        for name, stream in (("http_over_offline", True), ("whole_answers", False)):
            engine = partial(offline, llm, sampling, stream=stream)
            http = partial(over_http, port, sampling, stream=stream)
            result[name] = compare(options.rounds, offline=engine, http=http)
    with server(options.model, "--max-num-seqs", str(_NUM_SEATS)) as port:
        beside = partial(running, port, sampling)
        alone = partial(beside, lambda stack: None)
        idle = partial(beside, partial(idle_connections, port))
        result["beside_idle_connections"] = compare(options.rounds, alone=alone, idle=idle)
        queue = partial(beside, partial(queued_requests, port, sampling))
        result["beside_queued_requests"] = compare(options.rounds, alone=alone, queue=queue)
    for name, (_, ratio) in result.items():
        print(f"{name:>24} {ratio:6.3f}")
    print(json.dumps({name: {"ratio": r, "tok_per_s": s} for name, (s, r) in result.items()}))


if __name__ == "__main__":
    main()
