"""Two runs of the same requests: who gained, who lost, and what it comes to.

From the records of requests alone; times are those of whatever clock the runs had.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ridgeline.core.records import Record, RequestRecord, StepRecord

METRICS = ("ttft", "tpot", "e2el")  # time to first token, of each further one, to the end
IN_MS = tuple(f"{metric}_ms" for metric in METRICS)


class Change(NamedTuple):
    """A request in two runs, by the names of ``IN_MS``; None where there is no such time."""

    request: int
    before: dict[str, float | None]
    after: dict[str, float | None]

    @property
    def gain_ms(self) -> float:
        """How much sooner it ended in the second run."""
        return (self.before["e2el_ms"] or 0.0) - (self.after["e2el_ms"] or 0.0)


def times_ms(record: RequestRecord) -> dict[str, float | None]:
    """Return time to first token, mean time of a further token, and time to the end."""
    first_s, finish_s = record.first_token_s, record.finish_s
    num_gaps = max(record.num_generated, default=0) - 1
    return {
        "ttft_ms": None if first_s is None else 1e3 * (first_s - record.arrival_s),
        "tpot_ms": 1e3 * (finish_s - first_s) / num_gaps if first_s and num_gaps > 0 else None,
        "e2el_ms": 1e3 * (finish_s - record.arrival_s),
    }


def changes(before: Iterable[Record], after: Iterable[Record]) -> list[Change]:
    """Return all requests that ended in both runs, those that gained most first."""
    then, now = (
        {r.request_id: times_ms(r) for r in side if isinstance(r, RequestRecord)}
        for side in (before, after)
    )
    compared = [
        Change(number, times, now[number]) for number, times in then.items() if number in now
    ]
    return sorted(compared, key=lambda change: -change.gain_ms)


def totals(records: Iterable[Record]) -> dict[str, float]:
    """Return what a run comes to: means and 95th percentiles of requests, and its throughput."""
    requests, steps = list[RequestRecord](), list[StepRecord]()
    for record in records:
        if isinstance(record, RequestRecord):
            requests.append(record)
        elif isinstance(record, StepRecord):
            steps.append(record)
    measured = [times_ms(one) for one in requests]
    summary: dict[str, float] = {}
    for name in IN_MS:
        values = sorted(value for one in measured if (value := one[name]) is not None)
        if values:
            summary[f"mean_{name}"] = sum(values) / len(values)
            summary[f"p95_{name}"] = values[min(len(values) - 1, int(0.95 * len(values)))]
    if steps and requests:
        duration_s = max(one.finish_s for one in requests) - min(one.arrival_s for one in requests)
        num_tokens = sum(sum(one.num_generated) for one in requests)
        summary["duration_s"] = duration_s
        summary["output_tokens_per_s"] = num_tokens / duration_s if duration_s else 0.0
        summary["num_steps"] = len(steps)
        summary["num_preemptions"] = sum(len(step.preempted) for step in steps)
    return summary


def as_dict(change: Change) -> dict[str, Any]:
    """Return a change as plain values."""
    return {**change._asdict(), "gain_ms": change.gain_ms}
