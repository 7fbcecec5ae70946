"""Logarithms and powers that are the same on every machine.

Those of the C library and of numpy are not: with other instructions of the processor their last bit
is another. These are computed in decimal digits, by software, and rounded to a float once. Slow:
for the few dozen numbers of a model's description.
"""

from __future__ import annotations

from decimal import Context, Decimal
from fractions import Fraction

_DIGITS = Context(prec=40)  # a float has 17


def log(x: float) -> float:
    """Return the natural logarithm of a positive number."""
    return float(_DIGITS.ln(Decimal(x)))


def power(base: float, exponent: Fraction) -> float:
    """Return ``base ** exponent`` of a positive base."""
    quotient = _DIGITS.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
    return float(_DIGITS.power(Decimal(base), quotient))
