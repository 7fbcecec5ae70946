"""A step's work as flat arrays: rows dealt to threads, and what attends together.

Rows are tokens. Below four they stay in order. Otherwise they are dealt to the threads, a few of
one sequence at a time, so that the later rows of a long prompt, which have more to look
at, are shared evenly. Everything here is plain arrays; it knows no addresses and no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.plan import BLOCK, COLUMN_ROWS
from ridgeline.core.step import Work

Int32s = NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """One step, by rows."""

    tokens: NDArray[np.int64]
    positions: Int32s
    sequences: Int32s  # where the row's block table begins in ``tables``
    tables: Int32s  # of all sequences, one after another
    row_bounds: Int32s  # thread t has rows row_bounds[t] .. row_bounds[t + 1]
    items: Int32s  # [n + 1, 2]: first row, and how many attend together: 1 or a whole tile
    item_bounds: Int32s  # thread t has items item_bounds[t] .. item_bounds[t + 1]
    places: list[int]  # row of the i-th token, in the order of the work
    ends: list[int]  # index behind each work item's last token, in that order


def arrange(work: tuple[Work, ...], num_threads: int, tile: int, records_per_block: int) -> Batch:
    """Deal the tokens of a step to ``num_threads``; ``tile`` consecutive ones can attend together.

    A block of the cache is ``records_per_block`` records, which tables name one by one.
    """
    # Lists, not arrays: between two steps the caches hold weights, and every numpy function that
    # has to be fetched again costs more than the loops here.
    counts = [len(item.tokens) for item in work]
    ends = list(accumulate(counts))
    few = ends[-1] <= COLUMN_ROWS
    rows = _Rows([0] * ends[-1])
    bounds, item_bounds = [0], [0]
    for hands in [_hands(counts, 1, tile)[0]] if few else _hands(counts, num_threads, tile):
        first = len(rows.tokens)
        for i, low, high in hands:
            rows.add(i, work[i], low, high, ends[i] - counts[i])
            rows.add_items(first, high - low, tile)
        bounds.append(len(rows.tokens))
        item_bounds.append(len(rows.items))
    tables, begins = _tables(work, records_per_block)
    return Batch(
        np.array(rows.tokens),
        np.array(rows.positions, np.int32),
        np.array([begins[i] for i in rows.sequences], np.int32),
        tables,
        np.array(bounds, np.int32),
        np.array([*rows.items, (ends[-1], 0)], np.int32),
        np.array(item_bounds, np.int32),
        rows.places,
        ends,
    )


@dataclass(slots=True)
class _Rows:
    """Rows as they are dealt."""

    places: list[int]
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    items: list[tuple[int, int]] = field(default_factory=list)

    def add(self, index: int, item: Work, low: int, high: int, begin: int) -> None:
        """Append tokens ``low`` up to ``high`` of an item; its first is the ``begin``-th of all."""
        row = len(self.tokens)
        self.places[begin + low : begin + high] = range(row, row + high - low)
        self.tokens += item.tokens[low:high]
        self.positions += range(item.start + low, item.start + high)
        self.sequences += [index] * (high - low)

    def add_items(self, first: int, count: int, tile: int) -> None:
        """Let the last ``count`` rows attend: whole tiles inside a block of rows, or one by one."""
        end = len(self.tokens)
        for row in range(end - count, end, tile):
            last = min(row + tile, end) - 1
            if last - row + 1 == tile and (row - first) // BLOCK == (last - first) // BLOCK:
                self.items.append((row, tile))
            else:
                self.items += [(single, 1) for single in range(row, last + 1)]


def _hands(counts: list[int], num_threads: int, tile: int) -> list[list[tuple[int, int, int]]]:
    """Deal, always to who has fewest rows: item, and first and last token of what goes together."""
    size = tile * max(1, 8 // tile)
    dealt: list[list[tuple[int, int, int]]] = [[] for _ in range(num_threads)]
    held = [0] * num_threads
    for i, count in enumerate(counts):
        for low in range(0, count, size):
            thread = held.index(min(held))
            high = min(low + size, count)
            dealt[thread].append((i, low, high))
            held[thread] += high - low
    return dealt


def _tables(work: tuple[Work, ...], records_per_block: int) -> tuple[Int32s, list[int]]:
    """Return all block tables by records, one after the other, and where each begins."""
    lengths = [len(item.table) * records_per_block for item in work]
    begins = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
    blocks = [block for item in work for block in item.table]
    # Kernels look ahead of a row's blocks in the next row's table, which may be shorter.
    blocks += [0] * max(len(item.table) for item in work)
    tables = np.array(blocks, np.int32)
    if records_per_block > 1:
        records = tables[:, None] * records_per_block + np.arange(records_per_block)
        tables = records.reshape(-1).astype(np.int32)
    return tables, begins
