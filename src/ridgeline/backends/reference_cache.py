"""Keys and values in the reference backend: paged arrays, one pair for each layer that has its own.

Of latent attention only keys are kept, whose last channels are the values. A layer that reads
another's has that layer's pair. Shapes are named as in ``reference``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ridgeline.physics.arch import ModelArch

Floats = NDArray[np.float32]
Ints = NDArray[np.intp]


class KeysAndValues:
    """The cache of all layers, in float32."""

    def __init__(self, arch: ModelArch, num_blocks: int, block_size: int) -> None:
        """Allocate ``[blocks, block_size, heads, channels]`` for keys and for values of a layer."""
        self._by_layer: dict[int, list[Floats]] = {}
        self._value_dims: dict[int, int] = {}
        for index in arch.cached_layers:
            mixer = arch.layers[index].known_attention
            shape = num_blocks, block_size, mixer.num_kv_heads, mixer.key_dim
            arrays = 2 if mixer.latent is None else 1
            self._by_layer[index] = [np.zeros(shape, np.float32) for _ in range(arrays)]
            self._value_dims[index] = mixer.value_dim
        self._place = {
            index: index if layer.attention.kv_of is None else layer.attention.kv_of
            for index, layer in enumerate(arch.layers)
            if layer.attention is not None
        }

    def arrays(self) -> Iterator[Floats]:
        """Yield every array, keys and values of a layer in turn."""
        for arrays in self._by_layer.values():
            yield from arrays

    def copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks, each from the first to the second of a pair."""
        if copies:
            old, new = map(list, zip(*copies, strict=True))
            for array in self.arrays():
                array[new] = array[old]

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
        for array, new in zip(self._by_layer[layer], new_TKD, strict=True):
            array.reshape(-1, *array.shape[2:])[slot_T] = new
        return finite

    def read(self, layer: int, tables: Ints) -> tuple[Floats, Floats]:
        """Return the keys and the values that a layer sees in ``[B, blocks]``, as [B, L, K, D]."""
        arrays = self._by_layer[self._place[layer]]
        shape = len(tables), -1, *arrays[0].shape[2:]
        k, *v = (array[tables].reshape(shape) for array in arrays)
        return k, v[0] if v else k[..., -self._value_dims[layer] :]
