"""Predicted against actual, always on: what a server learns of its own steps while it serves.

A model of time is a shape times a speed. The speed of a shared machine changes within minutes, so
one factor follows it: the mean of actual over predicted seconds, in which the last two busy seconds
count most. If the shape errs, it is fitted again to the steps that were seen, where the caller lets
that run. All else runs in the engine's thread, so it is plain Python over a dozen numbers
(``python -m peers.watching_cost``).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.foresight.step_time.calibration import Calibration, Factors
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.foresight.step_time.sampler import Measured, Samples, Watcher

ERROR_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_MEMORY_S = 2.0  # of busy time, in which the factor forgets two thirds
_CUT = 3.0  # no step counts as more times as long as predicted
_FAST_STEPS, _FAST = 50, 0.2  # an assumed model may be off by any factor: find it at once
FIRST_STEPS = 200  # after which what was assumed is replaced, and again at each doubling
_ENOUGH_STEPS = 10_000  # behind which it is only fitted as time goes by
_REFIT_S, _LEAST_S = 300.0, 30.0  # of busy time between fits, and at least if the shape errs
_CHECKED_STEPS = 1000  # over which sums are compared
_MOST_OFF = 0.05
_SHARE = 0.02  # of the newest value in a mean of errors
_MOST_KEPT = 8192  # steps, for the times of requests


class _PredictedTimeline:
    """What was predicted of the time that passed, so that it can be asked for any two moments."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._sums: list[float] = []  # predicted seconds up to the end of each step
        self._factors: list[float] = []  # known when it began

    def add(self, step: StepRecord, predicted_s: float, gap_s: float, factor: float) -> None:
        """Take a step, and what was predicted for it and for the gap before it."""
        if len(self._ends) >= _MOST_KEPT:
            for kept in (self._starts, self._ends, self._sums, self._factors):
                del kept[: _MOST_KEPT // 2]
        self._starts.append(step.start_s)
        self._ends.append(step.start_s + step.schedule_s + step.execute_s)
        self._sums.append((self._sums[-1] if self._sums else 0.0) + gap_s + predicted_s)
        self._factors.append(factor)

    def between(self, from_s: float, to_s: float) -> float | None:
        """Return the time predicted for this step at its start; None if it is forgotten."""
        first, last = self._at(from_s), self._at(to_s)
        if first is None or last is None:
            return None
        index = min(bisect_right(self._ends, from_s), len(self._ends) - 1)
        return self._factors[index] * (last - first)

    def _at(self, now_s: float) -> float | None:
        """Return the predicted seconds up to a moment."""
        index = bisect_right(self._ends, now_s)
        if index == 0:
            return None
        before = self._sums[index - 1]
        if index < len(self._ends) and self._starts[index] < now_s:  # within a step
            length_s = self._ends[index] - self._starts[index]
            share = (now_s - self._starts[index]) / length_s
            before += share * (self._sums[index] - before)
        return before


class PredictionMonitor:
    """A listener of an engine: predicts each step, and learns from it.

    Attributes:
        calibration: what is known; replaced when it was fitted again.
        factor: actual over predicted seconds, recently.
        num_steps: steps that were compared.
        predicted_s, actual_s: sums of such predictions, and of what the steps took.
        total_error: predicted over actual seconds, less 1, of a thousand steps; None before.
        error_counts: steps by relative error, for ``ERROR_BOUNDS`` and beyond.
        errors: recent mean relative errors, of steps and of requests: "step", "ttft", "tpot"; and
            of what was predicted on a request's arrival: "ttft_at_arrival", "e2e_at_arrival".
        num_requests: requests that were predicted on arrival.
        num_fits: how often the model of step times was fitted again.
    """

    def __init__(
        self,
        calibration: Calibration,
        *,
        start: Callable[[Callable[[], None]], None] = lambda work: work(),
        keep: Callable[[Calibration], object] = lambda fit: None,
        now_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Begin with what is known.

        Args:
            calibration: of the model, measured or assumed.
            start: lets something run elsewhere; by default it runs at once.
            keep: is given each new fit, and at the end the newest speeds.
            now_s: the time that a fit is of, in seconds since 1970; 0 if not needed.
        """
        self.calibration = calibration
        self.factor = calibration.interval().middle
        self.num_steps = self.num_fits = self.num_requests = 0
        self.predicted_s = self.actual_s = self.error_sum = 0.0
        self.total_error = calibration.total_error
        self.error_counts = [0] * (len(ERROR_BOUNDS) + 1)
        self.errors: dict[str, float] = {}
        self._start, self._keep, self._now_s = start, keep, now_s
        self._times = calibration.times
        self._watcher = Watcher(calibration.reservoir(), calibration.times.windows)
        self._factors = Factors(calibration.factors)
        self._course = _PredictedTimeline()
        self._gap_s = 0.0
        self._last = -1, 0.0  # step, and seconds that were predicted for it and the gap behind
        self._checked = [0, 0.0, 0.0]  # steps, predicted and actual seconds
        self._busy_s = 0.0  # since the last fit
        self._next_fit = _ENOUGH_STEPS if self.is_calibrated else FIRST_STEPS  # steps
        self._is_off = self._is_fitting = False
        self._new_calibration: Calibration | None = None  # a new fit, until the next step

    @property
    def is_calibrated(self) -> bool:
        """Whether what is known was measured."""
        return self.calibration.source != "assumed"

    @property
    def speed(self) -> float:
        """How fast it is now, as a share of when the model of time was fitted."""
        return 1 / self.factor

    def on_record(self, record: Record) -> None:
        """Take a record of the engine."""
        sample = self._watcher.take(record)
        if sample is not None:
            assert isinstance(record, StepRecord)
            self._add(record, sample)
        elif isinstance(record, RequestRecord):
            self._add_request(record)

    def foreseen(self, number: int) -> float | None:
        """Return the seconds that were predicted for the last step, if it has this number."""
        return self._last[1] if self._last[0] == number else None

    def note_request(self, errors: Mapping[str, float]) -> None:
        """Take how far off the forecast of a request was, that was made when it came."""
        self.num_requests += 1
        for of, error in errors.items():
            self._note_error(of, error)

    def close(self) -> None:
        """Keep the newest speeds for the next start, if anything was measured."""
        if self.is_calibrated and self.num_steps:
            self._keep(self._with_speeds(self.calibration))

    # --- in the engine's thread ----------------------------------------------------------------

    def _add(self, step: StepRecord, sample: Measured) -> None:
        if self._new_calibration is not None:
            self._go_on_with(self._new_calibration)
        times, factor, actual_s = self._times, self.factor, sample.seconds
        plain_s = times.seconds(sample.features)
        self._course.add(step, plain_s, self._gap_s, factor)
        self._gap_s = times.after(sample.features.num_rows, 0)
        predicted_s = factor * plain_s
        self._last = step.number, predicted_s + self._gap_s
        self.num_steps += 1
        self.predicted_s += predicted_s
        self.actual_s += actual_s
        error = abs(actual_s / predicted_s - 1)
        self.error_sum += error
        self.error_counts[bisect_left(ERROR_BOUNDS, error)] += 1
        self._note_error("step", error)
        ratio = actual_s / plain_s
        ratio = ratio if ratio < _CUT * factor else _CUT * factor
        # By the predicted time: by the actual one, steps that were held up would count more.
        weight = 1 - math.exp(-predicted_s / _MEMORY_S)
        if self.num_steps <= _FAST_STEPS and not self.is_calibrated:
            weight = max(weight, _FAST)
        self.factor += weight * (ratio - factor)
        self._busy_s += actual_s
        is_full = self._factors.add(actual_s, plain_s)
        self._check(predicted_s, actual_s)
        if is_full or (self.num_steps == FIRST_STEPS and not self.is_calibrated):
            self._fit_if_due()

    def _check(self, predicted_s: float, actual_s: float) -> None:
        """Compare sums: single steps are noise, but their sum is not."""
        checked = self._checked
        checked[0] += 1
        checked[1] += predicted_s
        checked[2] += actual_s
        if checked[0] >= _CHECKED_STEPS:
            self.total_error = checked[1] / checked[2] - 1
            self._is_off = abs(self.total_error) > _MOST_OFF
            self._checked = [0, 0.0, 0.0]

    def _note_error(self, of: str, error: float) -> None:
        known = self.errors.get(of)
        self.errors[of] = error if known is None else known + _SHARE * (error - known)

    def _add_request(self, request: RequestRecord) -> None:
        """Compare a request's times with the predictions made at their start.

        What ran in the meantime is taken as it was: this is the error of times, not of schedules.
        """
        first_s = request.first_token_s
        if first_s is None or set(request.finish_reasons) - {"stop", "length"}:
            return
        spans = {"ttft": (request.arrival_s, first_s), "tpot": (first_s, request.finish_s)}
        for name, (from_s, to_s) in spans.items():
            foreseen_s = self._course.between(from_s, to_s)
            if foreseen_s and to_s > from_s:
                self._note_error(name, abs(foreseen_s / (to_s - from_s) - 1))

    def _fit_if_due(self) -> None:
        is_due = self._busy_s > (_LEAST_S if self._is_off else _REFIT_S)
        is_learning = self._next_fit <= self.num_steps < _ENOUGH_STEPS
        if self._is_fitting or not (is_learning or is_due):
            return
        while self._next_fit <= self.num_steps:  # few steps show little of what there will be
            self._next_fit *= 2
        self._is_fitting, self._is_off, self._busy_s = True, False, 0.0
        seen, before = self._watcher.samples, self._with_speeds(self.calibration)
        samples = Samples(seen.steps(), seen.after())  # those of now
        self._start(lambda: self._fit(before, samples))

    def _go_on_with(self, calibration: Calibration) -> None:
        """Predict with a new fit. The speeds of before were shares of the old one's."""
        change = _ratio(self._times, calibration.times, calibration.samples)
        factors = tuple(round(change * factor, 4) for factor in self._factors.kept)
        self.calibration, self._new_calibration = replace(calibration, factors=factors), None
        self._factors, self._times = Factors(factors), calibration.times
        self.factor *= change
        self.num_fits += 1
        self._is_fitting = False

    def _with_speeds(self, calibration: Calibration) -> Calibration:
        return replace(calibration, factors=tuple(self._factors.kept), total_error=self.total_error)

    # --- elsewhere -----------------------------------------------------------------------------

    def _fit(self, before: Calibration, samples: Samples) -> None:
        """Fit to what was seen, and keep it."""
        from ridgeline.foresight.step_time.least_squares import (
            fitted,  # here: a start needs no numpy
        )

        calibration = fitted(before, samples, (), "served", self._now_s())
        change = _ratio(before.times, calibration.times, calibration.samples)
        factors = tuple(round(change * factor, 4) for factor in before.factors)
        self._keep(replace(calibration, factors=factors))
        self._new_calibration = calibration


def _ratio(times: StepTime, others: StepTime, samples: Sequence[Measured]) -> float:
    """Return how many times as long these steps take by one model as by another."""
    one, other = (sum(by.seconds(s.features) for s in samples) for by in (times, others))
    return one / other
