"""Blocks of 32 weights as this package encodes them, for files that have no blocks of their own.

``model.files.quantized`` makes them of what GPTQ, AWQ, compressed-tensors, bitsandbytes and HQQ
store. A row is whole blocks, so rows can be selected and reordered while encoded, as those of GGUF
can. Scales and zeros are float32, wide enough for what any file has, so decoding loses nothing.

    INT4             scale, zero, 16 bytes: w = scale (q - zero), zero is 8. Byte j holds q of
                     weight j in its low four bits, and of weight 16 + j above them
    INT4_ZERO        the same, zero a whole number from 0 to 16
    INT4_FLOAT_ZERO  the same, zero any number
    INT8             scale, zero, 32 bytes: zero is 128
    INT8_ZERO        the same, zero any number
    FP8              scale, 32 bytes e4m3 (4 bits of exponent, 3 of mantissa, no infinities)
    NF4              scale, 16 bytes: nibbles through ``NF4_LEVELS``
    MXFP4            1 byte e, 16 bytes: nibbles through ``MXFP4_LEVELS``, scale 2 ** (e - 128)
    INT4_ORDERED, INT8_ORDERED  no blocks, but float32: inputs of a group are not neighbours
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
BLOCK = 32

_HALF_BYTES = {"INT4": 16, "INT4_ZERO": 16, "INT4_FLOAT_ZERO": 16, "INT8": 32, "INT8_ZERO": 32}
_ORDERED = ("INT4_ORDERED", "INT8_ORDERED")
ENCODINGS = (*_HALF_BYTES, *_ORDERED, "FP8", "NF4", "MXFP4")

# Twice the values of e2m1 (Open Compute Project, Microscaling Formats 1.0, 2023).
MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
# Quantiles of a normal distribution (Dettmers et al., QLoRA, 2023).
NF4_LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


def _e4m3() -> Floats:
    """Return the value of each byte; 0x7F and 0xFF are no numbers."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    size = np.where(exponent > 0, normal, mantissa * 2.0**-9)
    size[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)


E4M3 = _e4m3()


def nibbles(q: Bytes) -> Bytes:
    """Return values below 16, ``[rows, inputs]``, two in a byte: ``[rows, blocks, 16]``."""
    halves = q.reshape(len(q), -1, 2, BLOCK // 2)
    out: Bytes = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
    return out


def values(packed: Bytes) -> Bytes:
    """Return what ``nibbles`` packed, ``[rows, blocks, 32]``."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=2)


def encode(scale: Floats, zero: Floats | None, q: Bytes) -> Bytes:
    """Return encoded rows ``[rows, bytes]`` of scales, zeros, ``[rows, blocks]``, and blocks.

    ``q`` is the last part of each block, ``[rows, blocks, bytes]``.
    """
    numbers = [scale] if zero is None else [scale, zero]
    words = np.stack([part.astype(np.float32) for part in numbers], axis=2)
    head = np.ascontiguousarray(words).view(np.uint8)
    return np.concatenate([head, q], axis=2).reshape(len(q), -1)


def parts(dtype: str, data: Bytes) -> tuple[Bytes, Floats, Floats]:
    """Return a byte of each weight ``[rows, inputs]``, and scales and zeros ``[rows, blocks]``.

    The zeros of types that have none are 0.
    """
    rows = len(data)
    if dtype == "MXFP4":
        blocks = data.reshape(rows, -1, 17)
        scale = np.ldexp(np.float32(1), blocks[:, :, 0].astype(np.int32) - 128)
        return values(blocks[:, :, 1:]).reshape(rows, -1), scale, np.zeros_like(scale)
    has_zero = dtype in _HALF_BYTES
    head, body = 8 if has_zero else 4, _HALF_BYTES.get(dtype, 16 if dtype == "NF4" else 32)
    blocks = data.reshape(rows, -1, head + body)
    numbers = np.ascontiguousarray(blocks[:, :, :head]).view(np.float32)
    scale = numbers[:, :, 0]
    q = blocks[:, :, head:]
    q = values(q) if body == 16 else np.ascontiguousarray(q)
    return q.reshape(rows, -1), scale, numbers[:, :, 1] if has_zero else np.zeros_like(scale)


def decode(dtype: str, data: Bytes) -> Floats:
    """Return the weights of encoded rows, ``[rows, inputs]``."""
    if dtype in _ORDERED:
        return np.ascontiguousarray(data).view(np.float32).copy()
    q, scale, zero = parts(dtype, data)
    tables = {"FP8": E4M3, "NF4": NF4_LEVELS, "MXFP4": MXFP4_LEVELS.astype(np.float32)}
    wide = tables[dtype][q] if dtype in tables else q.astype(np.float32)
    with np.errstate(all="ignore"):  # a damaged scale is an error of the answers that it reaches
        wide -= np.repeat(zero, BLOCK, axis=1)
        wide *= np.repeat(scale, BLOCK, axis=1)
    return wide
