"""Which layers share a block table: those that see equally far.

A block holds some tokens' keys and values of one group of layers. All blocks are equally large, so
layers of one reach that would need larger ones form several groups (Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention", 2023, has one table for all).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ridgeline.model.shape.model import ModelArch


class CacheGroup(NamedTuple):
    """Layers that share a block table.

    Attributes:
        window: how many last tokens any of them sees, itself included; None if all.
        layers: those that have keys and values of their own, rising.
    """

    window: int | None
    layers: tuple[int, ...]


def one_group(arch: ModelArch) -> tuple[CacheGroup, ...]:
    """Return all layers as one group that keeps all tokens."""
    return (CacheGroup(None, arch.cached_layers),)


def cache_groups(arch: ModelArch) -> tuple[CacheGroup, ...]:
    """Return the groups of a model's layers, the widest reach first.

    A block is as large as the layers of one reach need, those that need least. Models with states,
    and those that read texts whole, keep all tokens.
    """
    reaches = _reaches(arch)
    if arch.reads_whole or arch.num_state_values or not reaches:
        return one_group(arch)
    by_reach: dict[int | None, list[int]] = {}
    for layer, reach in reaches.items():
        by_reach.setdefault(reach, []).append(layer)
    sizes = {i: arch.layers[i].known_attention.cache_size for i in reaches}
    least = min(sum(sizes[i] for i in layers) for layers in by_reach.values())
    room = max(least, *sizes.values())
    of_all: list[CacheGroup] = []
    for reach in sorted(by_reach, key=lambda reach: -(reach or 1 << 62)):
        groups: list[list[int]] = [[]]
        for layer in by_reach[reach]:
            if sum(sizes[i] for i in groups[-1]) + sizes[layer] > room:
                groups.append([])
            groups[-1].append(layer)
        of_all += [CacheGroup(reach, tuple(layers)) for layers in groups]
    return tuple(of_all)


def _reaches(arch: ModelArch) -> dict[int, int | None]:
    """Return how far each layer's keys and values are seen, also by layers that read them."""
    reaches: dict[int, int | None] = {}
    for i, layer in enumerate(arch.layers):
        if layer.attention is not None:
            owner, window = layer.attention.kv_of, layer.attention.window
            place = i if owner is None else owner
            before = reaches.get(place, 0)
            reaches[place] = None if window is None or before is None else max(before, window)
    return reaches


def spans(groups: Iterable[CacheGroup], sizes: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Return where in a block each layer's part begins and ends, of ``sizes`` by layer."""
    bounds: dict[int, tuple[int, int]] = {}
    for group in groups:
        begin = 0
        for layer in group.layers:
            bounds[layer] = begin, begin + sizes[layer]
            begin += sizes[layer]
    return bounds


def places(groups: tuple[CacheGroup, ...], arch: ModelArch) -> list[int]:
    """Return the number of each layer's group: of layers without a cache that of its owner."""
    of_owner = {i: number for number, group in enumerate(groups) for i in group.layers}
    owners = [
        i if layer.attention is None or layer.attention.kv_of is None else layer.attention.kv_of
        for i, layer in enumerate(arch.layers)
    ]
    return [of_owner.get(owner, 0) for owner in owners]
