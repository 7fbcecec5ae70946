"""The load of one plan from several processes, where one event loop would be the limit.

Each process has its part of the sessions; all start at the same moment. What they saw is put
together as if one had seen it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from threading import BrokenBarrierError
from typing import Any

from ridgeline.bench.load.client import Session, drive, sessions
from ridgeline.bench.load.client_flags import Endpoint
from ridgeline.bench.load.stats import Outcome
from ridgeline.engine.setup.progress import Report
from ridgeline.foresight.simulator.workload import Planned

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
        known = [health[name] for health in healths if health[name]]
        merged[name] = max(known, key=lambda one: float(one["p99_ms"]), default=None)
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
