"""An adapter as kernels read it: padded and in tiles, with words that say where each matrix is.

A lies in groups of four ranks: of each, 16 inputs after another, the four side by side,
``[rank / 4, inputs / 16, 4, 16]``. B lies as 16 outputs after another with all ranks,
``[outputs / 16, rank, 16]``. Both are read front to back.

Values are f32 if weights are. Else they are halves, multiplied before by a power of two that makes
the largest of a matrix nearly as large as a half can be: so each is within a thousandth of itself,
where products with weights are off by more. The word ``scale`` takes both powers back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.arrays import address, aligned
from ridgeline.backends.cpu.layout.arguments import ADAPTER
from ridgeline.backends.cpu.layout.model_sizes import head_permutation
from ridgeline.backends.cpu.layout.pack import Index, padded
from ridgeline.backends.cpu.layout.shapes import RANK_STEP, KernelConfig
from ridgeline.model.files.adapters import AdapterWeights
from ridgeline.model.shape.model import ModelArch

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class PackedAdapter:
    """An adapter in memory.

    Attributes:
        words: ``[layers, words]``, by the names of ``layout.arguments.ADAPTER``.
        values: all that they point to.
    """

    words: NDArray[np.int64]
    values: NDArray[np.floating]

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return int(self.words.nbytes + self.values.nbytes)

    @property
    def arrays(self) -> list[NDArray[np.generic]]:
        """All of its arrays."""
        return [self.words, self.values]


def pack_adapter(weights: AdapterWeights, arch: ModelArch, sizes: KernelConfig) -> PackedAdapter:
    """Return an adapter as the kernels of a model of these sizes read it.

    Raises ValueError if its rank is larger than they have room for.
    """
    if weights.rank > sizes.max_lora_rank:
        raise ValueError(f"rank {weights.rank}: these kernels have room for {sizes.max_lora_rank}")
    kinds, places = sizes.layers, [head_permutation(arch, sizes, i) for i in range(arch.num_layers)]
    words = np.zeros((arch.num_layers, len(ADAPTER)), np.int64)
    tiles: list[tuple[int, str, int, Floats, Floats]] = []
    for name, part in weights.parts.items():
        _, layer, matrix = name.split(".")
        rank = -(-len(part.a) // RANK_STEP) * RANK_STEP
        rows, columns = places[int(layer)]
        a = np.zeros((rank, kinds[int(layer)].inputs(matrix)), np.float32)
        _spread(a, part.a.T, columns.get(matrix))
        outputs = rows.get(matrix)
        b = np.zeros((padded(len(part.b) if outputs is None else len(outputs)), rank), np.float32)
        _spread(b.T, part.b, outputs)
        tiles.append((int(layer), matrix, rank, _groups(a), _columns(b)))
    kind: type[np.floating] = np.float32 if sizes.adapter_bytes == 4 else np.float16
    values: NDArray[np.floating] = aligned(sum(a.size + b.size for *_, a, b in tiles), kind)
    begin, names = 0, {name: i for i, name in enumerate(ADAPTER)}
    for index, matrix, rank, *both in tiles:
        words[index, names[f"{matrix}_rank"]] = rank
        powers = [0 if kind is np.float32 else _power(tile) for tile in both]
        scale = np.float32(2.0 ** -sum(powers))
        words[index, names[f"{matrix}_scale"]] = scale.view(np.int32)
        for side, tile, power in zip("ab", both, powers, strict=True):
            place = values[begin : begin + tile.size]
            place[:] = np.ldexp(tile, power)
            words[index, names[f"{matrix}_{side}"]] = address(place)
            begin += tile.size
    return PackedAdapter(words, values)


def _power(values: Floats) -> int:
    """Return the power of two that brings the largest value between 2^14 and 2^15, if it may."""
    largest = float(np.abs(values).max())
    return int(np.clip(15 - np.frexp(largest)[1], -50, 50)) if largest else 0


def _spread(out: Floats, values: Floats, order: Index | None) -> None:
    """Put columns of ``values.T`` into those of ``out``; where ``order`` is -1 it stays zero."""
    rank = values.shape[1]
    if order is None:
        out[:rank, : len(values)] = values.T
    else:
        out[:rank, np.flatnonzero(order >= 0)] = values[order[order >= 0]].T


def _groups(a: Floats) -> Floats:
    rank, size = a.shape
    return a.reshape(rank // RANK_STEP, RANK_STEP, size // 16, 16).swapaxes(1, 2).reshape(-1)


def _columns(b: Floats) -> Floats:
    size, rank = b.shape
    return b.reshape(size // 16, 16, rank).swapaxes(1, 2).reshape(-1)
