"""Cosine and sine for rotary embedding: the same bits on every processor.

Those of numpy and of the C library differ in the last bit from one processor to the next, and an
answer with them. This module uses only operations that IEEE 754 rounds correctly, each an array
operation of its own, so that no compiler joins two of them. Logarithms and powers are computed in
decimal digits, by software, and rounded to a float once. That is slow: it is for the few dozen
numbers of a model's description.
"""

from __future__ import annotations

from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.shape.model import Rope

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# Pi / 2 in three parts. The first two have 33 bits, so that whole multiples of them are exact.
_HALF_PI = tuple(
    map(float.fromhex, ("0x1.921fb544p0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69"))
)
_TWO_OVER_PI = 0.6366197723675814
# Minimax polynomials on [-pi / 4, pi / 4], of Sun's fdlibm: within 2 ** -57.
_SIN = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)  # r + r ** 3 * (...), highest power first
_COS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)  # 1 - r ** 2 / 2 + r ** 4 * (...)
_AT_ONCE = 1 << 14  # angles: the work on them stays in the second-level cache
_DIGITS = Context(prec=40)  # a float has 17


def rope_tables(rope: Rope, max_model_len: int) -> tuple[Floats, Floats]:
    """Return cosine and sine for every position and pair, ``[max_model_len, dim / 2]``."""
    exponents = [Fraction(-2 * pair, rope.dim) for pair in range(rope.dim // 2)]
    frequencies = np.array([power(rope.theta, exponent) for exponent in exponents])
    frequencies /= rope.divisors_for(max_model_len)
    cos, sin = np.empty((2, max_model_len, len(frequencies)), np.float32)
    step = max(1, _AT_ONCE // len(frequencies))
    for low in range(0, max_model_len, step):
        positions = np.arange(low, min(low + step, max_model_len))
        both = cos_and_sin(positions[:, None] * frequencies)
        for table, values in zip((cos, sin), both, strict=True):
            table[low : low + step] = values * rope.attention_factor
    return cos, sin


def query_scales(rope: Rope, max_model_len: int) -> Floats:
    """Return what queries at every position are multiplied by, ``[max_model_len]``."""
    lengths = np.arange(max_model_len) // rope.original_max_position
    by_length = [1.0 + rope.query_growth * log(1.0 + n) for n in range(lengths.max() + 1)]
    return np.array(by_length, np.float32)[lengths]


def cos_and_sin(angles: Doubles) -> tuple[Doubles, Doubles]:
    """Return cosine and sine of angles from 0, in radians, within about 2 ** -52.

    Beyond 2 ** 20 the error grows like that of the angle itself.
    """
    turns = np.rint(angles * _TWO_OVER_PI)
    r = angles
    for part in _HALF_PI:
        r = r - turns * part
    square = r * r
    sin = r + r * square * _polynomial(_SIN, square)
    cos = 1.0 - 0.5 * square + square * square * _polynomial(_COS, square)
    quarter = turns.astype(np.int64) & 3
    odd = (quarter & 1).astype(bool)
    cos, sin = np.where(odd, sin, cos), np.where(odd, cos, sin)
    np.negative(cos, out=cos, where=(quarter == 1) | (quarter == 2))
    np.negative(sin, out=sin, where=quarter >= 2)
    return cos, sin


def _polynomial(coefficients: tuple[float, ...], x: Doubles) -> Doubles:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total


def log(x: float) -> float:
    """Return the natural logarithm of a positive number."""
    return float(_DIGITS.ln(Decimal(x)))


def power(base: float, exponent: Fraction) -> float:
    """Return ``base ** exponent`` of a positive base."""
    quotient = _DIGITS.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
    return float(_DIGITS.power(Decimal(base), quotient))
