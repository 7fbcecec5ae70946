"""What was counted, as programs for vLLM read it: its four kinds of metrics.

The names are those of a server's /metrics (``foresight.counts``), without Prometheus' endings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.foresight.counts import Counts


@dataclass(frozen=True)
class Metric:
    """What all have; ``labels`` are those by which several of one name differ."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Numbers that only grow, by place: drafts that were right, by their place in a step."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A number as it is now."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """Measurements: how many, their sum, and by upper bounds how many are not above each."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(counts: Counts, gauges: Mapping[str, float]) -> list[Metric]:
    """Return all metrics, of records that were counted and of an engine as it is now."""
    found: list[Metric] = [Gauge(_name(name), {}, value) for name, value in gauges.items()]
    found += [Counter(_name(name), {}, value) for name, value in counts.counters().items()]
    found += [
        Counter(_name("request_success"), {"finished_reason": reason}, value)
        for reason, value in [*counts.finished.items()]
    ]
    places = [counts.accepted[i] for i in range(max(counts.accepted, default=-1) + 1)]
    found.append(Vector(_name("spec_decode_num_accepted_tokens_per_pos"), {}, places))
    for name, spread in counts.histograms.items():
        buckets = {bound: int(count) for bound, count in spread.buckets()}
        found.append(Histogram(_name(name), {}, buckets["+Inf"], spread.total, buckets))
    return found


def _name(name: str) -> str:
    return f"ridgeline:{name}"
