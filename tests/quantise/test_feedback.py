"""Error feedback: products lose less than by rounding alone, in every format."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.quantise.feedback import passed_on, quantised, spread_of, weight_of
from ridgeline.quantise.grids import FORMS
from tests.quantise.weights import heavy_tailed


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
    q, fed = quantised(x, np.diag(spread), passed_on(spread), form)
    grid = form.fit(x, weight_of(x, np.diag(spread), form.span))
    alone = form.values(form.rounded(x, grid), grid)
    lost = [np.square(rows @ (values - x).T).mean() for values in (form.values(q, fed), alone)]
    assert lost[0] < 0.6 * lost[1]
