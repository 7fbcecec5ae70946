"""A step's work as flat arrays: rows dealt to threads, and what attends together.

Rows are tokens. Below four they stay in order. Otherwise they are dealt to the threads in turns,
a few of one sequence at a time, so that the later rows of a long prompt, which have more to look
at, are shared evenly. Everything here is plain arrays; it knows no addresses and no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    places: NDArray[np.intp]  # row of the i-th token, in the order of the work
    ends: NDArray[np.intp]  # index behind each work item's last token, in that order


def arrange(work: tuple[Work, ...], num_threads: int, tile: int, records_per_block: int) -> Batch:
    """Deal the tokens of a step to ``num_threads``; ``tile`` consecutive ones can attend together.

    A block of the cache is ``records_per_block`` records, which tables name one by one.
    """
    tables: list[int] = []
    sequences: list[int] = []
    first = 0
    for item in work:
        sequences.append(first)
        tables += item.table
        first += len(item.table) * records_per_block
    # Kernels look ahead of a row's blocks in the next row's table, which may be shorter.
    tables += [0] * max(len(item.table) for item in work)
    tables_of = np.array(tables, np.int32)
    if records_per_block > 1:
        records = tables_of[:, None] * records_per_block + np.arange(records_per_block)
        tables_of = records.reshape(-1).astype(np.int32)
    tokens = np.array([token for item in work for token in item.tokens])
    if len(tokens) <= COLUMN_ROWS:
        return _in_order(work, tokens, sequences, tables_of, num_threads)
    counts = np.array([len(item.tokens) for item in work])
    ends = counts.cumsum()
    of_item = np.repeat(np.arange(len(work)), counts)
    offset = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    positions = (np.array([w.start for w in work])[of_item] + offset).astype(np.int32)
    hand = tile * max(1, 8 // tile)  # rows dealt at once
    hands = -(-counts // hand)
    deal = (hands.cumsum() - hands)[of_item] + offset // hand
    thread = deal % num_threads
    order = np.argsort(thread, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    row_bounds = np.searchsorted(thread[order], np.arange(num_threads + 1)).astype(np.int32)
    groups = (deal * hand + offset % hand // tile)[order]
    items = _items(groups, tile, row_bounds)
    return Batch(
        tokens[order],
        positions[order],
        np.array(sequences, np.int32)[of_item[order]],
        tables_of,
        row_bounds,
        items,
        np.searchsorted(items[:-1, 0], row_bounds).astype(np.int32),
        places,
        ends,
    )


def _in_order(
    work: tuple[Work, ...],
    tokens: NDArray[np.int64],
    sequences: list[int],
    tables: Int32s,
    num_threads: int,
) -> Batch:
    """Leave a few rows as they are; without arrays where lists will do, for one stream's sake."""
    rows = [(i, item.start + j) for i, item in enumerate(work) for j in range(len(item.tokens))]
    nothing = np.zeros(num_threads + 1, np.int32)
    return Batch(
        tokens,
        np.array([position for _, position in rows], np.int32),
        np.array([sequences[i] for i, _ in rows], np.int32),
        tables,
        nothing,
        np.zeros((1, 2), np.int32),
        nothing,
        np.arange(len(rows)),
        np.array(list(accumulate(len(item.tokens) for item in work))),
    )


def _items(groups: NDArray[np.intp], tile: int, row_bounds: Int32s) -> Int32s:
    """Return what attends together: groups of ``tile`` rows in one block, or single rows."""
    rows = np.arange(len(groups))
    thread = np.searchsorted(row_bounds, rows, side="right") - 1
    block = (rows - row_bounds[thread]) // BLOCK
    starts = np.ones(len(rows), bool)
    starts[1:] = (np.diff(groups) != 0) | (np.diff(block) != 0) | (np.diff(thread) != 0)
    first = np.flatnonzero(starts)
    sizes = np.diff(first, append=len(rows))
    whole = np.repeat(sizes == tile, sizes)
    heads = starts | ~whole
    items = np.zeros((np.count_nonzero(heads) + 1, 2), np.int32)
    items[:-1, 0] = rows[heads]
    items[:-1, 1] = np.where(whole, tile, 1)[heads]
    items[-1, 0] = len(rows)
    return items
