"""Where keys and values lie in a block of the paged cache, for each group of layers.

All blocks are as large as the largest group needs, so any group may have any block. Of one group
each is a run of records, one for a layer and key/value head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.layout.arguments import LAYER
from ridgeline.backends.cpu.layout.shapes import Sizes
from ridgeline.model.shape.cache_groups import CacheGroup, places, spans
from ridgeline.model.shape.model import ModelArch


def part_bytes(sizes: Sizes, groups: Sequence[CacheGroup]) -> int:
    """Return the bytes of 16 tokens in a block."""
    return max(sum(sizes.layers[i].cache_bytes for i in group.layers) for group in groups)


def put_places(
    layers: NDArray[np.int64], arch: ModelArch, sizes: Sizes, groups: tuple[CacheGroup, ...]
) -> None:
    """Say in the words of each layer which group it is of, and where in a block it begins.

    A layer that reads another's keys and values has that one's place.
    """
    words = {name: i for i, name in enumerate(LAYER)}
    layers[:, words["group"]] = places(groups, arch)
    part_of = {i: sizes.layers[i].cache_bytes for group in groups for i in group.layers}
    for i, (begin, _) in spans(groups, part_of).items():
        layers[i, words["cache_at"]] = begin
    for i, layer in enumerate(arch.layers):
        if layer.attention is not None and layer.attention.kv_of is not None:
            layers[i, words["cache_at"]] = layers[layer.attention.kv_of, words["cache_at"]]


def has_unlike_records(sizes: Sizes, groups: Sequence[CacheGroup]) -> bool:
    """Return whether a block may pass between groups whose records differ.

    What is left of one's bytes need not be finite numbers in the other's places.
    """
    owners = [sizes.layers[i].heads for group in groups for i in group.layers]
    return len(groups) > 1 and len({(heads.size, heads.record_bytes) for heads in owners}) > 1
