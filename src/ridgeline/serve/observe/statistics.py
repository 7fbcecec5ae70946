"""What Triton's statistics say of a model, added up from records alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.serve.engine.interface import EngineClient

_FAILED = {"abort", "error"}  # ways in which an answer ends
# Nothing is timed of the first two, and answers are not kept for later requests.
_NEVER = ("compute_input", "compute_output", "cache_hit", "cache_miss")
_NS_PER_S, _MS_PER_S = 1e9, 1e3

Durations = dict[str, int]  # Triton's: how many, and how long all took together


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

    def shown(self, name: str, version: str, adapter: str = "") -> dict[str, Any]:
        """Return what Triton says of a model; ``adapter`` is the digest of one, hexadecimal.

        A prompt counts as an inference. Steps are shared, so all are named with each adapter.
        """
        with self._lock:
            counts = Counter(self._requests.get(adapter, ()))
            steps = {size: dict(one) for size, one in sorted(self._steps.items())}
        never = dict.fromkeys(_NEVER, _durations(0, 0))
        return {
            "name": name,
            "version": version,
            "last_inference": counts["last ms"],
            "inference_count": counts["success count"],
            "execution_count": sum(one["count"] for one in steps.values()),
            "inference_stats": never
            | {
                of: _durations(counts[f"{of} count"], counts[f"{of} ns"])
                for of in ("success", "fail", "queue", "compute_infer")
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": _durations(0, 0),
                    "compute_infer": one,
                    "compute_output": _durations(0, 0),
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
            known = by_size.get(size)
            by_size[size] = _sum_of(known, batch) | {"batch_size": size} if known else batch
        total["batch_stats"] = [by_size[size] for size in sorted(by_size)]
    return total


def _sum_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the durations of both; what is no duration is left out."""
    return {
        name: _durations(of["count"] + other[name]["count"], of["ns"] + other[name]["ns"])
        for name, of in one.items()
        if isinstance(of, dict)
    }


def _durations(count: int, ns: int) -> Durations:
    return {"count": count, "ns": ns}


def _ns(seconds: float) -> int:
    return int(seconds * _NS_PER_S)
