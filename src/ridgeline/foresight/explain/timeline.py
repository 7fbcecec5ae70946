"""A trace as Chrome's trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

One process for a run, with a track for each part of a step and one for each slot that sequences
take, counters, and arrows from a preemption to its victim. The format is "Trace Event Format"
(Google, 2016). There is no text of a prompt or an answer in it, not even as token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ridgeline.foresight.explain.explain import Json, Predict

_PARTS = ("schedule", "execute", "commit")  # the first tracks
_FIRST_SLOT = 10  # the number of the track of the first slot


SeqId = tuple[int, int]


@dataclass
class _Timeline:
    """Steps in a row in which a sequence did one thing: its prompt was read, or it generated."""

    kind: str
    start_us: float
    end_us: float
    num_tokens: int = 0
    num_steps: int = 0


@dataclass
class _Stay:
    """What a sequence did from its admission to its end, or until its blocks were taken."""

    seq: SeqId
    runs: list[_Timeline] = field(default_factory=list)
    taken: tuple[float, float, int] | None = None  # in which step: begin, duration, number


def timeline(
    engine: Json,
    steps: Listing[Json],
    requests: Iterable[Json],
    *,
    process: int = 1,
    name: str = "",
    predict: Predict | None = None,
    is_shown: Callable[[int], bool] = lambda request_id: True,
) -> list[Json]:
    """Return the events of a run, with times in microseconds from its first step.

    Args:
        engine: the first record of the trace.
        steps: records of steps, in order.
        requests: records of requests; how long their prompts are tells prompts from answers.
        process: a number; two runs with different ones can stand side by side in one file.
        name: what the process is called.
        predict: a model of time, as for ``explain``; with it there is a counter of what each step
            should have taken, beside the one of what it took.
        is_shown: whether a request has slots; the others are in the sums of steps alone.
    """
    if not steps:
        return []
    origin_s = steps[0]["start_s"]
    prompts = {one["request_id"]: one["num_prompt_tokens"] for one in requests}
    events = [*_names(process, name or f"ridgeline, {engine['policy']}")]
    for step in steps:
        events += _of_step(step, process, origin_s, predict)
    stays = [stay for stay in _stays(steps, prompts, origin_s) if is_shown(stay.seq[0])]
    for track, stay in _on_tracks(stays):
        events += _of_stay(stay, process, track)
    last_track = max((event["tid"] for event in events if event["ph"] == "X"), default=0)
    for track in range(_FIRST_SLOT, last_track + 1):
        events.append(_meta("thread_name", process, track, f"slot {track - _FIRST_SLOT}"))
    return events


def as_file(events: Listing[Json]) -> str:
    """Return what a file for ui.perfetto.dev holds."""
    return json.dumps({"traceEvents": events}, separators=(",", ":"))


def _names(process: int, name: str) -> Iterator[Json]:
    yield _meta("process_name", process, 0, name)
    for track, part in enumerate(_PARTS, start=1):
        yield _meta("thread_name", process, track, part)


def _meta(kind: str, process: int, track: int, name: str) -> Json:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _of_step(step: Json, process: int, origin_s: float, predict: Predict | None) -> Iterator[Json]:
    """Yield a step's three parts, and the counters at its beginning."""
    now_s = step["start_s"] - origin_s
    counts = {
        "running": step["num_running"],
        "waiting": step["num_waiting"] + step["num_outside"],
        "blocks": step["blocks_used"],
        "actual ms": round(1e3 * (step["schedule_s"] + step["execute_s"]), 3),
    }
    if predict and step["work"]:
        counts["predicted ms"] = round(1e3 * predict(step), 3)
    for name, value in counts.items():
        args = {name: value}
        yield {"ph": "C", "name": name, "pid": process, "ts": _us(now_s), "args": args}
    num_tokens = sum(count for _, _, count in step["work"])
    said = {"step": step["number"], "sequences": len(step["work"]), "tokens": num_tokens}
    for track, part in enumerate(_PARTS, start=1):
        num_s = step[f"{part}_s"]
        yield {
            "ph": "X", "name": f"{part} {step['number']}", "cat": part, "pid": process,
            "tid": track, "ts": _us(now_s), "dur": _us(num_s), "args": said,
        }  # fmt: skip
        now_s += num_s


def _stays(steps: Listing[Json], prompts: dict[int, int], origin_s: float) -> list[_Stay]:
    """Return the stays of all sequences, in order of their begin."""
    stays: list[_Stay] = []
    now: dict[SeqId, _Stay] = {}
    for step in steps:
        start_us, schedule_us = _us(step["start_s"] - origin_s), _us(step["schedule_s"])
        for one in step["preempted"]:
            if stay := now.pop(tuple(one), None):
                stay.taken = start_us, schedule_us, step["number"]
        for seq in [seq for seq in now if seq[0] in step["paused"]]:
            del now[seq]
        for one, start, count in step["work"]:
            seq = one[0], one[1]
            if seq not in now:
                now[seq] = _Stay(seq)
                stays.append(now[seq])
            runs = now[seq].runs
            kind = "prompt" if start < prompts.get(seq[0], 0) else "answer"
            if not runs or runs[-1].kind != kind:
                runs.append(_Timeline(kind, start_us + schedule_us, 0.0))
            runs[-1].end_us = start_us + schedule_us + _us(step["execute_s"])
            runs[-1].num_tokens += count
            runs[-1].num_steps += 1
    return stays


def _on_tracks(stays: list[_Stay]) -> Iterator[tuple[int, _Stay]]:
    """Yield stays with tracks: the first slot that is free."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    num_slots = 0
    for stay in stays:
        while busy and busy[0][0] <= stay.runs[0].start_us:
            heappush(free, heappop(busy)[1])
        if free:
            slot = heappop(free)
        else:
            slot, num_slots = num_slots, num_slots + 1
        end_us = stay.runs[-1].end_us
        if stay.taken:
            end_us = max(end_us, stay.taken[0] + stay.taken[1])
        heappush(busy, (end_us, slot))
        yield _FIRST_SLOT + slot, stay


def _of_stay(stay: _Stay, process: int, track: int) -> Iterator[Json]:
    """Yield what a sequence did, and an arrow from the step that took its blocks."""
    request_id, index = stay.seq
    name = f"{request_id}.{index}" if index else f"{request_id}"
    on_track = {"pid": process, "tid": track}
    for run in stay.runs:
        yield {
            "ph": "X", "name": f"{name} {run.kind}", "cat": run.kind, **on_track,
            "ts": run.start_us, "dur": round(run.end_us - run.start_us, 3),
            "args": {"request": request_id, "tokens": run.num_tokens, "steps": run.num_steps},
        }  # fmt: skip
    if stay.taken:
        start_us, duration_us, number = stay.taken
        arrow = {"name": "preempted", "cat": "preemption", "id": f"{process}.{number}.{name}"}
        yield {
            "ph": "X", "name": f"{name} preempted", "cat": "preemption", **on_track,
            "ts": start_us, "dur": duration_us, "args": {"request": request_id, "step": number},
        }  # fmt: skip
        yield {"ph": "s", **arrow, "pid": process, "tid": 1, "ts": start_us}
        yield {"ph": "f", "bp": "e", **arrow, **on_track, "ts": start_us}


def _us(num_s: float) -> float:
    return round(1e6 * num_s, 3)
