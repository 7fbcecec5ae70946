"""Clients that leave, that do not read, that send slowly: T01 to T04."""

from __future__ import annotations

import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.faults.oracles import MARK, Watch, watched
from tests.serve.engine.test_async_engine import post, reset
from tests.waiting import eventually

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 16}  # so that some wait, and read in pieces
LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
MANY_STEPS = 50  # half of the longest answer


def own_prompt(number: int, length: int = 6) -> list[int]:
    """Return a prompt that no other request has: its number, in base 300, and more."""
    return [20 + number % 300, 20 + number // 300 % 300, *[40] * (length - 2)]


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def leave(watch: Watch, number: int, rng: random.Random, how: str) -> tuple[float, int]:
    """Send a request, read a random part of its answer, leave; return when that was.

    In seconds, and in steps that the engine had begun.
    """
    stream = rng.random() < 0.7
    length = rng.choice([6, 24])
    body = LONG | {"prompt": own_prompt(number, length), "stream": stream, "n": rng.choice([1, 3])}
    connection = post(watch.served.port, body, close=False)
    patience_s = rng.choice([0, 0.01, 10, 10])
    if stream and patience_s:
        connection.settimeout(patience_s)
        with suppress(TimeoutError):
            for _ in range(rng.choice([1, 1, 5, 20])):
                connection.recv(rng.choice([1, 100, 700]))  # seldom a whole frame
    elif not stream:
        time.sleep(rng.choice([0, 0.001, 0.02, 0.2]))
    left_s = time.monotonic()
    if how == "shut":
        connection.shutdown(socket.SHUT_WR)
        time.sleep(rng.choice([0, 0.01]))
    (reset if how == "rst" else socket.socket.close)(connection)
    connection.close()
    return left_s, watch.served.valve.num_steps


def leavers(
    watch: Watch, count: int, rng: random.Random, ways: list[str], *, alone: bool = True
) -> str:
    """Let clients leave, 12 at a time; say how many were forgotten and how fast.

    Unless they are ``alone`` the server has other work, and is not idle when they are gone.
    """
    watch.num_left = count
    plan = [(number, random.Random(rng.random()), rng.choice(ways)) for number in range(count)]
    with ThreadPoolExecutor(12) as pool:
        left = list(pool.map(lambda one: leave(watch, *one), plan))
    if alone:
        watch.served.assert_idle()
    found = {record.prompt_token_ids: record for record in watch.records}
    waits_s, finished, late, never_ran = [], 0, 0, 0
    for number, (at_s, at_step) in enumerate(left):
        mine = [p for n in (6, 24) if (p := found.get(tuple(own_prompt(number, n))))]
        if not mine or mine[0].scheduled_s is None:
            never_ran += 1  # it left before its turn came
        elif "abort" in mine[0].finish_reasons:
            waits_s.append(max(0.0, mine[0].finish_s - at_s))
        else:
            finished += 1
            late += watch.ended_at[mine[0].request_id] - at_step > MANY_STEPS
    assert late <= count // 10, f"{late} of {count} were answered to the end for nobody"
    return (
        f"{count}/{count} gone: {len(waits_s)} aborted (p99 {1e3 * p99([0, *waits_s]):.1f} ms), "
        f"{never_ran} before they ran, {finished} were done; 0 blocks lost"
    )


def t01(model: Path, count: int, rng: random.Random) -> str:
    with watched(model, SMALL) as watch:
        return leavers(watch, count, rng, ["fin"])


def t02(model: Path, count: int, rng: random.Random) -> str:
    with watched(model, SMALL) as watch:
        return leavers(watch, count, rng, ["rst", "shut", "fin"])


def t03(model: Path, count: int, rng: random.Random) -> str:
    """Half of them trickle a head, half a body, one byte at a time."""
    deadline_s = 3.0
    with watched(model, receive_timeout=deadline_s, counts_all=False) as watch:
        good = {"prompt": f"{MARK} good", "max_tokens": 3}

        def round_trips(number: int) -> list[float]:
            durations_s = []
            for _ in range(number):
                start_s = time.monotonic()
                watch.text(good)
                durations_s.append(time.monotonic() - start_s)
            return durations_s

        before_s = round_trips(50)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        full = head + b"content-type: application/json\r\ncontent-length: 900\r\n\r\n"
        slow = [socket.create_connection(("127.0.0.1", watch.served.port)) for _ in range(count)]
        start_s = time.monotonic()
        for i, connection in enumerate(slow):
            connection.sendall(head if i % 2 else full)
        during_s: list[float] = []
        while time.monotonic() - start_s < 2 * deadline_s:
            during_s += round_trips(10)
            for i, connection in enumerate(slow):
                with suppress(OSError):
                    connection.send(b"x" if i % 2 else b" ")
        connections = watch.served.running.server.server_state.connections
        eventually(lambda: len(connections) <= 2)  # the canary's and ours
        for connection in slow:
            connection.close()
        return (
            f"{count}/{count} slow senders cut after {deadline_s:g} s; {len(during_s)} good "
            f"requests, all served, p99 {1e3 * p99(during_s):.0f} ms "
            f"(before {1e3 * p99(before_s):.0f} ms)"
        )


def t04(model: Path, count: int, rng: random.Random) -> str:
    growth_mib = 32 + count
    bounds: dict[str, Any] = {"growth_mib": growth_mib, "counts_all": False, "stall_timeout": 2.0}
    with watched(model, {"max_num_seqs": 16}, **bounds) as watch:
        served = watch.served
        served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        start = watch.resources()["bytes"]
        wish = LONG | {"stream": True, "n": 16, "logprobs": 5, "max_tokens": 110}
        sleepers = [
            post(served.port, wish | {"prompt": own_prompt(i)}, rcvbuf=4096) for i in range(count)
        ]
        most, buffered = 0, 0
        while sum("reads too slowly" in line for line in served.lines) < count:
            assert len(served.lines) < count * 50 + 10_000
            most = max(most, watch.resources()["bytes"] - start)
            for protocol in list(served.running.server.server_state.connections):
                buffered = max(buffered, protocol.transport.get_write_buffer_size())
            time.sleep(0.05)
        for connection in sleepers:
            with suppress(ConnectionError):
                while data := connection.recv(1 << 16):
                    assert not re.search(rb"\[DONE\]", data)
            connection.close()
        watch.num_left = count
    return (
        f"{count}/{count} who do not read were cut; at most {most / 2**20:.0f} MiB in all, "
        f"{buffered >> 10} KiB in a socket's buffer; {watch.num_canaries} neighbours unhurt"
    )
