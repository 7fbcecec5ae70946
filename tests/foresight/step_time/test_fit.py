"""Fits: what a model of time made is found again, through noise, and nothing is negative."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ridgeline.foresight.step_time.features import After, Measured, StepTime
from ridgeline.foresight.step_time.fit import _non_negative, cross_validated, fit
from ridgeline.model.cost.costs import Features

KNOTS = (1, 2, 3, 4, 6, 7, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
TRUE = StepTime(
    (1, 6, 16, 64, 2048), (3e-3, 4e-3, 6e-3, 20e-3, 600e-3), 3e-4, 2e-5, 3e-5, 1e-7, 2e-9,
    1e-4, 2e-6, 5e-5,
)  # fmt: skip


def shapes(num: int, dice: random.Random) -> list[Features]:
    """Steps as a server has them: answers side by side, and often a piece of a prompt beside."""
    found = []
    for _ in range(num):
        seqs, context = dice.choice((1, 1, 2, 4, 8, 16, 32, 64)), dice.randint(8, 1500)
        tokens, pairs, rows = seqs, seqs * context, seqs
        if dice.random() < 0.5:
            piece, start = dice.choice((5, 30, 64, 200, 700, 2000)), dice.randint(0, 500)
            tokens, seqs = tokens + piece, seqs + 1
            pairs += piece * start + piece * (piece + 1) // 2
            rows += dice.random() < 0.5
        found.append(Features(tokens, seqs, rows, seqs * context, pairs))
    return found


def noisy(num: int, seed: int, spread: float, wild: float = 0.0) -> list[Measured]:
    dice = random.Random(seed)
    found = []
    for features in shapes(num, dice):
        seconds = TRUE.seconds(features) * dice.lognormvariate(0, spread)
        found.append(Measured(features, seconds * (20 if dice.random() < wild else 1)))
    return found


def mean_error(model: StepTime, seed: int = 99) -> float:
    fresh = shapes(300, random.Random(seed))
    return float(np.mean([abs(model.seconds(f) / TRUE.seconds(f) - 1) for f in fresh]))


def test_what_made_the_times_is_found_again() -> None:
    assert mean_error(fit(noisy(900, 1, 0.0), (), KNOTS)) < 0.01


def test_noise_averages_out() -> None:
    assert mean_error(fit(noisy(900, 2, 0.15), (), KNOTS)) < 0.05


def test_a_few_wild_steps_do_not_bend_it() -> None:
    """Two of a hundred steps took twenty times as long: something else ran then."""
    assert mean_error(fit(noisy(900, 3, 0.05, wild=0.02), (), KNOTS)) < 0.08


def test_sums_agree_though_noise_is_skewed() -> None:
    steps = noisy(900, 4, 0.3)
    model = fit(steps, (), KNOTS)
    total = sum(model.seconds(step.features) for step in steps)
    assert total == pytest.approx(sum(step.seconds for step in steps), rel=0.01)


def test_the_error_that_is_promised_is_the_error_on_fresh_steps() -> None:
    promised = cross_validated(noisy(600, 5, 0.1), KNOTS)
    model = fit(noisy(600, 5, 0.1), (), KNOTS)
    fresh = noisy(600, 6, 0.1)
    found = np.mean([abs(model.seconds(s.features) / s.seconds - 1) for s in fresh])
    assert promised == pytest.approx(found, rel=0.2)


def test_where_nothing_was_seen_it_goes_on_as_assumed() -> None:
    """Single streams were measured, on a machine half as fast as assumed; then a prompt comes."""
    dice = random.Random(7)
    slow = TRUE.scaled(2.0)
    steps = [
        Measured(f, slow.seconds(f) * dice.lognormvariate(0, 0.05))
        for f in (Features(1, 1, 1, n, n) for n in range(50, 250))
    ]
    model = fit(steps, (), KNOTS, prior=TRUE)
    for prompt in (Features(700, 1, 1, 700, 245_000), Features(64, 64, 64, 6400, 6400)):
        assert model.seconds(prompt) == pytest.approx(slow.seconds(prompt), rel=0.25)
    bare = fit(steps, (), KNOTS)
    assert bare.seconds(Features(700, 1, 1, 700, 245_000)) < 0.2 * slow.seconds(prompt) + 0.1


def test_what_follows_a_step_is_fitted_too() -> None:
    dice = random.Random(8)
    after = []
    for _ in range(300):
        rows, ended = dice.randint(1, 64), dice.choice((0, 0, 0, 1, 2))
        after.append(After(rows, ended, TRUE.after(rows, ended) * dice.lognormvariate(0, 0.1)))
    model = fit(noisy(50, 9, 0.0), after, KNOTS)
    for rows, ended in ((1, 0), (64, 0), (16, 2)):
        assert model.after(rows, ended) == pytest.approx(TRUE.after(rows, ended), rel=0.1)


@pytest.mark.parametrize("num", [1, 2, 5])
def test_a_handful_of_steps_is_enough_to_say_something(num: int) -> None:
    model = fit(noisy(num, 10, 0.0), (), KNOTS)
    assert model.seconds(Features(1, 1, 1, 100, 100)) > 0


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e300])
def test_a_step_of_any_length_is_fitted(seconds: float) -> None:
    with np.errstate(all="raise", under="ignore"):
        model = fit(
            [*noisy(30, 10, 0.1), Measured(shapes(1, random.Random(1))[0], seconds)], (), KNOTS
        )
    assert all(np.isfinite(model.seconds(features)) for features in shapes(50, random.Random(2)))


def test_nothing_measured_is_said() -> None:
    with pytest.raises(ValueError, match="no step was measured"):
        fit((), (), KNOTS)


matrices = st.integers(1, 6).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(-5, 5), min_size=width + 1, max_size=width + 1),
        min_size=width,
        max_size=12,
    )
)


@given(matrices)
def test_no_feasible_point_is_better(rows: list[list[int]]) -> None:
    """The conditions of Karush, Kuhn and Tucker: nothing can be gained from any rate."""
    table = np.array(rows, np.float64)
    a, y = table[:, :-1], table[:, -1]
    x = _non_negative(a, y)
    assert (x >= 0).all()
    gain: NDArray[np.float64] = a.T @ (y - a @ x)
    scale = 1 + np.abs(a).max() * np.abs(y).max() * len(a) * max(1, x.max())
    assert (gain <= 1e-6 * scale).all()
    assert (np.abs(gain[x > 1e-9]) <= 1e-6 * scale).all()


@given(st.integers(0, 1000), st.integers(8, 200))
def test_tables_rise(seed: int, num: int) -> None:
    model = fit(noisy(num, seed, 0.5), (), KNOTS)
    assert all(less <= more for less, more in pairwise(model.table_s))
