"""Error feedback: what rounding an input's weights loses, the weights after it make up for.

GPTQ (Frantar et al., 2023), for any format: a block's grid is fitted to what the weights have
become when its turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ridgeline.engine.quantise.grids import Form, Grid, Whole, joined

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

_DAMPING = 0.01  # of the mean of the diagonal, as in the paper
_REACH = 512  # inputs of a run: whole blocks of every format
_AT_ONCE = 32  # inputs whose errors are passed on one by one; to others they go together


def shares_of(rows: Floats) -> list[Floats]:
    """Return what ``passed_on`` does for each run of inputs that make up for each other.

    Without runs the down projection of an 8B model would need 5 GB, and longer than all else;
    what inputs far apart could make up for is little (docs/results.md#accuracy).
    """
    runs = range(0, rows.shape[1], _REACH)
    return [passed_on(spread_of(np.ascontiguousarray(rows[:, i : i + _REACH]))) for i in runs]


def spread_of(rows: Floats) -> Floats:
    """Return how inputs vary together: the mean of ``x x'`` over rows ``[tokens, inputs]``."""
    total: Floats = rows.T @ rows
    total /= np.float32(len(rows))
    return total


def passed_on(spread: Floats) -> Floats:
    """Return U, upper: its rows say how an input's error is shared out among those after it.

    U' U is the inverse of the damped ``spread``. Cholesky's factor of the reversed matrix gives it
    by inverting a triangle, without the inverse itself. Inputs that are always 0 have an error of
    nothing.

    Raises:
        ValueError: the inputs are not finite.
    """
    if not np.isfinite(spread).all():
        raise ValueError("what the model computes on this text is not finite")
    damped = spread.astype(np.float64)
    diagonal = np.diag(damped).copy()
    mean = diagonal.mean() or 1.0
    np.fill_diagonal(damped, np.where(diagonal > 0, diagonal, mean) + _DAMPING * mean)
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    return np.ascontiguousarray(_inverse(lower.astype(np.float64))[::-1, ::-1].astype(np.float32))


def _inverse(lower: Doubles) -> Doubles:
    """Return the inverse of a lower triangle, by halves."""
    size = len(lower)
    if size <= 64:
        return np.tril(np.linalg.inv(lower)).astype(np.float64)
    half = size // 2
    first, last = _inverse(lower[:half, :half]), _inverse(lower[half:, half:])
    out = np.zeros_like(lower)
    out[:half, :half], out[half:, half:] = first, last
    out[half:, :half] = -last @ (lower[half:, :half] @ first)
    return out


def quantised(
    x: Floats, importance: Floats, shares: Sequence[Floats], form: Form
) -> tuple[Whole, Grid]:
    """Return q of weights ``[rows, inputs]``, and the grid.

    ``importance`` is how much each input counts, ``shares`` what ``shares_of`` returns.
    """
    left = np.ascontiguousarray(x.T)  # [inputs, rows]: an input's weights lie together
    q = np.empty(left.shape, np.int16)
    grids: list[Grid] = []
    end = 0
    for upper in shares:
        begin, end = end, end + len(upper)
        run = slice(begin, end)
        grids += _one_run(left[run], q[run], importance[run], upper, form)
    return np.ascontiguousarray(q.T), joined(grids)


def _one_run(left: Floats, q: Whole, importance: Floats, upper: Floats, form: Form) -> list[Grid]:
    """Round a run of inputs, block by block, in place; return the grid of each block."""
    grids: list[Grid] = []
    for begin in range(0, len(left), form.span):
        block = slice(begin, begin + form.span)
        now = np.ascontiguousarray(left[block].T)
        grid = form.fit(now, weight_of(now, importance[block], form.span))
        grids.append(grid)
        errors = _one_by_one(left[block], q[block], grid, upper[block, block], form)
        left[block.stop :] -= upper[block, block.stop :].T @ errors
    return grids


def weight_of(x: Floats, importance: Floats | float, span: int) -> Floats:
    """Return how much an error of each weight counts: more for large ones, and for inputs that do.

    Kawrakow's (llama.cpp, 2023): a weight's size says something of what it meets, as well.
    """
    by_block = x.reshape(len(x), -1, span)
    squares = np.square(by_block)
    size = np.sqrt(squares.mean(axis=2, keepdims=True) + squares).reshape(x.shape)
    out: Floats = size * importance
    return out


def _one_by_one(left: Floats, q: Whole, grid: Grid, upper: Floats, form: Form) -> Floats:
    """Round a block's inputs in turn, in place; return their errors, scaled as they are shared."""
    scale = np.repeat(grid.scale.T, form.group, axis=0)
    offset = np.repeat(grid.offset.T, form.group, axis=0)
    inverse = 1 / np.where(scale == 0, np.inf, scale)
    errors = np.empty_like(left)
    for begin in range(0, len(left), _AT_ONCE):
        end = begin + _AT_ONCE
        for j in range(begin, end):
            rounded = np.clip(np.rint((left[j] + offset[j]) * inverse[j]), form.low, form.high)
            q[j] = rounded
            errors[j] = (left[j] - (scale[j] * rounded - offset[j])) / upper[j, j]
            if j + 1 < end:
                left[j + 1 : end] -= upper[j, j + 1 : end, None] * errors[j]
        left[end:] -= upper[begin:end, end:].T @ errors[begin:end]
    return errors
