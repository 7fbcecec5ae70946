"""What would have helped a request: the same requests again, with one setting changed.

The greatest cause that a setting can change names it. Two simulations, with it and without, say
what this request would have gained and what the others would have paid. Where steps would be larger
than those whose time is known, or the gain smaller than the simulation's error, that is said in
place of advice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from ridgeline.core.records import EngineRecord, Record, RequestRecord
from ridgeline.foresight.explain import Explanation, Json, changes, usual_times
from ridgeline.foresight.simulator import what_if
from ridgeline.foresight.simulator.replay_times import settings_of
from ridgeline.foresight.step_time.features import Reach, StepTime, as_text, reach_of_run
from ridgeline.foresight.trace import step_of
from ridgeline.system.report import duration

MOST_TOKENS = 4000  # of those before the request in question, and of those behind, that count too
DRAFTS_WARNING = "drafts, which the recording has, are not simulated"
_MOST = 3  # suggestions
_FIGURES = ("gain_s", "others_gain_s", "num_others", "error_s")
_LEAST = 0.05  # of its time: what took less is not worth a change


class Suggestions(NamedTuple):
    """What would have helped a request, as plain values, and settings of which that is not known.

    Each of the second kind has its reason.
    """

    helpful: list[dict[str, Any]]
    not_foreseen: list[dict[str, Any]]


class _Gain(NamedTuple):
    """What a setting changes, in seconds: of the request, and of the others in the mean.

    ``error_s`` is by how much the simulation misses the recording where nothing is changed.
    """

    own_s: float
    others_s: float
    num_others: int
    error_s: float


def would_help(explanation: Explanation, records: Sequence[Json] = ()) -> Suggestions:
    """Return suggestions, the one for the greatest cause first.

    Args:
        explanation: where the request's time went.
        records: a trace of it and of those beside it, with prompts (or what stands for them);
            without one, no setting is foreseen. What does not help in its simulation is left out.
    """
    causes: list[dict[str, Any]] = []
    for cause, num_ns in explanation.causes_ns().items():
        if num_ns < _LEAST * explanation.duration_ns or len(causes) == _MOST:
            break
        change, text = _suggestion(cause, explanation.engine)
        if text and text not in [one["text"] for one in causes]:
            causes.append({"cause": cause, "set": change, "text": text})
    suggestions, gain_of = Suggestions([], []), _simulated(explanation, records)
    warnings = [DRAFTS_WARNING] if what_if.has_drafts(records) else []
    for one in causes:
        gain = gain_of(one["set"]) if one["set"] else None
        if isinstance(gain, str):
            suggestions.not_foreseen.append(one | {"reason": gain})
        elif gain is None:
            suggestions.helpful.append(one | dict.fromkeys(_FIGURES) | {"warnings": []})
        elif gain.own_s > 0:
            figures = dict(zip(_FIGURES, gain, strict=True)) | {"warnings": warnings}
            text = "; ".join([one["text"] + _said(gain), *warnings])
            suggestions.helpful.append(one | figures | {"text": text})
    return suggestions


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
    if cause == "queue_overtaken":
        return None, "a shorter prompt, or a deadline: a request with a promise enters at once"
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


def _simulated(explanation: Explanation, records: Sequence[Json]) -> Callable[[str], _Gain | str]:
    """Return what tells the gain of a setting, or why none can be told."""

    @cache
    def unchanged() -> tuple[Served, list[Record]]:
        served = served_again(records)
        return served, served.serve(settings_of(records))

    def gain(change: str) -> _Gain | str:
        if not records:
            return "it is simulated only where one request is explained"
        try:
            served, before = unchanged()
            after = served.serve(what_if.changed(settings_of(records), [change]))
        except ValueError as error:  # too few steps, a search, or a request that could never run
            return str(error)
        if excess := served.excess(after):
            return f"its steps would have {as_text(excess)}"
        result = _gain(explanation, records, before, after)
        if isinstance(result, _Gain) and 0 < result.own_s <= result.error_s:
            own, miss = (duration(one) for one in (result.own_s, result.error_s))
            return f"its gain of {own} is within {miss}, the error of the simulation"
        return result

    return gain


def _gain(
    explanation: Explanation,
    records: Sequence[Json],
    before: Sequence[Record],
    after: Sequence[Record],
) -> _Gain | str:
    """Return what a request and the others gain, and how far off the simulation is.

    That is its miss of this request's time, or its mean miss of all if that is more: one request
    may be met by chance.
    """
    number = explanation.request["request_id"]
    gains_s = {one.request: one.gain_ms / 1e3 for one in changes(before, after)}
    if number not in gains_s:
        return "this request does not end in the simulation"
    own_s = gains_s.pop(number)
    took_s = {
        r.request_id: r.finish_s - r.arrival_s for r in before if isinstance(r, RequestRecord)
    }
    misses_s = {
        one["request_id"]: abs(took_s[one["request_id"]] - (one["finish_s"] - one["arrival_s"]))
        for one in records
        if one["type"] == "request" and one["request_id"] in took_s
    }
    error_s = max(misses_s[number], sum(misses_s.values()) / len(misses_s))
    others_s = sum(gains_s.values()) / max(len(gains_s), 1)
    return _Gain(own_s, others_s, len(gains_s), error_s)


def _said(gain: _Gain) -> str:
    text = f": simulated, this request ends {_sooner(gain.own_s)}"
    if gain.num_others:
        text += f", and the {gain.num_others:,} beside it {_sooner(gain.others_s)} in the mean"
    return f"{text}; the simulation misses the recorded times by {duration(gain.error_s)}"


def _sooner(gain_s: float) -> str:
    return f"{duration(abs(gain_s))} {'later' if gain_s < 0 else 'sooner'}"


class Served(NamedTuple):
    """A load that can be served again.

    Attributes:
        serve: serves it with given settings and returns the records. It raises ValueError if a
            request can never run.
        reach: of the steps that the model of time was fitted to; None if that is not known.
    """

    serve: Callable[[EngineRecord], list[Record]]
    reach: Reach | None

    def excess(self, run: Sequence[Record]) -> dict[str, tuple[int, int]]:
        """Return in which counts a run has steps beyond those fitted, as ``Reach.exceeds``."""
        most = reach_of_run(run)
        return most.exceeds(self.reach) if most and self.reach else {}


def served_again(
    records: Sequence[Json], calibrated: tuple[StepTime, Reach | None] | None = None
) -> Served:
    """Return what serves a trace's requests again with other settings.

    It simulates with ``calibrated`` times, or with steps that take as long as those of the trace
    usually did. Raises ValueError if the trace is too short, or has a search.
    """
    load = what_if.load_of(records)
    steps = (step_of(record) for record in records if record["type"] == "step")
    times, reach = usual_times(steps) if calibrated is None else calibrated
    return Served(lambda settings: what_if.run(load, settings, times), reach)
