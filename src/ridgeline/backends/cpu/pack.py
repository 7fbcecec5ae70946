"""From a file's tensors to the layouts that kernels read (``linear``).

Blocks of 32 with 4, 5 or 8 bits are moved, not changed: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 run exactly
as they are in the file. Q4_K and Q5_K keep their values, their scales become half floats. All else
is quantised again, to 8 bits per weight with a scale for each 32, or with ``int4`` to 4 bits.
``int8-row`` has one scale for all weights of an output, which only a rotation makes good enough.

It knows no kernels and no steps; it makes one buffer of bytes.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.linear import KINDS, RECORD_BYTES, TILE
from ridgeline.backends.cpu.rows import MOST_TURNED
from ridgeline.models.weights import Tensor

Bytes = NDArray[np.uint8]
Index = NDArray[np.intp]
_HALF = np.float16
_SKETCHED = 64  # tiles at once
_T = TypeVar("_T", bound=np.generic)


class Matrix(NamedTuple):
    """A packed matrix: its kind, and bytes ``[tiles, ...]``, by records where nothing follows."""

    kind: str
    data: Bytes

    @property
    def words(self) -> tuple[int, int, int]:
        """What the plan says of it, besides its address: kind, tiles, records."""
        num_records = self.data[0].nbytes // RECORD_BYTES[self.kind]
        return KINDS.index(self.kind), len(self.data), num_records


def padded(size: int) -> int:
    """Return ``size`` rounded up to whole tiles."""
    return -(-size // TILE) * TILE


def pack(
    tensor: Tensor, dtype: str, rows: Index | None = None, columns: Index | None = None
) -> Matrix:
    """Pack a matrix ``[out, in]`` for a dtype: auto is as the file has it.

    ``rows`` and ``columns`` say which output and input of the tensor stands where; -1 is zero.
    Without them both are padded with zeros to whole tiles.
    """
    rows = _extended(tensor.shape[0], rows)
    columns_moved = columns is not None
    columns = _extended(tensor.shape[1], columns)
    whole_blocks = not columns_moved and tensor.shape[1] % TILE == 0
    if dtype in ("f32", "bf16", "int8-row"):
        weights = _placed(tensor.to_f32(), rows, columns)
        return {"f32": _pack_f32, "bf16": _pack_bf16, "int8-row": _pack_r8}[dtype](weights)
    keeps_four = dtype != "int8" and whole_blocks
    if keeps_four and tensor.dtype in ("Q4_0", "Q4_1", "Q4_K"):
        q4, *scales = four_bits(tensor)
        kind = "w4" if len(scales) == 2 else "s4"
        return _pack_nibbles(kind, _taken(q4, rows), *(_taken(part, rows) for part in scales))
    if dtype == "auto" and whole_blocks and tensor.dtype in ("Q5_0", "Q5_1", "Q5_K"):
        q5, *scales = five_bits(tensor)
        kind = "w5" if len(scales) == 2 else "s5"
        return _pack_nibbles(kind, _taken(q5, rows), *(_taken(part, rows) for part in scales))
    if dtype != "int4" and whole_blocks and tensor.dtype in ("Q8_0", "Q5_0"):
        q8, scale = eight_bits(tensor)
        return _pack_w8(_taken(q8, rows), _taken(scale, rows))
    weights = _placed(tensor.to_f32(), rows, columns)
    return (
        _pack_nibbles("w4", *to_four_bits(weights))
        if dtype == "int4"
        else _pack_w8(*to_eight_bits(weights))
    )


def sketch(head: Matrix) -> tuple[Matrix, NDArray[np.float32]] | None:
    """Return a w8 matrix again in 5 bits, and each output's distance from it; None if not finite.

    Outputs have much in common, which would make their steps coarse: it is taken off, and stands
    behind them as the first output of one more tile. However head and sketch are multiplied by
    activations x, a result differs from its own plus the common one by at most the distance times
    the length of x: the distance (Euclidean) holds what all three may lose by rounding.
    """
    parts = range(0, len(head.data), _SKETCHED)
    total = sum(_weights_of(head, low)[0].sum(axis=0) for low in parts)
    mean = np.zeros((TILE, head.data.shape[1] * TILE), np.float32)
    mean[0] = total / (len(head.data) * TILE)
    with np.errstate(over="ignore", invalid="ignore"):  # the end says so
        centre = _to_five_bits(mean)
        common = _of_five_bits(*centre)[0]
        tiles, distances = [], []
        for low in parts:
            weights, scale = _weights_of(head, low)
            own = _to_five_bits(weights - common)
            lost = weights - common - _of_five_bits(*own)
            # What a record's terms are at most, but for the sum of 32 activations.
            terms = 384 * scale + 47 * np.abs(own[1]) + 47 * np.abs(centre[1][0])
            rounding = (terms.shape[1] + 16) * 2.0**-24 * TILE**0.5
            lengths = [np.linalg.norm(part, axis=1) for part in (lost, terms)]
            distances.append(1.001 * lengths[0] + rounding * lengths[1])
            tiles.append(_pack_nibbles("s5", *own).data)
    tiles.append(_pack_nibbles("s5", *centre).data)
    distance = np.concatenate(distances).astype(np.float32)
    return (Matrix("s5", np.concatenate(tiles)), distance) if np.isfinite(distance).all() else None


def _weights_of(head: Matrix, low: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the weights and scales of some tiles of a w8 matrix, from ``low`` on."""
    q, scale = _unpack_w8(head.data[low : low + _SKETCHED])
    wide = scale.astype(np.float32)
    return q.astype(np.float32) * np.repeat(wide, TILE, axis=1), wide


# --- places ------------------------------------------------------------------------------------


def _extended(size: int, places: Index | None) -> Index:
    places = np.arange(size) if places is None else places
    fill = np.full(padded(len(places)) - len(places), -1)
    return np.concatenate([places, fill])


def _placed(weights: NDArray[np.float32], rows: Index, columns: Index) -> NDArray[np.float32]:
    out = np.zeros((len(rows), len(columns)), np.float32)
    out[np.ix_(rows >= 0, columns >= 0)] = weights[np.ix_(rows[rows >= 0], columns[columns >= 0])]
    return out


def _taken(values: NDArray[_T], rows: Index) -> NDArray[_T]:
    """Return rows by index; row -1 has all zeros, so its weights are zero whatever the bits."""
    out = values[np.maximum(rows, 0)]
    out[rows < 0] = 0
    return out


# --- blocks ------------------------------------------------------------------------------------


def four_bits(tensor: Tensor) -> tuple[Bytes, *tuple[NDArray[np.float16], ...]]:
    """Return q ``[out, in]`` u8 below 16, scale and offset ``[out, in / 32]``: w = d q + m.

    Q4_0 has no offset: w = d (q - 8).
    """
    num_rows, size = tensor.shape
    if tensor.dtype == "Q4_K":
        return _four_bits_k(tensor)
    affine = tensor.dtype == "Q4_1"
    blocks = tensor.data.reshape(num_rows, size // TILE, 20 if affine else 18)
    scale = blocks[:, :, :2].copy().view(_HALF)[:, :, 0]
    nibbles = blocks[:, :, 4 if affine else 2 :]
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(num_rows, size)
    return (q, scale, blocks[:, :, 2:4].copy().view(_HALF)[:, :, 0]) if affine else (q, scale)


def _four_bits_k(
    tensor: Tensor,
) -> tuple[Bytes, NDArray[np.float16], NDArray[np.float16]]:
    """Q4_K: 256 weights with scales of the K kind, then nibbles."""
    num_rows, size = tensor.shape
    blocks = tensor.data.reshape(num_rows, size // 256, 144)
    q = _nibbles_k(blocks[:, :, 16:]).reshape(num_rows, size)
    return q, *_scales_k(blocks[:, :, :16], (num_rows, size // TILE))


def _nibbles_k(packed: Bytes) -> Bytes:
    """Return 256 nibbles of each block ``[rows, blocks, 128]``: 32 low ones, 32 high ones, ..."""
    parts = packed.reshape(*packed.shape[:2], 4, 32)
    return np.stack([parts & 15, parts >> 4], axis=3)


def _scales_k(
    head: Bytes, shape: tuple[int, int]
) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Return scales and offsets: d, dmin (f16), and 8 pairs of 6-bit factors in 12 bytes."""
    d, dmin = (head[:, :, i : i + 2].copy().view(_HALF).astype(np.float32) for i in (0, 2))
    first, second, last = head[:, :, 4:8], head[:, :, 8:12], head[:, :, 12:]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=2)
    minima = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=2)
    return (
        (d * scales).astype(_HALF).reshape(shape),
        (-dmin * minima).astype(_HALF).reshape(shape),
    )


def five_bits(tensor: Tensor) -> tuple[Bytes, *tuple[NDArray[np.float16], ...]]:
    """Return q ``[out, in]`` u8 below 32, scale and offset ``[out, in / 32]``: w = d q + m.

    Q5_0 has no offset: w = d (q - 16).
    """
    num_rows, size = tensor.shape
    if (
        tensor.dtype == "Q5_K"
    ):  # as Q4_K, with a plane of fifth bits: bit j of byte l, input 32 j + l
        blocks = tensor.data.reshape(num_rows, size // 256, 176)
        planes = np.unpackbits(blocks[:, :, 16:48, None], axis=3, bitorder="little")
        fifth = planes.transpose(0, 1, 3, 2).reshape(num_rows, size)
        q = _nibbles_k(blocks[:, :, 48:]).reshape(num_rows, size) | (fifth << np.uint8(4))
        return q, *_scales_k(blocks[:, :, :16], (num_rows, size // TILE))
    affine = tensor.dtype == "Q5_1"
    blocks = tensor.data.reshape(num_rows, size // TILE, 24 if affine else 22)
    scale = blocks[:, :, :2].copy().view(_HALF)[:, :, 0]
    q = _fives(blocks[:, :, 4 if affine else 2 :]).reshape(num_rows, size)
    return (q, scale, blocks[:, :, 2:4].copy().view(_HALF)[:, :, 0]) if affine else (q, scale)


def _fives(packed: Bytes) -> Bytes:
    """Return 32 values of 5 bits of each ``[rows, blocks, 20]``: a plane of fifth bits, nibbles."""
    fifth = np.unpackbits(packed[:, :, :4], axis=2, bitorder="little")
    nibbles = packed[:, :, 4:]
    out: Bytes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2) | (fifth << np.uint8(4))
    return out


def eight_bits(tensor: Tensor) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Return q ``[out, in]`` s8 and scale ``[out, in / 32]`` of Q8_0 or Q5_0: w = d q."""
    num_rows, size = tensor.shape
    blocks = tensor.data.reshape(num_rows, size // TILE, -1)
    scale = blocks[:, :, :2].copy().view(_HALF)[:, :, 0]
    if tensor.dtype == "Q8_0":
        return blocks[:, :, 2:].copy().view(np.int8).reshape(num_rows, size), scale
    q = _fives(blocks[:, :, 2:]).astype(np.int8) - np.int8(16)
    return q.reshape(num_rows, size), scale


def to_eight_bits(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Quantise to bytes with a scale for each 32: what Q8_0 does."""
    groups = weights.reshape(len(weights), -1, TILE)
    scale = (np.abs(groups).max(axis=2) / 127).astype(_HALF)
    q = np.rint(groups / _nonzero(scale)[:, :, None]).clip(-127, 127)
    return q.astype(np.int8).reshape(weights.shape), scale


def to_four_bits(
    weights: NDArray[np.float32],
) -> tuple[Bytes, NDArray[np.float16], NDArray[np.float16]]:
    """Quantise to 4 bits with a scale and an offset for each 32: what Q4_1 does."""
    groups = weights.reshape(len(weights), -1, TILE)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scale, offset = ((high - low) / 15).astype(_HALF), low.astype(_HALF)
    steps = (groups - offset.astype(np.float32)[:, :, None]) / _nonzero(scale)[:, :, None]
    return np.rint(steps).clip(0, 15).astype(np.uint8).reshape(weights.shape), scale, offset


def _to_five_bits(weights: NDArray[np.float32]) -> tuple[Bytes, NDArray[np.float16]]:
    """Quantise to 5 bits with a scale for each 32: what Q5_0 does, w = d (q - 16)."""
    groups = weights.reshape(len(weights), -1, TILE)
    place = np.abs(groups).argmax(axis=2)
    largest = np.take_along_axis(groups, place[:, :, None], axis=2)[:, :, 0]
    scale = (largest / -16).astype(_HALF)
    q = np.rint(groups / _nonzero(scale)[:, :, None]).clip(-16, 15) + 16
    return q.astype(np.uint8).reshape(weights.shape), scale


def _of_five_bits(q: Bytes, scale: NDArray[np.float16]) -> NDArray[np.float32]:
    return (q.astype(np.float32) - 16) * np.repeat(scale.astype(np.float32), TILE, axis=1)


def turned(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn the inputs of a matrix as ``quantise_rows`` turns activations: products stay the same.

    A Hadamard matrix is its own inverse times its size; the division is here.
    """
    size = weights.shape[1]
    block = min(size & -size, MOST_TURNED)
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    out: NDArray[np.float32] = weights.reshape(-1, block) @ (matrix / np.float32(block))
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


def _nonzero(scale: NDArray[np.float16]) -> NDArray[np.float32]:
    return np.where(scale == 0, np.float32(1), scale.astype(np.float32))


# --- tiles -------------------------------------------------------------------------------------


def _pack_nibbles(kind: str, q: Bytes, *scales: NDArray[np.float16]) -> Matrix:
    """Pack 4 bits, or 5 with a plane of fifth bits; scales, and offsets where the kind has them."""
    tiles, records = len(q) // TILE, q.shape[1] // TILE
    out = np.empty((tiles, records, RECORD_BYTES[kind]), np.uint8)
    # outputs: tile, half, o; inputs: record, nibble, v, i
    parts = q.reshape(tiles, 2, 16, records, 2, 4, 4).transpose(0, 3, 1, 4, 5, 2, 6)
    low = parts & 15
    out[:, :, :512] = (low[:, :, :, 0] | low[:, :, :, 1] << 4).reshape(tiles, records, 512)
    if kind in ("w5", "s5"):
        bits = np.ascontiguousarray(parts >> 4).reshape(tiles, records, 1024)
        out[:, :, 512:640] = np.packbits(bits, axis=2, bitorder="little")
    each = np.stack([part.reshape(tiles, 2, 16, records) for part in scales], axis=2)
    out[:, :, -64 * len(scales) :] = _as_bytes(each.transpose(0, 4, 1, 2, 3), tiles, records)
    return Matrix(kind, out)


def _pack_w8(q: NDArray[np.int8], scale: NDArray[np.float16]) -> Matrix:
    tiles, records = len(q) // TILE, q.shape[1] // TILE
    out = np.empty((tiles, records, RECORD_BYTES["w8"]), np.uint8)
    out[:, :, :1024] = _byte_records(q)
    scales = scale.reshape(tiles, 2, 16, records).transpose(0, 3, 1, 2)
    out[:, :, 1024:] = _as_bytes(scales, tiles, records)
    return Matrix("w8", out)


def _unpack_w8(data: Bytes) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Return q ``[out, in]`` and scale ``[out, in / 32]`` of some tiles."""
    tiles, records, _ = data.shape
    parts = data[:, :, :1024].reshape(tiles, records, 2, 8, 16, 4).transpose(0, 2, 4, 1, 3, 5)
    q = (parts.reshape(tiles * TILE, -1) ^ np.uint8(128)).view(np.int8)
    scale = np.ascontiguousarray(data[:, :, 1024:]).view(_HALF).reshape(tiles, records, TILE)
    return q, scale.transpose(0, 2, 1).reshape(tiles * TILE, records)


def _byte_records(q: NDArray[np.int8]) -> Bytes:
    """Return ``[tiles, records, 1024]`` bytes, 128 added to each."""
    tiles, records = len(q) // TILE, q.shape[1] // TILE
    shifted = q.view(np.uint8) ^ np.uint8(128)
    parts = shifted.reshape(tiles, 2, 16, records, 8, 4).transpose(0, 3, 1, 4, 2, 5)
    out: Bytes = parts.reshape(tiles, records, 1024)
    return out


def _pack_r8(weights: NDArray[np.float32]) -> Matrix:
    q, scale = to_row_bytes(turned(weights))
    tiles = len(q) // TILE
    records, scales = _byte_records(q), scale.view(np.uint8)
    return Matrix("r8", np.hstack([records.reshape(tiles, -1), scales.reshape(tiles, -1)]))


def _pack_bf16(weights: NDArray[np.float32]) -> Matrix:
    tiles, records = len(weights) // TILE, weights.shape[1] // TILE
    parts = to_bf16(weights).reshape(tiles, 2, 16, records, 16, 2).transpose(0, 3, 1, 4, 2, 5)
    return Matrix("bf16", _as_bytes(parts, tiles, records))


def _pack_f32(weights: NDArray[np.float32]) -> Matrix:
    tiles, records = len(weights) // TILE, weights.shape[1] // TILE
    parts = weights.reshape(tiles, TILE, records, TILE).transpose(0, 2, 3, 1)
    return Matrix("f32", _as_bytes(parts, tiles, records))


def _as_bytes(values: NDArray[np.generic], tiles: int, records: int) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(tiles, records, -1)
