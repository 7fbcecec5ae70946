"""Cosines and sines of positions as kernels read them, and what multiplies queries there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.layout.shapes import Sizes
from ridgeline.model.files.rope.tables import query_scales, rope_tables
from ridgeline.model.shape.model import ModelArch
from ridgeline.model.shape.rope import Rope

Floats = NDArray[np.float32]


def tables_of_ropes(
    arch: ModelArch, sizes: Sizes, max_model_len: int
) -> dict[tuple[Rope | None, int], tuple[Floats, Floats, Floats]]:
    """Return the tables of each rope, by it and the pairs of a head.

    They are cosines and sines, ``[positions, pairs]``, where nothing turns 1 and 0, and what
    queries are multiplied by, ``[positions]``: empty where that is nothing.
    """
    tables: dict[tuple[Rope | None, int], tuple[Floats, Floats, Floats]] = {}
    for layer, kind in zip(arch.layers, sizes.layers, strict=True):
        if layer.attention is None:
            continue
        rope, half = key = layer.attention.rope, kind.heads.half
        if key in tables:
            continue
        shape = (max_model_len, half)
        cos, sin = np.ones(shape, np.float32), np.zeros(shape, np.float32)
        scales = np.zeros(0, np.float32)
        if rope:
            padding = ((0, 0), (0, half - rope.dim // 2))
            cos, sin = rope_tables(rope, max_model_len)
            cos, sin = np.pad(cos, padding), np.pad(sin, padding)
            if rope.query_growth:
                scales = query_scales(rope, max_model_len)
        tables[key] = cos, sin, scales
    return tables
