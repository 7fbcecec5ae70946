"""The formats that are searched for: which values each can hold, its bytes, and the best scales.

A grid says what each group of a row's weights can become: ``scale q - offset`` for whole numbers q
from ``low`` to ``high``. Fitting chooses the grid; which q each weight then gets is ``rounded``'s
choice, or that of error feedback.

Scales are those with the least weighted squared error that a search finds. Its arrays are
``[group, count]``: each column is a group of weights that share a scale, so that sums over a group
are sums of long rows. ``weight`` says how much an error of each weight counts; it has the same
shape, or one column for all. The way is that of the quantisers of llama.cpp (Kawrakow, 2023): round
the group for several steps near the one that spans it, and take for each rounding the scale that
suits it best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.gguf.blocks import BLOCK, SUPER, k_rows, simple_rows

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Bytes = NDArray[np.uint8]
Whole = NDArray[np.int16]

_LEAST = np.float32(2**-24)  # above 0 in 16 bits
_MOST = np.float32(65504)
_TINY = np.float32(1e-30)


class Grid(NamedTuple):
    """Values of ``[rows, groups]``: w = scale q - offset, and the numbers that the file has of it.

    ``numbers`` are arrays whose second axis is that of a row's blocks.
    """

    scale: Floats
    offset: Floats
    numbers: tuple[NDArray[np.generic], ...]


class Form(NamedTuple):
    """A format.

    Attributes:
        name: of GGML's type.
        span: inputs of a block, which is fitted as a whole; rows are whole blocks.
        group: inputs that share a scale.
        low: the least q.
        high: the largest.
        fit: makes a grid of ``[rows, inputs]`` and of the weight of each error, which may have one
            row for all.
        rows: makes a file's rows of q and of the grid's numbers.
    """

    name: str
    span: int
    group: int
    low: int
    high: int
    fit: Callable[[Floats, Floats], Grid]
    rows: Callable[[Whole, tuple[NDArray[np.generic], ...]], Bytes]

    def rounded(self, x: Floats, grid: Grid) -> Whole:
        """Return the nearest q of each weight."""
        groups = x.reshape(len(x), -1, self.group)
        scale = np.where(grid.scale == 0, np.inf, grid.scale)[..., None]
        q = np.rint((groups + grid.offset[..., None]) / scale)
        return np.clip(q, self.low, self.high).astype(np.int16).reshape(x.shape)

    def values(self, q: Whole, grid: Grid) -> Floats:
        """Return the weights that q stands for."""
        groups = q.astype(np.float32).reshape(len(q), -1, self.group)
        out: Floats = grid.scale[..., None] * groups - grid.offset[..., None]
        return out.reshape(q.shape)


def joined(grids: list[Grid]) -> Grid:
    """Return the grid of a row's blocks of several, side by side."""
    numbers = zip(*(grid.numbers for grid in grids), strict=True)
    return Grid(
        np.concatenate([grid.scale for grid in grids], axis=1),
        np.concatenate([grid.offset for grid in grids], axis=1),
        tuple(np.concatenate(parts, axis=1) for parts in numbers),
    )


def _half(values: Floats) -> Halves:
    return np.clip(values, -_MOST, _MOST).astype(np.float16)


def _columns(x: Floats, group: int) -> Floats:
    """Return each group of ``[rows, inputs]`` as a column; a single row stands for all rows."""
    return np.ascontiguousarray(x.reshape(-1, group).T)


def _both(x: Floats, weight: Floats, group: int) -> tuple[Floats, Floats]:
    """Return weights and what their errors count as columns."""
    weight = np.broadcast_to(weight, x.shape)
    return _columns(x, group), _columns(np.ascontiguousarray(weight), group)


def fit_symmetric(top: int, group: int, *, signed: bool = True) -> Callable[[Floats, Floats], Grid]:
    """Return what fits grids of -top to top - 1 steps, a half float for each group."""

    def fit(x: Floats, weight: Floats) -> Grid:
        scale = symmetric(*_both(x, weight, group), top, signed=signed).reshape(len(x), -1)
        stored = _half(scale)
        wide = stored.astype(np.float32)
        return Grid(wide, wide * np.float32(top), (stored,))

    return fit


def _affine(x: Floats, weight: Floats) -> Grid:
    """Fit Q5_1."""
    scale, offset = affine(*_both(x, weight, BLOCK), 31)
    stored = _half(scale.reshape(len(x), -1)), _half(-offset.reshape(len(x), -1))
    return Grid(stored[0].astype(np.float32), -stored[1].astype(np.float32), stored)


def _k_affine(top: int) -> Callable[[Floats, Floats], Grid]:
    """Fit Q4_K or Q5_K: scales and offsets of 32 in whole numbers up to 63, for each 256."""

    def fit(x: Floats, weight: Floats) -> Grid:
        columns = _both(x, weight, BLOCK)
        scale, offset = (part.reshape(len(x), -1, 8) for part in affine(*columns, top))
        first = _factors(scale, offset)
        blocks, weights = (part.T.reshape(*scale.shape, BLOCK) for part in columns)
        second = _factors_again(blocks, weights, first, top)
        errors = [_error(blocks, weights, one, top) for one in (first, second)]
        is_better = errors[1] < errors[0]
        f, g = first[:2]
        d, e = (np.where(is_better, second[i], first[i]) for i in (2, 3))
        wide = [
            (factor * half.astype(np.float32)[..., None]).reshape(len(x), -1)
            for factor, half in ((f, d), (g, e))
        ]
        factors = np.stack([f, g], axis=3).astype(np.uint8).reshape(len(x), -1, 2)
        return Grid(wide[0], wide[1], (factors, np.stack([d, e], axis=2)))

    return fit


_Factors = tuple[Floats, Floats, Halves, Halves]  # [rows, blocks, 8] twice, [rows, blocks] twice


def _factors(scale: Floats, offset: Floats) -> _Factors:
    """Return what is nearest to scales and offsets: factors up to 63 of a half float each."""
    d, e = (_half(np.maximum(part.max(axis=2) / 63, _LEAST)) for part in (scale, offset))
    f, g = (
        np.clip(np.rint(part / one.astype(np.float32)[..., None]), 0, 63).astype(np.float32)
        for part, one in ((scale, d), (offset, e))
    )
    return f, g, d, e


def _q_of(x: Floats, factors: _Factors, top: int) -> tuple[Floats, Floats, Floats]:
    """Return the nearest q, and scales and offsets ``[rows, blocks, 8, 1]``."""
    f, g, d, e = factors
    scale = (f * d.astype(np.float32)[..., None])[..., None]
    offset = (g * e.astype(np.float32)[..., None])[..., None]
    q = np.clip(np.rint((x + offset) / np.where(scale == 0, np.inf, scale)), 0, top)
    return q, scale, offset


def _error(x: Floats, weight: Floats, factors: _Factors, top: int) -> Floats:
    q, scale, offset = _q_of(x, factors, top)
    out: Floats = (weight * np.square(scale * q - offset - x)).sum(axis=(2, 3))
    return out


def _factors_again(x: Floats, weight: Floats, factors: _Factors, top: int) -> _Factors:
    """Return the same factors, of half floats that are best for the q that these led to."""
    f, g, d, e = factors
    q, _, _ = _q_of(x, factors, top)
    along, across = f[..., None] * q, np.broadcast_to(-g[..., None], q.shape)
    uu, uv, vv, ux, vx = (
        (weight * a * b).sum(axis=(2, 3), dtype=np.float64)
        for a, b in ((along, along), (along, across), (across, across), (along, x), (across, x))
    )
    size = uu * vv - uv * uv
    can_turn = size > 1e-9 * uu * vv
    size = np.where(can_turn, size, 1)
    new_d = np.where(can_turn, (vv * ux - uv * vx) / size, d)
    new_e = np.where(can_turn, (uu * vx - uv * ux) / size, e)
    is_kept = (new_d > 0) & (new_e > 0)
    halves = [_half(np.where(is_kept, new, old).astype(np.float32))
              for new, old in ((new_d, d), (new_e, e))]  # fmt: skip
    return f, g, halves[0], halves[1]


def _sixes(x: Floats, weight: Floats) -> Grid:
    """Fit Q6_K: scales of 16 in signed bytes, for each 256."""
    scale = symmetric(*_both(x, weight, 16), 32).reshape(len(x), -1, 16)
    place = np.abs(scale).argmax(axis=2)[..., None]
    peak = np.take_along_axis(scale, place, axis=2)[..., 0]
    d = _half(-peak / np.float32(128))
    wide = d.astype(np.float32)[..., None]
    f = np.clip(np.rint(scale / np.where(wide == 0, np.inf, wide)), -128, 127)
    step = (f * wide).reshape(len(x), -1).astype(np.float32)
    factors = f.astype(np.int8).view(np.uint8).reshape(len(x), -1, 2)
    return Grid(step, step * np.float32(32), (factors, d[..., None]))


def _simple(dtype: str) -> Callable[[Whole, tuple[NDArray[np.generic], ...]], Bytes]:
    def rows(q: Whole, numbers: tuple[NDArray[np.generic], ...]) -> Bytes:
        return simple_rows(dtype, q.astype(np.uint8), np.stack(numbers).astype(np.float16))

    return rows


def _super(dtype: str) -> Callable[[Whole, tuple[NDArray[np.generic], ...]], Bytes]:
    def rows(q: Whole, numbers: tuple[NDArray[np.generic], ...]) -> Bytes:
        factors, scales = numbers
        return k_rows(
            dtype, q.astype(np.uint8), factors.astype(np.uint8), scales.astype(np.float16)
        )

    return rows


FORMS = {
    form.name: form
    for form in (
        Form("Q4_0", BLOCK, BLOCK, 0, 15, fit_symmetric(8, BLOCK), _simple("Q4_0")),
        Form("Q5_0", BLOCK, BLOCK, 0, 31, fit_symmetric(16, BLOCK), _simple("Q5_0")),
        Form("Q5_1", BLOCK, BLOCK, 0, 31, _affine, _simple("Q5_1")),
        Form("Q4_K", SUPER, BLOCK, 0, 15, _k_affine(15), _super("Q4_K")),
        Form("Q5_K", SUPER, BLOCK, 0, 31, _k_affine(31), _super("Q5_K")),
        Form("Q6_K", SUPER, 16, 0, 63, _sixes, _super("Q6_K")),
    )
}


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
