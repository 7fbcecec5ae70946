"""Sends planned requests to an OpenAI-compatible server and notes when each piece comes back.

It decides nothing and concludes nothing: it keeps to the plan as well as one event loop can, and
measures how well that was: a request costs it about 0.5 ms of a core, and a chunk 0.1 ms. Times are
seconds from the start of the run. Where one process cannot keep up, several send.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from threading import BrokenBarrierError
from typing import Any

import httpx2

from ridgeline.bench.load.client_flags import Endpoint, Failed
from ridgeline.bench.load.stats import Outcome, summary_ms
from ridgeline.engine.setup.progress import Report
from ridgeline.foresight.simulator.workload import Planned

Session = list[Planned]
# Told which requests have ended, which are under way, and the seconds since the start.
IsEnough = Callable[[Sequence[Outcome], Sequence[Outcome], float], bool]
# Reads an answer with status 200 into its outcome; the last is the start of the run.
Reader = Callable[[httpx2.AsyncClient, httpx2.Response, Outcome, float], Awaitable[None]]

_LAG_PERIOD_S = 0.01
_ENOUGH_PERIOD_S = 0.1
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "text")


async def drive(
    target: Endpoint,
    warmups: Sequence[Planned],
    plan: Sequence[Planned],
    num_workers: int | None,
    report: Report,
    is_enough: IsEnough | None = None,
    read: Reader | None = None,
    ready: Callable[[], None] | None = None,
) -> tuple[list[Outcome], dict[str, Any]]:
    """Send the warm-up at once, then the plan: as it is due, or in turn on ``num_workers``.

    Once ``is_enough`` says so, the rest is not sent, and what is under way is broken off. ``read``
    reads an answer with status 200; by default one that is streamed. ``ready`` is called after the
    warm-up, and returns when the run is to start.

    Returns the outcomes in the order of the plan, and how well the client kept up. Raises
    ValueError if no warm-up request succeeds.
    """
    # A limit of connections would be a queue that is not measured. Idle ones are dropped before
    # servers do so (uvicorn after 5 s), as a request into a closing connection fails.
    limits = httpx2.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
    )
    async with httpx2.AsyncClient(limits=limits, timeout=None) as http:
        run = _LoadRun(http, target, read or read_stream, time.perf_counter())
        warm = await asyncio.gather(*(run.ask(planned, ()) for planned in warmups))
        if warm and all(outcome.error for outcome in warm):
            raise ValueError(f"{target.url} does not serve the first requests: {warm[0].error}")
        outcomes: list[Outcome] = []
        if ready:
            ready()
        lag_s: list[float] = []
        watch = asyncio.create_task(_watch(lag_s))
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        run.start_s = start_s

        async def work(own: Iterable[Session]) -> None:
            for session in own:
                said: list[tuple[str, str]] = []
                for planned in session:
                    await asyncio.sleep(planned.think_s)
                    outcomes.append(await run.turn(planned, said))
                    report(len(outcomes), len(plan))

        async def send() -> None:
            async with asyncio.TaskGroup() as tasks:
                shared = iter(sessions(plan))
                for _ in range(num_workers or 0):
                    tasks.create_task(work(shared))
                for session in shared if num_workers is None else ():
                    due_s = (session[0].arrival_s or 0.0) + start_s
                    await asyncio.sleep(due_s - time.perf_counter())
                    tasks.create_task(work([session]))

        sending = asyncio.create_task(send())
        while is_enough and not sending.done():
            await asyncio.wait([sending], timeout=_ENOUGH_PERIOD_S)
            now_s = time.perf_counter() - start_s
            if is_enough(outcomes, list(run.under_way.values()), now_s):
                sending.cancel()
        await asyncio.wait([sending])  # which, unlike the task itself, Ctrl-C interrupts
        if not sending.cancelled():
            sending.result()
        watch.cancel()
    span_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    late_s = [o.sent_s - o.arrival_s for o in outcomes if o.arrival_s is not None]
    health = {"event_loop_lag": summary_ms(lag_s), "send_lateness": summary_ms(late_s)}
    outcomes.sort(key=lambda outcome: outcome.index)
    return outcomes, health | {"cpu_share_of_one_core": round(cpu_s / span_s, 3)}


async def _watch(lag_s: list[float]) -> None:
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(_LAG_PERIOD_S)
        lag_s.append(time.perf_counter() - before_s - _LAG_PERIOD_S)


def sessions(plan: Sequence[Planned]) -> list[Session]:
    """Return the plan's sessions, each with its turns in order."""
    grouped: list[Session] = []
    for planned in plan:
        if planned.turn:
            grouped[-1].append(planned)
        else:
            grouped.append([planned])
    return grouped


class _LoadRun:
    """Requests on their way to one server, and their answers."""

    def __init__(
        self, http: httpx2.AsyncClient, target: Endpoint, read: Reader, start_s: float
    ) -> None:
        self._http, self._target, self._read = http, target, read
        self.start_s = start_s
        self.under_way: dict[int, Outcome] = {}

    async def turn(self, planned: Planned, said: list[tuple[str, str]]) -> Outcome:
        """Ask behind what was said, and add to it; without an answer to ask behind it fails."""
        if planned.turn > len(said):
            now_s = time.perf_counter() - self.start_s
            return Outcome(planned.index, None, now_s, now_s, error="the turn before it failed")
        outcome = await self.ask(planned, said)
        if outcome.error is None:
            said.append((str(planned.prompt), outcome.text))
        return outcome

    async def ask(self, planned: Planned, said: Sequence[tuple[str, str]]) -> Outcome:
        """Send one request and read its answer; any failure becomes the outcome's error."""
        target, body = self._target, self._target.body(planned, said)
        sent_s = time.perf_counter() - self.start_s
        outcome = self.under_way[planned.index] = Outcome(
            planned.index, planned.arrival_s, sent_s, sent_s
        )
        request = self._http.stream("POST", target.url, content=body, headers=target.headers)
        try:
            async with asyncio.timeout(target.timeout_s), request as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise Failed(f"HTTP {response.status_code}: {_message(text)}")
                await self._read(self._http, response, outcome, self.start_s)
        except TimeoutError:
            outcome.error = f"no complete answer after {target.timeout_s:g} s"
        except Failed as error:
            outcome.error = str(error)
        except Exception as error:  # one strange answer must not end the run of all others
            outcome.error = f"{type(error).__name__}: {_one_line(str(error))}"
        if outcome.error is not None:
            outcome.end_s = time.perf_counter() - self.start_s
        del self.under_way[planned.index]
        return outcome


async def read_stream(
    http: httpx2.AsyncClient, response: httpx2.Response, outcome: Outcome, start_s: float
) -> None:
    """Read a streamed answer; raises Failed if it ends too early or brings an error."""
    is_complete = False
    async for event in httpx2.EventSource(response):
        if event.data == "[DONE]":
            is_complete = True  # read on: only at its end can the connection serve again
        elif event.data:
            is_complete |= _take(event.data, outcome, time.perf_counter() - start_s)
    if not is_complete:
        raise Failed("the stream ended without a finish_reason and without [DONE]")


def _take(data: str, outcome: Outcome, now_s: float) -> bool:
    """Note what an event brings; True if it ends the answer."""
    event = json.loads(data)
    if event.get("error"):
        raise Failed(f"error in the stream: {_message(data)}")
    if usage := event.get("usage"):
        outcome.prompt_tokens = int(usage["prompt_tokens"])
        outcome.usage_tokens = int(usage["completion_tokens"])
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    is_last = False
    for choice in event.get("choices") or ():
        outcome.end_s = now_s
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in _TEXT_FIELDS):
            outcome.chunk_s.append(now_s)
            outcome.text += delta.get("content") or delta.get("text") or ""
        reason = choice.get("finish_reason")
        if reason in ("error", "abort"):
            raise Failed(f"finish_reason {reason}")
        is_last |= bool(reason)
    return is_last


def _message(text: str) -> str:
    """Return what an error body says, whatever form it has."""
    try:
        error = json.loads(text)["error"]
        return _one_line(error["message"] if isinstance(error, dict) else str(error))
    except (ValueError, TypeError, KeyError):
        return _one_line(text)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


_START_S = 120.0  # until all processes must have had their warm-up
_POLL_S = 0.2
# Of this process, if it is a client: where all meet before the start, and what all have done.
_shared: dict[str, Any] = {}


def drive_many(
    target: Endpoint,
    warmups: Sequence[Planned],
    plan: Sequence[Planned],
    num_workers: int | None,
    num_clients: int,
    report: Report,
) -> tuple[list[Outcome], dict[str, Any]]:
    """Do what ``client.drive`` does, from ``num_clients`` processes.

    The client's own health is that of the one that kept up worst. Raises ValueError if no warm-up
    request of one of them succeeds, or there are more processes than requests at a time.
    """
    if num_clients == 1:
        return asyncio.run(drive(target, warmups, plan, num_workers, report))
    if num_workers is not None and num_workers < num_clients:
        raise ValueError(
            f"--clients is {num_clients}, but --max-concurrency {num_workers}: each client needs a "
            "request to send"
        )
    context = get_context("spawn")
    barrier, counter = context.Barrier(num_clients), context.Value("q", 0)
    parts = [sessions(plan)[i::num_clients] for i in range(num_clients)]
    seats = share(num_workers, num_clients)
    with ProcessPoolExecutor(
        num_clients, mp_context=context, initializer=_begin, initargs=(barrier, counter)
    ) as pool:
        futures = [
            pool.submit(_client, target, warmups[i::num_clients], parts[i], seats[i])
            for i in range(num_clients)
        ]
        while not all(one.done() for one in futures):
            report(counter.value, len(plan))
            time.sleep(_POLL_S)
    errors = [error for one in futures if (error := one.exception())]
    if errors:  # what went wrong itself, before what only waited for it
        raise min(errors, key=lambda error: isinstance(error, BrokenBarrierError))
    outcomes, healths = zip(*(one.result() for one in futures), strict=True)
    merged = sorted((one for part in outcomes for one in part), key=lambda one: one.index)
    return merged, worst(healths)


def share(num_workers: int | None, num_clients: int) -> list[int | None]:
    """Return how many requests at a time each process may have; None in an open loop."""
    if num_workers is None:
        return [None] * num_clients
    return [(num_workers + i) // num_clients for i in range(num_clients)]


def worst(healths: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return of each measure of health the worst of all processes."""
    merged: dict[str, Any] = {"num_clients": len(healths)}
    for name in ("event_loop_lag", "send_lateness"):
        delays = [health[name] for health in healths if health[name]]
        merged[name] = max(delays, key=lambda one: float(one["p99_ms"]), default=None)
    merged["cpu_share_of_one_core"] = max(one["cpu_share_of_one_core"] for one in healths)
    return merged


def _begin(barrier: Any, counter: Any) -> None:
    _shared.update(barrier=barrier, counter=counter)


def _client(
    target: Endpoint, warmups: Sequence[Planned], part: Sequence[Session], seats: int | None
) -> tuple[list[Outcome], dict[str, Any]]:
    """Be one of the processes."""

    def report(done: int, total: int) -> None:
        with _shared["counter"].get_lock():
            _shared["counter"].value += 1

    plan = [planned for session in part for planned in session]
    try:
        return asyncio.run(drive(target, warmups, plan, seats, report, ready=_meet))
    except BaseException:
        _shared["barrier"].abort()  # or the others would wait for this one
        raise


def _meet() -> None:
    _shared["barrier"].wait(_START_S)
