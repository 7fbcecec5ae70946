"""Replay: a recorded run is decided again, step for step, and compared.

A fresh engine is given the arrivals of each step, and a runner that samples what was recorded; it
must decide what the record says. It knows nothing of files and clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listing
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, NamedTuple

from ridgeline.core.decoding.search import new_search
from ridgeline.core.engine import Engine, new_scheduler
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, StepRecord
from ridgeline.core.request import Request, Sequence
from ridgeline.core.scheduling.policies import Load
from ridgeline.core.scheduling.speculate import Guess, Speculation
from ridgeline.core.step import Step, StepOutput, Work
from ridgeline.foresight.structure import engine_of, params_from, to_json

Json = Mapping[str, Any]

_DECIDED = (
    *("arrived", "aborted", "paused", "resumed", "work", "admitted", "preempted", "waits"),
    *("num_copies", "num_outside", "num_running", "num_waiting", "blocks_used", "blocks_indexed"),
)
_ACTS = {"aborted": "abort", "paused": "pause", "resumed": "resume"}

# What comes of records that are each as they should be, but not of one run.
CONTRADICTIONS = (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)


class Replay(NamedTuple):
    """The result of a replay.

    Attributes:
        num_steps: steps that were decided again.
        num_requests: requests of the trace that had ended.
        difference: the first decision that differs: its step, what is recorded and what was
            decided now; None if there is none.
        unfinished: the first step that is not decided again, because a request begins there that
            had not ended when the trace did; None if all were.
    """

    num_steps: int
    num_requests: int
    difference: tuple[int, Json, Json] | None
    unfinished: int | None


class _Ends:
    """Stands for an answer's text, which is not in the records: it stops where the answer did."""

    def __init__(self, length: int | None) -> None:
        self._left = length

    def feed(self, token: int, may_stop: bool) -> str | None:
        if self._left is None:
            return None
        self._left -= 1
        return "stop" if self._left == 0 else None

    def take(self) -> str:
        return ""

    def finish(self) -> None:
        return None


class _Lost(RuntimeError):
    """The backend failed then, or something else is to be computed now."""


class _RecordedRunner:
    """The runner and the drafter of a replay: they give what was recorded of a step."""

    def __init__(self) -> None:
        self.record: Json = {}

    def execute(self, step: Step) -> StepOutput:
        record = self.record
        work = [(tuple(seq_id), start, count) for seq_id, start, count in record["work"]]
        if not record["sampled"] or work != [(w.seq_id, w.start, len(w.tokens)) for w in step.work]:
            raise _Lost
        places = {seq_id: i for i, (seq_id, _, _) in enumerate(work)}

        def by_place(name: str) -> dict[int, Any]:
            return {places[tuple(seq_id)]: value for seq_id, value in record[name]}

        return StepOutput(
            tuple(map(tuple, record["sampled"])),
            errors=by_place("errors"),
            top={i: tuple(map(tuple, ranked)) for i, ranked in by_place("ranked").items()},
            similarity=by_place("similarities"),
        )

    def draft(self, wanted: Listing[tuple[Sequence, int]]) -> list[Guess]:
        drafts = {tuple(seq_id): tuple(tokens) for seq_id, tokens in self.record["drafts"]}
        return [Guess(drafts.get(seq.id, ()), 0) for seq, _ in wanted]

    def note_draws(self, work: Work, draws: tuple[int, ...]) -> None:
        return None

    def forget(self, request: Request) -> None:
        return None


def replay(records: Iterable[Json]) -> Replay:
    """Decide every step of a trace again.

    Args:
        records: the lines of a trace, in order, as JSON values (``record_json.to_json``).

    Raises ValueError if these are not the records of an engine, or of another version's.
    """
    try:
        engine, *others = list(records) or [{"type": "nothing"}]
        if engine["type"] == "simulated" and others:  # what a simulation says of itself
            engine, *others = others
        if engine["type"] != "engine":
            raise ValueError("this is not a trace: its first line does not describe an engine")
        settings, recorded, new_records = engine_of(engine), _RecordedRunner(), list[Record]()
        again = Engine(
            new_scheduler(settings, speculation=Speculation(recorded)),
            recorded,
            lambda: 0.0,
            max_model_len=settings.max_model_len,
            eos_ids=settings.eos_ids,
            listeners=[new_records.append],
            new_search=new_search,
        )
        requests = {one["request_id"]: one for one in others if one["type"] == "request"}
        steps = [record for record in others if record["type"] == "step"]
        for number, record in enumerate(steps):
            if any(request_id not in requests for request_id in record["arrived"]):
                return Replay(number, len(requests), None, record["number"])
            recorded.record = record
            new_records.clear()
            for request_id in record["arrived"]:
                _enter(again, requests[request_id])
            act_as_recorded(again, record)
            with suppress(RuntimeError):  # also where nothing can run now
                again.step(Load(record["num_outside"], record["is_read"]))
            if difference := difference_of(record, new_records):
                return Replay(number, len(requests), difference, None)
    except CONTRADICTIONS as error:
        raise ValueError(f"this is not a trace of this version: {error!r:.200}") from None
    return Replay(len(steps), len(requests), None, None)


def _enter(engine: Engine, record: Json) -> None:
    """Let a recorded request into an engine again."""
    answers = tuple(map(tuple, record["answers"]))
    ends = zip(record["finish_reasons"], lengths_of(record), strict=True)
    texts = [_Ends(length if reason == "stop" else None) for reason, length in ends]
    engine.add(
        tuple(record["prompt_token_ids"]),
        params_of(record["params"]),
        new_text=partial(next, iter(texts), _Ends(None)),
        cache_root=bytes.fromhex(record["cache_root"]),
        owner=record.get("owner", ""),
        due_s=inf if record["due_s"] is None else record["due_s"],
        answers=answers,
    )


def lengths_of(record: Json) -> list[int]:
    """Return how many tokens each answer of a recorded request has, with those from elsewhere."""
    lengths = [*record["num_generated"]]
    for i, before in enumerate(record["answers"]):
        lengths[i] += len(before)
    return lengths


def act_as_recorded(engine: Engine, step: Json) -> None:
    """Abort, pause and resume requests as they were before a step."""
    for name, act in _ACTS.items():
        for request_id in step[name]:
            getattr(engine, act)(request_id)


def difference_of(step: Json, records: Iterable[Record]) -> tuple[int, Json, Json] | None:
    """Return the step's number, what was recorded and what was decided now, where these differ.

    ``records`` are those since the step before; without one of a step nothing was decided.
    """
    now: Json = {}
    for record in records:
        if isinstance(record, StepRecord):
            now = json.loads(json.dumps(to_json(record)))
    # That one of these was paused before says nothing: they are ended first.
    ended = step["aborted"]
    step = {**step, "paused": [one for one in step["paused"] if one not in ended]}
    recorded, decided = ({name: side.get(name) for name in _DECIDED} for side in (step, now))
    return None if recorded == decided else (step["number"], recorded, decided)


def params_of(recorded: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a recorded request, but its stop strings, which need its text.

    Raises ValueError or TypeError if they are none.
    """
    return params_from({name: value for name, value in recorded.items() if name != "stop"})
