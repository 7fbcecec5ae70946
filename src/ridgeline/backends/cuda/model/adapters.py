"""Adapters (LoRA; Hu et al., 2021) on the device: what rows get beside the products with weights.

An adapter takes what its own matrices need, wherever there is room, and its words say where each of
them is. A step's table has the address of the words of each adapter in it, so a captured graph may
serve any. A rank is padded with zeros to a multiple of 16, and a row has its own sums in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.backends.cuda.model.experts import meet
from ridgeline.backends.cuda.ranks.shard import Shard
from ridgeline.backends.cuda.step.plan import AdapterPlan
from ridgeline.model.files.adapters import MATRICES, AdapterWeights

Adapt = Callable[..., Tensor]  # see ``AdaptedRows.add``, without the layer
RANK_STEP = 16  # what the matrix unit multiplies at a time
WORDS = 3  # of a matrix: how many RANK_STEPs its rank has, and the addresses of A and B


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class LoadedAdapter:
    """An adapter on a device.

    Attributes:
        parts: of each adapted matrix, by ``matrix_number``: A ``[rank, in]`` and B ``[out, rank]``.
        values: the memory of them all.
        words: where each is, ``[layers * matrices, WORDS]`` int64; zeros for what is not adapted.
    """

    parts: Mapping[int, tuple[Tensor, Tensor]]
    values: Tensor
    words: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return int(self.values.nbytes + self.words.nbytes)


def matrix_number(layer: int, name: str) -> int:
    """Return the number of a matrix among those of all layers that can be adapted."""
    return layer * len(MATRICES) + MATRICES.index(name)


def padded_rank(rank: int) -> int:
    """Return the rank that a matrix takes room for."""
    return -(-rank // RANK_STEP) * RANK_STEP


def load_adapter(
    weights: AdapterWeights,
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    share: Shard | None = None,
) -> LoadedAdapter:
    """Upload an adapter, in the type of a model's activations.

    Of each B a rank has the rows of its own outputs, which ``share`` knows; A it has whole.
    """
    placed: dict[int, list[tuple[int, tuple[int, int]]]] = {}
    end, arrays = 0, list[tuple[int, Any]]()
    for name, part in weights.parts.items():
        _, layer, matrix = name.split(".")
        more = padded_rank(len(part.a)) - len(part.a)
        b = part.b if share is None else part.b[share.rows(name, len(part.b))]
        both = np.pad(part.a, ((0, more), (0, 0))), np.pad(b, ((0, 0), (0, more)))
        for array in both:
            placed.setdefault(matrix_number(int(layer), matrix), []).append((end, array.shape))
            arrays.append((end, array))
            end += -(-array.size // RANK_STEP) * RANK_STEP  # each begins where wide loads may
    host = torch.zeros(end, dtype=dtype)
    for begin, array in arrays:
        host[begin : begin + array.size] = torch.from_numpy(array).reshape(-1)
    values = host.to(device)
    words = torch.zeros((num_layers * len(MATRICES), WORDS), dtype=torch.int64)
    parts = {}
    for number, places in placed.items():
        a, b = (
            values[at : at + rows * columns].view(rows, columns) for at, (rows, columns) in places
        )
        parts[number] = a, b
        words[number] = torch.tensor([len(a) // RANK_STEP, a.data_ptr(), b.data_ptr()])
    return LoadedAdapter(parts, values, words.to(device))


class AdaptedRows:
    """Which rows of a step have which adapter."""

    def __init__(self, plan: AdapterPlan, share: Shard, ops: Any) -> None:
        """Look at a step's rows."""
        self._plan, self._share, self._ops = plan, share, ops
        self._met = meet(plan.slot_of[:, None].long(), len(plan.words))

    def add(self, layer: int, out: Tensor, x: Tensor, *names: str) -> Tensor:
        """Add to ``out``, the products of rows ``x`` with these matrices side by side; return it.

        Rows without an adapter stay as they are.
        """
        whole = self._share.whole
        shapes = whole.layers[layer].shapes(whole.hidden_size, norm_bias=False)
        sizes = tuple(
            self._share.num_rows(f"layers.{layer}.{name}", shapes[name][0]) for name in names
        )
        first = matrix_number(layer, names[0])
        self._ops.add_low_rank(out, x, self._met, self._plan, first, sizes)
        return out


def adaptation(layer: int, adapted: AdaptedRows | None) -> Adapt:
    """Return what adds to a layer's products: for a step in which some row has an adapter."""
    return not_adapted if adapted is None else partial(adapted.add, layer)


def not_adapted(out: Tensor, x: Tensor, *names: str) -> Tensor:
    """Return products as they are: no adapter changes their matrices."""
    return out
