"""What the kernels compute, said again in numpy: the same mathematics, in the same order.

Sums follow the order that the kernels promise, and ``fma`` rounds once, so results are compared bit
for bit. Layouts are written here from their descriptions, not taken from the kernels' code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.backends.cpu.machine import halves

Array = NDArray[Any]
F32 = np.float32
NOTHING = F32(1e-30)


def fma(a: Any, b: Any, c: Any) -> Array:
    """a * b + c, rounded once: exact in float64, whose last bit remembers what was cut off."""
    product = np.multiply(a, b, dtype=np.float64)  # of two float32: exact
    addend = np.asarray(c, np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    outwards = (error < 0) == (total < 0)
    odd = np.where(outwards, bits, bits - 1) | 1  # towards zero, then odd: rounds right below
    exact = (error == 0) | ~np.isfinite(total)
    return np.where(exact, total, odd.view(np.float64)).astype(np.float32)


def to_whole(x: Array, factor: Array) -> Array:
    """The nearest integer of a product, rounded once."""
    result: Array = (fma(x, factor, F32(12582912)) - F32(12582912)).astype(np.int32)
    return result


def exp(x: Array) -> Array:
    """Cody-Waite and the polynomial, step by step."""
    x = np.where(x < F32(88), x, F32(88))
    x = np.where(x > F32(-87), x, F32(-87))
    words = to_whole(x, F32(1.4426950408889634))
    n = words.astype(np.float32)
    r = fma(n, F32(2.12194440e-4), fma(n, F32(-0.693359375), x))
    p = np.full_like(x, F32(1.3814613092e-3))
    for coefficient in (
        8.3687098318e-3,
        4.1668387365e-2,
        1.666652069e-1,
        4.9999993452e-1,
        1.0,
        1.0,
    ):
        p = fma(p, r, F32(coefficient))
    result: Array = (p.view(np.int32) + (words << 23)).view(np.float32)
    return result


# --- activations and packed weights ------------------------------------------------------------

GROUP = 16  # activations that share a scale
ACT_SCALES = np.dtype(
    [("scale", "<f4", 2), ("total", "<f4"), ("shift", "<f4"), ("shifts", "<f4", 2)]
)
ROW_ACT_SCALES = np.dtype([("scale", "<f4"), ("shift", "<i4"), ("unused", "<i8", 2)])


def to_bytes(groups: Array) -> tuple[Array, Array]:
    """Signed bytes of the last axis, and its scale."""
    largest = np.abs(groups).max(axis=-1)
    inverse = np.zeros_like(largest)
    np.divide(F32(127), largest, out=inverse, where=largest > NOTHING)
    return to_whole(groups, inverse[..., None]).astype(np.int8), largest * F32(1 / 127)


def act_scales_of(x: Array, scale: Array) -> Array:
    """The act_scales of rows of bytes ``[rows, inputs]`` with scales ``[rows, inputs / 16]``."""
    out = np.zeros((len(x), x.shape[1] // 32), ACT_SCALES)
    sums = x.reshape(len(x), -1, 2, GROUP).sum(axis=-1, dtype=np.int32)
    out["scale"] = scale.reshape(len(x), -1, 2)
    parts = out["scale"] * sums.astype(np.float32)
    out["total"] = parts[..., 0] + parts[..., 1]
    out["shift"] = out["total"] * F32(-128)
    out["shifts"] = parts * F32(-32)
    return out


def row_act_scales_of(x: Array, scale: Array) -> Array:
    """The scale and sum of each row of bytes with these scales."""
    out = np.zeros(len(x), ROW_ACT_SCALES)
    out["scale"] = scale
    out["shift"] = -128 * x.sum(axis=1, dtype=np.int32)
    return out


def hadamard(x: Array) -> Array:
    """Butterflies of distance 1, 2, 4, ... in blocks of a power of two, 512 at most."""
    size, distance = x.shape[-1], 1
    while distance < min(size & -size, 512):
        pairs = x.reshape(-1, 2, distance)
        a, b = pairs[:, 0], pairs[:, 1]
        x = np.stack([a + b, a - b], axis=1).reshape(x.shape)
        distance *= 2
    return x


def bf16(x: Array) -> Array:
    """The upper halves of floats, rounded to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: Array) -> Array:
    """The floats of some upper halves."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def values_of(kind: str, data: Array) -> Array:
    """The integers of records ``[tiles, records, bytes]``, as they stand there."""
    q = np.zeros((len(data) * 32, data.shape[1] * 32), np.int32)
    for half in range(2):
        for o in range(16):
            rows = slice(16 * half + o, None, 32)
            for v in range(8):
                for i in range(4):
                    column = slice(4 * v + i, None, 32)
                    if kind in ("w8", "r8"):
                        byte = data[:, :, 512 * half + 64 * v + 4 * o + i].astype(np.int32)
                        q[rows, column] = byte - 128
                        continue
                    byte = data[:, :, 256 * half + 64 * (v % 4) + 4 * o + i]
                    q[rows, column] = byte >> 4 if v >= 4 else byte & 15
                    if kind in ("w5", "s5", "k5"):
                        bit = 4 * o + i
                        fifth = data[:, :, 512 + 64 * half + 8 * v + bit // 8] >> bit % 8 & 1
                        q[rows, column] |= fifth.astype(np.int32) << 4
                    if kind == "k6":
                        byte = data[:, :, 512 + 128 * half + 64 * (v // 4) + 4 * o + i]
                        q[rows, column] |= (byte >> 2 * (v % 4) & 3).astype(np.int32) << 4
    return q


K_HEADS = {"k4": 128, "k5": 128, "k6": 64}  # bytes before the 8 records of a block


def unpack_k(kind: str, data: Array) -> tuple[Array, Array, Array]:
    """``unpack`` of blocks of 256, ``[tiles, blocks, bytes]``."""
    tiles, blocks, size = data.shape
    head = K_HEADS[kind]
    heads = data[:, :, :head].copy().view(np.float16).astype(np.float32)
    records = data[:, :, head:].reshape(tiles, blocks * 8, (size - head) // 8)
    q = values_of(kind, records)
    parts = 1 if kind == "k6" else 2
    first, second = (np.zeros((tiles * 32, blocks * 8), np.float32) for _ in range(2))
    for half in range(2):
        for o in range(16):
            rows = slice(16 * half + o, None, 32)
            at = records.shape[2] - 64 + 32 * half + o
            for i, out in enumerate((first, second)):
                factor = records[:, :, at + 16 * i]
                factor = factor.view(np.int8) if kind == "k6" else factor
                d = heads[:, :, 16 * parts * half + 16 * (i % parts) + o]
                out[rows] = factor.astype(np.float32) * np.repeat(d, 8, axis=1)
    if kind == "k6":
        return q - 32, np.stack([first, second], axis=2).reshape(len(q), -1), np.zeros_like(first)
    return q, first, -second


def unpack(kind: str, data: Array) -> tuple[Array, Array, Array]:
    """Return q ``[outputs, inputs]``, scale and offset ``[outputs, inputs / 32]`` of records.

    k6 has a scale for 16 inputs.
    """
    if kind in K_HEADS:
        return unpack_k(kind, data)
    tiles = len(data)
    outputs = tiles * 32
    if kind == "r8":
        scales = data[:, -128:].copy().view(np.float32).reshape(outputs, 1)
        pairs = data[:, :-128].reshape(tiles, -1, 2, 2, 512)  # a half of both, then the other
        data = np.stack([pairs[:, :, :, i] for i in range(2)], axis=2).reshape(tiles, -1, 1024)
    if kind == "t4":
        tables = np.repeat(data[:, -64:-48].astype(np.int32) - 128, 32, axis=0)
        data = data[:, :-64].reshape(tiles, -1, 576)
    records = data.shape[1]
    if kind in ("f32", "bf16"):
        if kind == "f32":
            q = data.view(np.float32).reshape(tiles, records, 32, 32).transpose(0, 3, 1, 2)
        else:
            words = data.view(np.uint16).reshape(tiles, records, 2, 16, 16, 2)
            q = widened(words.transpose(0, 2, 4, 1, 3, 5))
        return q.reshape(outputs, -1), np.ones((outputs, records)), np.zeros((outputs, records))
    q = values_of(kind, data)
    if kind == "t4":
        q = np.stack([table[row] for table, row in zip(tables, q, strict=True)])
    scale, offset = (np.zeros((outputs, records), np.float32) for _ in range(2))
    for half in range(2):
        for o in range(16):
            rows = slice(16 * half + o, None, 32)
            if kind == "r8":
                continue
            at = {"w8": 1024, "w5": 640, "s5": 640}.get(kind, 512)
            at += (64 if kind in ("w4", "w5") else 32) * half + 2 * o
            scale[rows] = data[:, :, at : at + 2].copy().view(np.float16)[..., 0]
            if kind in ("w4", "w5"):
                offset[rows] = data[:, :, at + 32 : at + 34].copy().view(np.float16)[..., 0]
            if kind == "z4":  # exactly: a half float times a byte
                zero = data[:, :, 576 + 16 * half + o].astype(np.float32)
                offset[rows] = -(scale[rows] * zero)
    if kind == "r8":
        scale = np.repeat(scales, records, axis=1)
    q -= {"s4": 8, "s5": 16}.get(kind, 0)
    return q, scale, offset


def weights(kind: str, data: Array) -> Array:
    """The matrix ``[outputs, inputs]`` that is packed, float64."""
    q, scale, offset = unpack(kind, data)
    wide = [
        np.repeat(part.astype(np.float64), q.shape[1] // part.shape[1], axis=1)
        for part in (scale, offset)
    ]
    result: Array = q * wide[0] + wide[1]
    return result


def linear(kind: str, data: Array, x: Array, act_scales: Array | None = None) -> Array:
    """``x`` (bytes and their act_scales, or floats) times packed weights: ``[rows, outputs]``."""
    q, scale, offset = unpack(kind, data)
    sums = np.zeros((len(x), len(q)), np.float32)
    if kind == "f32":
        for i in range(q.shape[1]):
            sums = fma(x[:, i, None], q[:, i], sums)
        return sums
    if kind == "bf16":
        x = widened(x)
        for i in range(0, q.shape[1], 2):
            for j in (i + 1, i):
                sums = fma(x[:, j, None], q[:, j], sums)
        return sums
    assert act_scales is not None
    if kind == "r8":
        integers = x.astype(np.int32) @ (q + 128).T + act_scales["shift"][:, None]
        result: Array = integers.astype(np.float32) * act_scales["scale"][:, None] * scale[:, 0]
        return result
    has_offset = kind in ("w4", "w5", "z4", "k4", "k5")
    finer = {"s4": 16, "s5": 8}.get(kind, 1)
    middle = 0 if has_offset else 32 if kind == "k6" else 128
    bytes_q = q * finer + middle  # as the products see them
    for k in range(q.shape[1] // 32):
        of_record = act_scales[:, k, None]
        low, high = (
            (x[:, part].astype(np.int32) @ bytes_q[:, part].T).astype(np.float32)
            for part in (slice(32 * k, 32 * k + 16), slice(32 * k + 16, 32 * k + 32))
        )
        s_low, s_high = of_record["scale"][..., 0], of_record["scale"][..., 1]
        if kind == "k6":
            below, above = of_record["shifts"][..., 0], of_record["shifts"][..., 1]
            sums = fma(fma(low, s_low, below), scale[:, 2 * k], sums)
            sums = fma(fma(high, s_high, above), scale[:, 2 * k + 1], sums)
        elif has_offset:
            product = fma(low, s_low, high * s_high)
            sums = fma(offset[:, k], of_record["total"], fma(product, scale[:, k], sums))
        else:
            product = fma(low, s_low, fma(high, s_high, of_record["shift"]))
            sums = fma(product, scale[:, k] / F32(finer), sums)
    return sums


# --- rows --------------------------------------------------------------------------------------


def norm(x: Array, weight: Array, num_channels: int, eps: float) -> Array:
    """Rows ``[rows, size]``, padded with zeros."""
    vectors = x.reshape(len(x), -1, 2, 16)
    squares = np.zeros((len(x), 2, 16), np.float32)
    for k in range(vectors.shape[1]):
        squares = fma(vectors[:, k], vectors[:, k], squares)
    mean = halves(squares[:, 0] + squares[:, 1]) * F32(1 / num_channels)
    scale = F32(1) / np.sqrt(mean + F32(eps))
    result: Array = x * scale[:, None] * weight
    return result


def gate(g: Array, up: Array) -> Array:
    """SwiGLU."""
    result: Array = g / (exp(-g) + F32(1)) * up
    return result
