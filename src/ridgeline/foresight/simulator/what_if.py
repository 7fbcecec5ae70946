"""Time travel: the requests of a trace are served again with other settings.

Both runs, with the recorded settings and with the changed ones, are simulated under one model of
time; so they differ by the settings alone. Requests come when they came, and clients leave when
they left; a batch gives way to others, and promised requests enter at once. That a client read
slowly is left out, and so are drafts and what a forecast permitted beside promises.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from ridgeline.core.records import EngineRecord, Record, RequestRecord, StepRecord
from ridgeline.core.scheduling.policies import POLICIES
from ridgeline.core.step import SeqId
from ridgeline.foresight.simulator.replay_times import ReplayResult, requests_in, serve_again
from ridgeline.foresight.simulator.run import SimRequest, TimeModel, simulate
from ridgeline.system.report import counted

Json = Mapping[str, Any]
_FIXED = {
    "seed": "the answers of the trace are known",
    "eos_ids": "it is the model's",
    "num_checkpoints": "it is the model's",
    "windows": "it is the model's",
    "looks_ahead": "it is the backend's",
}  # what no other setting can change, and why
_MOST_BLOCKS = 1_000_000  # a simulation keeps a list of them
_SEARCHES = ("best_of", "use_beam_search", "penalty_alpha")


class Difference(NamedTuple):
    """The first step that two runs decided otherwise.

    Attributes:
        number: of the step.
        start_s: when it began, in the first run.
        reasons: what is otherwise, in words.
    """

    number: int
    start_s: float
    reasons: tuple[str, ...]


def changed(settings: EngineRecord, changes: Iterable[str]) -> EngineRecord:
    """Return settings with each of ``changes``, NAME=VALUE.

    Raises ValueError for a name that is none, with the nearest, for what is the model's, or for a
    value that does not fit.
    """
    kinds = {f.name: type(getattr(settings, f.name)) for f in fields(settings)}
    kinds = {name: kind for name, kind in kinds.items() if name not in _FIXED}
    kinds["reserve_full"] = bool  # None in an older trace
    for change in changes:
        key, equals, value = change.partition("=")
        name = key.removeprefix("--").replace("-", "_")
        if not equals:
            raise ValueError(f"--set {change!r}: write NAME=VALUE, as max_num_seqs=64")
        if name in _FIXED:
            raise ValueError(f"--set {change!r}: {key} cannot be changed: {_FIXED[name]}")
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(kinds)}"
            raise ValueError(f"--set {change!r}: there is no setting {key!r}; {hint}")
        if name == "policy":  # each has its own way, unless another is asked for behind it
            settings = replace(settings, reserve_full=None)
        settings = replace(settings, **{name: _value(change, value, kinds[name])})
    if settings.num_blocks > _MOST_BLOCKS:
        raise ValueError(f"num_blocks ({settings.num_blocks}) must be at most {_MOST_BLOCKS:,}")
    if not 1 <= settings.max_num_seqs <= settings.max_num_batched_tokens:
        raise ValueError(
            f"max_num_batched_tokens ({settings.max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({settings.max_num_seqs}), and that at least 1"
        )
    return settings


def _value(change: str, text: str, kind: type[Any]) -> Any:
    if kind is str:
        if text not in POLICIES:
            raise ValueError(f"--set {change!r}: it must be one of {', '.join(POLICIES)}")
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"--set {change!r}: it must be true or false")
        return text.lower() == "true"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--set {change!r}: it must be a whole number above 0")
    return int(text)


def load_of(records: Sequence[Json]) -> list[SimRequest]:
    """Return the requests of a trace that had ended; each is named by its number in the trace.

    Raises ValueError for a search, which a simulation cannot run.
    """
    _refuse_searches(records)
    gone_s, unread = {}, set[int]()
    for record in records:
        if record["type"] == "request":
            if "abort" in record["finish_reasons"]:
                gone_s[record["request_id"]] = record["finish_s"]
        elif record["type"] == "step" and not record["is_read"]:
            unread.update(seq[0] for seq, *_ in (*record["work"], *record["waits"]))
    return [
        replace(request, name=str(number), gone_s=gone_s.get(number), is_read=number not in unread)
        for number, request in requests_in(records).items()
    ]


def has_drafts(records: Iterable[Json]) -> bool:
    """Return whether any step of a trace has drafts, which ``run`` does not make again."""
    return any(record.get("drafts") for record in records)


def _refuse_searches(records: Sequence[Json]) -> None:
    for record in records:
        if record["type"] != "request":
            continue
        if searching := [name for name in _SEARCHES if record["params"].get(name)]:
            raise ValueError(
                f"request {record['request_id']} asks for {searching[0]}: searches cannot be "
                "simulated"
            )


def run_as_recorded(records: Sequence[Json]) -> ReplayResult:
    """Serve the requests of a trace with its settings and its durations, and compare all steps.

    Requests have their numbers of the trace, as names too. Raises ValueError for a search.
    """
    _refuse_searches(records)
    again = serve_again(
        [
            {**record, "name": str(record["request_id"])} if record["type"] == "request" else record
            for record in records
        ]
    )
    return again._replace(records=_with_names_for_numbers(again.records))


def run(load: Sequence[SimRequest], settings: EngineRecord, times: TimeModel) -> list[Record]:
    """Serve a load; return the records, in which requests have their numbers of the load again.

    Raises ValueError if a request can never run with these settings.
    """
    return _with_names_for_numbers(simulate(load, settings, times))


def _with_names_for_numbers(records: Sequence[Record]) -> list[Record]:
    numbers = {r.request_id: int(r.name) for r in records if isinstance(r, RequestRecord)}
    return [_renumbered(record, numbers) for record in records]


def _renumbered(record: Record, numbers: Mapping[int, int]) -> Record:
    """Return a record with other numbers of requests; those that have not ended keep theirs."""

    def of(seq_id: SeqId) -> SeqId:
        return numbers.get(seq_id[0], seq_id[0]), seq_id[1]

    if isinstance(record, RequestRecord):
        return replace(record, request_id=numbers[record.request_id])
    if isinstance(record, StepRecord):
        return replace(
            record,
            arrived=tuple(numbers.get(one, one) for one in record.arrived),
            aborted=tuple(numbers.get(one, one) for one in record.aborted),
            work=tuple((of(seq), start, count) for seq, start, count in record.work),
            admitted=tuple((of(seq), length) for seq, length in record.admitted),
            preempted=tuple(map(of, record.preempted)),
            waits=tuple((of(seq), why) for seq, why in record.waits),
        )
    return record


def first_difference(before: Iterable[Record], after: Iterable[Record]) -> Difference | None:
    """Return the first step that is decided otherwise in a second run, None if there is none."""
    sides = [[r for r in side if isinstance(r, StepRecord)] for side in (before, after)]
    for one, other in zip_longest(*sides):
        if one is None or other is None:
            ended = "the first" if one is None else "the second"
            last = sides[one is None][-1]
            return Difference(last.number, last.start_s, (f"{ended} run has ended before",))
        if reasons := tuple(_reasons(one, other)):
            return Difference(one.number, one.start_s, reasons)
    return None


def _reasons(one: StepRecord, other: StepRecord) -> Iterable[str]:
    """Yield in words what a step does otherwise than another."""
    states, states_now = _states(one), _states(other)
    for seq in sorted({*states, *states_now}):
        was, now = states.get(seq, "not in the engine"), states_now.get(seq, "not in the engine")
        if was != now:
            which = f", answer {seq[1]}" if seq[1] else ""
            yield f"request {seq[0]}{which}: {now}; before, {was}"
    for seq in sorted({*one.preempted} ^ {*other.preempted}):
        yield f"request {seq[0]} {'keeps' if seq in one.preempted else 'loses'} its blocks"


def _states(step: StepRecord) -> dict[SeqId, str]:
    waits = {seq: f"waits ({why})" for seq, why in step.waits}
    return waits | {seq: f"runs ({counted(count, 'token')})" for seq, _, count in step.work}
