"""What the kernels of recurrent layers compute, said again in numpy, for one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.backends.cpu.machine import halves
from tests.backends.cpu.twins import F32, exp, fma

Array = NDArray[Any]


def softplus(x: Array) -> Array:
    y = exp(-np.abs(x))
    s = y / (y + F32(2))
    square, series = s * s, np.full_like(x, F32(2 / 15))
    for odd in (13, 11, 9, 7, 5, 3, 1):
        series = fma(series, square, F32(2 / odd))
    result: Array = np.where(x > 0, x, F32(0)) + series * s
    return result


def silu(x: Array) -> Array:
    result: Array = x / (exp(-x) + F32(1))
    return result


def convolve(window: Array, x: Array, weights: Array, bias: Array | None) -> tuple[Array, Array]:
    """Sums of ``[tokens, channels]``, and the window behind them."""
    seen, count = np.concatenate([window, x]), len(weights)
    out = seen[: len(x)] * weights[0]
    for i in range(1, count):
        out = fma(seen[i : i + len(x)], weights[i], out)
    return (out if bias is None else out + bias), seen[len(x) :]


def unit(x: Array, num_channels: int, *, is_query: bool) -> Array:
    """Heads ``[tokens, padded channels]`` of length 1."""
    total = np.zeros((len(x), 16), F32)
    for at in range(0, x.shape[1], 16):
        total = fma(x[:, at : at + 16], x[:, at : at + 16], total)
    x = x / np.sqrt(halves(total) + F32(1e-6))[:, None]
    return x * F32(num_channels**-0.5) if is_query else x


def _read(memory: Array, weights: Array) -> Array:
    """Rows of a memory, weighted and added up in four chains."""
    chains = [np.zeros(memory.shape[1], F32) for _ in range(4)]
    for i, (row, weight) in enumerate(zip(memory, weights, strict=True)):
        chains[i % 4] = fma(row, weight, chains[i % 4])
    result: Array = (chains[0] + chains[1]) + (chains[2] + chains[3])
    return result


def delta(
    memory: Array, q: Array, k: Array, v: Array, strength: Array, decay: Array, rates: Sequence[Any]
) -> tuple[Array, Array]:
    """What is read by each token, and the memory ``[rows, columns]`` behind them."""
    strength = F32(1) / (exp(-strength) + F32(1))
    kept = exp(rates[0] * softplus(decay + rates[1]))
    out = np.zeros_like(v)
    for t in range(len(v)):
        error = (v[t] - kept[t] * _read(memory, k[t])) * strength[t]
        memory = fma(np.broadcast_to(error, memory.shape), k[t][:, None], memory * kept[t])
        out[t] = _read(memory, q[t])
    return out, memory


def scan(
    memory: Array, x: Array, b: Array, c: Array, pace: Array, factor: float, rates: Sequence[Any]
) -> tuple[Array, Array]:
    """The same for a state space."""
    pace = softplus((pace * F32(factor) if factor != 1 else pace) + rates[1])
    kept, out = exp(rates[0] * pace), np.zeros_like(x)
    for t in range(len(x)):
        taken = np.broadcast_to(x[t] * pace[t], memory.shape)
        memory = fma(taken, b[t][:, None], memory * kept[t])
        out[t] = fma(x[t], rates[2], _read(memory, c[t]))
    return out, memory


def gate_heads(
    x: Array,
    gate: Array,
    scale: Array | None,
    *,
    groups: int,
    size: int,
    eps: float,
    norm_first: bool,
    factors: tuple[float, float] = (1.0, 1.0),
) -> Array:
    """A row's heads, gated and normed over groups; ``size`` channels of each are no padding."""
    if factors[0] != 1:
        gate = gate * F32(factors[0])
    if scale is None or not norm_first:
        x = x * silu(gate)
    if scale is not None:
        parts = x.reshape(groups, -1)
        total = np.zeros((groups, 16), F32)
        for at in range(0, parts.shape[1], 16):
            total = fma(parts[:, at : at + 16], parts[:, at : at + 16], total)
        inverse = F32(1) / np.sqrt(halves(total) * F32(1 / size) + F32(eps))
        x = (parts * inverse[:, None]).reshape(-1) * scale
        x = x * silu(gate) if norm_first else x
    return x * F32(factors[1]) if factors[1] != 1 else x
