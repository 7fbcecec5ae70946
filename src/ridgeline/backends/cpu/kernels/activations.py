"""Activation functions of vectors of floats, lane by lane.

All are made of ``exp``, which every processor rounds alike.
"""

from __future__ import annotations

import math

from ridgeline.backends.cpu.kernels.ir import Value, absolute, exp, fma, select

# Of the complementary error function, within 1.5e-7: Abramowitz and Stegun, "Handbook of
# Mathematical Functions" (1964), 7.1.26.
_ERFC_SHIFT = 0.3275911
_ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def activated(name: str, x: Value) -> Value:
    """Return x after the activation that ``arch.model.Mlp`` calls ``name``."""
    functions = {
        "silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu, "relu2": _relu2,
    }  # fmt: skip
    return functions[name](x)


def gated(name: str, gate: Value, up: Value) -> Value:
    """Return gated inner values: see ``arch.model.Mlp``."""
    if name != "swiglu_clamped":
        return activated(name, gate) * up
    gate = _at_most(gate, 7.0)
    up = _at_most(-_at_most(-up, 7.0), 7.0)
    return gate / (exp(gate * -1.702) + 1.0) * (up + 1.0)


def _at_most(x: Value, limit: float) -> Value:
    return select((x > limit).equals(0), x, limit)  # not a number stays what it is


def softcapped(x: Value, cap: float) -> Value:
    """Return ``cap * tanh(x / cap)``, with tanh(z) as 1 - 2 / (exp(2 z) + 1)."""
    return cap - (2.0 * cap) / (exp(x * (2.0 / cap)) + 1.0)


def _silu(x: Value) -> Value:
    return x / (exp(-x) + 1.0)


def _gelu_tanh(x: Value) -> Value:
    """0.5 x (1 + tanh(z)) is x times the sigmoid of 2 z."""
    cubed = x * x * x
    return x / (exp(fma(cubed, 0.044715, x) * (-2.0 * (2 / math.pi) ** 0.5)) + 1.0)


def _gelu(x: Value) -> Value:
    z = absolute(x) * 0.5**0.5
    t = 1.0 / fma(z, _ERFC_SHIFT, 1.0)
    series = t * _ERFC[0]
    for coefficient in _ERFC[1:]:
        series = (series + coefficient) * t
    tail = series * exp(-(z * z)) * 0.5  # of a normal distribution, beyond |x|
    return x * select(x > 0.0, 1.0 - tail, tail)


def _relu(x: Value) -> Value:
    return select(x > 0.0, x, x * 0.0)  # not a number stays what it is


def _relu2(x: Value) -> Value:
    positive = _relu(x)
    return positive * positive
