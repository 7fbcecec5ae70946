"""Step times fitted: to measured steps by least squares, and corrected by what a server sees."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.foresight.step_time.calibration import Calibration, Factors
from ridgeline.foresight.step_time.features import (
    SHORTEST_S,
    After,
    Measured,
    Samples,
    StepTime,
    Watcher,
    Windows,
    of_items,
)
from ridgeline.model.cost.costs import Features
from ridgeline.version import __version__

Floats = NDArray[np.float64]

_HUBER = 0.15  # relative errors beyond this count less
_ROUNDS = 8
_LEAST_NEAR = 4  # samples near a knot; with fewer it is left out
_CUT = 3.0  # a step that took longer than this many times its prediction met something else
_FOLDS = 5
_UNITS = np.array([1.0, 1.0, 1e3, 1e6])  # sequences, rows, positions, pairs: of like size
_PRIOR_WEIGHT = 0.1
_LEAST_S = 1e-6  # errors are relative to what was measured, so nothing may have taken no time


def fit(
    steps: Sequence[Measured],
    after: Sequence[After],
    knots: Sequence[int],
    *,
    windows: Windows = (),
    prior: StepTime | None = None,
) -> StepTime:
    """Return the model of time that explains samples best.

    Args:
        steps: at least one.
        after: what followed steps; none leaves ``after`` of the model at 0.
        knots: numbers of tokens at which the backend may change its plan.
        windows: of the model's layers.
        prior: what is assumed where nothing was measured, at the speed of what was.

    Raises ValueError without samples.
    """
    if not steps:
        raise ValueError("no step was measured")
    x = np.array([sample.features for sample in steps], np.float64)
    y = np.maximum([sample.seconds for sample in steps], _LEAST_S)
    weights = np.ones(len(y))
    if prior is not None:
        assumed = _assumed(knots)
        speed = float(np.median([s.seconds / prior.seconds(s.features) for s in steps]))
        x = np.vstack([x, np.array(assumed, np.float64)])
        y = np.append(y, [speed * prior.seconds(features) for features in assumed])
        weights = np.append(weights, np.full(len(assumed), _PRIOR_WEIGHT))
    knots = _knots_with_samples(x[:, 0], knots)
    rates = _robust(_design(x, knots), y, weights, len(steps))
    table = np.cumsum(rates[: len(knots)])
    table = np.maximum(table, SHORTEST_S)  # of a busy machine all may lie in the other rates
    beyond, per_seq, per_row, per_position, per_pair = rates[len(knots) :]
    if x[:, 0].max() <= knots[-1] and len(knots) > 1:  # nothing was seen there: go on as before
        beyond = (table[-1] - table[-2]) / (knots[-1] - knots[-2])
    model = StepTime(
        tuple(knots),
        tuple(table.tolist()),
        per_token_s=float(beyond),
        per_seq_s=float(per_seq),
        per_row_s=float(per_row),
        per_position_s=float(per_position / _UNITS[2]),
        per_pair_s=float(per_pair / _UNITS[3]),
        windows=windows,
    )
    return _with_after(model, after)


def cross_validated(steps: Sequence[Measured], knots: Sequence[int]) -> float:
    """Return the mean relative error of single steps that the model was not fitted to.

    Each fifth of the samples is predicted by a model that was fitted to the others.
    """
    errors = []
    for fold in range(min(_FOLDS, len(steps))):
        others = [sample for i, sample in enumerate(steps) if i % _FOLDS != fold]
        model = fit(others or steps, (), knots)
        errors += [abs(model.seconds(s.features) / s.seconds - 1) for s in steps[fold::_FOLDS]]
    return float(np.mean(errors))


def _assumed(knots: Sequence[int]) -> list[Features]:
    """Return steps of all sizes: prompts and answers, of short and of long contexts."""
    steps = []
    for num in knots:
        for context in (64, 1024):
            steps.append(of_items([(context, num, 1)]))
            seqs = min(num, 64)
            steps.append(of_items([(context, num // seqs, 1)] * seqs))
    return steps


def _knots_with_samples(tokens: Floats, knots: Sequence[int]) -> list[int]:
    """Return the knots that have samples near them; at least one."""
    middles = [0.0, *((a + b) / 2 for a, b in pairwise(knots)), np.inf]
    near = [
        knot
        for knot, (low, high) in zip(knots, pairwise(middles), strict=True)
        if np.count_nonzero((tokens > low) & (tokens <= high)) >= _LEAST_NEAR
    ]
    return near or [int(np.median(tokens))]


def _design(x: Floats, knots: Sequence[int]) -> Floats:
    """Return a column for each rate: the first height, the rises between knots, then the others."""
    tokens = x[:, :1]
    low, high = np.array(knots[:-1], np.float64), np.array(knots[1:], np.float64)
    rises = np.clip((tokens - low) / (high - low), 0, 1)
    beyond = np.maximum(0, tokens - knots[-1])
    return np.hstack([np.ones_like(tokens), rises, beyond, x[:, 1:] / _UNITS])


def _robust(design: Floats, y: Floats, weights: Floats, num_measured: int) -> Floats:
    """Fit relative errors, with less weight for those that are large (Huber, 1964).

    The weights come from the fit before (iteratively reweighted least squares). The sums agree at
    the end over the first ``num_measured`` rows.
    """
    scale = weights / y
    for _ in range(_ROUNDS):
        rates = _non_negative(design * scale[:, None], y * scale)
        errors = np.abs(design @ rates / y - 1)
        scale = weights * np.sqrt(np.minimum(1, _HUBER / np.maximum(errors, 1e-9))) / y
    predicted, actual = (design @ rates)[:num_measured], y[:num_measured]
    total = predicted.sum()
    return rates * (np.minimum(actual, _CUT * predicted).sum() / total) if total else rates


def _non_negative(a: Floats, y: Floats) -> Floats:
    """Return the least squares solution of ``a @ x = y`` with all of ``x`` at least 0.

    An active set over the normal equations (Lawson and Hanson, 1974; Bro and de Jong, 1997).
    """
    norms = np.linalg.norm(a, axis=0)
    norms[norms == 0] = 1
    a = a / norms
    gram, rhs = a.T @ a, a.T @ y
    x, free = np.zeros(len(rhs)), np.zeros(len(rhs), bool)
    for _ in range(3 * len(rhs)):
        gain = np.where(free, -np.inf, rhs - gram @ x)
        best = int(np.argmax(gain))
        if gain[best] <= 1e-10 * np.abs(rhs).max():
            break
        free[best] = True
        while True:
            trial = np.zeros(len(rhs))
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], rhs[free], rcond=1e-12)[0]
            out = free & (trial <= 0)
            if not out.any():
                break
            step = (x[out] / np.maximum(x[out] - trial[out], 1e-300)).min()
            x = x + step * (trial - x)  # as far as all stay at least 0
            free &= x > 1e-12 * x.max()
        x = trial
    solution: Floats = np.maximum(x, 0) / norms
    return solution


def _with_after(model: StepTime, after: Sequence[After]) -> StepTime:
    """Add what follows a step: a constant, and something for each row and each end."""
    if not after:
        return model
    rows = np.array([[1.0, sample.num_rows, sample.num_ended] for sample in after])
    seconds = np.maximum([sample.seconds for sample in after], _LEAST_S)
    base, per_row, per_end = _robust(rows, seconds, np.ones(len(seconds)), len(seconds))
    return replace(
        model,
        after_s=float(base),
        after_per_row_s=float(per_row),
        after_per_end_s=float(per_end),
    )


def fitted(
    before: Calibration, samples: Samples, order: Sequence[Measured], source: str, at_s: float
) -> Calibration:
    """Fit again: return a calibration of the same model.

    Args:
        before: stands in where a server has no samples.
        samples: what to fit to.
        order: steps as they came, for the factors of the seconds between.
        source: what it will be called.
        at_s: now, in seconds since 1970.
    """
    knots = before.times.knots
    steps, after = tuple(samples.steps()), tuple(samples.after())
    prior = before.times if source == "served" else None  # a server may never see some shapes
    times = fit(steps, after, knots, windows=before.times.windows, prior=prior)
    error = cross_validated(steps, knots)
    factors = Factors()
    for sample in order:
        factors.add(sample.seconds, times.seconds(sample.features))
    return replace(
        before,
        source=source,
        measured_at=round(at_s, 3),
        version=__version__,
        times=times,
        step_error=round(error, 4),
        factors=tuple(factors.past),
        samples=steps,
        after=after,
    )


ERROR_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_MEMORY_S = 2.0  # of busy time, in which the factor forgets two thirds
_CUT_OUT = 3.0  # no step counts as more times as long as predicted
_FAST_STEPS, _FAST = 50, 0.2  # an assumed model may be off by any factor: find it at once
FIRST_STEPS = 200  # after which what was assumed is replaced, and again at each doubling
_ENOUGH_STEPS = 10_000  # behind which it is only fitted as time goes by
# Of busy time between fits, and at least if the shape errs.
_REFIT_S, _SOONEST_S = 300.0, 30.0
_CHECKED_STEPS = 1000  # over which sums are compared
_MOST_OFF = 0.05
_SHARE = 0.02  # of the newest value in a mean of errors
_MOST_STEPS = 8192  # steps, for the times of requests


class _PredictedTimeline:
    """What was predicted of the time that passed, so that it can be asked for any two moments."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._sums: list[float] = []  # predicted seconds up to the end of each step
        self._factors: list[float] = []  # known when it began

    def add(self, step: StepRecord, predicted_s: float, gap_s: float, factor: float) -> None:
        """Take a step, and what was predicted for it and for the gap before it."""
        if len(self._ends) >= _MOST_STEPS:
            for column in (self._starts, self._ends, self._sums, self._factors):
                del column[: _MOST_STEPS // 2]
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
        ratio = ratio if ratio < _CUT_OUT * factor else _CUT_OUT * factor
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
        before = self.errors.get(of)
        self.errors[of] = error if before is None else before + _SHARE * (error - before)

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
        is_due = self._busy_s > (_SOONEST_S if self._is_off else _REFIT_S)
        is_learning = self._next_fit <= self.num_steps < _ENOUGH_STEPS
        if self._is_fitting or not (is_learning or is_due):
            return
        while self._next_fit <= self.num_steps:  # few steps show little of what there will be
            self._next_fit *= 2
        self._is_fitting, self._is_off, self._busy_s = True, False, 0.0
        reservoir, before = self._watcher.samples, self._with_speeds(self.calibration)
        samples = Samples(reservoir.steps(), reservoir.after())  # those of now
        self._start(lambda: self._fit(before, samples))

    def _go_on_with(self, calibration: Calibration) -> None:
        """Predict with a new fit. The speeds of before were shares of the old one's."""
        change = _ratio(self._times, calibration.times, calibration.samples)
        factors = tuple(round(change * factor, 4) for factor in self._factors.past)
        self.calibration, self._new_calibration = replace(calibration, factors=factors), None
        self._factors, self._times = Factors(factors), calibration.times
        self.factor *= change
        self.num_fits += 1
        self._is_fitting = False

    def _with_speeds(self, calibration: Calibration) -> Calibration:
        return replace(calibration, factors=tuple(self._factors.past), total_error=self.total_error)

    # --- elsewhere -----------------------------------------------------------------------------

    def _fit(self, before: Calibration, samples: Samples) -> None:
        """Fit to what was seen, and keep it."""
        from ridgeline.foresight.step_time.fit import (
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
