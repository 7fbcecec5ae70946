"""States of recurrent layers in the reference backend: one array for each part and layer.

A step reads states from their slots and writes them when all of it is computed. So a step that
failed can be executed again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ridgeline.backends.reference.recurrent import Floats, Recurrence, State
from ridgeline.core.step import Work
from ridgeline.model.shape.model import ModelArch


class RecurrentStates:
    """Slots of states; none is kept of a model without recurrent layers."""

    def __init__(self, arch: ModelArch, num_slots: int) -> None:
        """Allocate ``num_slots`` slots, at least one: for texts that no engine reads."""
        num_slots = max(num_slots, 1)
        self._by_layer: dict[int, State] = {}
        for index, layer in enumerate(arch.layers):
            if layer.recurrent is not None:
                parts = layer.recurrent.state_shapes(arch.hidden_size)
                self._by_layer[index] = {
                    name: np.zeros((num_slots, *shape), np.float32) for name, shape in parts.items()
                }
        self._new: list[tuple[Floats, int, Floats]] = []  # array, slot, what to write there

    def arrays(self) -> Iterator[Floats]:
        """Yield all arrays, ``[slots, ...]``."""
        for parts in self._by_layer.values():
            yield from parts.values()

    def begin(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy slots; all are read before one is written. Forget what a failed step computed."""
        self._new.clear()
        if copies:
            old, new = map(list, zip(*copies, strict=True))
            for array in self.arrays():
                array[new] = array[old]

    def go(
        self, layer: int, items: tuple[Work, ...], rows: Floats, recurrence: Recurrence
    ) -> Floats:
        """Take a step's rows, ``[tokens, channels]``, through a layer's recurrence.

        Each item continues its own state, zeros at its beginning. Where a state is to be saved the
        rows are cut.
        """
        outputs: list[Floats] = []
        first = 0
        for work in items:
            state = {
                name: array[work.state] if work.start else np.zeros_like(array[work.state])
                for name, array in self._by_layer[layer].items()
            }
            begin = 0
            for end, slot in (*work.save, (len(work.tokens), work.state)):
                if end > begin:
                    outputs.append(recurrence(rows[first + begin : first + end], state))
                for name, array in self._by_layer[layer].items():
                    self._new.append((array, slot, state[name]))
                begin = end
            first += begin
        return np.concatenate(outputs)

    def end(self) -> None:
        """Write what a step computed."""
        for array, slot, values in self._new:
            array[slot] = values
        self._new.clear()
