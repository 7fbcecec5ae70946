"""Keys and values on the device: blocks of equal bytes, each of one group of layers.

A layer's part of a block is ``[2, K, block_size, D]``: the keys of a head are contiguous, and so is
a block. With latent attention it has only keys, ``[1, 1, block_size, D]``.
"""

from __future__ import annotations

import math

import torch

from ridgeline.backends.cuda.layer_spec import values_per_token
from ridgeline.model.shape.cache_groups import CacheGroup, places, spans
from ridgeline.model.shape.model import ModelArch


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
