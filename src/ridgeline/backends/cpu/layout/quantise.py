"""Blocks of quantised weights: unpacked from a file, or made of floats.

A block is some weights of one output that share a scale. It knows nothing of the layout for
kernels: that is ``pack``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.layout.formats import MAX_ROTATED, TILE
from ridgeline.model.files.encodings import ENCODINGS, MXFP4_LEVELS, NF4_LEVELS, parts
from ridgeline.model.files.gguf.blocks import nibbles, simple_numbers
from ridgeline.model.files.tensors import Tensor

Bytes = NDArray[np.uint8]
# Of IQ4_NL and IQ4_XS.
_IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
_HALF = np.float16
_ROTATED_AT_ONCE = 512  # blocks: they stay in the second-level cache
_QUANTISED_AT_ONCE = 1 << 12


def simple_blocks(tensor: Tensor) -> tuple[NDArray[Any], ...]:
    """Return q ``[out, in]``, scale and, of Q4_1 and Q5_1, offset ``[out, in / 32]``: w = d q + m.

    Without an offset q is u8, w = d (q - 8) (Q4_0) or d (q - 16) (Q5_0), or s8, w = d q (Q8_0); of
    IQ4, MXFP4 and NF4 a place in ``levels``. Of INT4_ZERO the third part is the zero, u8.
    """
    if tensor.dtype in ENCODINGS:
        return _encoded_blocks(tensor)
    if tensor.dtype == "IQ4_XS":
        return _iq4_xs(tensor)
    q, scales = simple_numbers(tensor.dtype, tensor.data)
    return q, *scales


def levels(dtype: str) -> NDArray[np.int8]:
    """Return the sixteen values of a type whose nibbles are places in a table.

    Those of NF4 are rounded to whole 127ths, which costs it 0.4 % of its largest.
    """
    match dtype:
        case "MXFP4":
            return MXFP4_LEVELS
        case "NF4":
            return np.rint(NF4_LEVELS * 127).astype(np.int8)
    return _IQ4_LEVELS


def _encoded_blocks(tensor: Tensor) -> tuple[NDArray[Any], ...]:
    """Return the parts of a tensor of ``files.encodings``; ValueError if a scale is too large."""
    q, wide, zero = parts(tensor.dtype, tensor.data)
    if tensor.dtype == "NF4":
        wide = wide / np.float32(127)
    scale = _half_scales(tensor, wide, q)
    match tensor.dtype:
        case "INT8":
            return (q ^ np.uint8(128)).view(np.int8), scale
        case "INT4_ZERO":
            return q, scale, zero.astype(np.uint8)
        case "INT4_FLOAT_ZERO":
            return q, scale, (-zero * wide).astype(_HALF)
    return q, scale


def _half_scales(tensor: Tensor, wide: NDArray[np.float32], q: Bytes) -> NDArray[np.float16]:
    """Return scales as half floats; MXFP4's are powers of two, and must not become zero either."""
    with np.errstate(over="ignore"):  # said below
        scale = wide.astype(_HALF)
    lost = np.isinf(scale) & np.isfinite(wide)
    if tensor.dtype == "MXFP4":
        is_used = (q & 7).reshape(*wide.shape, TILE).any(axis=2)
        scale[~is_used] = 0
        lost = (scale != wide) & is_used
    if lost.any():
        raise ValueError(
            f"tensor {tensor.name!r} has a scale of {wide[lost][0]:.3g}, which is no half float: "
            f"use --dtype bf16 or f32"
        )
    return scale


def _iq4_xs(tensor: Tensor) -> tuple[NDArray[Any], ...]:
    """Return q and scale of blocks of 256, each with a half float and eight factors of 6 bits."""
    num_rows, size = tensor.shape
    blocks = tensor.data.reshape(num_rows, size // 256, 136)
    d = blocks[:, :, :2].copy().view(_HALF).astype(np.float32)
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    upper = (blocks[:, :, 2:4].copy().view(np.uint16) >> shifts & 3).astype(np.int32)
    lower = np.stack([blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4], axis=3)
    factors = (lower.reshape(upper.shape) | upper << 4) - 32
    q = nibbles(blocks[:, :, 8:].reshape(num_rows, -1, 16)).reshape(num_rows, size)
    return q, (d * factors.astype(np.float32)).reshape(num_rows, -1).astype(_HALF)


def to_eight_bits(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Quantise to bytes with a scale for each 32: as Q8_0 does."""
    groups = weights.reshape(len(weights), -1, TILE)
    scale = (np.abs(groups).max(axis=2) / 127).astype(_HALF)
    q = np.rint(groups / nonzero(scale)[:, :, None]).clip(-127, 127)
    return q.astype(np.int8).reshape(weights.shape), scale


def to_four_bits(
    weights: NDArray[np.float32],
) -> tuple[Bytes, NDArray[np.float16], NDArray[np.float16]]:
    """Quantise to 4 bits with a scale and an offset for each 32, as Q4_1 has them.

    Each block takes what has the least squared error: steps from its smallest value to its largest,
    or from and to a little within, or those that fit either's steps best.
    """
    groups = weights.reshape(len(weights), -1, TILE)
    shape = groups.shape[:2]
    outputs = np.empty(groups.shape, np.uint8), np.empty(shape, _HALF), np.empty(shape, _HALF)
    at_once = max(1, _QUANTISED_AT_ONCE // shape[1])
    for low in range(0, len(groups), at_once):
        part = slice(low, low + at_once)
        for array, values in zip(outputs, _four_bits(groups[part]), strict=True):
            array[part] = values
    return outputs[0].reshape(weights.shape), *outputs[1:]


def _four_bits(groups: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
    low, high = groups.min(axis=2), groups.max(axis=2)
    best = _rounded(groups, (high - low) / 15, low)
    for cut in (0.0, 0.04):  # of the range, at both ends
        ends = (high - low) * np.float32(cut)
        first = _rounded(groups, (high - low - 2 * ends) / 15, low + ends)
        for candidate in (first, _rounded(groups, *_fitted(groups, first[0]))):
            better = candidate[-1] < best[-1]
            for old, new in zip(best, candidate, strict=True):
                old[better] = new[better]
    return best[:-1]


def _rounded(
    groups: NDArray[np.float32], scale: NDArray[np.float32], offset: NDArray[np.float32]
) -> tuple[NDArray[Any], ...]:
    """Return the steps of each weight, scale and offset as half floats, and the squared error."""
    half, least = scale.astype(_HALF), offset.astype(_HALF)
    wide = least.astype(np.float32)[:, :, None]
    steps = np.rint((groups - wide) / nonzero(half)[:, :, None]).clip(0, 15)
    error = steps * half.astype(np.float32)[:, :, None] + wide - groups
    return steps, half, least, _sums(error * error)


def _fitted(groups: NDArray[np.float32], steps: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
    """Return the scale and the offset that fit these steps best (least squares)."""
    of_steps, of_squares = _sums(steps), _sums(steps * steps)
    of_weights, of_products = _sums(groups), _sums(groups * steps)
    spread = TILE * of_squares - of_steps * of_steps
    scale = (TILE * of_products - of_steps * of_weights) / np.where(spread == 0, 1, spread)
    return scale, (of_weights - scale * of_steps) / TILE


def _sums(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the sum of each 32, in one order on every processor."""
    while values.shape[2] > 1:
        half = values.shape[2] // 2
        values = values[:, :, :half] + values[:, :, half:]
    return values[:, :, 0]


def hadamard(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn the inputs of a matrix as ``quantise_rows`` turns activations: products stay the same.

    A Hadamard matrix is its own inverse times its size; the division is here. Butterflies, not a
    product: a BLAS rounds by processor and by a row's place, but weights must be the same
    everywhere.
    """
    size = weights.shape[1]
    block = min(size & -size, MAX_ROTATED)
    blocks = weights.reshape(-1, block)
    out = np.empty_like(blocks)
    for low in range(0, len(blocks), _ROTATED_AT_ONCE):
        part = slice(low, low + _ROTATED_AT_ONCE)
        now = np.ascontiguousarray(blocks[part].T) * np.float32(1 / block)
        for level in range(1, block.bit_length()):
            pairs = now.reshape(block >> level, 2, -1)
            now = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        out[part] = now.reshape(block, -1).T
    return out.reshape(weights.shape)


def to_row_bytes(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise to bytes with one scale for a row."""
    scale = np.abs(weights).max(axis=1) / np.float32(127)
    q = np.rint(weights / np.where(scale == 0, np.float32(1), scale)[:, None])
    return q.astype(np.int8), scale


def to_bf16(weights: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def nonzero(scale: NDArray[np.float16]) -> NDArray[np.float32]:
    """Return scales to divide by: 1 in the place of 0, where all values are 0."""
    return np.where(scale == 0, np.float32(1), scale.astype(np.float32))
