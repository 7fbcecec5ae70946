"""Keys and values in the reference backend: blocks, each with those of one group of layers.

A layer that reads another's has that layer's place. Shapes are named as in ``reference``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.physics.arch import ModelArch
from ridgeline.physics.cache_groups import CacheGroup, places

Floats = NDArray[np.float32]
Ints = NDArray[np.intp]


class KeysAndValues:
    """The cache of all layers, in float32.

    Attributes:
        blocks: all memory, ``[blocks, values]``.
        by_layer: its parts, keys and values of each layer that has its own.
    """

    def __init__(
        self,
        arch: ModelArch,
        num_blocks: int,
        block_size: int,
        groups: tuple[CacheGroup, ...],
    ) -> None:
        """Allocate blocks that are large enough for any group.

        In them a layer has ``[blocks, block_size, heads, channels]`` for keys and for values.
        """
        self._block_size = block_size
        mixers = {index: arch.layers[index].known_attention for index in arch.cached_layers}
        values_of = {index: block_size * mixer.kv_size for index, mixer in mixers.items()}
        most = max(2 * sum(values_of[index] for index in group.layers) for group in groups)
        self.blocks = np.zeros((num_blocks, most), np.float32)
        self.by_layer: dict[int, tuple[Floats, Floats]] = {}
        for group in groups:
            begin = 0
            for index in group.layers:
                shape = num_blocks, block_size, mixers[index].num_kv_heads, mixers[index].head_dim
                parts = np.split(self.blocks[:, begin:][:, : 2 * values_of[index]], 2, axis=1)
                k, v = (part.reshape(shape) for part in parts)
                self.by_layer[index] = k, v
                begin += 2 * values_of[index]
        self.group_of = places(groups, arch)
        self._place = {
            index: index if layer.attention.kv_of is None else layer.attention.kv_of
            for index, layer in enumerate(arch.layers)
            if layer.attention is not None
        }

    def copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks, each from the first to the second of a pair."""
        if copies:
            old, new = map(list, zip(*copies, strict=True))
            self.blocks[new] = self.blocks[old]

    def write(self, layer: int, slot_T: Ints, k_TKD: Floats, v_TKD: Floats) -> NDArray[np.bool_]:
        """Store K and V of tokens; return which tokens were finite.

        Values that are not finite are stored as zero: blocks are read whole, later also by their
        next owner, and zero times infinity is not a number.
        """
        finite = np.logical_and(np.isfinite(k_TKD).all((1, 2)), np.isfinite(v_TKD).all((1, 2)))
        if not finite.all():
            k_TKD, v_TKD = (np.nan_to_num(a, posinf=0.0, neginf=0.0) for a in (k_TKD, v_TKD))
        for array, new in zip(self.by_layer[layer], (k_TKD, v_TKD), strict=True):
            array[slot_T // self._block_size, slot_T % self._block_size] = new
        return finite

    def read(self, layer: int, tables: Ints) -> tuple[Floats, Floats]:
        """Return the keys and the values that a layer sees in ``[B, blocks]``, as [B, L, K, D]."""
        k, v = self.by_layer[self._place[layer]]
        shape = len(tables), -1, *k.shape[2:]
        return k[tables].reshape(shape), v[tables].reshape(shape)
