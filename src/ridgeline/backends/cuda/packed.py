"""Matrices of 8 or 4 bits a weight, with a scale (and a least value) for each 32 inputs.

The layout is made for the product: 8 bits are ``[N, K]``; 4 bits are ``[N, K / 2]``, where byte j
of a run of 64 inputs holds input j in its low half and j + 32 in its high half, so that a tile of
bytes is two tiles of inputs and nothing needs interleaving.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUP = 32  # inputs of one scale
RUN = 64  # inputs whose 4-bit numbers share bytes
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q4_K": 144}  # gguf's blocks
SUPERBLOCK = 256  # inputs of a block of Q4_K


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """A quantised matrix: each weight is its number times a scale, plus a least value.

    Attributes:
        bits: 8 or 4.
        values: int8 ``[N, K]``, or uint8 ``[N, K / 2]``.
        scales: ``[N, K / 32]`` float16.
        least: the same for least values; None for zeros.
        shape: N outputs, K inputs.
        num_outputs: of the whole matrix, where this is a rank's part of it; 0 where it is not.
    """

    bits: int
    values: Tensor
    scales: Tensor
    least: Tensor | None
    shape: tuple[int, int]
    num_outputs: int = 0

    @property
    def ndim(self) -> int:
        """Dimensions: a matrix has two."""
        return 2

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        arrays = [self.values, self.scales] + ([] if self.least is None else [self.least])
        return sum(array.nbytes for array in arrays)

    def rows(self, index: Tensor) -> Packed:
        """Return the matrix of these rows, in this order."""
        least = None if self.least is None else self.least[index]
        shape = len(index), self.shape[1]
        return replace(
            self, values=self.values[index], scales=self.scales[index], least=least, shape=shape
        )

    def wide(self) -> Tensor:
        """Return the matrix in float32, ``[N, K]``."""
        N, K = self.shape
        if self.bits == 8:
            numbers = self.values.float()
        else:
            runs = self.values.reshape(N, K // RUN, 1, GROUP)
            numbers = torch.cat([runs & 15, runs >> 4], 2).float()
        out = numbers.reshape(N, -1, GROUP) * self.scales.float()[..., None]
        if self.least is not None:
            out = out + self.least.float()[..., None]
        return out.reshape(N, K)


def pack(weight: Tensor, bits: int) -> Packed:
    """Quantise a matrix ``[N, K]`` by rounding to nearest; K is a multiple of 64.

    8 bits are symmetric; 4 bits lie between a group's least and greatest value.
    """
    N, K = weight.shape
    groups = weight.float().reshape(N, K // GROUP, GROUP)
    if bits == 8:
        scales = (groups.abs().amax(2) / 127.0).half()
        numbers = torch.round(groups / _divisor(scales)).clamp(-127, 127)
        return Packed(8, numbers.to(torch.int8).reshape(N, K), scales, None, (N, K))
    least = groups.amin(2).half()
    scales = ((groups.amax(2) - least.float()) / 15.0).half()
    numbers = torch.round((groups - least.float()[..., None]) / _divisor(scales)).clamp(0, 15)
    return _from_nibbles(numbers.to(torch.uint8), scales, least, (N, K))


def _divisor(scales: Tensor) -> Tensor:
    return scales.float().clamp(min=1e-12)[..., None]


def _from_nibbles(numbers: Tensor, scales: Tensor, least: Tensor, shape: tuple[int, int]) -> Packed:
    """Return a matrix of numbers from 0 to 15, ``[N, K / 32, 32]`` uint8."""
    N, K = shape
    runs = numbers.reshape(N, K // RUN, 2, GROUP)
    values = (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(N, K // 2)
    return Packed(4, values.contiguous(), scales.contiguous(), least.contiguous(), shape)


def from_gguf(kind: str, rows: Tensor, shape: tuple[int, int]) -> Packed | None:
    """Return a matrix of a GGUF file's own blocks, or None for a type that is not kept as it is.

    Numbers, scales and least values are the file's. In Q4_K scale and least value of a group are
    products of two numbers, which are rounded once, to float16.

    Args:
        kind: GGUF's name of the type.
        rows: the file's bytes, ``[N, bytes of a row]`` uint8, on any device.
        shape: N outputs, K inputs.
    """
    N, K = shape
    if kind not in BLOCK_BYTES or K % (SUPERBLOCK if kind == "Q4_K" else RUN):
        return None
    if kind == "Q4_K":
        return _from_q4_k(rows.reshape(N, K // SUPERBLOCK, BLOCK_BYTES[kind]), shape)
    blocks = rows.reshape(N, K // GROUP, BLOCK_BYTES[kind])
    scales = _halves(blocks[..., :2])[..., 0]
    if kind == "Q8_0":
        numbers = blocks[..., 2:].contiguous().view(torch.int8).reshape(N, K)
        return Packed(8, numbers, scales.contiguous(), None, shape)
    least = -8.0 * scales if kind == "Q4_0" else _halves(blocks[..., 2:4])[..., 0]
    nibbles = blocks[..., -16:]  # byte j of a block has inputs j and j + 16
    return _from_nibbles(torch.cat([nibbles & 15, nibbles >> 4], 2), scales, least, shape)


def _halves(part: Tensor) -> Tensor:
    """Return the float16 numbers of bytes ``[..., 2 * count]``."""
    return part.contiguous().view(torch.float16)


def _from_q4_k(blocks: Tensor, shape: tuple[int, int]) -> Packed:
    """Return a matrix of blocks of 256 inputs, whose nibbles lie as ours do.

    A block has two float16 factors, 12 bytes with eight scales and eight least values of 6 bits,
    and 128 bytes of nibbles.
    """
    N, K = shape
    factors, bits, nibbles = _halves(blocks[..., :4]).float(), blocks[..., 4:16], blocks[..., 16:]
    a, b, c = bits.split(4, 2)
    scales = torch.cat([a & 63, c & 15 | a >> 6 << 4], 2)
    least = torch.cat([b & 63, c >> 4 | b >> 6 << 4], 2)
    scales = (factors[..., :1] * scales).half().reshape(N, K // GROUP)
    least = (-factors[..., 1:] * least).half().reshape(N, K // GROUP)
    return Packed(4, nibbles.reshape(N, K // 2).contiguous(), scales, least, shape)


def stack(parts: list[Packed]) -> Packed:
    """Return matrices of one kind and number of inputs joined, the first one's outputs first."""
    first = parts[0]
    values = torch.cat([part.values for part in parts])
    scales = torch.cat([part.scales for part in parts])
    least = None
    if first.least is not None:
        least = torch.cat([part.least for part in parts if part.least is not None])
    shape = sum(part.shape[0] for part in parts), first.shape[1]
    num_outputs = sum(part.num_outputs for part in parts)
    return Packed(first.bits, values, scales, least, shape, num_outputs)
