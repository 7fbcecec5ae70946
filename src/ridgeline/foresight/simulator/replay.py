"""Replay: a recorded run is decided again, step for step, and compared.

A fresh scheduler is given the arrivals of each step and the tokens that were sampled; it must
decide what the record says. It knows nothing of files and clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listing
from functools import partial
from math import inf
from typing import Any, NamedTuple

from ridgeline.core.fold import abort, commit
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord
from ridgeline.core.request import Request, Sequence
from ridgeline.core.scheduling.policies import Load
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.scheduling.speculate import Guess, Speculation
from ridgeline.core.step import SeqId, Step, StepOutput, Work
from ridgeline.decoding.search import new_search
from ridgeline.foresight.simulator.scheduler import engine_of, new_scheduler

Json = Mapping[str, Any]

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


class _Recorded:
    """The drafter of a replay: it guesses what was verified then."""

    def __init__(self) -> None:
        self.drafts: dict[SeqId, tuple[int, ...]] = {}

    def draft(self, wanted: Listing[tuple[Sequence, int]]) -> list[Guess]:
        return [Guess(self.drafts.get(seq.id, ()), 0) for seq, _ in wanted]

    def note_draws(self, work: Work, draws: tuple[int, ...]) -> None:
        return None

    def forget(self, request: Request) -> None:
        return None


def replay(records: Iterable[Json]) -> Replay:
    """Decide every step of a trace again.

    Args:
        records: the lines of a trace, in order, as JSON values (``records.to_json``).

    Raises ValueError if these are not the records of an engine, or of another version's.
    """
    try:
        engine, *others = list(records) or [{"type": "nothing"}]
        if engine["type"] == "simulated" and others:  # what a simulation says of itself
            engine, *others = others
        if engine["type"] != "engine":
            raise ValueError("this is not a trace: its first line does not describe an engine")
        recorded_drafts = _Recorded()
        settings = engine_of(engine)
        scheduler = new_scheduler(settings, speculation=Speculation(recorded_drafts))
        requests = dict(_requests(settings, others))
        steps = [record for record in others if record["type"] == "step"]
        for number, record in enumerate(steps):
            if any(request_id not in requests for request_id in record["arrived"]):
                return Replay(number, len(requests), None, record["number"])
            drafts = {tuple(seq_id): tuple(tokens) for seq_id, tokens in record["drafts"]}
            recorded_drafts.drafts = drafts
            step = _decide(scheduler, requests, record)
            decided = _decisions(scheduler, step)
            recorded = {name: record[name] for name in decided}
            if decided != recorded:
                return Replay(number, len(requests), (record["number"], recorded, decided), None)
            _fold(scheduler, step, record)
    except CONTRADICTIONS as error:
        raise ValueError(f"this is not a trace of this version: {error!r:.200}") from None
    return Replay(len(steps), len(requests), None, None)


def _requests(engine: EngineRecord, records: Iterable[Json]) -> Iterable[tuple[int, Request]]:
    """Yield the recorded requests, ready to run again."""
    for record in (record for record in records if record["type"] == "request"):
        ends = zip(record["finish_reasons"], record["num_generated"], strict=True)
        texts = [_Ends(length if reason == "stop" else None) for reason, length in ends]
        yield (
            record["request_id"],
            Request(
                record["request_id"],
                tuple(record["prompt_token_ids"]),
                params_of(record["params"]),
                eos_ids=engine.eos_ids,
                max_model_len=engine.max_model_len,
                new_text=partial(next, iter(texts), _Ends(None)),
                cache_root=bytes.fromhex(record["cache_root"]),
                owner=record.get("owner", ""),
                new_search=new_search,
                due_s=inf if record["due_s"] is None else record["due_s"],
            ),
        )


def params_of(recorded: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a recorded request, but its stop strings, which need its text.

    Raises ValueError or TypeError if they are none.
    """
    params = {name: value for name, value in recorded.items() if name != "stop"}
    if isinstance(biases := params.get("logit_bias"), Mapping):  # JSON has text for keys
        params["logit_bias"] = {int(token): bias for token, bias in biases.items()}
    return SamplingParams(**params)


def _decide(scheduler: Scheduler, requests: Mapping[int, Request], record: Json) -> Step:
    """Add, abort, pause and resume requests as recorded, then decide."""
    queues = scheduler.queues
    for request_id in record["arrived"]:
        scheduler.add(requests[request_id])
    for request_id in record["aborted"]:
        abort(queues, requests[request_id])
    for request_id in record["paused"]:
        queues.pause(requests[request_id])
    for request_id in record["resumed"]:
        queues.resume(requests[request_id])
    return scheduler.schedule(Load(record["num_outside"], record["is_read"]))


def _decisions(scheduler: Scheduler, step: Step) -> Json:
    """Return the decisions, and how full the queues and the cache are, by a record's names."""
    queues = scheduler.queues
    decided = {
        "work": [(work.seq_id, work.start, len(work.tokens)) for work in step.work],
        "admitted": step.admitted,
        "preempted": step.preempted,
        "waits": step.waits,
        "num_copies": len(step.copies),
        "num_running": len(queues.running),
        "num_waiting": len(queues.waiting) + len(queues.paused),
        "blocks_used": sum(refs > 0 for refs in queues.kv.pool.refs),
        "blocks_indexed": queues.kv.pool.num_indexed,
    }
    plain: Json = json.loads(json.dumps(decided))
    return plain


def _fold(scheduler: Scheduler, step: Step, record: Json) -> None:
    """Commit the step with the recorded tokens."""
    if not record["sampled"]:  # the backend failed
        scheduler.retract()
        return
    failed = {tuple(seq_id): error for seq_id, error in record["errors"]}
    errors = {i: failed[w.seq_id] for i, w in enumerate(step.work) if w.seq_id in failed}
    sampled = tuple(map(tuple, record["sampled"]))
    ranked = {
        tuple(seq_id): tuple(map(tuple, candidates)) for seq_id, candidates in record["ranked"]
    }
    top = {i: ranked[work.seq_id] for i, work in enumerate(step.work) if work.seq_id in ranked}
    similarities = {tuple(seq_id): value for seq_id, value in record["similarities"]}
    alike = {
        i: similarities[work.seq_id]
        for i, work in enumerate(step.work)
        if work.seq_id in similarities
    }
    output = StepOutput(sampled, errors=errors, top=top, similarity=alike)
    commit(scheduler.queues, step, output)
