"""Logarithms and powers by software: against the C library's, which are right but for a bit."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.model.files.rope_tables import log, power

POSITIVE = st.floats(1e-6, 1e15)


@given(POSITIVE)
def test_log(x: float) -> None:
    assert abs(log(x) - math.log(x)) <= math.ulp(math.log(x))


@given(POSITIVE, st.fractions(-1, 1, max_denominator=256))
def test_power(base: float, exponent: Fraction) -> None:
    wanted = base ** (exponent.numerator / exponent.denominator)
    # The library is given a rounded exponent, which costs it some units in the last place.
    assert math.isclose(power(base, exponent), wanted, rel_tol=1e-14)


def test_powers_that_are_known() -> None:
    assert power(2.0, Fraction(1, 2)) == math.sqrt(2)
    assert power(10_000.0, Fraction(-2, 8)) == 0.1
    assert power(3.0, Fraction(0)) == 1
