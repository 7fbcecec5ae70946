"""A model spread over the cards of one machine, its RAM and its disk, as llama.cpp can place it.

What a token reads of a part decides where the part goes: the head, attention, dense networks,
shared experts and their cache first, from the last layer on (``-ngl`` counts layers so); then the
experts of which a token meets a few, of as many last layers as there is room for (``--n-cpu-moe``
counts the layers whose experts stay in RAM). The input embedding is always in RAM: a token reads a
row of it. What RAM has no room for stays in the file, and is read when it is needed. It is
arithmetic over shapes, without speeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ridgeline.model.cost.format_bytes import Storage
from ridgeline.model.cost.shapes import Matrix, ModelShape
from ridgeline.planner.memory.ledger import EngineMemory, layer_bytes


class ModelPart(NamedTuple):
    """A part of a model that is somewhere as a whole.

    Attributes:
        layer: its layer; the head counts as one behind the last, the embedding as -1.
        is_experts: whether it is experts, of which a token meets a few.
        num_bytes: of its weights.
        read_bytes: of its weights that a token reads.
        kv_bytes: of the cache that lies beside it.
        largest_bytes: of its largest tensor.
        used_twice: a copy of the embedding, which is the head as well.
    """

    layer: int
    is_experts: bool
    num_bytes: int
    read_bytes: float
    kv_bytes: int = 0
    largest_bytes: int = 0
    used_twice: bool = False


def parts_of_model(
    shape: ModelShape, storage: Storage, total_bytes: int, memory: EngineMemory
) -> tuple[ModelPart, ...]:
    """Return the parts of a model: the embedding, layers, their experts, the head.

    Their bytes, but for a copy of the embedding, sum to ``total_bytes``: what a file has more than
    is computed is shared out.
    """
    pieces = list(_pieces(shape))

    def size_of(name: str, matrix: Matrix) -> float:
        kept = storage.of(name, matrix)
        return kept.values_bytes(matrix) + kept.scales_bytes(matrix)

    exact = [sum(size_of(*one) for one in matrices) for _, _, matrices in pieces]
    scale = total_bytes / sum(exact)
    ends = [round(scale * end) for end in accumulate(exact, initial=0.0)]
    parts = []
    for (at, is_experts, matrices), begin, end in zip(pieces, ends, ends[1:], strict=False):
        read = sum(size_of(name, one) * one.active / one.copies for name, one in matrices)
        largest = max((size_of(*one) for one in matrices), default=0.0)
        kv_bytes = 0.0
        if 0 <= at < len(shape.layers) and not is_experts:
            kv_bytes = memory.concurrency * layer_bytes(shape.layers[at].cache, memory)
        parts.append(
            ModelPart(
                at,
                is_experts,
                num_bytes=end - begin,
                read_bytes=0.0 if at < 0 else scale * read,
                kv_bytes=round(kv_bytes),
                largest_bytes=round(scale * largest),
            )
        )
    if shape.is_tied:
        copied = parts[0].num_bytes
        parts.append(ModelPart(len(shape.layers), False, copied, float(copied), used_twice=True))
    return tuple(part for part in parts if part.num_bytes)


def _pieces(shape: ModelShape) -> Iterator[tuple[int, bool, list[tuple[str, Matrix]]]]:
    """Yield what is somewhere as a whole: its layer, whether it is experts, and its matrices."""
    yield -1, False, [(f"model.{one.name}", one) for one in shape.embedding]
    for i, layer in enumerate(shape.layers):
        named = [(f"model.layers.{i}.{one.name}", one) for one in layer.matrices]
        yield i, False, [one for one in named if not _is_sparse(one[1])]
        yield i, True, [one for one in named if _is_sparse(one[1])]
    end = [(one.name if one.group == "head" else f"model.{one.name}", one) for one in shape.end]
    yield len(shape.layers), False, end


def _is_sparse(matrix: Matrix) -> bool:
    return matrix.active < matrix.copies


@dataclass(frozen=True, slots=True)
class LayerSpread:
    """Where the parts are.

    Attributes:
        num_layers: of the model, with the head as one.
        num_gpu_layers: how many of them, from the last on, are on cards: ``-ngl``.
        num_cpu_moe: the experts of how many first layers are in RAM: ``--n-cpu-moe``.
        split: of the layers on cards, how many each card has, in the order of the cards: ``-ts``.
        on_cards: the parts on each card.
        in_ram: those in RAM, or in the file where RAM has no room for them.
    """

    num_layers: int
    num_gpu_layers: int
    num_cpu_moe: int
    split: tuple[int, ...]
    on_cards: tuple[tuple[ModelPart, ...], ...]
    in_ram: tuple[ModelPart, ...]

    @property
    def num_expert_layers_in_ram(self) -> int:
        """How many layers have their experts in RAM, though the rest of them is on a card."""
        first = self.num_layers - self.num_gpu_layers
        return sum(part.is_experts and part.layer >= first for part in self.in_ram)


def spread(parts: Sequence[ModelPart], num_layers: int, rooms: Sequence[int]) -> LayerSpread:
    """Return the spread of which a token reads least from RAM.

    Args:
        parts: of the model.
        num_layers: with the head as one.
        rooms: bytes for weights and cache on each card, in the order in which they are filled.
    """
    expert_layers = [part.layer for part in parts if part.is_experts]
    for num_gpu_layers, num_cpu_moe in _choices(num_layers, expert_layers):
        placed = lay(parts, num_layers, rooms, num_gpu_layers, num_cpu_moe)
        if placed is not None:
            return placed
    raise AssertionError("no layer on any card always has room")  # the last choice


def _choices(num_layers: int, expert_layers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield layers on cards and layers whose experts are not, from the best choice on."""
    for layer in (-1, *expert_layers):
        yield num_layers, layer + 1
    most = max(expert_layers, default=-1) + 1
    for num_gpu_layers in range(num_layers - 1, -1, -1):
        yield num_gpu_layers, most


def lay(
    parts: Sequence[ModelPart], num_layers: int, rooms: Sequence[int], num_gpu_layers: int,
    num_cpu_moe: int,
) -> LayerSpread | None:  # fmt: skip
    """Return the spread that llama.cpp makes of these two flags; None where cards are too small.

    A card that is streamed to needs a buffer besides, for the largest tensor in RAM.
    """
    first = num_layers - num_gpu_layers
    in_ram: list[ModelPart] = []
    by_layer: list[list[ModelPart]] = [[] for _ in range(num_layers)]
    for part in parts:
        stays = part.layer < first or (part.is_experts and part.layer < num_cpu_moe)
        (in_ram if stays else by_layer[part.layer]).append(part)
    buffer = streamed_bytes(in_ram)
    split = [0] * len(rooms)
    by_card: list[list[ModelPart]] = [[] for _ in rooms]
    card, left = 0, rooms[0] - buffer
    for layer in range(first, num_layers):
        own = by_layer[layer]
        size = sum(part.num_bytes + part.kv_bytes for part in own)
        while size > left:
            card += 1
            if card == len(rooms):
                return None
            left = rooms[card] - buffer
        left -= size
        split[card] += 1
        by_card[card] += own
    on_cards = tuple(tuple(one) for one in by_card)
    return LayerSpread(
        num_layers, num_gpu_layers, num_cpu_moe, tuple(split), on_cards, tuple(in_ram)
    )


def streamed_bytes(in_ram: Sequence[ModelPart]) -> int:
    """Return the buffer on a card for the weights in RAM that it computes prompts with."""
    return max((part.largest_bytes for part in in_ram if part.layer >= 0), default=0)
