"""Turns between keys: who is next, who may begin, who leaves."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ridgeline
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.fair_pool import FairThreadPool, in_thread
from ridgeline.serve.http.keys import Pacer
from ridgeline.serve.http.request_state import CALLER
from tests.waiting import PATIENCE_S


class Bench:
    """Work of several keys; each piece stands still until it is let go.

    Attributes:
        begun: the pieces that were begun, in order.
    """

    def __init__(self, max_workers: int, most_waiting: int = 100) -> None:
        self.now_s = 100.0
        self.pace = Pacer(lambda: self.now_s, num_processors=2)
        self.turns = FairThreadPool(max_workers, "test", most_waiting, self.pace)
        self.begun: list[str] = []
        self._num_sent, self._news = 0, asyncio.Event()  # to threads; and that one has begun
        run = asyncio.get_running_loop().run_in_executor

        def sent(*args: Any) -> asyncio.Future[Any]:
            self._num_sent += 1
            return run(*args)

        asyncio.get_running_loop().run_in_executor = sent  # type: ignore[method-assign, assignment]
        self.used_s: dict[str, float] = {}
        self._go: dict[str, threading.Event] = {}
        self._tasks: dict[str, asyncio.Task[str]] = {}

    async def ask(self, *names: str) -> None:
        """Ask for pieces of work; the first letter of each is its key."""
        for name in names:
            self._go[name] = threading.Event()
            self._tasks[name] = asyncio.create_task(self._run(name))
            await asyncio.sleep(0)

    async def end(self, name: str, used_s: float = 0.0) -> str:
        """Let a piece end, as if it had taken so long, and return what it returned."""
        self.turns._used_s[name[0]] += used_s
        self._go[name].set()
        return await self._tasks[name]

    async def leave(self, name: str) -> None:
        """Have who asked for a piece leave."""
        self._tasks[name].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._tasks[name]

    async def now(self, *names: str) -> None:
        """Check that just these have begun, in this order."""
        for _ in range(20):  # whoever has a turn takes it
            await asyncio.sleep(0)
        while len(self.begun) < max(self._num_sent, len(names)):
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), PATIENCE_S)
        assert self.begun == list(names)

    async def _run(self, name: str) -> str:
        CALLER.set(name[0])
        loop = asyncio.get_running_loop()

        def work() -> str:
            self.begun.append(name)
            loop.call_soon_threadsafe(self._news.set)
            assert self._go[name].wait(PATIENCE_S)
            return name.upper()

        return await self.turns.run(work)


def on_a_bench(
    max_workers: int, **options: Any
) -> Callable[[Callable[[Bench], Awaitable[None]]], Callable[[], None]]:
    def wrap(test: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            bench = Bench(max_workers, **options)
            try:
                await test(bench)
            finally:
                for go in bench._go.values():
                    go.set()
                await asyncio.gather(*bench._tasks.values(), return_exceptions=True)
                bench.turns.close()
            assert not bench.turns._num_running.total()
            assert not any(bench.turns._waiting.values())

        def test_itself() -> None:
            asyncio.run(run())

        return test_itself

    return wrap


@on_a_bench(3)
async def test_a_key_leaves_one_thread_to_others(bench: Bench) -> None:
    await bench.ask("a1", "a2", "a3", "a4")
    await bench.now("a1", "a2")
    await bench.ask("b1", "b2")
    await bench.now("a1", "a2", "b1")
    assert await bench.end("b1") == "B1"
    await bench.now("a1", "a2", "b1", "b2")


@on_a_bench(3)
async def test_who_rests_waits_in_its_line_and_begins_when_it_has_rested(bench: Bench) -> None:
    bench.pace.wait_s("b", 0)
    bench.pace.note_work("a", 0.3)  # 1.2 s at a quarter of a processor, of which 0.55 s are over
    await bench.ask("a1", "a2", "b1")
    await bench.now("b1")
    assert await bench.end("b1") == "B1"  # that others end does not shorten it
    await bench.now("b1")
    bench.pace.wait_s("b", 0)
    bench.now_s += 0.66
    bench.turns._begin_next()  # as the timer does
    await bench.now("b1", "a1", "a2")


@on_a_bench(3)
async def test_whoever_rests_begins_by_itself(bench: Bench) -> None:
    bench.pace.wait_s("b", 0)
    bench.pace.note_work("a", 0.3)
    asked_s = bench.pace.rest_s("a")
    await bench.ask("a1")
    assert bench.turns._wake is not None
    loop = asyncio.get_running_loop()
    assert bench.turns._wake.when() - loop.time() == pytest.approx(asked_s, abs=0.1)
    bench.now_s += asked_s + 0.01
    await bench.now("a1")  # when the timer rings


@on_a_bench(2)
async def test_who_comes_as_a_rest_ends_does_not_pass_who_waited(bench: Bench) -> None:
    bench.pace.wait_s("b", 0)
    bench.pace.note_work("a", 0.3)
    await bench.ask("a1")
    bench.now_s += 2.0  # the rest is over, and the timer has not rung
    await bench.ask("a2")
    await bench.now("a1")


@on_a_bench(2)
async def test_work_of_one_key_is_done_in_order_and_no_thread_rests(bench: Bench) -> None:
    await bench.ask("a1", "a2", "a3")
    for i in (1, 2, 3):
        await bench.now(*[f"a{j}" for j in range(1, i + 1)])
        await bench.end(f"a{i}")


@on_a_bench(2)
async def test_whom_least_was_done_for_is_next(bench: Bench) -> None:
    await bench.ask("a1", "b1", "a2", "b2", "c1")
    await bench.now("a1", "b1")
    await bench.end("b1", used_s=5)  # a has a thread still: c, who had nothing, is next
    await bench.now("a1", "b1", "c1")
    await bench.end("a1", used_s=9)
    await bench.now("a1", "b1", "c1", "b2")
    await bench.end("c1")
    await bench.now("a1", "b1", "c1", "b2", "a2")


@on_a_bench(2)
async def test_nobody_saves_up_turns_while_away(bench: Bench) -> None:
    await bench.ask("a1", "b1")
    await bench.end("a1", used_s=50)
    await bench.end("b1", used_s=60)
    await bench.ask("a2", "c1", "c2", "a3", "b2")  # c comes to a server that worked an hour
    await bench.now("a1", "b1", "a2", "c1")
    await bench.end("c1", used_s=20)
    await bench.now("a1", "b1", "a2", "c1", "b2")  # 60, where c has 70 by now


@on_a_bench(2)
async def test_who_leaves_while_it_waits_takes_no_turn(bench: Bench) -> None:
    await bench.ask("a1", "a2", "a3")
    await bench.leave("a2")
    await bench.end("a1")
    await bench.now("a1", "a3")


@on_a_bench(2)
async def test_who_leaves_amid_its_work_keeps_the_thread_until_it_is_done(bench: Bench) -> None:
    await bench.ask("a1", "a2")
    await bench.now("a1")
    await bench.leave("a1")
    await bench.now("a1")
    bench._go["a1"].set()
    await bench.now("a1", "a2")


@on_a_bench(2)
async def test_a_turn_that_comes_as_its_owner_leaves_goes_to_the_next(bench: Bench) -> None:
    turns = bench.turns
    await turns._turn("a")
    second, third = (asyncio.create_task(turns._turn("a")) for _ in range(2))
    await asyncio.sleep(0)
    turns._leave("a", 0.0)
    second.cancel()  # it has its turn, and does not know yet
    with pytest.raises(asyncio.CancelledError):
        await second
    await third
    turns._leave("a", 0.0)


@on_a_bench(2, most_waiting=2)
async def test_of_a_key_only_so_many_wait(bench: Bench) -> None:
    await bench.ask("a1", "a2", "a3", "a4", "b1")
    with pytest.raises(ApiError) as refused:
        await bench._tasks["a4"]
    assert (refused.value.status, refused.value.code) == (429, "server_is_overloaded")
    assert refused.value.headers["retry-after"]
    await bench.now("a1", "b1")


@on_a_bench(2)
async def test_what_work_raises_comes_to_who_asked_and_frees_the_thread(bench: Bench) -> None:
    def fail() -> None:
        raise ValueError("wrong")

    for _ in range(3):
        with pytest.raises(ValueError, match="wrong"):
            await bench.turns.run(fail)
    assert await bench.turns.run(lambda: 7) == 7


@on_a_bench(2)
async def test_work_that_finds_nothing_fails_and_nobody_waits_for_ever(bench: Bench) -> None:
    for run in (bench.turns.run, in_thread):
        with pytest.raises(RuntimeError, match="is not there"):
            # No future has StopIteration.
            await asyncio.wait_for(run(partial(next, iter(()))), PATIENCE_S)
    assert await bench.turns.run(lambda: 7) == 7


@pytest.mark.parametrize("room", ["server", "fleet"])
def test_all_work_in_threads_is_carried(room: str) -> None:
    for path in (Path(ridgeline.__file__).parent / room).rglob("*.py"):
        for call in re.findall(r"(?:to_thread|run_in_executor)\([^)]*", path.read_text()):
            is_ours = "engine.stop," in call  # waits for a thread, and raises nothing
            assert "carried(" in call or is_ours, f"{path}: {call}"


@on_a_bench(3)
async def test_only_time_on_a_processor_is_rested_from(bench: Bench) -> None:
    bench.pace.wait_s("b", 0)
    await bench.ask("a1")
    await bench.now("a1")
    bench.now_s += 20  # it stands still, as one does beside a flood
    await bench.end("a1")
    assert bench.pace.rest_s("a") == 0
    CALLER.set("a")

    def computes() -> None:
        end_s = time.thread_time() + 0.3
        while time.thread_time() < end_s:
            pass

    bench.pace.wait_s("b", 0)
    await bench.turns.run(computes)
    assert bench.pace.rest_s("a") >= 0.3 * 4 - 0.3 - 0.25 - 1e-6
