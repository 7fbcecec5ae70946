"""What a fleet costs and how fast it recovers, on a machine that does nothing else.

    python -m tests.fleet.cost              # all of it, a few minutes
    python -m tests.fleet.cost cost first   # some of it

Each line says what was measured, beside what it should be (docs/results.md#server).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.fleet.test_remote_server import joined
from tests.fleet.test_router import Routed, routing
from tests.serve.tunnel.clouds import serving_cloud
from tests.waiting import eventually

_EVENT = b"data: {"
_NUM_FIRSTS, _ROUNDS, _KILLS = 40, 8, 3
_REST_S = 4.0  # until a new server has done what it does beside its first answers
_ROOM = ("--kv-cache-memory", "128MiB")
_WORDS = ["harbour", "copper", "lantern", "winter", "orchard", "signal", "marble", "river"]


@dataclass
class Heard:
    """What a client heard of a stream: when it began, when bytes came, and how many events."""

    begin_s: float
    at_s: list[float] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)

    @property
    def first_s(self) -> float:
        return self.at_s[0] - self.begin_s

    @property
    def silence_s(self) -> float:
        """The longest time between two events."""
        return max(b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False))

    @property
    def num_events(self) -> int:
        return self.text.count(_EVENT)


async def ask(port: int, path: str, body: dict[str, Any]) -> Heard:
    """Ask for an answer, and hear it to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
    heard = Heard(time.perf_counter())
    writer.write(head.encode() + data)
    while data := await reader.read(1 << 16):
        if _EVENT in data:
            heard.at_s.append(time.perf_counter())
        heard.text += data
    writer.close()
    assert heard.text.startswith(b"HTTP/1.1 200"), bytes(heard.text[:500])
    return heard


def stream(port: int, seed: int, num_tokens: int) -> Awaitable[Heard]:
    """Ask for a stream whose prompt is in no cache."""
    words = " ".join(random.Random(seed).choices(_WORDS, k=40))
    body = {"prompt": f"{seed} {words}", "max_tokens": num_tokens, "ignore_eos": True}
    return ask(port, "/v1/completions", body | {"stream": True, "temperature": 0})


async def streams(port: int, num: int, num_tokens: int, seed: int) -> list[Heard]:
    """Hear so many streams at once."""
    return await asyncio.gather(*(stream(port, seed + i, num_tokens) for i in range(num)))


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(model: str, folder: Path, *flags: str) -> Iterator[Routed]:
    """Run ``serve`` with servers of one thread."""
    with routing(Path(model), folder / "log", *_ROOM, *flags) as running:
        asyncio.run(streams(running.port, 4, 4, seed=0))
        yield running


def table(running: Routed) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(running.call("/v1/fleet")[1]["models"].values()))
    return found


def cost(model: str, folder: Path) -> None:
    """Processor time of the router for an event of a stream."""
    with served(model, folder, "--replicas", "2") as running:
        for num in (1, 16, 64):
            before_s = processor_s(running.process.pid)
            heard = asyncio.run(streams(running.port, num, 1600 // num + 150, seed=1000 * num))
            used_s = processor_s(running.process.pid) - before_s
            num_events = sum(one.num_events for one in heard)
            used_us = 1e6 * used_s / num_events
            print(f"{num} streams: {used_us:.0f} us an event (60 at 16), {num_events} events")


def first(model: str, folder: Path) -> None:
    """How much later the first token of a single stream is there than without a router."""
    with served(model, folder) as plain, served(model, folder, "--replicas", "2") as running:
        taken = [
            [asyncio.run(streams(one.port, 1, 2, seed))[0].first_s for one in (plain, running)]
            for seed in range(5000, 5000 + _NUM_FIRSTS)
        ]
    direct, routed = (1e3 * median(times) for times in zip(*taken, strict=True))
    added = 1e3 * median(b - a for a, b in taken)
    print(f"first token: {direct:.1f} ms, through the router {routed:.1f}: {added:.1f} more (3)")


def throughput(model: str, folder: Path) -> None:
    """Two servers through the router against two plain ones, 8 streams for each server."""

    async def both(ports: list[int], num: int, seed: int) -> float:
        begin_s = time.perf_counter()
        await asyncio.gather(
            *(streams(port, num, 200, seed + 100 * i) for i, port in enumerate(ports))
        )
        return 3200 / (time.perf_counter() - begin_s)

    with ExitStack() as stack:
        plain = [stack.enter_context(served(model, folder)).port for _ in range(2)]
        routed = stack.enter_context(served(model, folder, "--replicas", "2")).port
        time.sleep(_REST_S)
        ratios = []
        for turn in range(_ROUNDS):
            direct = asyncio.run(both(plain, 8, 7000 + 1000 * turn))
            through = asyncio.run(both([routed], 16, 7500 + 1000 * turn))
            ratios.append(through / direct)
            print(f"plain {direct:.0f} tok/s, routed {through:.0f}: {ratios[-1]:.3f}")
    print(f"throughput: {median(ratios):.3f} of two plain servers (0.95)")


def hits(model: str, folder: Path) -> None:
    """How much of 12 conversations of 5 turns is found in a cache."""
    rng = random.Random(5)
    systems = [" ".join(rng.choices(_WORDS, k=120)) for _ in range(3)]

    async def talk(port: int, number: int) -> tuple[int, int]:
        own, cached, total = random.Random(number), 0, 0
        messages = [{"role": "system", "content": systems[number % 3]}]
        for _ in range(5):
            messages.append({"role": "user", "content": " ".join(own.choices(_WORDS, k=60))})
            body = {"messages": messages, "max_tokens": 16, "temperature": 0}
            heard = await ask(port, "/v1/chat/completions", body)
            answer = json.loads(heard.text.split(b"\r\n\r\n", 1)[1])
            usage = answer["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            total += usage["prompt_tokens"]
            messages.append(answer["choices"][0]["message"])
        return cached, total

    async def talks(port: int) -> list[tuple[int, int]]:
        return await asyncio.gather(*(talk(port, number) for number in range(12)))

    with served(model, folder, "--replicas", "2") as running:
        cached, total = map(sum, zip(*asyncio.run(talks(running.port)), strict=True))
    print(f"hits: {cached / total:.1%} of {total} prompt tokens (73 %)")


def notice(model: str, folder: Path) -> None:
    """The longest silence of 16 streams while one of two machines leaves with 20 s of notice."""
    key = folder / "key"
    key.write_text("0123456789abcdef" * 4)
    flags = ("--fleet-key-file", str(key))
    with (
        served(model, folder, *flags) as running,
        serving_cloud("aws") as cloud,
        joined(
            Path(model),
            key,
            f"http://127.0.0.1:{running.port}",
            *_ROOM,
            *("--spot", "aws"),
            RIDGELINE_METADATA_URL=cloud.url,
        ),
    ):

        async def disturbed() -> list[Heard]:
            hearing = asyncio.ensure_future(streams(running.port, 16, 600, seed=9000))
            await asyncio.sleep(1)
            cloud.left_s = 20.0
            return await hearing

        heard, after = asyncio.run(disturbed()), table(running)
    silence_s = max(one.silence_s for one in heard)
    whole = sum(b'"finish_reason":"length"' in one.text for one in heard)
    print(f"notice of 20 s: {whole} of 16 whole, {after['resumed']} moved, ", end="")
    print(f"longest silence {silence_s:.2f} s (2)")


def back(model: str, folder: Path) -> None:
    """How long it takes until a killed server is back, and the silence of its streams."""
    with served(model, folder, "--replicas", "2") as running:
        for turn in range(_KILLS):

            async def disturbed(seed: int) -> tuple[list[Heard], float]:
                hearing = asyncio.ensure_future(streams(running.port, 16, 400, seed))
                await asyncio.sleep(0.7)
                os.kill(table(running)["replicas"][0]["pid"], signal.SIGKILL)
                begin_s = time.perf_counter()
                restarted = table(running)["restarted"]
                while table(running)["restarted"] == restarted:
                    await asyncio.sleep(0.02)
                back_s = time.perf_counter() - begin_s
                return await hearing, back_s

            heard, back_s = asyncio.run(disturbed(11000 + 100 * turn))
            silence_s = max(one.silence_s for one in heard)
            print(f"killed: back after {back_s:.2f} s (1.5), longest silence {silence_s:.2f} s")
            eventually(lambda: all(r["state"] == "ready" for r in table(running)["replicas"]))
            time.sleep(_REST_S)


MEASURED: dict[str, Callable[[str, Path], None]] = {
    one.__name__: one for one in (cost, first, throughput, hits, notice, back)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", nargs="*", choices=[[], *MEASURED], help="all, if none is named")
    parser.add_argument("--model", default=None, help="a folder or file; default: smollm2")
    given = parser.parse_args()
    model = given.model or _smollm2()
    for name in given.what or MEASURED:
        with tempfile.TemporaryDirectory() as folder:
            MEASURED[name](model, Path(folder))


def _smollm2() -> str:
    from ridgeline.engine.setup.home import locate

    return str(locate("smollm2").path)


if __name__ == "__main__":
    main()
