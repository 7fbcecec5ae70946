"""A run of a real engine's thread, served again by the simulation with the same settings and the
durations of then: who enters when, who rests and what is computed is the same, step for step.

No order is given to it. What the world did is: which prompts had come, who left, whose reader was
behind, how many a forecast permitted, and whether the background was to rest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import StepRecord
from ridgeline.core.step import Step
from ridgeline.foresight.simulator import what_if
from ridgeline.foresight.simulator.replay_times import ReplayResult
from ridgeline.serve.engine.request_stream import ClientGone, RequestStream, StreamCaller
from tests.serve.serving import Served, serving
from tests.waiting import PATIENCE_S, eventually

Json = dict[str, Any]


class World:
    """What asks a server, on its loop; the engine stands still meanwhile."""

    def __init__(self, served: Served) -> None:
        self._served, self._ends = served, list[Future[None]]()
        self._acts: dict[int, Callable[[], object]] = {}
        self.engine = served.running.async_engine
        served.valve.before = self._before

    def at_step(self, number: int, act: Callable[[], object]) -> None:
        """Do something while a step is computed, counted from now on."""
        self._acts[self._served.valve.num_steps + number] = act

    def _before(self, step: Step) -> None:
        if act := self._acts.pop(self._served.valve.num_steps, None):
            act()

    def on_loop(self, act: Callable[[], None]) -> None:
        """Do something on the loop, and wait until it is done."""

        async def do() -> None:
            act()

        asyncio.run_coroutine_threadsafe(do(), self._served.loop).result(PATIENCE_S)

    def ask(
        self,
        *lengths: int,
        num_new: int = 20,
        n: int = 1,
        tenant: str = "a",
        due_s: float = inf,
        is_background: bool = False,
        is_read: bool = True,
    ) -> RequestStream:
        """Submit prompts of these lengths; read the answers as they come, unless ``is_read``."""
        params = SamplingParams(max_tokens=num_new, n=n, ignore_eos=True, seed=1)
        prompts = [
            tuple(40 + (i * length + j) % 50 for j in range(length))
            for i, length in enumerate(lengths, 1)
        ]
        made: list[RequestStream] = []

        def submit() -> None:
            text = self._served.llm.text.new_text
            caller = StreamCaller(tenant, is_background=is_background)
            stream = RequestStream(prompts, params, text, caller)
            stream.due_s = due_s
            self.engine.submit(stream)
            made.append(stream)

        self.on_loop(submit)
        if is_read:
            self.read(made[0])
        return made[0]

    def read(self, stream: RequestStream) -> None:
        """Begin to read a stream."""

        async def read() -> None:
            with suppress(ClientGone):
                while await stream.events():
                    pass
            self.engine.abandon(stream, ClientGone())

        self._ends.append(asyncio.run_coroutine_threadsafe(read(), self._served.loop))

    def leave(self, stream: RequestStream) -> None:
        self.on_loop(lambda: self.engine.abandon(stream, ClientGone()))

    def wait(self) -> None:
        """Wait for the end of all that is read."""
        while self._ends:
            self._ends.pop().result(PATIENCE_S)


def batch(world: World, served: Served) -> None:
    """Four requests of a batch fill the engine; people ask, and it goes on when it is quiet."""
    for length in (3, 9, 20):
        world.ask(length, num_new=60, is_background=True)
    world.ask(5, 8, 13, num_new=40, is_background=True, tenant="b")
    world.at_step(10, lambda: world.ask(4, tenant="person"))
    world.at_step(15, lambda: world.ask(3, 30, n=2, tenant="person"))
    world.wait()


def promises(world: World, served: Served) -> None:
    """They enter at once, others as they are permitted, or with less than their share."""

    def promise(num_permitted: float) -> None:
        world.ask(7, 11, n=2, due_s=1e9 + num_permitted)
        world.on_loop(lambda: world.engine.permit(num_permitted))

    for length in range(2, 30, 3):
        world.ask(length, tenant="ab"[length % 2])
    for number in (3, 8, 9, 20):
        world.at_step(number, lambda number=number: promise(number % 3))  # type: ignore[misc]
    world.at_step(30, lambda: world.on_loop(lambda: world.engine.permit(inf)))
    world.wait()


def pause(world: World, served: Served) -> None:
    """Nobody reads what fills the engine: it rests, and those who come have all the room."""
    slow = world.ask(6, num_new=100, n=4, is_read=False)
    eventually(lambda: len(served.llm.engine.scheduler.queues.paused) == 4)
    held = served.valve.hold()
    for length in (30, 3, 12, 5, 4, 8):
        world.ask(length, 2)
    served.valve.before = world._before
    world.at_step(6, lambda: world.read(slow))
    held.set()
    world.wait()


def keys(world: World, served: Served) -> None:
    """One key asks for much, others come later; each has its share."""
    held = served.valve.hold()
    for number in range(12):
        world.ask(*range(2, 3 + number % 4), 9 + number, n=1 + number % 4, tenant="a")
    served.valve.before = world._before
    world.at_step(4, lambda: world.ask(3, num_new=8, tenant="v"))
    world.at_step(6, lambda: world.ask(*[5] * 9, num_new=12, tenant="w"))
    world.at_step(11, lambda: world.ask(40, n=3, tenant="v"))
    held.set()
    world.wait()


def leaving(world: World, served: Served) -> None:
    """Clients leave, with prompts in the engine and before it."""
    held = served.valve.hold()
    streams = [world.ask(*range(4 + i, 12), num_new=40, tenant="ab"[i % 2]) for i in range(5)]
    served.valve.before = world._before
    for number, stream in enumerate(streams[:3]):
        world.at_step(3 + 5 * number, lambda stream=stream: world.leave(stream))  # type: ignore[misc]
    held.set()
    world.wait()


RUNS: dict[str, Callable[[World, Served], None]] = {
    run.__name__: run for run in (batch, promises, pause, keys, leaving)
}


def record(model: Path, path: Path, run: Callable[[World, Served], None]) -> list[Json]:
    """Return the trace of a run of a server with few slots."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "trace": path}
    with serving(model, options) as served:
        run(World(served), served)
        served.assert_idle()
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(records: list[Json]) -> list[Json]:
    return [one for one in records if one["type"] == "step"]


def assert_same(records: list[Json], again: ReplayResult) -> None:
    """The steps have the same requests, and the same tokens come of them."""
    steps = steps_of(records)
    assert again.difference is None
    assert again.num_equal == again.num_steps == len(steps)
    sampled = [one.sampled for one in again.records if isinstance(one, StepRecord)]
    assert sampled == [tuple(map(tuple, step["sampled"])) for step in steps]


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_run_is_served_again_step_for_step(
    model: Path, tmp_path: Path, run: Callable[[World, Served], None]
) -> None:
    records = record(model, tmp_path / "trace.jsonl", run)
    steps, requests = steps_of(records), [one for one in records if one["type"] == "request"]
    assert all(one["pushed"] for one in requests), "an order would be given"
    assert_same(records, what_if.run_as_recorded(records))
    happened = {
        "batch": any(step["gives_way"] and step["paused"] for step in steps)
        and any(one["is_background"] for one in requests),
        "promises": {0, 2, None} <= {step["num_permitted"] for step in steps},
        "pause": any(step["paused"] for step in steps) and any(step["resumed"] for step in steps),
        "keys": any(step["preempted"] for step in steps),
        "leaving": any(set(step["arrived"]) & set(step["aborted"]) for step in steps),
    }
    assert happened[run.__name__]
