"""Recorded times: the simulation serves a trace again, with the recorded durations.

It shows that a simulation errs by its model of time alone: given the recorded seconds, front and
engine decide every step as the server did: who enters, and what is computed. What the world outside
did is an input: which prompts had come before a step, how many a forecast permitted, when a request
was given up, paused or resumed, and whether the background was to rest. A request that did not wait
before the engine, or of an older trace, which does not say what had come, enters when it did.
Drafts are not made again (``foresight.simulator.run``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record, StepRecord
from ridgeline.foresight.simulator.replay import (
    act_as_recorded,
    difference_of,
    lengths_of,
    params_of,
)
from ridgeline.foresight.simulator.run import (
    Clock,
    Replica,
    SimRequest,
    VirtualRunner,
    new_replica,
)
from ridgeline.foresight.step_time.features import Windows
from ridgeline.foresight.structure import engine_of
from ridgeline.model.cost.costs import Features

Json = Mapping[str, Any]

_SINCE = ("arrived", "aborted", "paused", "resumed")  # since the step before
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


def requests_in(records: Iterable[Json]) -> dict[int, SimRequest]:
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
    requests.sort(key=lambda one: (one["arrival_s"], one.get("pushed") or [], one["request_id"]))
    cache: dict[str, SamplingParams] = {}  # most ask for the same, and to check it takes 40 us
    return {record["request_id"]: _request_of(record, answers, cache) for record in requests}


def _request_of(
    record: Json,
    answers: Mapping[tuple[int, int], list[int]],
    cache: dict[str, SamplingParams],
) -> SimRequest:
    params = repr(record["params"])
    if params not in cache:
        cache[params] = params_of(record["params"])
    ends = zip(record["finish_reasons"], lengths_of(record), strict=True)
    lengths = [_NEVER if reason in ("abort", "error") else length for reason, length in ends]
    number, before = record["request_id"], dict(enumerate(map(tuple, record["answers"])))
    return SimRequest(
        prompt=tuple(record["prompt_token_ids"]),
        num_new=tuple(lengths),
        arrival_s=record["arrival_s"],
        params=cache[params],
        cache_root=bytes.fromhex(record["cache_root"]),
        name=record["name"],
        answers=tuple(
            before.get(i, ()) + tuple(answers.get((number, i), ())) for i in range(len(lengths))
        ),
        num_before=tuple(map(len, record["answers"])),
        due_s=inf if record["due_s"] is None else record["due_s"],
        tenant=record.get("owner", ""),
        is_background=record.get("is_background", False),
        push=pushed[0] if (pushed := record.get("pushed")) else None,
    )


def serve_again(records: Sequence[Json]) -> ReplayResult:
    """Serve a trace's requests again with its durations, and compare all decisions.

    It ends before the first step for which a request is needed that had not ended in the trace.

    Args:
        records: the lines of a trace, in order, as JSON values (``record_json.to_json``).

    Raises ValueError if these are not the records of an engine.
    """
    settings, requests = settings_of(records), requests_in(records)
    clock, times, new_records = Clock(), _RecordedTimes(), list[Record]()
    replica, runner = new_replica(settings, clock, times, new_records.append)
    world = _World(replica, runner, records, requests)
    num_steps = num_equal = 0
    difference: tuple[int, Json, Json] | None = None
    for step in (record for record in records if record["type"] == "step"):
        clock.now_s = step["start_s"]
        times.next_s = step["schedule_s"] + step["execute_s"]
        if not (requests.keys() >= set(step["arrived"]) and world.acts_before(step)):
            break
        num_before = len(new_records)
        num_outside = step["num_outside"] if step.get("num_pushed") is None else None
        replica.step(is_read=step["is_read"], num_outside=num_outside)
        differs = difference_of(step, map(world.in_numbers_of_then, new_records[num_before:]))
        num_steps += 1
        num_equal += differs is None
        difference = difference or differs
    return ReplayResult(new_records, num_steps, num_equal, difference)


class _World:
    """What is outside of an engine: it does before each step what it did then."""

    def __init__(
        self,
        replica: Replica,
        runner: VirtualRunner,
        records: Iterable[Json],
        requests: Mapping[int, SimRequest],
    ) -> None:
        self._replica, self._runner, self._requests = replica, runner, requests
        self._numbers = {id(one): number for number, one in requests.items()}
        ended = [record for record in records if record["type"] == "request"]
        self._pushed = {one["request_id"]: one["pushed"] for one in ended if one.get("pushed")}
        prompts = sorted((pushed, number) for number, pushed in self._pushed.items())
        self._to_come = deque(
            (first, [number for _, number in push])
            for first, push in groupby(prompts, key=lambda prompt: prompt[0][0])
        )
        self._num_come = 0

    def acts_before(self, step: Json) -> bool:
        """Do what was done before a step; return False if a prompt waits that had not ended.

        What came before the choice who enters was a turn of its own, without a step.
        """
        num_since = dict(zip(_SINCE, step.get("num_since", ()), strict=False))
        first = {name: step[name][:num] for name, num in num_since.items()}
        rest = {name: step[name][num_since.get(name, 0) :] for name in _SINCE}
        if any(first.values()):
            pushed = [self._pushed[one] for one in first["arrived"] if one in self._pushed]
            num_pushed = max((own + 1 for _, own in pushed), default=0)
            self._turn(first, step, num_pushed)
        num_pushed = step.get("num_pushed") or 0
        self._turn(rest, step, num_pushed)
        if self._num_come == num_pushed:
            return True
        num_outside: int = step["num_outside"]
        return self._replica.front.load.num_outside >= num_outside  # they were refused

    def _turn(self, acts: Json, step: Json, num_pushed: int) -> None:
        replica, front = self._replica, self._replica.front
        while self._to_come and self._to_come[0][0] < num_pushed:
            _, numbers = self._to_come.popleft()
            self._num_come += len(numbers)
            replica.push(*(self._requests[number] for number in numbers))
        for number in acts["arrived"]:
            if number not in self._pushed:
                replica.enter(self._requests[number])
        permitted = step.get("num_permitted")
        front.num_permitted = inf if permitted is None else permitted
        if num_pushed:
            replica.take(step.get("gives_way", False))
        left = {id(self._requests[number]) for number in acts["aborted"]}
        for prompt in front.remove(lambda prompt: id(prompt.request) in left):
            replica.enter(*prompt)
        act_as_recorded(replica.engine, acts)

    def in_numbers_of_then(self, record: Record) -> Record:
        """Return a step's record that names those who entered as the trace does."""
        if not isinstance(record, StepRecord):
            return record
        entered = [self._numbers[id(self._runner.request(one))] for one in record.arrived]
        return replace(record, arrived=tuple(entered))
