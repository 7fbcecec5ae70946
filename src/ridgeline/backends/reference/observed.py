"""A model seen layer by layer: what its matrices read, and no more than a layer's weights kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.layer_weights import LayerWeights
from ridgeline.backends.reference.parts import linear

Floats = NDArray[np.float32]
Observe = Callable[..., Floats]  # layer, weight, rows, *names -> weight


def observed(observe: Observe) -> Callable[..., Floats]:
    """Return a product with the matrices that ``observe`` returns in place of a layer's own."""

    def product(layer: int, x: Floats, weight: Floats, bias: Floats | None, *names: str) -> Floats:
        return linear(x, observe(layer, weight, x, *names), bias)

    return product


class OneAtATime(Sequence[LayerWeights]):
    """Layers that are loaded when they are asked for; the last one is kept."""

    def __init__(self, load: Callable[[int], LayerWeights], count: int) -> None:
        self._load, self._count = load, count
        self._last: tuple[int, LayerWeights] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...

    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._last is None or self._last[0] != index:
            self._last = None  # before the next is there
            self._last = index, self._load(index)
        return self._last[1]
