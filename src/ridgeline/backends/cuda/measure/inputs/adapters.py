"""Adapters of several ranks beside each other, of which one leaves a matrix as it is."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.backends.cuda.measure.part import Part
from ridgeline.backends.cuda.measure.shapes import models
from ridgeline.backends.cuda.model.adapters import LoadedAdapter, load_adapter
from ridgeline.backends.cuda.step.plan import AdapterPlan
from ridgeline.model.files.adapters import MATRICES, AdapterWeights, LowRank
from ridgeline.model.shape.model import Experts, ModelArch

RANKS = {7: 8, 9: 40, 4: 64}  # by number
_LESS = 9, "k"


def adaptable(arch: ModelArch) -> dict[str, tuple[int, int]]:
    """Return the shapes of a model's matrices that can be adapted, by canonical name."""
    shapes: dict[str, tuple[int, int]] = {}
    for i, layer in enumerate(arch.layers):
        has_latent = layer.attention is None or layer.attention.latent is not None
        wanted = MATRICES[4 * has_latent : 4 if isinstance(layer.ffn, Experts) else None]
        for name, shape in layer.shapes(arch.hidden_size, norm_bias=False).items():
            if name in wanted:
                shapes[f"layers.{i}.{name}"] = shape[0], shape[1]
    return shapes


def random_adapter(shapes: dict[str, tuple[int, int]], rank: int, seed: int) -> AdapterWeights:
    """Return an adapter of matrices, whose shapes are given by canonical names."""
    random = np.random.default_rng(seed)

    def low_rank(rows: int, columns: int) -> LowRank:
        a, b = (
            random.standard_normal(shape, np.float32) for shape in ((rank, columns), (rows, rank))
        )
        return LowRank(a / np.float32(columns**0.5), b / np.float32(rank**0.5))

    return AdapterWeights(bytes([seed] * 16), {name: low_rank(*shapes[name]) for name in shapes})


def adapters(part: Part) -> tuple[dict[int, LoadedAdapter], tuple[int, ...], int]:
    """Return adapters of "q", "k" and "v" by number, what these have of outputs, and of inputs."""
    (shape,) = models(part, "llama3-8b").values()
    sizes = tuple(heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    by_number = {}
    for number, rank in RANKS.items():
        of_each = {
            f"layers.0.{name}": (size, shape.hidden)
            for name, size in zip("qkv", sizes, strict=True)
            if (number, name) != _LESS
        }
        weights = random_adapter(of_each, rank, number)
        by_number[number] = load_adapter(weights, 1, part.dtype, part.device)
    return by_number, sizes, shape.hidden


def plan_of(part: Part, loaded: dict[int, LoadedAdapter], slots: Tensor) -> AdapterPlan:
    """Return the plan of tokens that have the adapters of these slots; the last slot is none."""
    words = [one.words.data_ptr() for one in loaded.values()]
    return AdapterPlan(
        slot_of=slots.to(torch.int32),
        words=torch.tensor(words, device=part.device),
        max_lora_rank=max(RANKS.values()),
        numbers=list(loaded),
        loaded=loaded,
    )
