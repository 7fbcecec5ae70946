"""Fitting the model of time: non-negative least squares that outliers do not bend.

Errors are relative, so that a step of 3 ms counts as much as one of 300. A robust fit foresees the
median; what adds up is the mean, so all rates are multiplied at the end by what makes the sums
agree. It knows nothing of files, engines and clocks. A calibration is fitted again to steps that
were seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ridgeline.foresight.step_time.calibration import Calibration, Factors
from ridgeline.foresight.step_time.features import SHORTEST_S, StepTime, Windows, of_items
from ridgeline.foresight.step_time.sampler import After, Measured, Samples
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
    kept = _knots_with_samples(x[:, 0], knots)
    rates = _robust(_design(x, kept), y, weights, len(steps))
    table = np.cumsum(rates[: len(kept)])
    table = np.maximum(table, SHORTEST_S)  # of a busy machine all may lie in the other rates
    beyond, per_seq, per_row, per_position, per_pair = rates[len(kept) :]
    if x[:, 0].max() <= kept[-1] and len(kept) > 1:  # nothing was seen there: go on as before
        beyond = (table[-1] - table[-2]) / (kept[-1] - kept[-2])
    model = StepTime(
        tuple(kept),
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
    kept = [
        knot
        for knot, (low, high) in zip(knots, pairwise(middles), strict=True)
        if np.count_nonzero((tokens > low) & (tokens <= high)) >= _LEAST_NEAR
    ]
    return kept or [int(np.median(tokens))]


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
        factors=tuple(factors.kept),
        samples=steps,
        after=after,
    )
