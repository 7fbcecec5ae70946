"""Turns between keys: whose work a few threads do next, so that no key waits for another's.

For all that is not a step of the engine and may take longer than the event loop can spare. Of those
that wait, the key with the fewest threads is next, then the one that was worked for least; a key's
own work is done in the order in which it came. One thread is always left to other keys. A key that
has had much work done beside others rests, and others of its own wait behind it. This module
knows nothing of the work.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.keys import Pacer
from ridgeline.serve.http.request_state import CALLER
from ridgeline.system.process import NUM_PROCESSES

_MOST_WAITING = 1000
_LOOK_S = 1.0  # how often who rests is looked at

Result = TypeVar("Result")
Args = ParamSpec("Args")


def carried(work: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return work for a thread that a task waits for, which hears of it however it ends.

    A future of asyncio carries no StopIteration: a caller that waits for it would wait for ever.
    """

    def run(*args: Args.args, **named: Args.kwargs) -> Result:
        try:
            return work(*args, **named)
        except StopIteration as error:
            raise RuntimeError("what was looked for is not there") from error

    return run


async def in_thread(work: Callable[Args, Result], *args: Args.args, **named: Args.kwargs) -> Result:
    """Return what ``work`` returns, which a thread does at once."""
    return await asyncio.to_thread(carried(work), *args, **named)


class FairThreadPool:
    """A few threads, and the work that waits for them. All but the work lives on one event loop."""

    def __init__(
        self,
        max_workers: int,
        name: str,
        most_waiting: int = _MOST_WAITING,
        pace: Pacer | None = None,
    ) -> None:
        """Have work done by ``max_workers``, at least 2; of a key at most ``most_waiting`` wait.

        ``pace`` says how long a key rests; without it nobody does.
        """
        self._max_workers, self._most_waiting = max(2, max_workers), most_waiting
        self._pace = pace or Pacer()
        self._wake: asyncio.TimerHandle | None = None  # when the first of those that rest may begin
        self._threads = ThreadPoolExecutor(self._max_workers, name)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._num_running: Counter[str] = Counter()
        self._used_s: defaultdict[str, float] = defaultdict(float)
        self._floor_s = 0.0  # what the last to begin had used: nobody saves up more than that

    async def run(self, work: Callable[[], Result]) -> Result:
        """Return what ``work`` returns, which a thread does when it is the caller's turn.

        A caller that is cancelled while it waits leaves. Raises ApiError 429 if too much work of
        this key waits.
        """
        caller = CALLER.get()
        await self._turn(caller)
        begin_s, loop, computed_s = time.monotonic(), asyncio.get_running_loop(), 0.0

        def timed() -> Result:
            nonlocal computed_s
            before_s = time.thread_time()
            try:
                return work()
            finally:
                computed_s = time.thread_time() - before_s

        def leave(_: object) -> None:
            self._pace.note_work(caller, computed_s)
            self._leave(caller, time.monotonic() - begin_s)

        done = loop.run_in_executor(self._threads, carried(timed))
        done.add_done_callback(leave)
        return await asyncio.shield(done)  # a thread cannot be cancelled: it is busy until the end

    def soon(self, work: Callable[[], object]) -> None:
        """Have work of the server's own done, which is short and for which nobody waits."""
        self._threads.submit(work)

    def is_free(self) -> bool:
        """Whether the caller's work would begin at once, or when the caller has rested."""
        caller = CALLER.get()
        has_thread = self._num_running[caller] < self._max_workers - 1
        return has_thread and not self._waiting.get(caller)

    def close(self) -> None:
        """Begin no more work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, caller: str) -> None:
        """Return when the caller's next piece of work may begin; ``_leave`` must follow."""
        waiting = self._waiting.setdefault(caller, deque())
        if len(waiting) >= self._most_waiting:
            message = f"{len(waiting)} requests of this key wait to be prepared: try again later"
            headers = {"retry-after": "5"}
            raise ApiError(429, message, code="server_is_overloaded", headers=headers)
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._begin_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn in waiting:
                waiting.remove(turn)
            elif not turn.cancelled():  # its turn came at this very moment
                self._leave(caller, 0.0)
            raise

    def _begin(self, caller: str) -> None:
        if not self._num_running[caller]:
            self._used_s[caller] = max(self._used_s[caller], self._floor_s)
        self._floor_s = self._used_s[caller]
        self._num_running[caller] += 1

    def _leave(self, caller: str, used_s: float) -> None:
        """Give a thread back, and let others begin."""
        self._num_running[caller] -= 1
        self._used_s[caller] += used_s
        self._begin_next()

    def _begin_next(self) -> None:
        """Let those begin whose turn it is, and come back when the first that rests may."""
        if self._wake:
            self._wake.cancel()
            self._wake = None
        while self._num_running.total() < self._max_workers:
            waiting = [one for one, turns in self._waiting.items() if turns]
            ready = [one for one in waiting if self._may_begin(one)]
            if not ready:
                rests_s = [rest_s for one in waiting if (rest_s := self._pace.rest_s(one))]
                if rests_s:  # which end sooner where the other keys leave
                    loop = asyncio.get_running_loop()
                    self._wake = loop.call_later(min(_LOOK_S, *rests_s), self._begin_next)
                return
            first = min(ready, key=lambda one: (self._num_running[one], self._used_s[one]))
            turn = self._waiting[first].popleft()
            if not turn.cancelled():  # it is about to leave
                self._begin(first)
                turn.set_result(None)

    def _may_begin(self, caller: str) -> bool:
        has_thread = self._num_running[caller] < self._max_workers - 1
        return has_thread and not self._pace.rest_s(caller)


class WorkPools:
    """The work that an application does beside answers, by what it needs and how long it takes.

    Attributes:
        bodies: long ones, to checked models; of a key one at a time, which bounds its memory too.
        prompts: templates and tokenising: milliseconds.
        grammars: compiling them: up to ``--grammar-timeout`` of computing.
        reports: what is told of a model or a server, plans among it: up to seconds.
        loads: plans for a load: up to half a minute.
    """

    def __init__(self, most_waiting: int = _MOST_WAITING, pace: Pacer | None = None) -> None:
        """Begin with nothing to do; of each kind, ``most_waiting`` of a key may wait.

        ``pace`` says how long a key rests from work of any kind; without it nobody does.
        """
        self.bodies = FairThreadPool(2, "bodies", most_waiting, pace)
        self.prompts = FairThreadPool(NUM_PROCESSES, "prompts", most_waiting, pace)
        self.grammars = FairThreadPool(2, "grammars", most_waiting, pace)
        self.reports = FairThreadPool(2, "reports", most_waiting, pace)
        self.loads = FairThreadPool(2, "plans for loads", most_waiting, pace)

    def close(self) -> None:
        """Begin no more work."""
        for turns in (self.bodies, self.prompts, self.grammars, self.reports, self.loads):
            turns.close()
