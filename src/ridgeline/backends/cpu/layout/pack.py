"""From a file's tensors to the layouts that kernels read (``formats``).

Blocks are moved, not changed: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4 and the
integers of ``model.files.encodings`` run exactly as they are in the file, where their scales are
half floats; IQ4_XS and NF4 nearly so. Other types are quantised again (``quantise``), to 8 bits per
weight with a scale for each 32, or with ``int4`` to 4 bits. ``int8-row`` has one scale for all
weights of an output, which only a rotation makes good enough.

It knows nothing of kernels and steps; it makes one buffer of bytes.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.layout.formats import BLOCK_RECORDS, FORMATS, KINDS, TILE
from ridgeline.backends.cpu.layout.quantise import (
    Bytes,
    hadamard,
    levels,
    simple_blocks,
    to_bf16,
    to_eight_bits,
    to_four_bits,
    to_row_bytes,
)
from ridgeline.model.files.gguf.blocks import k_numbers
from ridgeline.model.files.tensors import Tensor

Index = NDArray[np.intp]
LANES = 16  # of a kernel's vectors of floats
_HALF = np.float16
# Kinds of a file's blocks, and which stay as they are, by dtype.
_KINDS = {
    "Q4_0": "s4", "Q4_1": "w4", "Q4_K": "k4", "Q5_0": "s5", "Q5_1": "w5", "Q5_K": "k5",
    "Q6_K": "k6", "Q8_0": "w8", "INT4": "s4", "INT4_ZERO": "z4", "INT4_FLOAT_ZERO": "w4",
    "INT8": "w8", "IQ4_NL": "t4", "IQ4_XS": "t4", "MXFP4": "t4", "NF4": "t4",
}  # fmt: skip
_KEPT = {
    "auto": tuple(_KINDS.values()), "int4": ("s4", "z4", "t4", "w4", "k4"), "int8": ("w8",),
}  # fmt: skip
_T = TypeVar("_T", bound=np.generic)
_WEIGHTS_AT_ONCE = 1 << 24


class PackedMatrix(NamedTuple):
    """A packed matrix: its kind, and bytes ``[tiles, ...]``, by records unless more follows."""

    kind: str
    data: Bytes

    @property
    def words(self) -> tuple[int, int, int, int]:
        """What arguments say of it, besides its address: kind, tiles, records, a tile's bytes."""
        tile_bytes = self.data[0].nbytes
        num_records = tile_bytes // FORMATS[self.kind].record_bytes
        return KINDS.index(self.kind), len(self.data), num_records, tile_bytes


def to_lanes(count: int) -> int:
    """Return a number of channels with padding, so that whole vectors hold them."""
    return -(-count // LANES) * LANES


def padded(size: int) -> int:
    """Return ``size`` rounded up to whole tiles."""
    return -(-size // TILE) * TILE


def pack(
    tensor: Tensor, dtype: str, rows: Index | None = None, columns: Index | None = None
) -> PackedMatrix:
    """Pack a matrix ``[out, in]`` for a dtype: auto is as the file has it.

    ``rows`` and ``columns`` say which output and input of the tensor stands where; -1 is zero.
    Without them both are padded with zeros to whole tiles. A large matrix is packed piece by piece,
    for its weights as floats may take more memory than there is.
    """
    rows = _extended(tensor.shape[0], rows)
    at_once = max(1, _WEIGHTS_AT_ONCE // tensor.shape[1] // TILE) * TILE
    if len(rows) <= at_once or tensor.parts or tensor.make:  # these two are made whole each time
        return _pack(tensor, dtype, rows, columns)
    kind, data = "", np.empty(0, np.uint8)
    for low in range(0, len(rows), at_once):
        places = rows[low : low + at_once]
        piece = tensor.rows(np.maximum(places, 0))
        kind, part = _pack(piece, dtype, np.where(places < 0, -1, np.arange(len(places))), columns)
        if not low:
            data = np.empty((len(rows) // TILE, *part.shape[1:]), np.uint8)
        data[low // TILE : low // TILE + len(part)] = part
    return PackedMatrix(kind, data)


def _pack(tensor: Tensor, dtype: str, rows: Index, columns: Index | None) -> PackedMatrix:
    columns_moved = columns is not None
    columns = _extended(tensor.shape[1], columns)
    whole_blocks = not columns_moved and tensor.shape[1] % TILE == 0
    if dtype in ("f32", "bf16", "int8-row"):
        weights = _placed(tensor.to_f32(), rows, columns)
        return {"f32": _pack_f32, "bf16": _pack_bf16, "int8-row": _pack_r8}[dtype](weights)
    kind = _KINDS.get(tensor.dtype, "") if whole_blocks else ""
    if kind == packed_kind(tensor, dtype, columns_moved=columns_moved):
        has_blocks = FORMATS[kind].head_bytes > 0
        parts = k_numbers(tensor.dtype, tensor.data) if has_blocks else simple_blocks(tensor)
        values, *scales = (_select_rows(part, rows) for part in parts)
        if kind == "t4":
            return _pack_t4(levels(tensor.dtype), values, *scales)
        if kind == "z4":
            return _pack_z4(values, *scales)
        if has_blocks:
            return _pack_k(kind, values, *scales)
        return pack_nibbles(kind, values, *scales) if kind != "w8" else _pack_w8(values, *scales)
    if dtype == "int8" and kind == "s5":
        q, scale = (_select_rows(part, rows) for part in simple_blocks(tensor))
        return _pack_w8(q.astype(np.int8) - np.int8(16), scale)
    weights = _placed(tensor.to_f32(), rows, columns)
    return (
        pack_nibbles("w4", *to_four_bits(weights))
        if dtype == "int4"
        else _pack_w8(*to_eight_bits(weights))
    )


def packed_kind(tensor: Tensor, dtype: str, *, columns_moved: bool = False) -> str:
    """Return the format that ``pack`` gives a matrix; columns that move break its blocks up."""
    if dtype in ("f32", "bf16", "int8-row"):
        return {"int8-row": "r8"}.get(dtype, dtype)
    whole_blocks = not columns_moved and tensor.shape[1] % TILE == 0
    kind = _KINDS.get(tensor.dtype, "") if whole_blocks else ""
    return kind if kind in _KEPT[dtype] else "w4" if dtype == "int4" else "w8"


# --- places ------------------------------------------------------------------------------------


def _extended(size: int, places: Index | None) -> Index:
    places = np.arange(size) if places is None else places
    fill = np.full(padded(len(places)) - len(places), -1)
    return np.concatenate([places, fill])


def _placed(weights: NDArray[np.float32], rows: Index, columns: Index) -> NDArray[np.float32]:
    out = np.zeros((len(rows), len(columns)), np.float32)
    out[np.ix_(rows >= 0, columns >= 0)] = weights[np.ix_(rows[rows >= 0], columns[columns >= 0])]
    return out


def _select_rows(values: NDArray[_T], rows: Index) -> NDArray[_T]:
    """Return rows by index; row -1 has all zeros, so its weights are zero whatever the bits."""
    out = values[np.maximum(rows, 0)]
    out[rows < 0] = 0
    return out


# --- tiles -------------------------------------------------------------------------------------


def pack_nibbles(kind: str, q: Bytes, *scales: NDArray[np.float16]) -> PackedMatrix:
    """Pack 4 bits, or 5; scales, and offsets where the kind has them."""
    tiles, records = len(q) // TILE, q.shape[1] // TILE
    out = np.empty((tiles, records, FORMATS[kind].record_bytes), np.uint8)
    _put_values(kind, q, out)
    each = np.stack([part.reshape(tiles, 2, 16, records) for part in scales], axis=2)
    out[:, :, -64 * len(scales) :] = _as_bytes(each.transpose(0, 4, 1, 2, 3), tiles, records)
    return PackedMatrix(kind, out)


def _pack_t4(table: NDArray[np.int8], q: Bytes, scale: NDArray[np.float16]) -> PackedMatrix:
    records = pack_nibbles("t4", q, scale).data
    tail = np.tile(table.view(np.uint8) ^ np.uint8(128), (len(records), 4))
    return PackedMatrix("t4", np.hstack([records.reshape(len(records), -1), tail]))


def _pack_z4(q: Bytes, scale: NDArray[np.float16], zero: Bytes) -> PackedMatrix:
    tiles, records = len(q) // TILE, q.shape[1] // TILE
    zeros = zero.reshape(tiles, 2, 16, records).transpose(0, 3, 1, 2)
    parts = pack_nibbles("s4", q, scale).data, _as_bytes(zeros, tiles, records)
    return PackedMatrix("z4", np.concatenate(parts, axis=2))


def _pack_k(kind: str, q: Bytes, factors: Bytes, scales: NDArray[np.float16]) -> PackedMatrix:
    """Pack blocks of 256: scales before the records, a pair of factors after each."""
    tiles, records = len(q) // TILE, q.shape[1] // TILE
    packed = FORMATS[kind]
    blocks, head = records // BLOCK_RECORDS, packed.head_bytes
    out = np.empty((tiles, blocks, BLOCK_RECORDS * packed.record_bytes), np.uint8)
    heads = scales.reshape(tiles, 2, 16, blocks, -1).transpose(0, 3, 1, 4, 2)
    out[:, :, :head] = _as_bytes(heads, tiles, blocks)
    own = out[:, :, head:].reshape(tiles, records, -1)
    _put_values(kind, q, own)
    pairs = factors.reshape(tiles, 2, 16, records, 2).transpose(0, 3, 1, 4, 2)
    own[:, :, -64:] = _as_bytes(pairs, tiles, records)
    out[:, :, head:] = own.reshape(tiles, blocks, -1)
    return PackedMatrix(kind, out)


def _put_values(kind: str, q: Bytes, out: Bytes) -> None:
    """Write the values of records: nibbles, then the bits above them."""
    tiles, records = len(q) // TILE, q.shape[1] // TILE
    # outputs: tile, half, o; inputs: record, nibble, v, i
    parts = q.reshape(tiles, 2, 16, records, 2, 4, 4).transpose(0, 3, 1, 4, 5, 2, 6)
    low = parts & 15
    out[:, :, :512] = (low[:, :, :, 0] | low[:, :, :, 1] << 4).reshape(tiles, records, 512)
    bits_above = FORMATS[kind].bits - 4
    if bits_above == 1:
        bits = np.ascontiguousarray(parts >> 4).reshape(tiles, records, 1024)
        out[:, :, 512:640] = np.packbits(bits, axis=2, bitorder="little")
    elif bits_above == 2:
        upper = parts >> 4
        pairs = upper[:, :, :, :, 0]
        for v in range(1, 4):
            pairs = pairs | upper[:, :, :, :, v] << 2 * v
        out[:, :, 512:768] = pairs.reshape(tiles, records, 256)


def _pack_w8(q: NDArray[np.int8], scale: NDArray[np.float16]) -> PackedMatrix:
    tiles, records = len(q) // TILE, q.shape[1] // TILE
    out = np.empty((tiles, records, FORMATS["w8"].record_bytes), np.uint8)
    out[:, :, :1024] = _byte_records(q)
    scales = scale.reshape(tiles, 2, 16, records).transpose(0, 3, 1, 2)
    out[:, :, 1024:] = _as_bytes(scales, tiles, records)
    return PackedMatrix("w8", out)


def unpack_w8(data: Bytes) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
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


def _pack_r8(weights: NDArray[np.float32]) -> PackedMatrix:
    q, scale = to_row_bytes(hadamard(weights))
    tiles, num_pairs = len(q) // TILE, FORMATS["r8"].num_records(q.shape[1]) // 2
    records = np.zeros((tiles, 2 * num_pairs, 2, 512), np.uint8)  # a byte of 0 adds nothing
    records[:, : q.shape[1] // TILE] = _byte_records(q).reshape(tiles, -1, 2, 512)
    pairs = records.reshape(tiles, num_pairs, 2, 2, 512).transpose(0, 1, 3, 2, 4)
    parts = pairs.reshape(tiles, -1), scale.view(np.uint8).reshape(tiles, -1)
    return PackedMatrix("r8", np.hstack(parts))


def _pack_bf16(weights: NDArray[np.float32]) -> PackedMatrix:
    tiles, records = len(weights) // TILE, weights.shape[1] // TILE
    parts = to_bf16(weights).reshape(tiles, 2, 16, records, 16, 2).transpose(0, 3, 1, 4, 2, 5)
    return PackedMatrix("bf16", _as_bytes(parts, tiles, records))


def _pack_f32(weights: NDArray[np.float32]) -> PackedMatrix:
    tiles, records = len(weights) // TILE, weights.shape[1] // TILE
    parts = weights.reshape(tiles, TILE, records, TILE).transpose(0, 2, 3, 1)
    return PackedMatrix("f32", _as_bytes(parts, tiles, records))


def _as_bytes(values: NDArray[np.generic], tiles: int, records: int) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(tiles, records, -1)
