"""Slots for the states of recurrent layers: their memory, and what a step says of them.

A step writes states where they are. So it cannot be computed again; what it left in the rows can
be answered from again, though, which is all that a repeated step needs: ``Done``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.arrays import aligned
from ridgeline.backends.cpu.batch import Batch
from ridgeline.backends.cpu.layout.shapes import Sizes
from ridgeline.core.step import Work


class Slots:
    """States by slot, all layers of one together: see ``layout.recurrent``.

    Attributes:
        states: ``[slots, floats]``, f32; no float where no layer keeps a state.
    """

    def __init__(self, sizes: Sizes, num_slots: int) -> None:
        """Reserve memory for at least one slot: for texts that no engine reads."""
        self.states: NDArray[np.float32] = aligned(
            (max(num_slots, 1), sizes.state_ends[-1]), np.float32
        )

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy states, from and to; all are read before one is written."""
        if pairs and self.states.size:
            old, new = map(list, zip(*pairs, strict=True))
            self.states[new] = self.states[old]


def segments(work: tuple[Work, ...]) -> list[tuple[int, int, int, int]]:
    """Return what kernels do with the tokens of a step, which are numbered in the order of work.

    First token and end, the slot that has the state before them (-1 for zeros), and the one that
    keeps it. A state to be saved is copied by a segment without tokens.
    """
    cuts = []
    first = 0
    for item in work:
        source, begin = item.state if item.start else -1, 0
        for end, slot in (*item.save, (len(item.tokens), item.state)):
            if end > begin:
                cuts.append((first + begin, first + end, source, item.state))
                source = item.state
            if slot != item.state:
                cuts.append((first + end, first + end, source, slot))
            begin = end
        first += len(item.tokens)
    return cuts


@dataclass(frozen=True, eq=False, slots=True)
class Done:
    """A step whose layers were computed, and which then failed: its work, and its rows."""

    work: tuple[Work, ...]
    batch: Batch

    def part(self, work: tuple[Work, ...]) -> Batch | None:
        """Return the rows of some of its items, in their order; None if one is another."""
        ends = [0, *accumulate(len(item.tokens) for item in self.work)]
        rows = self.batch.row_of_token
        row_of_token: list[int] = []
        for item in work:
            if item not in self.work:
                return None
            place = self.work.index(item)
            row_of_token += rows[ends[place] : ends[place + 1]]
        of_items = list(accumulate(len(item.tokens) for item in work))
        return replace(self.batch, row_of_token=row_of_token, ends=of_items)
