"""Keys and values in the reference backend: blocks, each with those of one group of layers.

Of latent attention only keys are kept, whose last channels are the values. A layer that reads
another's has that layer's place. Shapes are named as in ``reference``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.shape.cache_groups import CacheGroup, places, spans
from ridgeline.model.shape.model import ModelArch

Floats = NDArray[np.float32]
Ints = NDArray[np.intp]


class KeysAndValues:
    """The cache of all layers, in float32.

    Attributes:
        blocks: all memory, ``[blocks, values]``.
        by_layer: its parts, keys and values of each layer that has its own, or one of a latent.
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
        values_of = {index: block_size * mixer.cache_size for index, mixer in mixers.items()}
        most = max(sum(values_of[index] for index in group.layers) for group in groups)
        self.blocks = np.zeros((num_blocks, most), np.float32)
        self.by_layer: dict[int, list[Floats]] = {}
        self._value_dims = {index: mixer.value_dim for index, mixer in mixers.items()}
        for index, (begin, end) in spans(groups, values_of).items():
            mixer = mixers[index]
            shape = num_blocks, block_size, mixer.num_kv_heads, mixer.key_dim
            num_parts = 2 if mixer.latent is None else 1
            parts = np.split(self.blocks[:, begin:end], num_parts, axis=1)
            self.by_layer[index] = [part.reshape(shape) for part in parts]
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

    def write(self, layer: int, slot_T: Ints, *new_TKD: Floats) -> NDArray[np.bool_]:
        """Store K and V of tokens, or K alone of a latent; return which tokens were finite.

        Values that are not finite are stored as zero: blocks are read whole, later also by their
        next owner, and zero times infinity is not a number.
        """
        finite = np.ones(len(slot_T), bool)
        for new in new_TKD:
            finite &= np.isfinite(new).all((1, 2))
        if not finite.all():
            new_TKD = tuple(np.nan_to_num(new, posinf=0.0, neginf=0.0) for new in new_TKD)
        for array, new in zip(self.by_layer[layer], new_TKD, strict=True):
            array[slot_T // self._block_size, slot_T % self._block_size] = new
        return finite

    def read(self, layer: int, tables: Ints) -> tuple[Floats, Floats]:
        """Return the keys and the values that a layer sees in ``[B, blocks]``, as [B, L, K, D]."""
        arrays = self.by_layer[self._place[layer]]
        shape = len(tables), -1, *arrays[0].shape[2:]
        k, *v = (array[tables].reshape(shape) for array in arrays)
        return k, v[0] if v else k[..., -self._value_dims[layer] :]
