"""Scales of groups of weights: those with the least weighted squared error that a search finds.

Arrays are ``[group, count]``: each column is a group of weights that share a scale, so that sums
over a group are sums of long rows. ``weight`` says how much an error of each weight counts; it has
the same shape, or one column for all.

The way is that of the quantisers of llama.cpp (Kawrakow, 2023): round the group for several steps
near the one that spans it, and take for each rounding the scale that suits it best.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_TINY = np.float32(1e-30)


def symmetric(x: Floats, weight: Floats, top: int, *, signed: bool = True) -> Floats:
    """Return scales ``[count]`` for w = scale q, with whole q from -top to top - 1.

    A scale may be negative if ``signed``: so the largest weight can be -top, the larger end.
    """
    rows = np.abs(x).argmax(axis=0)
    peak: Floats = x[rows, np.arange(x.shape[1])]
    if not signed:
        peak = -np.abs(peak)
    steps = np.float32(top) + np.linspace(-0.9, 0.9, 13, dtype=np.float32)
    inverse = -1 / np.where(np.abs(peak) > _TINY, peak, np.inf)
    best: Floats = np.zeros_like(peak)
    best_score = np.zeros_like(peak)
    for step in steps:
        q = np.clip(np.rint(x * (inverse * step)), -top, top - 1)
        weighted = weight * q
        along = (weighted * x).sum(axis=0)
        size = (weighted * q).sum(axis=0)
        score = along * along / np.maximum(size, _TINY)
        is_better = score > best_score
        np.copyto(best_score, score, where=is_better)
        np.copyto(best, along / np.maximum(size, _TINY), where=is_better)
    return best


def affine(x: Floats, weight: Floats, top: int) -> tuple[Floats, Floats]:
    """Return scales and offsets ``[count]``, none negative: w = scale q - offset, q from 0 to top.

    So the smallest weight counts as 0 if it is larger.
    """
    low = np.minimum(x.min(axis=0), 0)
    spread = x.max(axis=0) - low
    inverse = 1 / np.where(spread > _TINY, spread, np.inf)
    weight = np.broadcast_to(weight, x.shape)
    total = weight.sum(axis=0)
    weighted_x = weight * x
    sum_x, sum_xx = weighted_x.sum(axis=0), (weighted_x * x).sum(axis=0)
    best_scale, best_offset, best_error = np.maximum(spread / top, 0), -low, sum_xx + np.inf
    above = x - low
    for step in np.float32(top) + np.linspace(-1.0, 0.8, 15, dtype=np.float32):
        q = np.clip(np.rint(above * (inverse * step)), 0, top)
        weighted = weight * q
        sum_q, sum_qq = weighted.sum(axis=0), (weighted * q).sum(axis=0)
        sum_qx = (weighted_x * q).sum(axis=0)
        scale, offset, error = _least_squares(total, sum_q, sum_qq, sum_x, sum_qx, sum_xx)
        is_better = error < best_error
        np.copyto(best_error, error, where=is_better)
        np.copyto(best_scale, scale, where=is_better)
        np.copyto(best_offset, offset, where=is_better)
    return best_scale, best_offset


def _least_squares(
    total: Floats, sum_q: Floats, sum_qq: Floats, sum_x: Floats, sum_qx: Floats, sum_xx: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return scale, offset and error of the best line through weighted points, offset >= 0."""
    size = total * sum_qq - sum_q * sum_q
    can_turn = size > np.float32(1e-6) * total * sum_qq
    size = np.where(can_turn, size, 1)
    offset = np.where(can_turn, (sum_q * sum_qx - sum_qq * sum_x) / size, 0)
    offset = np.maximum(offset, 0)
    scale = (sum_qx + offset * sum_q) / np.maximum(sum_qq, _TINY)
    error = (
        sum_xx
        + scale * scale * sum_qq
        + offset * offset * total
        - 2 * scale * sum_qx
        + 2 * offset * sum_x
        - 2 * scale * offset * sum_q
    )
    error = np.where(scale > 0, error, np.inf)
    return scale.astype(np.float32), offset.astype(np.float32), error.astype(np.float32)
