"""The bytes of GGUF's quantised blocks, read and written: each layout stands here, both ways.

A block is some weights of a row that share a scale. Here are whole numbers, scales and where their
bits lie; which numbers suit which weights, others decide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.gguf.file import BLOCK_SIZES

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]

BLOCK, SUPER = 32, 256
_HALF = np.float16


def simple_numbers(dtype: str, data: Bytes) -> tuple[NDArray[np.uint8 | np.int8], Halves]:
    """Return q ``[rows, inputs]``, and scales ``[1 or 2, rows, blocks]``, of encoded rows.

    Q8_0: w = d q, and q is s8. Q4_0: w = d (q - 8). Q5_0: w = d (q - 16). Q4_1 and Q5_1: w = d q +
    m, with d and m in turn. Of IQ4_NL q is a place in a table.
    """
    blocks = data.reshape(len(data), -1, BLOCK_SIZES[dtype][1])
    scale_bytes = 4 if dtype.endswith("_1") else 2
    scales = blocks[:, :, :scale_bytes].copy().view(_HALF)
    packed = blocks[:, :, scale_bytes:]
    unpack = _fives if dtype.startswith("Q5") else nibbles
    q = packed.view(np.int8) if dtype == "Q8_0" else unpack(packed)
    return q.reshape(len(data), -1), scales.transpose(2, 0, 1)


def simple_rows(dtype: str, q: NDArray[np.uint8 | np.int8], scales: Halves) -> Bytes:
    """Return the encoded rows of what ``simple_numbers`` returns."""
    rows = len(q)
    heads = np.ascontiguousarray(scales.transpose(1, 2, 0)).view(np.uint8)
    blocks = q.reshape(rows, -1, BLOCK)
    if dtype == "Q8_0":
        bodies = [blocks.view(np.uint8)]
    else:
        bodies = [_from_nibbles(blocks)]
        if dtype.startswith("Q5"):
            bodies.insert(0, np.packbits(blocks >> 4, axis=2, bitorder="little"))
    return np.concatenate([heads, *bodies], axis=2).reshape(rows, -1)


def k_numbers(dtype: str, data: Bytes) -> tuple[Bytes, Bytes, Halves]:
    """Return q ``[rows, inputs]`` u8, factors ``[rows, inputs / 32, 2]``, scales ``[rows, .., n]``.

    Q4_K, Q5_K: n is 2, w = d f q - e g with factors f and g of each 32. Q6_K: n is 1, the factors
    are signed and of the first and of the last 16, w = d f (q - 32).
    """
    rows = len(data)
    blocks = data.reshape(rows, -1, BLOCK_SIZES[dtype][1])
    shape = (rows, blocks.shape[1] * SUPER)
    if dtype == "Q6_K":
        q = _sixes(blocks[:, :, :192]).reshape(shape)
        factors = blocks[:, :, 192:208].reshape(rows, -1, 2)
        return q, factors, blocks[:, :, 208:].copy().view(_HALF)
    q = nibbles(blocks[:, :, -128:].reshape(rows, -1, 32)).reshape(shape)
    if dtype == "Q5_K":  # bit j of byte l: input 32 j + l
        planes = np.unpackbits(blocks[:, :, 16:48, None], axis=3, bitorder="little")
        q |= planes.transpose(0, 1, 3, 2).reshape(shape) << np.uint8(4)
    first, second, last = (blocks[:, :, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    f = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=2)
    g = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=2)
    factors = np.stack([f, g], axis=3).reshape(rows, -1, 2)
    return q, factors, blocks[:, :, :4].copy().view(_HALF)


def k_rows(dtype: str, q: Bytes, factors: Bytes, scales: Halves) -> Bytes:
    """Return the encoded rows of what ``k_numbers`` returns."""
    rows = len(q)
    heads = np.ascontiguousarray(scales).view(np.uint8)
    if dtype == "Q6_K":
        of_blocks = factors.reshape(rows, -1, 16)
        return np.concatenate([_from_sixes(q), of_blocks, heads], axis=2).reshape(rows, -1)
    f, g = factors.reshape(rows, -1, 8, 2).transpose(3, 0, 1, 2)
    first = f[:, :, :4] | f[:, :, 4:] >> 4 << 6
    second = g[:, :, :4] | g[:, :, 4:] >> 4 << 6
    last = (f[:, :, 4:] & 15) | g[:, :, 4:] << 4
    parts = [heads, first, second, last]
    by_32 = q.reshape(rows, -1, 8, BLOCK)
    if dtype == "Q5_K":
        planes = np.packbits(by_32.transpose(0, 1, 3, 2) >> 4, axis=3, bitorder="little")
        parts.append(planes.reshape(rows, -1, BLOCK))
    low = by_32.reshape(rows, -1, 2 * BLOCK)
    parts.append(_from_nibbles(low).reshape(rows, -1, SUPER // 2))
    return np.concatenate(parts, axis=2).reshape(rows, -1)


def nibbles(packed: Bytes) -> Bytes:
    """Return the nibbles of each ``[rows, parts, bytes]``: all low ones, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=2)


def _from_nibbles(q: NDArray[Any]) -> Bytes:
    """Return the inverse of ``nibbles``; bits above the fourth are not looked at."""
    low, high = np.split(q.astype(np.uint8) & 15, 2, axis=2)
    out: Bytes = low | high << np.uint8(4)
    return out


def _fives(packed: Bytes) -> Bytes:
    """Return 32 values of 5 bits of each ``[rows, blocks, 20]``: a plane of fifth bits, nibbles."""
    fifth = np.unpackbits(packed[:, :, :4], axis=2, bitorder="little")
    return nibbles(packed[:, :, 4:]) | (fifth << np.uint8(4))


def _sixes(packed: Bytes) -> Bytes:
    """Return 256 values of 6 bits of each block ``[rows, blocks, 192]``: nibbles, upper bits."""
    low = nibbles(packed[:, :, :128].reshape(len(packed), -1, 64))
    low = low.reshape(*packed.shape[:2], 2, 4, 32)
    high = packed[:, :, 128:].reshape(*packed.shape[:2], 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    out: Bytes = np.bitwise_or(low, (high >> shifts & 3) << np.uint8(4))
    return out


def _from_sixes(q: Bytes) -> Bytes:
    by_half = q.reshape(len(q), -1, 2, 4, 32)
    low = _from_nibbles(by_half.reshape(len(q), -1, 128)).reshape(len(q), -1, 128)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(by_half >> 4 << shifts, axis=3).reshape(len(q), -1, 64)
    return np.concatenate([low, high], axis=2)
