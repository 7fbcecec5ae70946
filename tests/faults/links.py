"""Servers of other machines: links that break, strangers, a router that is killed: F03, F09 to F11,
F16. Their machines are this one, and the network between is a relay of bytes."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, get_args

from safetensors.numpy import load_file, save_file

from ridgeline.serve.tunnel.proof import Ticket
from tests.faults.fleet import are_ready, check_rest, served_alone, servers, under_load
from tests.fleet.test_remote_server import joined, raw, url_of
from tests.fleet.test_replicas import WISH
from tests.fleet.test_router import Routed, routing
from tests.fleet.wire import Fault, Wire, wire
from tests.serve.serving import JSON
from tests.waiting import PATIENCE_S, connected, eventually, free_port

ENDLESS = WISH | {"model": "model", "n": 64, "stream": False}
KEY = "0123456789abcdef" * 4


class Two(NamedTuple):
    """A router with a server of its own, and one that has joined over a wire."""

    routed: Routed
    wire: Wire
    model: Path
    key: Path
    joined: subprocess.Popen[str]


@contextmanager
def two_machines(model: Path, *flags: str, **variables: str) -> Iterator[Two]:
    """Run both; the one that joins has the variables. At the end all is as if nothing happened."""
    with tempfile.TemporaryDirectory() as folder:
        served = served_alone(model, Path(folder))
        (key := Path(folder) / "key").write_text(KEY)
        own = ("--fleet-key-file", str(key), *flags)
        with (
            routing(served, Path(folder) / "log", *own) as routed,
            wire(routed.port) as between,
            joined(served, key, f"http://127.0.0.1:{between.port}", **variables) as process,
        ):
            yield Two(routed, between, served, key, process)
            eventually(lambda: len(servers(routed)) == 2)
            check_rest(routed)


def f03(model: Path, count: int, rng: random.Random) -> str:
    """Bytes on the way are cut off, come late, end within a frame, or are garbage."""
    with two_machines(model) as (routed, between, *_):
        left = [fault for fault in get_args(Fault) for _ in range(count)]
        rng.shuffle(left)
        total = len(left)

        def harm(routed: Routed) -> None:
            between.faults.append(left.pop())

        num = under_load(routed, total, rng, harm, num_servers=2)
        between.faults.clear()
    return f"{count} times each of four faults of a link: 0 lost, 0 different, {num} moved"


def f09(model: Path, count: int, rng: random.Random) -> str:
    """The router is killed: its own servers end, the joined one joins the next and is idle."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = served_alone(model, folder)
        (key := folder / "key").write_text(KEY)
        port = free_port()
        flags = ("--fleet-key-file", str(key), "--port", str(port))
        routed = stack.enter_context(routing(served, folder / "log", *flags))
        process = stack.enter_context(joined(served, key, url_of(routed)))
        for _ in range(count):
            _kill_under_load(routed)
            routed = stack.enter_context(routing(served, folder / "log", *flags))
            _check_idle(routed)
            assert process.poll() is None
        routed.process.kill()
    return f"{count} kills of a router: own servers gone, the joined one idle and back"


def _kill_under_load(routed: Routed) -> None:
    """Kill a router while it has four streams, and wait until its own servers are gone."""
    with ThreadPoolExecutor(4) as pool:
        eventually(lambda: len(servers(routed)) == 2)
        asked = [pool.submit(routed.call, "/v1/completions", ENDLESS) for _ in range(4)]
        eventually(lambda: sum(one["running"] for one in servers(routed)) == 4)
        own = routed.pids()
        routed.process.kill()
        assert all(one.exception() for one in asked), "clients see the end"
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in own))


def _check_idle(routed: Routed) -> None:
    """Wait until the joined server is back, and computes for nobody."""
    eventually(lambda: len(servers(routed)) == 2)
    running = r'num_requests_running{.*replica="2"} 0'
    eventually(lambda: re.search(running, routed.call("/metrics")[1]))


def f10(model: Path, count: int, rng: random.Random) -> str:
    """A server with other answers wants to join under load: refused, and no stream goes to it."""
    with tempfile.TemporaryDirectory() as folder, two_machines(model) as two:
        other = shutil.copytree(two.model, Path(folder) / "model")
        weights = load_file(other / "model.safetensors")
        weights["lm_head.weight"] = weights["lm_head.weight"][::-1].copy()
        save_file(weights, other / "model.safetensors")

        def harm(routed: Routed) -> None:
            with joined(other, two.key, url_of(routed), waits=False) as process:
                _, words = process.communicate(timeout=PATIENCE_S)
                assert "its answers would not be the same" in words, words
            os.kill(rng.choice([one["pid"] for one in servers(routed)][:1]), signal.SIGKILL)

        num = under_load(two.routed, count, rng, harm)
    return f"{count} servers of another fingerprint refused under load: 0 different, {num} moved"


def f11(model: Path, count: int, rng: random.Random) -> str:
    """Strangers at the door of servers, and at servers as if they were routers."""
    lines = [
        b"",
        b"\n",
        b'{"nonce": "1", "said": "{}", "proof": "0"}\n',
        json.dumps({"nonce": "1", "said": '{"kind": "request"}', "proof": "f" * 64}).encode(),
        b"\xff\xff\xff\xff\xff\xff\xff\x7f",  # two lengths of 2 GiB
        b'{"nonce": "1", "said": "{}", "proof": "\\ud800"}\n',
        b"[" * 5000 + b"\n",
        b"\x00" * (1 << 16),
    ]
    with two_machines(model) as (routed, *_):
        before = [one["pid"] for one in servers(routed)]

        def strange(number: int) -> None:
            own = random.Random(number)
            line = own.choice(lines) if own.random() < 0.7 else own.randbytes(own.randrange(200))
            is_overheard = own.random() < 0.5
            ticket = Ticket(f"stranger-{number}", 0).written(KEY.encode()) if is_overheard else ""
            heard = raw(routed, line, ticket=ticket)
            head, _, said = heard.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 101 " if is_overheard else b"HTTP/1.1 403 "), head
            if is_overheard:
                nonce, *rest = said.splitlines()
                assert list(json.loads(nonce)) == ["nonce"]
                assert [list(json.loads(one)) for one in rest] in ([], [["refused"]])
            told = {"x-ridgeline-fleet": own.choice(["{}", '{"key":"x","seed":1}', "null"])}
            status, answer, _ = routed.call("/v1/completions", {"prompt": "one"}, **told)
            assert status == 200, answer  # a client's header of this name says nothing

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(strange, range(count)))
        assert [one["pid"] for one in servers(routed)] == before
        assert routed.call("/health")[1] == {"status": "ok"}
    return f"{count} strangers, half with a ticket: a number to prove themselves with, no more"


def f16(model: Path, count: int, rng: random.Random) -> str:
    """A prompt with the time in it goes on at a server in another time zone, at another time."""
    template = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }} {{ messages[0].content }}"
    with tempfile.TemporaryDirectory() as folder:
        dated = shutil.copytree(model, Path(folder) / "dated")
        path = dated / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
        zones = {"TZ": "Asia/Tokyo"}
        with two_machines(dated, "--silence-timeout", "1", **zones) as (routed, between, *_):
            for number in range(count):
                eventually(lambda: len(servers(routed)) == 2 and are_ready(routed))
                _move_a_dated_one(routed, between, rng.randrange(1 << 31))
                ((found,),) = (routed.call("/v1/fleet")[1]["models"].values(),)
                assert found["resumed"] > number, found
    return f"{count} moves of prompts with the time between time zones: the same answer"


def _move_a_dated_one(routed: Routed, between: Wire, seed: int) -> None:
    """Stream an answer to a conversation, and let its server stand still in the middle.

    It is silent for a second before another one goes on, whose clock then says another second.
    """
    wish = {"messages": [{"role": "user", "content": "one two"}], "n": 64, "seed": seed}
    wish |= {"max_tokens": 90, "ignore_eos": True, "stream": True}
    with connected(routed.port) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(wish), JSON)
        response = connection.getresponse()
        assert response.status == 200
        while b'"content":"' not in response.readline():
            pass
        eventually(lambda: sum(one["running"] for one in servers(routed)) == 1)  # no other one
        (busy,) = [one for one in servers(routed) if one["running"]]
        if busy["node"]:
            between.stand_still()
        else:
            os.kill(busy["pid"], signal.SIGSTOP)
        rest = response.read()
        between.move()
        if not busy["node"]:
            os.kill(busy["pid"], signal.SIGCONT)
    assert rest.endswith(b"data: [DONE]\n\n"), rest[-300:]
