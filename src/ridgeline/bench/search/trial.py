"""One trial: a load is put on the server until it is clear whether its service levels hold.

Requests of the warm-up come first, as fast as the others, and are not counted: the server must be
as full as this load makes it. As many come behind those that are counted, so that it does not
empty while the last of them run; they are broken off.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ridgeline.bench.load.client_flags import Endpoint
from ridgeline.bench.load.main import read_plan
from ridgeline.bench.load.stats import Outcome, summarise
from ridgeline.bench.search.knee import Trial
from ridgeline.bench.search.slo import RequestSlo, Tally, queue_grows, tally, verdict
from ridgeline.engine.setup.progress import Report, count_bar
from ridgeline.foresight.simulator.workload import Planned, Workload
from ridgeline.system.report import figure

if TYPE_CHECKING:
    from ridgeline.bench.load.client import Reader

_WARMUPS = 200
_ROUGH_WARMUPS = 5


@dataclass(slots=True)
class TrialSetting:
    """What trials have in common.

    ``answer_s`` is what the last one said of an answer. While no load has failed, a rough trial is
    enough: its warm-up is short, and it passes as soon as that is certain. Close to the limit a
    queue needs hundreds of requests to build up, and quiet times come in rows: there the warm-up is
    long, and only a failure may end a trial early. ``read`` reads an answer; None: it is streamed.
    """

    target: Endpoint
    workload: Workload
    slos: Sequence[RequestSlo]
    is_open: bool
    num_measured: int
    answer_s: float
    is_rough: bool = True
    read: Reader | None = None

    def describe(self, load: float) -> str:
        """Return a load in words."""
        return f"{figure(load)} requests/s" if self.is_open else f"{load:.0f} at a time"

    def plan(self, load: float, number: int) -> tuple[list[Planned], int | None]:
        """Return a trial's requests, those before the measured ones below 0; and its clients."""
        count = math.ceil(load * self.answer_s) if self.is_open else round(load)
        least = _ROUGH_WARMUPS if self.is_rough else min(_WARMUPS, self.num_measured)
        num_warmups = min(max(count, least), _WARMUPS)
        workload = replace(
            self.workload,
            request_rate=load if self.is_open else None,
            max_concurrency=None if self.is_open else round(load),
            num_prompts=self.num_measured + 2 * num_warmups,
            num_warmups=0,
            seed=(self.workload.seed or 0) + number,
        )
        planned, _ = read_plan(workload)
        if len(planned) <= num_warmups:
            raise ValueError(
                f"{workload.trace_file} has {len(planned)} requests, which the warm-up uses up"
            )
        shifted = [replace(one, index=one.index - num_warmups) for one in planned]
        return shifted, workload.max_concurrency


class Judge:
    """Watches a trial, and ends it once its verdict is clear."""

    def __init__(self, setting: TrialSetting, num_measured: int, report: Report) -> None:
        self._setting, self._num, self._report = setting, num_measured, report
        self.tallies: list[Tally] = []
        self.is_overloaded = False
        self.now_s = 0.0
        self.num_late = 0

    def is_enough(
        self, ended: Sequence[Outcome], under_way: Sequence[Outcome], now_s: float
    ) -> bool:
        """Return whether the verdict is clear."""
        self.now_s = now_s
        begun = [*ended, *under_way]
        measured_s = [outcome.sent_s for outcome in begun if outcome.index >= 0]
        if not measured_s:
            return False
        late = self._counted(under_way)
        self.tallies = tally(self._setting.slos, self._counted(ended), late, now_s)
        self.num_late = sum(
            any(slo.is_met_so_far(outcome, now_s) is False for slo in self._setting.slos)
            for outcome in late
        )
        ended_s = [outcome.end_s for outcome in ended]
        sent_s = [outcome.sent_s for outcome in begun]
        self.is_overloaded = self._setting.is_open and queue_grows(
            sent_s, ended_s, min(measured_s), now_s
        )
        self._report(min(one.num for one in self.tallies), self._num)
        is_all = all(one.num >= self._num for one in self.tallies)
        certain = verdict(self.tallies)
        is_clear = certain is False or (certain is True and self._setting.is_rough)
        return is_all or self.is_overloaded or is_clear

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        """Count what ended after the last look, where nothing was broken off."""
        ended = self._counted(outcomes)
        if len(ended) == self._num:
            self.tallies, self.num_late = tally(self._setting.slos, ended, [], self.now_s), 0

    def _counted(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        return [outcome for outcome in outcomes if 0 <= outcome.index < self._num]


def run_trial(setting: TrialSetting, load: float, number: int) -> tuple[Trial, dict[str, Any]]:
    """Put a load on the server; return what it says, and its record for the JSON document.

    Raises ValueError if the workload's files are not what they should be.
    """
    from ridgeline.bench.load.client import drive

    planned, num_workers = setting.plan(load, number)
    num = min(setting.num_measured, sum(one.index >= 0 for one in planned))
    with count_bar(f"Trial {number}: {setting.describe(load)}", note="requests") as report:
        judge = Judge(setting, num, report)
        outcomes, client = asyncio.run(
            drive(
                setting.target, [], planned, num_workers, lambda done, total: None,
                judge.is_enough, setting.read,
            )
        )  # fmt: skip
    if min((one.num for one in judge.tallies), default=0) < num:
        judge.finish(outcomes)
    measured = [outcome for outcome in outcomes if 0 <= outcome.index < num]
    good = [outcome for outcome in measured if outcome.error is None]
    if good:
        setting.answer_s = sum(one.end_s - one.sent_s for one in good) / len(good)
    start_s = min((outcome.sent_s for outcome in measured), default=0.0)
    span_s = max(judge.now_s - start_s, 1e-9)
    num_good = sum(all(slo.is_met(one) for slo in setting.slos) for one in measured)
    values_ms = [percentile_ms(slo, measured, judge.num_late) for slo in setting.slos]
    trial = Trial(
        load=load,
        tallies=tuple(judge.tallies),
        is_overloaded=judge.is_overloaded,
        tightness=max(ms / slo.limit_ms for ms, slo in zip(values_ms, setting.slos, strict=True)),
        completed_per_s=sum(outcome.end_s >= start_s for outcome in outcomes) / span_s,
    )
    record = {
        "load": load,
        "seed": (setting.workload.seed or 0) + number,
        "is_overloaded": trial.is_overloaded,
        "slos": [
            {
                "slo": str(one.slo),
                "num_met": one.num_met,
                "num": one.num,
                "holds": one.holds,
                "value_ms": None if math.isinf(ms) else round(ms, 3),
            }
            for one, ms in zip(trial.tallies, values_ms, strict=True)
        ],
        "completed_per_s": round(trial.completed_per_s, 4),
        "goodput_per_s": round(num_good / span_s, 4),
        "client": client,
        "measured": summarise(measured, {}) if measured else None,
    }
    return trial, record


def percentile_ms(slo: RequestSlo, ended: Sequence[Outcome], num_late: int) -> float:
    """Return the latency that this percentage of requests stays within; infinite if too many fail.

    Requests under way that are already late count as later than all that have ended.
    """
    if slo.percent is None:  # the mean of those that have ended
        each = [1e3 * slo.value_s(one) for one in ended]
        return sum(each) / len(each) if each else math.inf
    values = sorted([1e3 * slo.value_s(one) for one in ended] + [math.inf] * num_late)
    rank = math.ceil(len(values) * slo.percent / 100)
    return values[max(rank - 1, 0)] if values else math.inf
