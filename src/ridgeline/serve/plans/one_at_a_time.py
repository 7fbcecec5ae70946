"""Plans for a load take seconds: one of a key at a time, within a limit, while a client waits.

It knows nothing of plans but that they ask, at every simulated step, whether they are still wanted.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive

from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.gate import client_left
from ridgeline.serve.http.turns import WorkTurns
from ridgeline.text.child import BUSY_TIMES

MOST_S = 30.0  # of computing
_LEFT = 499  # it is not read

Alive = Callable[[], None]


async def run_long(
    work: WorkTurns, receive: Receive, make: Callable[[Alive], Response]
) -> Response:
    """Return what ``make`` returns, which runs in a thread and calls what it is given often.

    Raises ApiError if another is at work, if it takes too long, or if the client leaves.
    """
    if not work.loads.is_free():
        raise ApiError(
            503,
            "another plan for a load is running, and each key has one at a time, with a rest after "
            "it while other keys ask: try again in a few seconds",
            code="plan_busy",
            headers={"retry-after": "2"},
        )
    gone = threading.Event()
    watcher = asyncio.ensure_future(_watch(receive, gone))
    try:
        return await work.loads.run(lambda: make(_until(gone)))
    finally:
        gone.set()  # also where the server ends this request
        watcher.cancel()


def _until(gone: threading.Event) -> Alive:
    """Return what ends the work of this thread: it has a limit on what it computes.

    One on the time that passes would refuse on a busy machine what is made at once on another.
    """
    begin_s, computing_since_s = time.monotonic(), time.thread_time()

    def alive() -> None:
        if gone.is_set():
            raise ApiError(_LEFT, "the client has left", code="client_left")
        if time.thread_time() - computing_since_s > MOST_S:
            raise ApiError(
                400,
                f"this plan takes more than {MOST_S:.0f} s of computing, and one is made at a "
                f"time: name fewer devices in on, or shorter answers, or use `ridgeline plan`",
                param="on",
                code="plan_too_long",
            )
        if time.monotonic() - begin_s > BUSY_TIMES * MOST_S:
            raise ApiError(
                503,
                "the machine is too busy for this plan now: try again later",
                code="plan_busy",
                headers={"retry-after": "60"},
            )

    return alive


async def _watch(receive: Receive, gone: threading.Event) -> None:
    await client_left(receive)
    gone.set()
