"""A request with a deadline, what it was told, and what became of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ridgeline.core.records import RequestRecord
from ridgeline.foresight.deadline import AdmissionVerdict, Due, latest_start_s
from ridgeline.foresight.simulator.forecast import PredictedTimes, RequestSnapshot
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.serve.deadlines.field import Deadline
from ridgeline.serve.engine.request_stream import RequestStream


@dataclass(eq=False)
class Promise:
    """A request with a deadline, and what became of it.

    Attributes:
        due: on the clock of the engine.
        foreseen: the same, when it was promised; without margin.
        expected: the same, with what others that came in since have delayed it.
        outcome: kept, broken or refused, or without a promise in_time or late; None while it is
            open, or if its client left.
        is_made: whether its client is told of a promise.
        is_protected: whether no other may take its margin: also where it would be promised, but
            promises are off.
        made_s: when it was predicted.
        num_new: tokens of each answer that were reckoned with.
        is_put_off: whether a round had no time for it.
    """

    stream: RequestStream
    deadline: Deadline
    due: Due
    outcome: str | None = None
    is_made: bool = False
    is_protected: bool = False
    foreseen: PredictedTimes = field(default_factory=PredictedTimes)
    expected: PredictedTimes = field(default_factory=PredictedTimes)
    made_s: float = 0.0
    num_new: int = 0
    is_put_off: bool = False
    snapshots: tuple[RequestSnapshot, ...] = ()  # as long as it is not in the engine
    begun: set[int] = field(default_factory=set)  # prompts with a first token
    records: list[RequestRecord] = field(default_factory=list)

    @property
    def has_first(self) -> bool:
        """Whether all prompts have their first token."""
        return len(self.begun) == len(self.stream.prompts)

    def left(self) -> Due:
        """Return what of it is still due."""
        return Due(inf if self.has_first else self.due.first_s, self.due.end_s)

    def timings(self) -> dict[str, Any]:
        """Return what a client may know of it."""
        after_s = [at_s - self.stream.arrived_s for at_s in self.foreseen]
        ttft_ms, total_ms = (None if s == inf else round(1e3 * s, 1) for s in after_s)
        outcome = self.outcome or "open"
        return {
            "promised": self.is_made,
            "outcome": outcome,
            "foreseen_ttft_ms": ttft_ms,
            "foreseen_total_ms": total_ms,
        }


def refuse_now(
    promise: Promise,
    future: asyncio.Future[AdmissionVerdict],
    verdict: AdmissionVerdict,
    now_s: float,
) -> None:
    """Give a verdict to the request that waits for it; times count from its arrival."""
    if not future.done():
        since_s = now_s - promise.stream.arrived_s
        stretched = PredictedTimes(*(since_s + seconds for seconds in verdict.stretched))
        future.set_result(verdict._replace(stretched=stretched))


def due_from(promise: Promise, now_s: float) -> Due:
    """Return when a request is due, in seconds from then."""
    return Due(*(at_s - now_s for at_s in promise.due))


def ranked(snapshot: RequestSnapshot, promise: Promise, times: StepTime) -> RequestSnapshot:
    """Give a request its place among those with a deadline."""
    now_s = promise.stream.arrived_s
    due = due_from(promise, now_s)
    slack_s = latest_start_s(times, snapshot.num_prompt, snapshot.num_new, due)
    return snapshot._replace(due_s=now_s + slack_s)
