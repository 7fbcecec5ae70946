"""Final hidden states of tokens, for contrastive search: kept by block, compared exactly.

A state is what comes out of the final norm, scaled to length 1. Its channels are rounded to whole
multiples of 2^-20. So every product and every sum of a comparison is exact in float64, and a
similarity is the same in any order of summation: with any library, batch and number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.step import Step, StepOutput, Work

STATE_BYTES = 4  # of each channel
_ONE = 1 << 20


class HiddenStateCache:
    """States of the tokens whose K/V are in the cache, as far as they were asked for."""

    def __init__(self, num_blocks: int, block_size: int, hidden_size: int) -> None:
        """Keep states of ``hidden_size`` channels; memory is taken as they are written."""
        self._shape = (num_blocks, block_size, hidden_size)
        self._by_block = np.zeros((0, *self._shape[1:]), np.float32)

    @property
    def array(self) -> NDArray[np.float32]:
        """All states, ``[blocks, tokens, channels]``; empty until some are asked for."""
        return self._by_block

    def compare(
        self, step: Step, output: StepOutput, hidden: Callable[[range], NDArray[np.float32]]
    ) -> StepOutput:
        """Keep the states of a step's ``similar`` items; return its output with similarities.

        ``hidden`` returns the final states, normed, ``[tokens, channels]``, of tokens of the step;
        they are numbered in the order of its work.
        """
        self._copy(step.copies)
        if not any(item.similar for item in step.work):
            return output
        if not len(self._by_block):
            self._by_block = np.zeros(self._shape, np.float32)
        for item, end in zip(step.work, accumulate(len(w.tokens) for w in step.work), strict=True):
            if item.similar:
                self._keep(item, hidden(range(end - len(item.tokens), end)))
        compared = [i for i in output.top if step.work[i].similar]
        similarities = self._similarities([step.work[i] for i in compared]) if compared else []
        return output._replace(similarity=dict(zip(compared, similarities, strict=True)))

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of all items: the first of a step's parts is given the copies of all."""
        if copies and len(self._by_block):
            old, new = map(list, zip(*copies, strict=True))
            self._by_block[new] = self._by_block[old]

    def _keep(self, item: Work, hidden: NDArray[np.float32]) -> None:
        exact = np.nan_to_num(hidden.astype(np.float64), posinf=0.0, neginf=0.0)
        lengths = np.sqrt((exact * exact).sum(axis=1, keepdims=True))
        positions = np.arange(item.start, item.start + len(item.tokens))
        blocks = np.array(item.table)[positions // self._shape[1]]
        whole = np.rint(exact * (_ONE / np.maximum(lengths, 1e-30)))
        self._by_block[blocks, positions % self._shape[1]] = whole

    def _similarities(self, items: Sequence[Work]) -> list[float]:
        """Return the greatest cosine of each item's last state with those before it in its text.

        That of a text's first token is 0.
        """
        blocks = sorted({block for item in items for block in item.table})
        place = {block: i for i, block in enumerate(blocks)}
        states = self._by_block[blocks].astype(np.float64)
        lasts = [item.start + len(item.tokens) - 1 for item in items]
        size = self._shape[1]
        queries = [
            states[place[item.table[last // size]], last % size]
            for item, last in zip(items, lasts, strict=True)
        ]
        cosines = (states @ np.array(queries).T) / _ONE**2  # [blocks, tokens, items]
        similarities: list[float] = []
        for i, (item, last) in enumerate(zip(items, lasts, strict=True)):
            of_item = cosines[[place[block] for block in item.table], :, i].reshape(-1)
            similarities.append(float(of_item[:last].max()) if last else 0.0)
        return similarities
