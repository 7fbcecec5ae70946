"""Adapters in numpy: what is added to a product for the rows that have one (Hu et al., 2021)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.reference.parts import linear
from ridgeline.core.step import Work
from ridgeline.model.files.adapters import AdapterWeights
from ridgeline.model.shape.model import ModelArch

Floats = NDArray[np.float32]


class Adapted:
    """Which rows of a step have which adapter."""

    def __init__(
        self, arch: ModelArch, items: tuple[Work, ...], adapters: Mapping[int, AdapterWeights]
    ) -> None:
        """Look at a step's items, and at the adapters by their numbers."""
        self._arch = arch
        numbers = np.repeat([work.adapter for work in items], [len(work.tokens) for work in items])
        self._rows = [
            (np.flatnonzero(numbers == number), adapters[number])
            for number in dict.fromkeys(work.adapter for work in items)
            if number
        ]

    def product(
        self, layer: int, x: Floats, weight: Floats, bias: Floats | None, *names: str
    ) -> Floats:
        """Return rows ``x`` times these matrices side by side, with what adapters add."""
        out = linear(x, weight, bias)
        if not self._rows:
            return out
        shapes = self._arch.layers[layer].shapes(self._arch.hidden_size, norm_bias=False)
        begin = 0
        for name in names:
            end = begin + shapes[name][0]
            for rows, adapter in self._rows:
                part = adapter.parts.get(f"layers.{layer}.{name}")
                if part is not None:
                    out[rows, begin:end] += (x[rows] @ part.a.T) @ part.b.T
            begin = end
        return out
