"""An explanation as others read it: sentences and JSON, a picture, and a file for Perfetto."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from statistics import median
from typing import Any

from ridgeline.foresight.explain import CAUSES, Explanation, Json, Predict
from ridgeline.system import svg
from ridgeline.system.report import Row, Table, bold, counted, duration

_MOST = 6  # sentences
_LATE = 2.0  # a gap of this many times the median is late
_ENDS = {
    "stop": "it came to its end",
    "length": "it reached its maximum length",
    "abort": "it was aborted",
    "error": "it failed",
}


def sentences(explanation: Explanation) -> list[str]:
    """Return what happened to a request, the greatest things first behind the opening."""
    times = explanation.causes_ns()
    pairs: list[Sentence] = [(explanation.duration_ns, _opening(explanation))]
    for tell in (_waits, _client, _prompt, _answer, _again, _late, _machine, _between):
        pairs += tell(explanation, times)
    first, *others = pairs
    greatest = sorted(others, key=lambda one: -one[0])[: _MOST - 1]
    return [first[1], *(text for cost, text in others if (cost, text) in greatest)]


Sentence = tuple[float, str]  # the nanoseconds that it explains, and its text


def _opening(explanation: Explanation) -> str:
    request, total = explanation.request, _time(explanation.duration_ns)
    reasons = list(dict.fromkeys(request["finish_reasons"]))
    end = " and ".join(_ENDS.get(reason, reason) for reason in reasons)
    text = f"Request {request['request_id']} took {total} from its arrival until {end}"
    if request["first_token_s"] is not None:
        first_ns = 1e9 * (request["first_token_s"] - request["arrival_s"])
        first = "first token" if any(request["num_generated"]) else "vector"
        return f"{text}; its {first} came after {_time(first_ns)}."
    if request["error"]:
        return f"{text}: {request['error']}."
    return f"{text}; {'it never had a token' if request['scheduled_s'] else 'it never ran'}."


def _waits(explanation: Explanation, times: dict[str, int]) -> Iterator[Sentence]:
    engine = explanation.engine
    max_num_seqs, budget = engine["max_num_seqs"], engine["max_num_batched_tokens"]
    ran = max((step["num_running"] for step in explanation.steps), default=0)
    num_used = max((step["blocks_used"] for step in explanation.steps), default=0)
    full = f"{num_used / engine['num_blocks']:.0%} of {engine['num_blocks']:,} blocks"
    reasons = {
        "step_under_way": "it waited for the step that was under way when it came",
        "queue_max_num_seqs": f"it waited before the engine, because {ran} sequences ran "
        f"(--max-num-seqs {max_num_seqs})",
        "queue_token_budget": "it waited before the engine, because prompts before it filled the "
        f"steps (--max-num-batched-tokens {budget})",
        "queue_blocks": "it waited before the engine, because the KV cache had no room for those "
        f"before it: up to {full} were held (--kv-cache-memory)",
        "queue_overtaken": "it waited before the engine, because it was overtaken by "
        f"{counted(explanation.num_overtakers, 'later request')}: the order is fair between keys, "
        "and of one key short prompts pass long ones",
        "wait_max_num_seqs": f"it waited for a slot, because {ran} sequences ran "
        f"(--max-num-seqs {max_num_seqs})",
        "wait_token_budget": "others used up the tokens of the steps "
        f"(--max-num-batched-tokens {budget})",
        "wait_blocks": f"the KV cache had no room for it: up to {full} were held "
        "(--kv-cache-memory)",
        "wait_policy": f"the policy, {engine['policy']}, gave the steps to others",
    }
    for cause, reason in reasons.items():
        if num_ns := times.get(cause, 0):
            yield num_ns, f"For {_share(explanation, num_ns)} {reason}."


def _client(explanation: Explanation, times: dict[str, int]) -> Iterator[Sentence]:
    if num_ns := times.get("client", 0):
        yield (
            num_ns,
            f"For {_share(explanation, num_ns)} it rested, because its client did not read.",
        )


def _prompt(explanation: Explanation, times: dict[str, int]) -> Iterator[Sentence]:
    request = explanation.request
    num_ns, alone_ns = _sum(times, "prompt"), times.get("prompt_alone", 0)
    if not num_ns:
        return
    num_steps = len({p.step for p in explanation.pieces if p.cause.startswith("prompt")})
    cached = request["num_cached_tokens"]
    beside = f" ({cached:,} of them were cached)" if cached else ""
    text = f"Its prompt of {counted(request['num_prompt_tokens'], 'token')}{beside} took "
    text += f"{_share(explanation, num_ns)} in {counted(num_steps, 'step')}"
    yield num_ns, text + _alone(explanation, num_ns, alone_ns)


def _answer(explanation: Explanation, times: dict[str, int]) -> Iterator[Sentence]:
    num_ns, alone_ns = _sum(times, "decode"), times.get("decode_alone", 0)
    if not num_ns:
        return
    lengths = explanation.request["num_generated"]
    num_tokens = max(lengths)
    answers = f"its {len(lengths)} answers of up to" if len(lengths) > 1 else "its answer of"
    num_gaps = num_tokens - 1  # the first token comes with the prompt
    each = f", {_time(num_ns / num_gaps)} a token" if num_gaps > 0 else ""
    text = f"Computing {answers} {counted(num_tokens, 'token')} took "
    text += f"{_share(explanation, num_ns)}{each}"
    yield num_ns, text + _alone(explanation, num_ns, alone_ns)


def _alone(explanation: Explanation, num_ns: int, alone_ns: int) -> str:
    if not explanation.is_predicted:
        return "."
    if alone_ns > 0.95 * num_ns:
        return "; alone it would have taken as long."
    return f"; alone it would have taken {_time(alone_ns)}."


def _again(explanation: Explanation, times: dict[str, int]) -> Iterator[Sentence]:
    request_id, num_ns = explanation.request["request_id"], times.get("again", 0)
    number = sum(seq[0] == request_id for step in explanation.steps for seq in step["preempted"])
    if number:
        older = _older(explanation, request_id)
        whom = f"request {older[0]}" if len(older) == 1 else "older requests"
        times_said = "once" if number == 1 else f"{number} times"
        text = f"It lost its blocks {times_said} to {whom}"
        if num_ns:
            text += f", and computing what it had lost took {_share(explanation, num_ns)}"
        yield num_ns + times.get("wait_blocks", 0), f"{text}."
    elif num_ns:
        yield num_ns, f"Computing again what it had given up took {_share(explanation, num_ns)}."


def _older(explanation: Explanation, request_id: int) -> list[int]:
    """Return the requests that may have taken the blocks: older ones that needed a new one."""
    size, older = explanation.engine["block_size"], dict[int, None]()
    for step in explanation.steps:
        if any(seq[0] == request_id for seq in step["preempted"]):
            for seq, start, count in step["work"]:
                if seq[0] < request_id and -(-(start + count) // size) > -(-start // size):
                    older[seq[0]] = None
    return list(older)


def _late(explanation: Explanation, times: dict[str, int]) -> Iterator[Sentence]:
    """Tell of tokens that came late, and what was in the step of the worst."""
    request_id = explanation.request["request_id"]
    drawn: list[tuple[float, Json]] = []  # when tokens came, and in which step
    for step in explanation.steps:
        pairs = zip(step["work"], step["sampled"], strict=False)
        if any(tokens and item[0][0] == request_id for item, tokens in pairs):
            drawn.append((step["start_s"] + step["schedule_s"] + step["execute_s"], step))
    gaps = [(after_s - before_s, step) for (before_s, _), (after_s, step) in pairwise(drawn)]
    if len(gaps) < 3:
        return
    usual_s = median(gap for gap, _ in gaps)
    late = [(gap, step) for gap, step in gaps if gap > _LATE * usual_s]
    if not late:
        return
    worst_s, step = max(late, key=lambda pair: pair[0])
    were = "was" if len(late) == 1 else "were"
    text = f"Of its {len(gaps)} gaps between tokens, {len(late)} {were} more than twice the usual "
    text += f"{duration(usual_s)}. The longest, {duration(worst_s)}, ended with step "
    text += f"{step['number']:,}"
    others = sum(n for seq, _, n in step["work"] if seq[0] != request_id and n > 1)
    if others:
        text += f", which also computed {counted(others, 'token')} of others' prompts"
    yield sum(1e9 * (gap - usual_s) for gap, _ in late), f"{text}."


def _machine(explanation: Explanation, times: dict[str, int]) -> Iterator[Sentence]:
    if num_ns := times.get("slow_machine", 0):
        steps = len({piece.step for piece in explanation.pieces if piece.cause == "slow_machine"})
        yield (
            num_ns,
            f"In {counted(steps, 'step')} the machine was slower than it usually is, by "
            f"{_share(explanation, num_ns)}.",
        )


def _between(explanation: Explanation, times: dict[str, int]) -> Iterator[Sentence]:
    if num_ns := times.get("between_steps", 0):
        work = "committing tokens and sending text"
        yield num_ns, f"Between steps, {_share(explanation, num_ns)} went into {work}."


def _sum(times: dict[str, int], kind: str) -> int:
    return sum(times.get(f"{kind}{part}", 0) for part in ("", "_alone", "_shared"))


def _share(explanation: Explanation, num_ns: float) -> str:
    return f"{_time(num_ns)} ({num_ns / max(explanation.duration_ns, 1):.0%})"


def _time(num_ns: float) -> str:
    return duration(num_ns / 1e9)


def as_dict(
    explanation: Explanation, would_help: Listing[Json], not_foreseen: Listing[Json]
) -> dict[str, Any]:
    """Return the document: seconds of each cause, the greatest first, and the order of events."""
    request = explanation.request
    return {
        "request": request["request_id"],
        "name": request["name"],
        "seconds": explanation.duration_ns / 1e9,
        "pieces": [
            {"cause": cause, "seconds": num_ns / 1e9}
            for cause, num_ns in explanation.causes_ns().items()
        ],
        "timeline": [
            {
                "cause": piece.cause,
                "start_s": (piece.start_ns - explanation.pieces[0].start_ns) / 1e9,
                "seconds": (piece.end_ns - piece.start_ns) / 1e9,
                "step": piece.step,
            }
            for piece in explanation.pieces
        ],
        "sentences": sentences(explanation),
        "would_help": [*would_help],
        "not_foreseen": [*not_foreseen],
    }


def table(explanation: Explanation) -> Table:
    """Return a row for each cause in words, with its time and share, and one for all."""
    total = max(explanation.duration_ns, 1)
    rows: list[Row] = [
        (CAUSES[cause], _time(num_ns), f"{num_ns / total:.1%}")
        for cause, num_ns in explanation.causes_ns().items()
    ]
    rows.append(bold("all", _time(explanation.duration_ns), "100.0%"))
    return Table(("where its time went", "time", "share"), rows)


def paragraphs(
    would_help: Listing[Json], not_foreseen: Listing[Json]
) -> list[tuple[str, list[str]]]:
    """Return advice, and what cannot be said: headings that have points, with them."""
    untold = [f"{one['text']}: {one['reason']}" for one in not_foreseen]
    parts = [
        ("What would have helped:", [one["text"] for one in would_help]),
        ("Not known whether it would have helped:", untold),
    ]
    return [(heading, points) for heading, points in parts if points]


def markdown(
    explanation: Explanation, would_help: Listing[Json], not_foreseen: Listing[Json]
) -> str:
    """Return the explanation as Markdown."""
    lines = [
        f"## Request {explanation.request['request_id']}",
        "",
        " ".join(sentences(explanation)),
        "",
        *table(explanation).markdown(),
    ]
    for heading, points in paragraphs(would_help, not_foreseen):
        lines += ["", heading, "", *(f"- {point}" for point in points)]
    return "\n".join(lines) + "\n"


_WIDTH, _LEFT, _BAR = 900, 24, 852  # pixels
_TOP, _HIGH, _ROW = 64, 44, 24
_COLOURS = {
    "step_under_way": "#e3b341",
    "queue_max_num_seqs": "#d9480f",
    "queue_token_budget": "#f08c4a",
    "queue_blocks": "#b45309",
    "queue_overtaken": "#a16207",
    "wait_max_num_seqs": "#c2410c",
    "wait_token_budget": "#fb923c",
    "wait_blocks": "#9a3412",
    "wait_policy": "#fdba74",
    "client": "#d6409f",
    "prompt": "#1f6feb",
    "prompt_alone": "#1f6feb",
    "prompt_shared": "#79b0ff",
    "decode": "#2da44e",
    "decode_alone": "#2da44e",
    "decode_shared": "#86d69a",
    "again": "#8250df",
    "slow_machine": "#cf222e",
    "between_steps": "#9aa4af",
}


def explain_svg(explanation: Explanation) -> str:
    """Return the picture of where a request's time went."""
    title = f"Request {explanation.request['request_id']} took {_time(explanation.duration_ns)}"
    parts = [
        svg.text(_LEFT, 36, title, size=18, weight=600),
        *_bar(explanation),
        *_axis(explanation),
    ]
    y, total_ns = _TOP + _HIGH + 60, max(explanation.duration_ns, 1)
    for cause, num_ns in explanation.causes_ns().items():
        share, colour = num_ns / total_ns, _COLOURS[cause]
        parts += [
            svg.box(_LEFT, y - 12, 14, 14, colour, CAUSES[cause]),
            svg.text(_LEFT + 24, y, CAUSES[cause]),
            svg.text(_LEFT + 480, y, _time(num_ns), anchor="end"),
            svg.text(_LEFT + 540, y, f"{share:.1%}", anchor="end"),
            svg.box(_LEFT + 560, y - 11, 292 * share, 12, colour, CAUSES[cause]),
        ]
        y += _ROW
    return svg.picture(_WIDTH, y, parts)


def _bar(explanation: Explanation) -> list[str]:
    """Return the bar; a column of one pixel has the colour of what took most of its time."""
    begin_ns = explanation.pieces[0].start_ns if explanation.pieces else 0
    scale = _BAR / max(explanation.duration_ns, 1)
    columns: list[Counter[str]] = [Counter() for _ in range(_BAR)]
    for piece in explanation.pieces:
        left, right = (scale * (one - begin_ns) for one in (piece.start_ns, piece.end_ns))
        cause = piece.cause.removesuffix("_alone").removesuffix("_shared")
        for column in range(int(left), min(int(right) + 1, _BAR)):
            columns[column][cause] += max(0.0, min(right, column + 1) - max(left, column))  # type: ignore[assignment]
    parts, first = [], 0
    greatest = [max(column, key=column.__getitem__, default="") for column in columns]
    for end in range(1, _BAR + 1):
        if end == _BAR or greatest[end] != greatest[first]:
            if greatest[first]:
                cause = greatest[first]
                width = end - first
                parts.append(
                    svg.box(_LEFT + first, _TOP, width, _HIGH, _COLOURS[cause], CAUSES[cause])
                )
            first = end
    return parts


def _axis(explanation: Explanation) -> list[str]:
    """Return five times below the bar, from the arrival to the end."""
    y, anchors = _TOP + _HIGH + 20, ("start", "middle", "middle", "middle", "end")
    parts = []
    for i, anchor in enumerate(anchors):
        label = _time(explanation.duration_ns * i / 4) if i else "0"
        x = _LEFT + _BAR * i / 4
        parts.append(svg.text(x, y, label, size=svg.SMALL, anchor=anchor, fill=svg.FAINT))
    return parts


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
