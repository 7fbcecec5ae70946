"""An explanation in plain English: three to six sentences, a table, Markdown and JSON.

Pure functions from an explanation to text; they compute nothing that its pieces do not say.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from itertools import pairwise
from statistics import median
from typing import Any

from ridgeline.foresight.explain.explain import CAUSES, Explanation, Json

_MOST = 6  # sentences
_LATE = 2.0  # a gap of this many times the median is late
_ENDS = {
    "stop": "it came to its end",
    "length": "it reached its maximum length",
    "abort": "it was aborted",
    "error": "it failed",
}


def seconds(num_ns: float) -> str:
    """Return a time with three digits that matter: ``3.42 s``, ``61.5 ms``."""
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if num_ns >= size:
            value = num_ns / size
            return f"{value:,.{max(0, 2 - (value >= 10) - (value >= 100))}f} {unit}"
    return f"{num_ns / 1e6:.2f} ms"


def sentences(explanation: Explanation) -> list[str]:
    """Return what happened to a request, the greatest things first behind the opening."""
    times = explanation.causes_ns()
    told: list[tuple[float, str]] = [(explanation.duration_ns, _opening(explanation))]
    for tell in (_waits, _client, _prompt, _answer, _again, _late, _machine, _between):
        told += tell(explanation, times)
    first, *others = told
    kept = sorted(others, key=lambda one: -one[0])[: _MOST - 1]
    return [first[1], *(text for cost, text in others if (cost, text) in kept)]


Told = Iterator[tuple[float, str]]  # nanoseconds that a sentence explains, and the sentence


def _opening(explanation: Explanation) -> str:
    request, total = explanation.request, seconds(explanation.duration_ns)
    reasons = list(dict.fromkeys(request["finish_reasons"]))
    end = " and ".join(_ENDS.get(reason, reason) for reason in reasons)
    text = f"Request {request['request_id']} took {total} from its arrival until {end}"
    if request["first_token_s"] is not None:
        first_ns = 1e9 * (request["first_token_s"] - request["arrival_s"])
        first = "first token" if any(request["num_generated"]) else "vector"
        return f"{text}; its {first} came after {seconds(first_ns)}."
    if request["error"]:
        return f"{text}: {request['error']}."
    return f"{text}; {'it never had a token' if request['scheduled_s'] else 'it never ran'}."


def _waits(explanation: Explanation, times: dict[str, int]) -> Told:
    engine = explanation.engine
    max_num_seqs, budget = engine["max_num_seqs"], engine["max_num_batched_tokens"]
    ran = max((step["num_running"] for step in explanation.steps), default=0)
    held = (
        max((step["blocks_used"] for step in explanation.steps), default=0) / engine["num_blocks"]
    )
    full = f"{held:.0%} of {engine['num_blocks']:,} blocks"
    reasons = {
        "step_under_way": "it waited for the step that was under way when it came",
        "queue_max_num_seqs": f"it waited before the engine, because {ran} sequences ran "
        f"(--max-num-seqs {max_num_seqs})",
        "queue_token_budget": "it waited before the engine, because prompts before it filled the "
        f"steps (--max-num-batched-tokens {budget})",
        "queue_blocks": "it waited before the engine, because the KV cache had no room for those "
        f"before it: up to {full} were held (--kv-cache-memory)",
        "queue_overtaken": "it waited before the engine, because it was overtaken by "
        f"{_count(explanation.num_overtakers, 'later request')}: the order is fair between keys, "
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


def _client(explanation: Explanation, times: dict[str, int]) -> Told:
    if num_ns := times.get("client", 0):
        yield (
            num_ns,
            f"For {_share(explanation, num_ns)} it rested, because its client did not read.",
        )


def _prompt(explanation: Explanation, times: dict[str, int]) -> Told:
    request = explanation.request
    num_ns, alone_ns = _sum(times, "prompt"), times.get("prompt_alone", 0)
    if not num_ns:
        return
    num_steps = len({p.step for p in explanation.pieces if p.cause.startswith("prompt")})
    cached = request["num_cached_tokens"]
    beside = f" ({cached:,} of them were cached)" if cached else ""
    text = f"Its prompt of {_count(request['num_prompt_tokens'], 'token')}{beside} took "
    text += f"{_share(explanation, num_ns)} in {_count(num_steps, 'step')}"
    yield num_ns, text + _alone(explanation, num_ns, alone_ns)


def _answer(explanation: Explanation, times: dict[str, int]) -> Told:
    num_ns, alone_ns = _sum(times, "decode"), times.get("decode_alone", 0)
    if not num_ns:
        return
    lengths = explanation.request["num_generated"]
    num_tokens = max(lengths)
    answers = f"its {len(lengths)} answers of up to" if len(lengths) > 1 else "its answer of"
    num_gaps = num_tokens - 1  # the first token comes with the prompt
    each = f", {seconds(num_ns / num_gaps)} a token" if num_gaps > 0 else ""
    text = f"Computing {answers} {_count(num_tokens, 'token')} took "
    text += f"{_share(explanation, num_ns)}{each}"
    yield num_ns, text + _alone(explanation, num_ns, alone_ns)


def _alone(explanation: Explanation, num_ns: int, alone_ns: int) -> str:
    if not explanation.is_predicted:
        return "."
    if alone_ns > 0.95 * num_ns:
        return "; alone it would have taken as long."
    return f"; alone it would have taken {seconds(alone_ns)}."


def _again(explanation: Explanation, times: dict[str, int]) -> Told:
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


def _late(explanation: Explanation, times: dict[str, int]) -> Told:
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
    text += f"{seconds(1e9 * usual_s)}. The longest, {seconds(1e9 * worst_s)}, ended with step "
    text += f"{step['number']:,}"
    others = sum(n for seq, _, n in step["work"] if seq[0] != request_id and n > 1)
    if others:
        text += f", which also computed {_count(others, 'token')} of others' prompts"
    yield sum(1e9 * (gap - usual_s) for gap, _ in late), f"{text}."


def _machine(explanation: Explanation, times: dict[str, int]) -> Told:
    if num_ns := times.get("slow_machine", 0):
        steps = len({piece.step for piece in explanation.pieces if piece.cause == "slow_machine"})
        yield (
            num_ns,
            f"In {_count(steps, 'step')} the machine was slower than it usually is, by "
            f"{_share(explanation, num_ns)}.",
        )


def _between(explanation: Explanation, times: dict[str, int]) -> Told:
    if num_ns := times.get("between_steps", 0):
        work = "committing tokens and sending text"
        yield num_ns, f"Between steps, {_share(explanation, num_ns)} went into {work}."


def _sum(times: dict[str, int], kind: str) -> int:
    return sum(times.get(f"{kind}{part}", 0) for part in ("", "_alone", "_shared"))


def _share(explanation: Explanation, num_ns: float) -> str:
    return f"{seconds(num_ns)} ({num_ns / max(explanation.duration_ns, 1):.0%})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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


def rows(explanation: Explanation) -> list[tuple[str, str, str]]:
    """Return a table: a cause in words, its time, its share."""
    total = max(explanation.duration_ns, 1)
    return [
        (CAUSES[cause], seconds(num_ns), f"{num_ns / total:.1%}")
        for cause, num_ns in explanation.causes_ns().items()
    ]


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
    ]
    lines += ["| where its time went | time | share |", "|---|---:|---:|"]
    lines += [f"| {cause} | {time} | {share} |" for cause, time, share in rows(explanation)]
    total = seconds(explanation.duration_ns)
    lines += [f"| **all** | **{total}** | **100 %** |"]
    for heading, points in paragraphs(would_help, not_foreseen):
        lines += ["", heading, "", *(f"- {point}" for point in points)]
    return "\n".join(lines) + "\n"
