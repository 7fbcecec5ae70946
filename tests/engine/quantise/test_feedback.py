"""Error feedback: products lose less than by rounding alone, in every format."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.engine.quantise import feedback
from ridgeline.engine.quantise.feedback import passed_on, quantised, shares_of, spread_of, weight_of
from ridgeline.engine.quantise.grids import FORMS
from tests.engine.quantise.weights import heavy_tailed


def inputs(num: int, size: int) -> np.ndarray:
    """Rows whose inputs vary together, some much and some little."""
    rng = np.random.default_rng(2)
    mixed = rng.normal(size=(num, size // 8)) @ rng.normal(size=(size // 8, size))
    return (mixed * rng.random(size) + 0.1 * rng.normal(size=(num, size))).astype(np.float32)


@pytest.mark.parametrize("size", [32, 200])
def test_shares_are_those_of_the_inverse(size: int) -> None:
    spread = spread_of(inputs(1000, size))
    upper = passed_on(spread).astype(np.float64)
    damped = spread + 0.01 * np.diag(spread).mean() * np.eye(size)
    assert (np.tril(upper, -1) == 0).all()
    np.testing.assert_allclose(upper.T @ upper @ damped, np.eye(size), atol=1e-3)


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    rows = inputs(500, 64)
    rows[:, 10:20] = 0
    assert np.isfinite(passed_on(spread_of(rows))).all()
    assert np.isfinite(passed_on(np.zeros((64, 64), np.float32))).all()


def test_inputs_that_are_not_finite_are_an_error() -> None:
    rows = inputs(10, 32)
    rows[3, 4] = np.nan
    with pytest.raises(ValueError, match="is not finite"):
        passed_on(spread_of(rows))


@pytest.mark.parametrize("name", FORMS)
def test_products_lose_less(name: str) -> None:
    form, x, rows = FORMS[name], heavy_tailed(24, 512), inputs(2000, 512)
    spread = spread_of(rows)
    q, fed = quantised(x, np.diag(spread), shares_of(rows), form)
    grid = form.fit(x, weight_of(x, np.diag(spread), form.span))
    alone = form.values(form.rounded(x, grid), grid)
    lost = [np.square(rows @ (values - x).T).mean() for values in (form.values(q, fed), alone)]
    assert lost[0] < 0.6 * lost[1]


def test_runs_of_inputs_are_rounded_as_if_each_were_all(monkeypatch: pytest.MonkeyPatch) -> None:
    form, x, rows = FORMS["Q4_K"], heavy_tailed(8, 768), inputs(2000, 768)
    importance = np.square(rows).mean(axis=0)
    monkeypatch.setattr(feedback, "_REACH", 256)
    q, _ = quantised(x, importance, shares_of(rows), form)
    for run in (slice(0, 256), slice(256, 512), slice(512, 768)):
        own, _ = quantised(x[:, run], importance[run], shares_of(rows[:, run]), form)
        np.testing.assert_array_equal(q[:, run], own)
