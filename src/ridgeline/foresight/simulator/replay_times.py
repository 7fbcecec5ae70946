"""Recorded times: the simulation serves a trace again, with the recorded durations.

It shows that a simulation errs by its model of time alone: given the recorded seconds, admission
and engine decide every step as the server did. What the world outside did is an input: when a
request came, was given up, paused or resumed. Where some had a promise, forecasts decided when each
request entered; between keys that depends on what each was served at moments that no record has.
Then the order of entry is an input too. Drafts are not made again (``foresight.simulator.run``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record
from ridgeline.foresight.simulator.replay import (
    act_as_recorded,
    difference_of,
    lengths_of,
    params_of,
)
from ridgeline.foresight.simulator.run import Clock, SimRequest, new_replica
from ridgeline.foresight.step_time.features import Windows
from ridgeline.foresight.structure import engine_of
from ridgeline.model.cost.costs import Features

Json = Mapping[str, Any]

_NEVER = 1 << 62  # an answer that was cut off would have gone on


class ReplayResult(NamedTuple):
    """A trace that was served again.

    Attributes:
        records: what was recorded this time.
        num_steps: steps that were compared.
        num_equal: steps that were decided as then.
        difference: the first that was not: its number, what is recorded and what was decided now.
    """

    records: list[Record]
    num_steps: int
    num_equal: int
    difference: tuple[int, Json, Json] | None


class _RecordedTimes:
    """The durations of a trace, one step after the other."""

    windows: Windows = ()

    def __init__(self) -> None:
        self.next_s = 0.0

    def seconds(self, features: Features) -> float:
        return self.next_s

    def after(self, num_rows: int, num_ended: int) -> float:
        return 0.0  # the next step says when it begins


def settings_of(records: Sequence[Json]) -> EngineRecord:
    """Return how the engine of a trace was set up. Raises ValueError if the trace does not say."""
    engine = next((record for record in records if record.get("type") == "engine"), None)
    if engine is None:
        raise ValueError("this is not a trace: none of its lines describes an engine")
    return engine_of(engine)


def asked_in(records: Iterable[Json]) -> dict[int, SimRequest]:
    """Return the requests of a trace that had ended, by their numbers, in order of arrival."""
    answers: dict[tuple[int, int], list[int]] = {}
    requests = []
    for record in records:
        if record["type"] == "request":
            requests.append(record)
        elif record["type"] == "step":
            drafted = {tuple(seq_id) for seq_id, _ in record["drafts"]}
            for ((number, index), _, _), tokens in zip(
                record["work"], record["sampled"], strict=False
            ):
                is_one = (number, index) in drafted  # several tokens of one answer, not of several
                for i, token in enumerate(tokens):
                    answers.setdefault((number, index if is_one else index + i), []).append(token)
    requests.sort(key=lambda record: (record["arrival_s"], record["request_id"]))
    known: dict[str, SamplingParams] = {}  # most ask for the same, and to check it takes 40 us
    return {record["request_id"]: _asked(record, answers, known) for record in requests}


def _asked(
    record: Json,
    answers: Mapping[tuple[int, int], list[int]],
    known: dict[str, SamplingParams],
) -> SimRequest:
    params = repr(record["params"])
    if params not in known:
        known[params] = params_of(record["params"])
    ends = zip(record["finish_reasons"], lengths_of(record), strict=True)
    lengths = [_NEVER if reason in ("abort", "error") else length for reason, length in ends]
    number, before = record["request_id"], dict(enumerate(map(tuple, record["answers"])))
    return SimRequest(
        prompt=tuple(record["prompt_token_ids"]),
        num_new=tuple(lengths),
        arrival_s=record["arrival_s"],
        params=known[params],
        cache_root=bytes.fromhex(record["cache_root"]),
        name=record["name"],
        answers=tuple(
            before.get(i, ()) + tuple(answers.get((number, i), ())) for i in range(len(lengths))
        ),
        num_before=tuple(map(len, record["answers"])),
        due_s=inf if record["due_s"] is None else record["due_s"],
        tenant=record.get("owner", ""),
    )


def serve_again(records: Sequence[Json]) -> ReplayResult:
    """Serve a trace's requests again with its durations, and compare all decisions.

    It ends before the first step for which a request is needed that had not ended in the trace.

    Args:
        records: the lines of a trace, in order, as JSON values (``record_json.to_json``).

    Raises ValueError if these are not the records of an engine.
    """
    settings, asked = settings_of(records), asked_in(records)
    waiting, num_before = list(asked.values()), 0  # requests that have not come; how many entered
    is_given = any(one.due_s < inf for one in waiting) or len({one.tenant for one in waiting}) > 1
    clock, times, new_records = Clock(), _RecordedTimes(), list[Record]()
    replica, _ = new_replica(settings, clock, times, new_records.append)
    num_steps = num_equal = 0
    difference: tuple[int, Json, Json] | None = None
    for step in (record for record in records if record["type"] == "step"):
        clock.now_s = step["start_s"]
        times.next_s = step["schedule_s"] + step["execute_s"]
        num_before += len(step["arrived"])
        num_to_come = len(asked) - num_before - step["num_outside"]
        if num_to_come < 0 or not asked.keys() >= set(step["arrived"]):
            break
        if is_given:
            for request_id in step["arrived"]:
                replica.enter(asked[request_id])
        else:
            while len(waiting) > num_to_come:
                replica.push(waiting.pop(0))
            replica.admit()
        act_as_recorded(replica.engine, step)
        num_made = len(new_records)
        replica.step(is_read=step["is_read"], num_outside=step["num_outside"])
        differs = difference_of(step, new_records[num_made:])
        num_steps += 1
        num_equal += differs is None
        difference = difference or differs
    return ReplayResult(new_records, num_steps, num_equal, difference)
