"""Servers of a fleet that end, stand still and refuse, under load: F01, F02, F04, F13, F19.

What a client reads must be what it reads when nothing happens: the same bytes but for clocks and
caches, of every API, streamed and whole.
"""

from __future__ import annotations

import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fleet.test_router import Routed, routing
from tests.waiting import children, eventually

_AT_ONCE, _PER_FAULT = 8, 10
_MEASURED = re.compile(  # by clocks and caches, and so no part of the answer
    r'("(?:created|created_at|completed_at|cached_tokens|cache_read_input_tokens|input_tokens'
    r'|[a-z_]*duration)": ?)("[^"]*"|\d+)'
)
_INDEX = re.compile(r'"choices":\[\{"index":(\d+)')
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
}
Wish = tuple[str, dict[str, Any], str]


def _wish(rng: random.Random, number: int) -> Wish:
    """Return a path, a body and an id of a request of any API."""
    name, words = "model", " ".join(rng.choices(["one", "two", "three", "four"], k=8))
    length, stream = rng.randrange(30, 70), rng.random() < 0.75
    talk = [{"role": "user", "content": words}]
    sampled = {"temperature": rng.choice([0, 0.8, 1.2]), "seed": rng.randrange(1 << 31)}
    body: dict[str, Any] = {"stream": stream, "max_tokens": length, **sampled}
    body |= rng.choice([{}, {"top_p": 0.9}, {"frequency_penalty": 0.5}, {"stop": ["e", "q"]}])
    path, own = rng.choice(
        [
            ("/v1/chat/completions", {"messages": talk, "n": 4, "logprobs": True}),
            (
                "/v1/chat/completions",
                {
                    "messages": talk,
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "s", "schema": _SCHEMA},
                    },
                },
            ),
            ("/v1/completions", {"prompt": [words] * 3, "n": 8, "logprobs": 2}),
            ("/v1/completions", {"prompt": words, "ignore_eos": True, "echo": True}),
            ("/v1/responses", {"input": words, "max_output_tokens": length}),
            ("/v1/messages", {"messages": talk}),
            ("/api/chat", {"messages": talk, "options": {"num_predict": length, **sampled}}),
            ("/v1/embeddings", {"input": [words] * 4}),
        ]
    )
    if path in ("/v1/responses", "/v1/messages", "/api/chat", "/v1/embeddings"):
        body = {"stream": stream, "temperature": 0}  # they have no seed
        body |= {"max_tokens": length} if path == "/v1/messages" else {}
    if path == "/v1/embeddings":
        body = {}
    return path, {"model": name, **body, **own}, f"wish-{number}"


def _answer(routed: Routed, wish: Wish) -> tuple[int, str]:
    path, body, name = wish
    status, answer, _ = routed.call(path, body, x_request_id=name)
    text = _MEASURED.sub(r"\1_", str(answer).replace("'", '"'))
    if path.endswith("completions"):  # answers to one request come in any order
        text = "\n\n".join(sorted(text.split("\n\n"), key=_place))
    return status, text


def _place(event: str) -> int:
    """Return which answer an event of a stream is of."""
    found = _INDEX.search(event)
    return int(found[1]) if found else 1 << 30


def servers(routed: Routed) -> list[dict[str, Any]]:
    """Return the servers of the one model."""
    ((found,),) = (routed.call("/v1/fleet")[1]["models"].values(),)
    return list(found["replicas"])


def are_ready(routed: Routed) -> bool:
    """Whether all of them are."""
    return all(one["state"] == "ready" for one in servers(routed))


def num_running(routed: Routed) -> int:
    """Return the requests that count as running; a server that is not there has none."""
    return sum(one.get("running", 0) for one in servers(routed))


def served_alone(model: Path, folder: Path) -> Path:
    """Return the model under a name that all rows use."""
    (served := folder / "model").symlink_to(model)
    return served


@contextmanager
def two_servers(model: Path, *flags: str, key: str = "") -> Iterator[Routed]:
    """Run two servers of a model; at the end nothing is counted as running, and none diverged.

    ``key`` is an operator's, if keys are needed.
    """
    with tempfile.TemporaryDirectory() as folder:
        served = served_alone(model, Path(folder))
        with routing(served, Path(folder) / "log", "--replicas", "2", *flags) as routed:
            routed.key = key
            yield routed
            check_rest(routed)


def check_rest(routed: Routed) -> None:
    """Raise AssertionError unless all is as if nothing had happened."""
    eventually(lambda: are_ready(routed) and not num_running(routed))
    ((found,),) = (routed.call("/v1/fleet")[1]["models"].values(),)
    assert found["diverged"] == 0
    assert "Traceback" not in routed.log, routed.log


def under_load(
    routed: Routed,
    count: int,
    rng: random.Random,
    harm: Callable[[Routed], None],
    num_servers: int = 1,
) -> int:
    """Harm servers so often under ten requests each time; return how many had brought something.

    Before each time at least ``num_servers`` are there, and all that are there are ready.
    Raises AssertionError unless all answers are what they are when nothing happens.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        wishes = [_wish(rng, number) for number in range(_PER_FAULT * count)]
        wanted = list(pool.map(lambda wish: _answer(routed, wish), wishes))
        refused = [answer for answer in wanted if answer[0] != 200]
        assert not refused, refused[0]
        for begin in range(0, len(wishes), _PER_FAULT):
            eventually(lambda: are_ready(routed) and len(servers(routed)) >= num_servers)
            some = wishes[begin : begin + _PER_FAULT]
            answers = [pool.submit(_answer, routed, wish) for wish in some]
            time.sleep(rng.random() * 0.3)
            harm(routed)
            for wish, answer, whole in zip(some, answers, wanted[begin:], strict=False):
                assert answer.result() == whole, (wish, answer.result(), whole)
        ((found,),) = (routed.call("/v1/fleet")[1]["models"].values(),)
        return int(found["resumed"] + found["again"])


def _under_load(
    model: Path, count: int, rng: random.Random, harm: Callable[[Routed], None], *flags: str
) -> int:
    with two_servers(model, *flags) as routed:
        return under_load(routed, count, rng, harm)


def pids(routed: Routed) -> list[int]:
    """Return the processes of servers."""
    return [one["pid"] for one in servers(routed) if "pid" in one]


def f01(model: Path, count: int, rng: random.Random) -> str:
    """A server is killed, or told to end, under load."""
    ends = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)

    def harm(routed: Routed) -> None:
        os.kill(rng.choice(pids(routed)), rng.choice(ends))

    num = _under_load(model, count, rng, harm)
    return f"{count} kills under {_PER_FAULT * count} requests: 0 lost, 0 different, {num} moved"


def f02(model: Path, count: int, rng: random.Random) -> str:
    """A server stands still until others have its requests, and then goes on."""

    def harm(routed: Routed) -> None:
        pid = rng.choice(pids(routed))
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(lambda: not are_ready(routed))
            time.sleep(2)
        finally:
            os.kill(pid, signal.SIGCONT)

    num = _under_load(model, count, rng, harm, "--silence-timeout", "1")
    return f"{count} servers stood still: 0 lost, 0 different, nothing twice, {num} moved"


def f04(model: Path, count: int, rng: random.Random) -> str:
    """All servers end at once: what has begun waits, and goes on."""

    def harm(routed: Routed) -> None:
        for pid in pids(routed):
            os.kill(pid, rng.choice((signal.SIGKILL, signal.SIGTERM)))

    num = _under_load(model, count, rng, harm)
    return f"{count} times all servers ended: 0 lost, 0 different, {num} moved"


def f13(model: Path, count: int, rng: random.Random) -> str:
    """A stage of a divided model is killed, under load and at rest: its server ends with it."""

    def harm(routed: Routed) -> None:
        os.kill(rng.choice([pid for one in pids(routed) for pid in _stages(one)]), signal.SIGKILL)

    with two_servers(model, "--stages", "2") as routed:
        num = under_load(routed, count, rng, harm)
        eventually(lambda: are_ready(routed))
        deaths = _num_deaths(routed)
        harm(routed)
        eventually(lambda: _num_deaths(routed) > deaths and are_ready(routed))
    return f"{count} stages killed under load: 0 lost, 0 different, {num} moved; 1 at rest was seen"


def _num_deaths(routed: Routed) -> int:
    return sum(one["deaths"] for one in servers(routed))


def _stages(pid: int) -> list[int]:
    """Return the processes of a server that compute some of its layers."""
    return children(pid, "cpu.pipeline.process")


def f19(model: Path, count: int, rng: random.Random) -> str:
    """Refusals in masses: no server is taken for dead by them."""
    bad: list[dict[str, Any]] = [
        {"prompt": "one", "max_tokens": -1},
        {"prompt": [10**9]},
        {"prompt": "one", "n": 10_000},
        {"prompt": "one " * 5000},
        {},
    ]
    with two_servers(model, "--max-queued-requests", "1", "--max-num-seqs", "1") as routed:
        wish = {"prompt": "one two", "max_tokens": 60, "ignore_eos": True}
        statuses: dict[int, int] = {}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            bodies = [wish if rng.random() < 0.3 else rng.choice(bad) for _ in range(count)]
            asked = [pool.submit(routed.call, "/v1/completions", body) for body in bodies]
            for one in asked:
                status = one.result()[0]
                statuses[status] = statuses.get(status, 0) + 1
        assert statuses.keys() <= {200, 400, 429, 503}, statuses
        assert statuses[400]
        assert [one["deaths"] for one in servers(routed)] == [0, 0]
        assert routed.call("/v1/completions", wish)[0] == 200
    return f"{count} requests, of which {statuses[400]} were wrong: no server was called dead"
