"""What would have helped a request: the same requests again, with one setting changed.

The greatest cause that a setting can change names it. Two simulations, with it and without, say
what this request would have gained and what the others would have paid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ridgeline.core.records import EngineRecord, Record
from ridgeline.foresight.explain.baseline import usual_times
from ridgeline.foresight.explain.compare import changes
from ridgeline.foresight.explain.explain import Explanation, Json
from ridgeline.foresight.explain.in_words import seconds
from ridgeline.foresight.simulator import what_if
from ridgeline.foresight.simulator.replay_times import settings_of
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.foresight.trace.reader import step_of

MOST_TOKENS = 4000  # of those before the request in question, and of those behind, that count too
_MOST = 3  # suggestions
_LEAST = 0.05  # of its time: what took less is not worth a change


def would_help(explanation: Explanation, records: Sequence[Json] = ()) -> list[dict[str, Any]]:
    """Return suggestions, the one for the greatest cause first.

    Args:
        explanation: where the request's time went.
        records: a trace of it and of those beside it, with prompts (or what stands for them);
            without one, suggestions have no gains. With one, what does not help in its simulation
            is left out.
    """
    told: list[dict[str, Any]] = []
    for cause, num_ns in explanation.causes_ns().items():
        if num_ns < _LEAST * explanation.duration_ns or len(told) == _MOST:
            break
        change, text = _suggestion(cause, explanation.engine)
        if text and text not in [one["text"] for one in told]:
            told.append({"cause": cause, "set": change, "text": text})
    kept, gain_of = [], _simulated(explanation, records)
    for one in told:
        gain = gain_of(one["set"]) if one["set"] else None
        one["gain_s"], one["others_gain_s"], one["num_others"] = gain or (None, None, None)
        if gain:
            one["text"] += _said(*gain)
        if gain is None or gain[0] > 0:
            kept.append(one)
    return kept


def _suggestion(cause: str, engine: Json) -> tuple[str | None, str]:
    """Return a setting and the flag for it in words; nothing where nothing helps."""
    where = cause.removeprefix("queue_").removeprefix("wait_")
    max_num_seqs, budget = engine["max_num_seqs"], engine["max_num_batched_tokens"]
    if where == "max_num_seqs":
        return f"max_num_seqs={2 * max_num_seqs}", f"--max-num-seqs {2 * max_num_seqs}"
    if where == "token_budget":
        return f"max_num_batched_tokens={2 * budget}", f"--max-num-batched-tokens {2 * budget}"
    if where in ("blocks", "again"):
        return f"num_blocks={2 * engine['num_blocks']}", "twice as much --kv-cache-memory"
    if cause == "client":
        return None, "a client that reads as fast as the answer comes"
    if cause == "slow_machine":
        return None, "a machine that does nothing else, or fewer --threads than it has cores"
    if where == "policy" or cause.endswith("_shared"):
        if engine["policy"] != "splitfuse":
            return "policy=splitfuse", "--policy splitfuse"
        if cause == "decode_shared" and budget // 2 >= max_num_seqs:
            less = budget // 2
            return f"max_num_batched_tokens={less}", f"--max-num-batched-tokens {less}"
    return None, ""


def _simulated(
    explanation: Explanation, records: Sequence[Json]
) -> Callable[[str], tuple[float, float, int] | None]:
    """Return what tells the gain of a setting; None where none can be told."""

    @cache
    def unchanged() -> tuple[Callable[[EngineRecord], list[Record]], list[Record]]:
        serve = served_again(records)
        return serve, serve(settings_of(records))

    def gain(change: str) -> tuple[float, float, int] | None:
        if not records:
            return None
        try:
            serve, before = unchanged()
            after = serve(what_if.changed(settings_of(records), [change]))
        except ValueError:  # too few steps, a search, or a request that could never run
            return None
        return _gain(explanation, before, after)

    return gain


def _gain(
    explanation: Explanation, before: Sequence[Record], after: Sequence[Record]
) -> tuple[float, float, int] | None:
    """Return what a request gains, what others gain in the mean, in seconds, and how many."""
    compared = changes(before, after)
    own_gains_ms = [
        one.gain_ms for one in compared if one.request == explanation.request["request_id"]
    ]
    others_gains_ms = [
        one.gain_ms for one in compared if one.request != explanation.request["request_id"]
    ]
    if not own_gains_ms:
        return None
    return (
        own_gains_ms[0] / 1e3,
        sum(others_gains_ms) / max(len(others_gains_ms), 1) / 1e3,
        len(others_gains_ms),
    )


def _said(gain_s: float, others_s: float, num_others: int) -> str:
    text = f": simulated, this request ends {_sooner(gain_s)}"
    if num_others:
        text += f", and the {num_others:,} beside it {_sooner(others_s)} in the mean"
    return text


def _sooner(gain_s: float) -> str:
    return f"{seconds(1e9 * abs(gain_s))} {'later' if gain_s < 0 else 'sooner'}"


def served_again(
    records: Sequence[Json], times: StepTime | None = None
) -> Callable[[EngineRecord], list[Record]]:
    """Return what serves a trace's requests again with given settings, and returns the records.

    It simulates with ``times``, or with steps that take as long as those of the trace usually did,
    and raises ValueError if a request can never run. Raises ValueError itself if the trace is too
    short, or has a search.
    """
    load = what_if.load_of(records)
    steps = (step_of(record) for record in records if record["type"] == "step")
    clock = usual_times(steps) if times is None else times
    return lambda settings: what_if.run(load, settings, clock)
