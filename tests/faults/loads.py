"""Loads that a fleet must bear: a request that ends servers, servers restarted in turn, limits of
keys, clients that do not read, a slow machine: F05, F06, F12, F17, F18."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ridgeline.system.machine import memory_of
from tests.faults.fleet import are_ready, pids, servers, two_servers
from tests.faults.links import two_machines
from tests.fleet.test_router import LONG, Routed
from tests.serve.serving import JSON
from tests.waiting import connected, eventually

_ASK: dict[str, Any] = {"prompt": "one two", "max_tokens": 40, "ignore_eos": True, "seed": 1}
_KILLER_TOKENS = 97  # by which it is known in the views of servers


def _has_killer(routed: Routed, number: str) -> bool:
    """Whether a server computes for the request that ends it."""
    errors = OSError, http.client.HTTPException, LookupError, ValueError
    with suppress(*errors), connected(routed.port) as connection:
        connection.request("GET", f"/v1/live?replica={number}")
        with connection.getresponse() as response:
            view = json.loads(response.readline().removeprefix(b"data: "))
        return any(one["max_tokens"] == _KILLER_TOKENS for one in view["sequences"])
    return False


def f05(model: Path, count: int, rng: random.Random) -> str:
    """A request that ends what runs it, among sixteen others: it is given up, they are whole."""
    most = 0
    killer = _ASK | {"prompt": ["one"] * 16, "n": 64, "max_tokens": _KILLER_TOKENS}
    with two_servers(model) as routed, ThreadPoolExecutor(17) as pool:
        whole = routed.call("/v1/completions", _ASK)[1]["choices"]
        for _ in range(count):
            eventually(lambda: are_ready(routed))
            before = sum(one["deaths"] for one in servers(routed))
            others = [pool.submit(routed.call, "/v1/completions", _ASK) for _ in range(16)]
            guilty = pool.submit(routed.call, "/v1/completions", killer)
            while not guilty.done():
                for one in servers(routed):
                    if "pid" in one and _has_killer(routed, one["name"]):
                        with suppress(ProcessLookupError):
                            os.kill(one["pid"], signal.SIGSEGV)
            status, answer, _ = guilty.result()
            assert (status, answer["error"]["code"]) == (503, "model_ended"), answer
            assert all(one.result()[1]["choices"] == whole for one in others)
            eventually(lambda: are_ready(routed))
            most = max(most, sum(one["deaths"] for one in servers(routed)) - before)
        assert most <= 4
    return f"{count} requests that end servers: at most {most} ended, 16 others each were whole"


def f06(model: Path, count: int, rng: random.Random) -> str:
    """Servers are restarted one after the other under load."""
    with two_servers(model) as routed, ThreadPoolExecutor(8) as pool:
        whole = routed.call("/v1/completions", _ASK)[1]["choices"]
        asked = [pool.submit(routed.call, "/v1/completions", _ASK) for _ in range(count)]
        num_restarts = 0
        while not all(one.done() for one in asked):
            eventually(lambda: are_ready(routed))
            os.kill(servers(routed)[num_restarts % 2]["pid"], signal.SIGTERM)
            num_restarts += 1
            eventually(lambda: not are_ready(routed))
        failed = [one.result() for one in asked if one.result()[1].get("choices") != whole]
        assert not failed, failed[:3]
    return f"{count} requests while {num_restarts} servers were restarted in turn: 0 failed"


def f12(model: Path, count: int, rng: random.Random) -> str:
    """A key asks all servers at once for more than it may have, while some are killed."""
    may, at_once = 40 * count // 4, 8
    with tempfile.TemporaryDirectory() as folder:
        (keys := Path(folder) / "keys").write_text("anna anna\nboss boss admin\n")
        (rules := Path(folder) / "rules").write_text(
            f'version = "1"\n[keys.default]\nlimits = {{ tokens_per_day = {may} }}\n'
        )
        flags = ("--api-key-file", str(keys), "--rules", str(rules))
        with two_servers(model, *flags, key="boss") as routed, ThreadPoolExecutor(at_once) as pool:

            def ask(number: int) -> int:
                body, key = _ASK | {"stream": number % 2 == 1}, {"authorization": "Bearer anna"}
                if number % 100 == 5:
                    eventually(lambda: pids(routed))  # another may have ended the last of them
                    os.kill(rng.choice(pids(routed)), signal.SIGKILL)
                    eventually(lambda: are_ready(routed))
                return routed.call("/v1/completions", body, **key)[0]

            statuses = list(pool.map(ask, range(count)))
            assert set(statuses) == {200, 429}
            num_tokens = 42 * statuses.count(200)
            # What runs at once may bring debt. Of what runs on a killed server, what it has not
            # told is not known, and what it has counts beside what is computed again elsewhere.
            unsure = 42 * at_once * -(-count // 100)
            assert may - unsure - 100 < num_tokens < may + unsure + 42 * at_once, num_tokens
    return f"{count} requests of a key to two servers: {num_tokens} tokens of {may}"


def f17(model: Path, count: int, rng: random.Random) -> str:
    """Clients that do not read: memory is bounded, others are served, no server seems dead."""
    with two_servers(model) as routed:
        whole = routed.call("/v1/completions", _ASK)[1]["choices"]
        before = memory_of(routed.process.pid).resident_bytes
        sleepers = []
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", routed.port))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = json.dumps(LONG | {"prompt": "one two", "n": 8}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{_head(body)}\r\n"
            connection.sendall(head.encode() + body)
            sleepers.append(connection)
        most = 0
        for _ in range(10):
            assert routed.call("/v1/completions", _ASK)[1]["choices"] == whole
            most = max(most, memory_of(routed.process.pid).resident_bytes - before)
        assert sum(one["deaths"] for one in servers(routed)) == 0
        assert most < (64 << 20) + count * (1 << 20), most
        for one in sleepers:
            one.close()
    return f"{count} who do not read: {most / 2**20:.0f} MiB more in the router, others served"


def _head(body: bytes) -> str:
    return f"content-type: {JSON['content-type']}\r\ncontent-length: {len(body)}\r\n"


def f18(model: Path, count: int, rng: random.Random) -> str:
    """One machine is ten times slower: it gets few requests, and no other waits for it."""
    with two_machines(model, "--silence-timeout", "30") as (routed, *_, process):
        is_over = threading.Event()

        def slow_down() -> None:
            while not is_over.is_set():
                process.send_signal(signal.SIGSTOP)
                time.sleep(0.09)
                process.send_signal(signal.SIGCONT)
                time.sleep(0.01)

        brake = threading.Thread(target=slow_down)
        brake.start()
        try:
            with ThreadPoolExecutor(4) as pool:
                body = _ASK | {"prompt": "one two " * 30}
                for _ in range(20):  # from which the router learns who is slow
                    list(pool.map(lambda _: routed.call("/v1/completions", body), range(4)))
                seen, waits = [0, 0], list[float]()
                for _ in range(10 * count):
                    begin_s = time.monotonic()
                    asked = pool.submit(routed.call, "/v1/completions", body)
                    while not asked.done():
                        for i, one in enumerate(servers(routed)[:2]):
                            seen[i] += one["running"]
                    waits.append(time.monotonic() - begin_s)
        finally:
            is_over.set()
            brake.join()
        slow = seen[1] / max(1, sum(seen))
        assert slow < 0.2, seen
    middle_s = statistics.median(waits)
    return f"{10 * count} requests beside a slow machine: {slow:.0%} there, p50 {middle_s:.2f} s"
