"""What Triton's statistics say of a model, added up from records alone, and their shapes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.serve.answer.schemas import ClosedDict
from ridgeline.serve.engine.interface import EngineClient

_FAILED = {"abort", "error"}  # ways in which an answer ends
_NS_PER_S, _MS_PER_S = 1e9, 1e3


class Durations(ClosedDict):
    """How many there were, and how long all took together, in nanoseconds."""

    count: int
    ns: int


class InferenceStatistics(ClosedDict):
    """What became of requests, and where their time went."""

    compute_input: Durations
    compute_output: Durations
    cache_hit: Durations
    cache_miss: Durations
    success: Durations
    fail: Durations
    queue: Durations
    compute_infer: Durations


class BatchStatistics(ClosedDict):
    """Steps with this many sequences."""

    batch_size: int
    compute_input: Durations
    compute_infer: Durations
    compute_output: Durations


class OneModelStatistics(ClosedDict):
    """A model; the last inference in milliseconds since 1970, 0 for none."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: list[BatchStatistics]


class Statistics:
    """Counts of one model's requests, those with each adapter apart, and of its steps."""

    def __init__(self, engine: EngineClient, now: Callable[[], float] = time.time) -> None:
        """Listen to an engine from now on; ``now`` is in seconds since 1970."""
        self._now, self._lock = now, threading.Lock()
        self._requests: dict[str, Counter[str]] = {}  # by the digest of the adapter
        self._steps: dict[int, Counter[str]] = {}  # by the number of sequences
        engine.listeners.append(self._on_record)

    def _on_record(self, record: Record) -> None:
        """Add a record; it comes in the engine's thread."""
        with self._lock:
            if isinstance(record, StepRecord):
                count = self._steps.setdefault(len(record.work), Counter())
                count.update(count=1, ns=_ns(record.execute_s))
            elif isinstance(record, RequestRecord):
                self._add(self._requests.setdefault(record.adapter, Counter()), record)

    def _add(self, counts: Counter[str], request: RequestRecord) -> None:
        has_failed = request.error is not None or not _FAILED.isdisjoint(request.finish_reasons)
        spans = {"fail" if has_failed else "success": request.finish_s - request.arrival_s}
        if request.scheduled_s is not None:
            spans["queue"] = request.scheduled_s - request.arrival_s
            spans["compute_infer"] = request.finish_s - request.scheduled_s
        for name, seconds in spans.items():
            counts.update({f"{name} count": 1, f"{name} ns": _ns(seconds)})
        counts["last ms"] = int(self._now() * _MS_PER_S)

    def shown(self, name: str, version: str, adapter: str = "") -> OneModelStatistics:
        """Return what Triton says of a model; ``adapter`` is the digest of one, hexadecimal.

        A prompt counts as an inference. Steps are shared, so all are named with each adapter.
        """
        with self._lock:
            counts = Counter(self._requests.get(adapter, ()))
            steps = {size: _of(one) for size, one in sorted(self._steps.items())}
        never: Durations = {"count": 0, "ns": 0}
        return {
            "name": name,
            "version": version,
            "last_inference": counts["last ms"],
            "inference_count": counts["success count"],
            "execution_count": sum(one["count"] for one in steps.values()),
            "inference_stats": {
                "compute_input": never,  # which is not timed, and neither is output
                "compute_output": never,
                "cache_hit": never,  # answers are not kept for later requests
                "cache_miss": never,
                "success": _of(counts, "success "),
                "fail": _of(counts, "fail "),
                "queue": _of(counts, "queue "),
                "compute_infer": _of(counts, "compute_infer "),
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": never,
                    "compute_infer": one,
                    "compute_output": never,
                }
                for size, one in steps.items()
            ],
        }


def added(several: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the statistics of a model that several servers have: one of them, or more."""
    first, *others = several
    total = dict(first)
    for one in others:
        total["last_inference"] = max(total["last_inference"], one["last_inference"])
        for name in ("inference_count", "execution_count"):
            total[name] += one[name]
        total["inference_stats"] = _sum_of(total["inference_stats"], one["inference_stats"])
        by_size = {batch["batch_size"]: batch for batch in total["batch_stats"]}
        for batch in one["batch_stats"]:
            size = batch["batch_size"]
            before = by_size.get(size)
            by_size[size] = _sum_of(before, batch) | {"batch_size": size} if before else batch
        total["batch_stats"] = [by_size[size] for size in sorted(by_size)]
    return total


def _sum_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the durations of both; what is no duration is left out."""
    return {
        name: {"count": of["count"] + other[name]["count"], "ns": of["ns"] + other[name]["ns"]}
        for name, of in one.items()
        if isinstance(of, dict)
    }


def _of(counts: Counter[str], name: str = "") -> Durations:
    return {"count": counts[f"{name}count"], "ns": counts[f"{name}ns"]}


def _ns(seconds: float) -> int:
    return int(seconds * _NS_PER_S)
