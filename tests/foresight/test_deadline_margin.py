"""The margin of promises: it follows errors, and what became of promises."""

from __future__ import annotations

import random
from math import inf

import pytest

from ridgeline.foresight.deadline import PromiseMargin


def after(margin: PromiseMargin, errors: list[float]) -> PromiseMargin:
    for error in errors:
        margin.note(1.0, 1.0 + error)
    return margin


def test_at_first_a_margin_is_assumed_and_soon_it_is_that_of_the_errors_seen() -> None:
    assert 1.15 < PromiseMargin().factor < 1.35
    steady = after(PromiseMargin(), [0.01, -0.01] * 15)
    spread = after(PromiseMargin(), [0.2, -0.2] * 15)
    assert 1.0 < steady.factor < 1.12
    assert spread.factor > 1.4


def test_errors_of_all_horizons_count_alike() -> None:
    short, long = PromiseMargin(), PromiseMargin()
    for i in range(25):
        short.note(0.1, 0.1 + 0.001 * i)
        long.note(40.0, 40.0 + 0.4 * i)
    assert short.factor == pytest.approx(long.factor)


def test_what_was_no_forecast_says_nothing() -> None:
    margin = PromiseMargin()
    first = margin.factor
    for foreseen_s, happened_s in ((0.0, 1.0), (-1.0, 1.0), (inf, 1.0), (1.0, inf), (1.0, 0.0)):
        margin.note(foreseen_s, happened_s)
    assert margin.factor == first


def test_a_machine_that_became_slower_or_quiet_is_followed_within_some_forecasts() -> None:
    slower = after(PromiseMargin(), [0.01, -0.01] * 20 + [0.3] * 25)
    assert slower.factor > 1.3
    quiet = after(slower, [0.01, -0.01] * 13)
    assert quiet.factor < 1.12


def test_it_widens_by_each_broken_promise_and_narrows_slowly_by_kept_ones() -> None:
    margin = PromiseMargin()
    first = margin.factor
    margin.judge(is_broken=True)
    wider = margin.factor
    assert wider > 1.05 * first
    for _ in range(10):
        margin.judge(is_broken=False)
    assert first < margin.factor < wider
    for _ in range(5000):
        margin.judge(is_broken=False)
    assert 1.0 < margin.factor < first
    for _ in range(50):
        margin.judge(is_broken=True)
    assert margin.factor <= 4.0


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_whatever_the_errors_few_promises_break(spread: float) -> None:
    """Deadlines are as close as the margin allows, the hardest case, and errors have long tails."""
    dice, margin, broken = random.Random(7), PromiseMargin(), list[bool]()
    for _ in range(20_000):
        error = dice.gauss(0.0, spread) + (
            dice.expovariate(1 / spread) if dice.random() < 0.05 else 0
        )
        happened_s = max(0.05, 1.0 + error)
        broken.append(happened_s > margin.factor)
        margin.note(1.0, happened_s)
        margin.judge(is_broken=broken[-1])
    assert 0.002 < sum(broken) / len(broken) < 0.01


def test_where_too_many_break_none_are_made_until_few_would() -> None:
    margin = PromiseMargin()
    for _ in range(4):
        margin.judge(is_broken=True)
        assert margin.are_promises_made
    margin.judge(is_broken=True)
    assert not margin.are_promises_made
    num_kept = 0
    while not margin.are_promises_made:
        margin.judge(is_broken=False)
        num_kept += 1
    assert 400 < num_kept < 500
    margin.judge(is_broken=True)
    assert margin.are_promises_made
