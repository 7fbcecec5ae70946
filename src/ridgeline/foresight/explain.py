"""Why a request took as long as it did: its time, cut into pieces of one cause each.

The cuts are whole nanoseconds between arrival and end, and each piece ends where the next begins.
So the pieces sum to the request's time exactly. It knows records alone: no files, no terminal.

How long steps usually take is fitted to the very run that is looked at. With it computing alone,
computing beside others and a slow machine can be told apart without a calibration. It foresees
nothing of another run. What a change does to all requests is summed up at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.foresight.simulator.replay import CONTRADICTIONS
from ridgeline.foresight.step_time.features import (
    Measured,
    Reach,
    Samples,
    StepTime,
    Watcher,
    of_record,
    reach_of,
)
from ridgeline.foresight.step_time.fit import fit
from ridgeline.foresight.trace import Recorded, step_of

Json = Mapping[str, Any]
Predict = Callable[[Json], float]  # a step's record -> seconds until its results are there

CAUSES = {  # and what each means, in the order of a request's life
    "step_under_way": "a step was under way when it came",
    "queue_max_num_seqs": "before the engine: all slots were taken",
    "queue_token_budget": "before the engine: earlier prompts filled the steps",
    "queue_blocks": "before the engine: the KV cache was full",
    "queue_overtaken": "before the engine: later requests passed it",
    "wait_max_num_seqs": "in the engine: all slots were taken",
    "wait_token_budget": "in the engine: others had all tokens of a step",
    "wait_blocks": "in the engine: the KV cache was full",
    "wait_policy": "in the engine: the policy chose others",
    "client": "its client did not read",
    "prompt": "its prompt was computed",
    "prompt_alone": "its prompt, as if it were alone",
    "prompt_shared": "its prompt: others in the same steps",
    "decode": "its answer was computed",
    "decode_alone": "its answer, as if it were alone",
    "decode_shared": "its answer: others in the same steps",
    "again": "computed again, what it had lost",
    "slow_machine": "the machine was slower than it usually is",
    "between_steps": "between steps: tokens committed, text sent",
}
_BEAMS = "other beams"
_SLOW = 1.25  # a step that takes this many times as long as predicted was slow
_S = 1_000_000_000  # nanoseconds
_LEAST = 50  # steps that say how long steps take; fewer say nothing
_MOST = 1500  # more say nothing new
_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class TimePiece(NamedTuple):
    """A stretch of a request's time with one cause; ``step`` is the one that ran, or ran last."""

    cause: str
    start_ns: int
    end_ns: int
    step: int | None


@dataclass(frozen=True)
class Explanation:
    """A request, and where its time went.

    Attributes:
        engine, request: their records; of a prompt only ``num_prompt_tokens`` is needed.
        steps: the records of the steps during its life.
        pieces: in order of time, without gaps, from its arrival to its end.
        is_predicted: whether alone, shared and slow were told apart.
        num_overtakers: requests that came later and were let into the engine before.
    """

    engine: Json
    request: Json
    steps: tuple[Json, ...]
    pieces: tuple[TimePiece, ...]
    is_predicted: bool
    num_overtakers: int = 0

    @property
    def duration_ns(self) -> int:
        """From arrival to end."""
        return _ns(self.request["finish_s"]) - _ns(self.request["arrival_s"])

    def causes_ns(self) -> dict[str, int]:
        """Return the time of each cause, the greatest first."""
        total: Counter[str] = Counter()
        for piece in self.pieces:
            total[piece.cause] += piece.end_ns - piece.start_ns
        return dict(total.most_common())


@dataclass
class _Life:
    """Follows a request through its steps, and cuts its time."""

    engine: Json
    request: Json
    predict: Predict | None
    critical: int  # the sequence that ends last: the others do not make the request longer
    overtakers: frozenset[int] = frozenset()
    cuts: list[tuple[int, str, int | None]] = field(default_factory=list)
    has_arrived: bool = False
    is_overtaken: bool = False
    num_computed: dict[int, int] = field(default_factory=dict)  # tokens, by sequence
    num_computed_prompt: int = 0
    last_end_ns: int = 0

    def cut(self, start_ns: int, cause: str, step: Json) -> None:
        """Let a piece begin."""
        self.cuts.append((start_ns, cause, step["number"]))

    def see(self, step: Json) -> None:
        """Cut at what a step did to the request."""
        request_id = self.request["request_id"]
        if request_id in step["paused"]:  # between the step before and this one
            self.cut(self.last_end_ns, "client", step)
        self.has_arrived = self.has_arrived or request_id in step["arrived"]
        self.is_overtaken = self.is_overtaken or not self.overtakers.isdisjoint(step["arrived"])
        cause, is_mine = self._cause(step)
        start_ns, executed_ns, self.last_end_ns = _times_ns(step)
        if is_mine:
            self._divide(step, cause, start_ns, executed_ns)
            self._note_computed(step)
        else:
            self.cut(start_ns, cause, step)
        if is_mine or cause == "step_under_way":
            self.cut(executed_ns, "between_steps", step)

    def _cause(self, step: Json) -> tuple[str, bool]:
        """Return what a step was to the request, and whether it computed for it."""
        request_id = self.request["request_id"]
        if step["start_s"] < self.request["arrival_s"]:
            return "step_under_way", False
        if not self.has_arrived:
            return self._queued(step), False
        starts = {seq[1]: start for seq, start, _ in step["work"] if seq[0] == request_id}
        waits = {seq[1]: why for seq, why in step["waits"] if seq[0] == request_id}
        why = waits.get(self.critical, _BEAMS)
        if why == _BEAMS:  # it waits for other beams, or is not there yet
            why = next((one for one in waits.values() if one != _BEAMS), "")
        if starts and (self.critical in starts or self.critical not in waits or why == ""):
            index = self.critical if self.critical in starts else next(iter(starts))
            return self._kind(index, starts[index]), True
        if not why:
            return "step_under_way", False  # it came while the step ran
        return ("client" if why == "paused" else f"wait_{why}".replace(" ", "_")), False

    def _queued(self, step: Json) -> str:
        """Return why a request was not let into the engine during a step.

        From the first that passed it on it is the order: there was room, and another had it.
        """
        if self.is_overtaken:
            return "queue_overtaken"
        reasons = Counter(why for _, why in step["waits"])
        busy = step["num_running"] + step["num_waiting"] - reasons["paused"]
        if busy >= self.engine["max_num_seqs"]:
            return "queue_max_num_seqs"
        return "queue_blocks" if reasons["blocks"] else "queue_token_budget"

    def _kind(self, index: int, start: int) -> str:
        num_prompt = self.request["num_prompt_tokens"]
        if start < max(self.num_computed.get(index, 0), self.num_computed_prompt):
            return "again"
        return "prompt" if start < num_prompt else "decode"

    def _note_computed(self, step: Json) -> None:
        """Remember how far each sequence has come; what is computed below that is done again."""
        request_id, num_prompt = self.request["request_id"], self.request["num_prompt_tokens"]
        drafts = {tuple(seq): len(tokens) for seq, tokens in step["drafts"]}
        for i, (seq, start, count) in enumerate(step["work"]):
            if seq[0] != request_id:
                continue
            end = start + count
            if num_drafts := drafts.get(tuple(seq)):
                # Right ones count, and each has a token after it. A state has seen all or none.
                num_drawn = len(step["sampled"][i]) if step["sampled"] else 0
                num_right = max(num_drawn - 1, 0)
                is_none = self.engine.get("num_checkpoints") is not None and num_right < num_drafts
                end += (0 if is_none else num_right) - num_drafts
            self.num_computed[seq[1]] = max(self.num_computed.get(seq[1], 0), end)
            self.num_computed_prompt = max(self.num_computed_prompt, min(end, num_prompt))

    def _divide(self, step: Json, cause: str, start_ns: int, executed_ns: int) -> None:
        """Cut a step that computed for the request: alone, shared with others, slow machine."""
        if self.predict is None:
            self.cut(start_ns, cause, step)
            return
        actual_ns = executed_ns - start_ns
        all_ns, alone_ns = (_ns(self.predict(one)) for one in (step, self._alone(step)))
        usual_ns = all_ns if actual_ns > _SLOW * all_ns else actual_ns
        if all_ns > 0 and usual_ns != all_ns:  # as fast as predicted, but for noise
            alone_ns = round(alone_ns * (usual_ns / all_ns))
        alone_ns = min(alone_ns, usual_ns)
        if cause == "again":
            self.cut(start_ns, cause, step)
        else:
            self.cut(start_ns, f"{cause}_alone", step)
            self.cut(start_ns + alone_ns, f"{cause}_shared", step)
        self.cut(start_ns + usual_ns, "slow_machine", step)

    def _alone(self, step: Json) -> Json:
        """Return the record of a step as if no other request had been in it."""
        request_id = self.request["request_id"]
        indices = [i for i, (seq, _, _) in enumerate(step["work"]) if seq[0] == request_id]
        return {
            **step,
            "work": [step["work"][i] for i in indices],
            "sampled": [step["sampled"][i] for i in indices] if step["sampled"] else [],
            **{
                name: [one for one in step[name] if one[0][0] == request_id]
                for name in ("drafts", "ranked", "similarities", "errors")
            },
        }

    def pieces(self) -> tuple[TimePiece, ...]:
        """Return the pieces between arrival and end; equal ones that touch are one."""
        now_ns, finish_ns = _ns(self.request["arrival_s"]), _ns(self.request["finish_s"])
        cause, number = "between_steps", None  # an idle engine wakes up
        merged: list[TimePiece] = []
        for start_ns, next_cause, step in [*self.cuts, (finish_ns, "", None)]:
            end_ns = min(max(start_ns, now_ns), finish_ns)
            if end_ns > now_ns:
                if merged and merged[-1].cause == cause:
                    merged[-1] = merged[-1]._replace(end_ns=end_ns)
                else:
                    merged.append(TimePiece(cause, now_ns, end_ns, number))
            now_ns, cause, number = end_ns, next_cause, step
        return tuple(merged)


def explain(
    engine: Json,
    request: Json,
    steps: Listing[Json],
    predict: Predict | None = None,
    *,
    overtakers: frozenset[int] = frozenset(),
) -> Explanation:
    """Return where a request's time went.

    Args:
        engine, request: their records, as JSON values; the request's with ``num_prompt_tokens``.
        steps: the records of all steps that overlap its life, in order; the one after it too, if
            there is one.
        predict: a model of time: how many seconds a step should take, from its record. With it,
            computing is divided into alone, shared and slow.
        overtakers: the numbers of the requests that passed it, as ``overtakers_of`` finds them.

    Raises ValueError if a step is missing.
    """
    request_id = request["request_id"]
    for before, after in pairwise(steps):
        if after["number"] != before["number"] + 1:
            raise ValueError(
                f"the trace has a hole in the life of request {request_id}: step {after['number']} "
                f"follows step {before['number']}"
            )
    is_known = any(request_id in step["arrived"] for step in steps)
    if not is_known and request["scheduled_s"] is not None:
        raise ValueError(
            f"the step in which request {request_id} arrived is not in the trace: its beginning is "
            "missing"
        )
    life = _Life(engine, request, predict, _last_to_end(request_id, steps), overtakers)
    try:
        for step in steps:
            life.see(step)
    except CONTRADICTIONS as error:
        raise ValueError(f"this is not a trace of this version: {error!r:.200}") from None
    pieces, is_predicted = life.pieces(), predict is not None
    return Explanation(engine, request, tuple(steps), pieces, is_predicted, len(overtakers))


def overtakers_of(request: Json, requests: Iterable[Json]) -> frozenset[int]:
    """Return the requests that came later than one and entered the engine before it.

    Requests are numbered as they enter.

    Args:
        request: its record.
        requests: of all that ended, at least ``request_id`` and ``arrival_s``.
    """
    return frozenset(
        one["request_id"]
        for one in requests
        if one["request_id"] < request["request_id"] and one["arrival_s"] > request["arrival_s"]
    )


def _last_to_end(request_id: int, steps: Listing[Json]) -> int:
    for step in reversed(steps):
        named = [*(item[0] for item in step["work"]), *(wait[0] for wait in step["waits"])]
        if indices := [index for owner, index in named if owner == request_id]:
            return int(indices[0])
    return 0


def _times_ns(step: Json) -> tuple[int, int, int]:
    """Return when a step began, had its results and was over."""
    executed_s = step["start_s"] + step["schedule_s"] + step["execute_s"]
    return _ns(step["start_s"]), _ns(executed_s), _ns(executed_s + step["commit_s"])


def _ns(seconds: float) -> int:
    return round(seconds * _S)


def usual_times(records: Iterable[Record]) -> tuple[StepTime, Reach]:
    """Return the model of time that explains a whole run best, and up to which steps it is known.

    Raises ValueError if the run is too short.
    """
    watcher = Watcher(Samples(), ())
    measured = [sample for record in records if (sample := watcher.take(record))]
    reach = reach_of(sample.features for sample in measured)
    if reach is None or len(measured) < _LEAST:
        raise ValueError(
            f"the trace has {len(measured)} steps that say how long steps take: at least {_LEAST} "
            "are needed"
        )
    thinned = measured[:: -(-len(measured) // _MOST)]
    return fit(thinned, watcher.samples.after(), _KNOTS), reach


def usual_steps(recorded: Recorded) -> Predict | None:
    """Return how long steps usually take, from some of a run's; None if there are too few."""
    steps = map(step_of, recorded.some(_MOST))
    measured = [
        Measured(of_record(step), step.schedule_s + step.execute_s)
        for step in steps
        if step.sampled and not step.errors
    ]
    if len(measured) < _LEAST:
        return None
    return predictor(fit(measured, (), _KNOTS))


def predictor(times: StepTime) -> Predict:
    """Return what an explanation asks a model of time: the seconds of a step, by its record."""

    def predict(step: Json) -> float:
        return times.seconds(of_record(step_of(step), times.windows))

    return predict


METRICS = ("ttft", "tpot", "e2el")  # time to first token, of each further one, to the end
IN_MS = tuple(f"{metric}_ms" for metric in METRICS)


class Change(NamedTuple):
    """A request in two runs, by the names of ``IN_MS``; None where there is no such time."""

    request: int
    before: dict[str, float | None]
    after: dict[str, float | None]

    @property
    def gain_ms(self) -> float:
        """How much sooner it ended in the second run."""
        return (self.before["e2el_ms"] or 0.0) - (self.after["e2el_ms"] or 0.0)


def times_ms(record: RequestRecord) -> dict[str, float | None]:
    """Return time to first token, mean time of a further token, and time to the end."""
    first_s, finish_s = record.first_token_s, record.finish_s
    num_gaps = max(record.num_generated, default=0) - 1
    return {
        "ttft_ms": None if first_s is None else 1e3 * (first_s - record.arrival_s),
        "tpot_ms": 1e3 * (finish_s - first_s) / num_gaps if first_s and num_gaps > 0 else None,
        "e2el_ms": 1e3 * (finish_s - record.arrival_s),
    }


def changes(before: Iterable[Record], after: Iterable[Record]) -> list[Change]:
    """Return all requests that ended in both runs, those that gained most first."""
    then, now = (
        {r.request_id: times_ms(r) for r in side if isinstance(r, RequestRecord)}
        for side in (before, after)
    )
    compared = [
        Change(number, times, now[number]) for number, times in then.items() if number in now
    ]
    return sorted(compared, key=lambda change: -change.gain_ms)


def totals(records: Iterable[Record]) -> dict[str, float]:
    """Return what a run comes to: means and 95th percentiles of requests, and its throughput."""
    requests, steps = list[RequestRecord](), list[StepRecord]()
    for record in records:
        if isinstance(record, RequestRecord):
            requests.append(record)
        elif isinstance(record, StepRecord):
            steps.append(record)
    measured = [times_ms(one) for one in requests]
    summary: dict[str, float] = {}
    for name in IN_MS:
        values = sorted(value for one in measured if (value := one[name]) is not None)
        if values:
            summary[f"mean_{name}"] = sum(values) / len(values)
            summary[f"p95_{name}"] = values[min(len(values) - 1, int(0.95 * len(values)))]
    if steps and requests:
        duration_s = max(one.finish_s for one in requests) - min(one.arrival_s for one in requests)
        num_tokens = sum(sum(one.num_generated) for one in requests)
        summary["duration_s"] = duration_s
        summary["output_tokens_per_s"] = num_tokens / duration_s if duration_s else 0.0
        summary["num_steps"] = len(steps)
        summary["num_preemptions"] = sum(len(step.preempted) for step in steps)
    return summary


def as_dict(change: Change) -> dict[str, Any]:
    """Return a change as plain values."""
    return {**change._asdict(), "gain_ms": change.gain_ms}
