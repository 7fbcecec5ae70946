"""What the device keeps of sequences: keys and values in blocks, recurrent states in slots.

Blocks are of equal bytes, each of one group of layers. A layer's part of a block is ``[2, K,
block_size, D]``: the keys of a head are contiguous, and so is a block. With latent attention it has
only keys, ``[1, 1, block_size, D]``.

Of a slot there are two states, of which a step reads one. It writes the other one, which counts
only when the whole step is computed: ``commit``. So a step that failed can be computed again. What
recurrences read of a step stands in ``StatePlan``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.backends.cuda.layer_spec import values_per_token
from ridgeline.core.step import Work
from ridgeline.model.shape.cache_groups import CacheGroup, places, spans
from ridgeline.model.shape.model import ModelArch

ITEM = 5  # words: first token, tokens, slot that is read (-1: zeros), first cut, cuts
CUT = 4  # words: first token of its item, tokens up to here, slot that is read, slot to write

Ints = NDArray[np.int32]


class Cache:
    """All blocks, and for each layer a view of its part of them.

    Attributes:
        blocks: all memory, ``[blocks, values]``.
        group_of: the group of each layer.
    """

    def __init__(
        self,
        arch: ModelArch,
        num_blocks: int,
        block_size: int,
        groups: tuple[CacheGroup, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate zeros: blocks are read whole, and zero times what was there must be zero."""
        width = block_size * values_per_token(arch, groups)
        self.blocks = torch.zeros((num_blocks, width), dtype=dtype, device=device)
        self.group_of = places(groups, arch)
        mixers = {i: arch.layers[i].known_attention for group in groups for i in group.layers}
        shapes = {
            i: (2, one.num_kv_heads, block_size, one.head_dim)
            if one.latent is None
            else (1, 1, block_size, one.key_dim)
            for i, one in mixers.items()
        }
        parts = spans(groups, {i: math.prod(shape) for i, shape in shapes.items()})
        self._of_layer = {
            i: self.blocks[:, begin:end].view(num_blocks, *shapes[i])
            for i, (begin, end) in parts.items()
        }

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(self.blocks[0].nbytes)

    def of(self, layer: int, owner: int | None) -> torch.Tensor:
        """Return what a layer reads, ``[blocks, 2, K, block_size, D]``: its own, or its owner's."""
        return self._of_layer[layer if owner is None else owner]


class States:
    """Slots of states; none where no layer keeps one. Slot s has the places 2 s and 2 s + 1.

    Attributes:
        by_layer: of each recurrent layer, its parts, ``[2 * slots, ...]`` float32.
    """

    def __init__(self, arch: ModelArch, num_slots: int, device: torch.device) -> None:
        """Allocate at least one slot: for texts that no engine reads."""
        num_slots = max(num_slots, 1)
        self.by_layer: dict[int, dict[str, Tensor]] = {}
        for index, layer in enumerate(arch.layers):
            if layer.recurrent is not None:
                parts = layer.recurrent.state_shapes(arch.hidden_size)
                self.by_layer[index] = {
                    name: torch.zeros((2 * num_slots, *shape), dtype=torch.float32, device=device)
                    for name, shape in parts.items()
                }
        self._current = np.zeros(num_slots, np.int32)  # which of the two counts

    @property
    def are_there(self) -> bool:
        """Whether any layer keeps a state."""
        return bool(self.by_layer)

    def arrays(self) -> list[Tensor]:
        """Return all arrays."""
        return [array for parts in self.by_layer.values() for array in parts.values()]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states, from and to; all are read before one is written."""
        if not pairs or not self.are_there:
            return
        old, new = (list(slots) for slots in zip(*pairs, strict=True))
        read, written = self._read(old), self._written(new)
        for array in self.arrays():
            array[written] = array[read]
        self._current[new] ^= 1

    def cut(self, work: Sequence[Work]) -> tuple[Ints, Ints]:
        """Return a step's items ``[n, ITEM]`` and cuts ``[m, CUT]``, a run for each item."""
        items, cuts, first = [], list[tuple[int, int, int, int]](), 0
        for item in work:
            count, source = len(item.tokens), self._read([item.state])[0] if item.start else -1
            ends = [(end, slot) for end, slot in item.save if slot != item.state]
            places = self._written([slot for _, slot in ends] + [item.state])
            items.append((first, count, source, len(cuts), len(places)))
            for (end, _), place in zip([*ends, (count, -1)], places, strict=True):
                cuts.append((first, end, source, place))
            first += count
        return np.array(items, np.int32), np.array(cuts, np.int32)

    def commit(self, work: Sequence[Work]) -> None:
        """Make what a step wrote count."""
        if self.are_there:
            slots = {slot for item in work for slot in (item.state, *(s for _, s in item.save))}
            self._current[list(slots)] ^= 1

    def _read(self, slots: Sequence[int]) -> list[int]:
        places: list[int] = (2 * np.array(slots) + self._current[list(slots)]).tolist()
        return places

    def _written(self, slots: Sequence[int]) -> list[int]:
        places: list[int] = (2 * np.array(slots) + 1 - self._current[list(slots)]).tolist()
        return places
