"""How a step's tokens become rows: each once, assigned to threads, attending in whole tiles."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.backends.cpu.batch import Batch, arrange
from ridgeline.backends.cpu.layout.shapes import (
    MIXED_ROWS,
    ROW_BLOCK,
    TOKENS,
    mixed_rows,
    row_block,
)
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Work

NOTHING = Sampling(SamplingParams(), 0, ())


def make_work(
    chunks: list[tuple[int, int]], block_size: int = 16
) -> tuple[tuple[Work, ...], list[tuple[int, ...]]]:
    """Items of (start, number of tokens); every token is unlike any other.

    Of every third something is sampled, of every third all tokens are ranked.
    """
    items, tables, token, block = [], [], 1000, 7
    for index, (start, count) in enumerate(chunks):
        num_blocks = -(-(start + count) // block_size)
        table = tuple(range(block, block + 3 * num_blocks, 3))
        tokens = tuple(range(token, token + count))
        seeds, targets = ((7,) if index % 3 == 1 else ()), (tokens if index % 3 == 2 else ())
        items.append(Work((index, 0), start, tokens, table, seeds, NOTHING, (), targets))
        tables.append(table)
        token, block = token + count, block + 3 * num_blocks
    return tuple(items), tables


chunks = st.lists(
    st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 12), st.integers(1, 300))),
    min_size=1,
    max_size=12,
)


@given(
    chunks=chunks,
    threads=st.integers(1, 5),
    tile=st.integers(1, 16),
    shortest=st.sampled_from([2, 16]),
    per_block=st.integers(1, 3),
    row_block=st.sampled_from([ROW_BLOCK, 4 * ROW_BLOCK]),
    mixed_rows=st.sampled_from([MIXED_ROWS, 4 * MIXED_ROWS]),
)
def test_any_step(
    chunks: list[tuple[int, int]],
    threads: int,
    tile: int,
    shortest: int,
    per_block: int,
    row_block: int,
    mixed_rows: int,
) -> None:
    work, tables = make_work(chunks, 16 * per_block)
    together = min(shortest, tile), tile
    batch = arrange(work, threads, together, per_block, row_block=row_block, mixed_rows=mixed_rows)
    num_tokens = sum(count for _, count in chunks)
    assert len(batch.tokens) == num_tokens
    assert sorted(batch.row_of_token) == list(range(num_tokens))  # one row for each token
    assert batch.ends == np.cumsum([count for _, count in chunks]).tolist()
    i = 0
    for item, table in zip(work, tables, strict=True):
        records = [block * per_block + part for block in table for part in range(per_block)]
        for offset, token in enumerate(item.tokens):
            row = batch.row_of_token[i]
            assert batch.tokens[row] == token
            assert batch.positions[row] == item.start + offset
            first = batch.sequences[0][row]
            assert batch.tables[first : first + len(records)] == records
            i += 1
    if num_tokens > mixed_rows:
        assert_dealt(batch, threads, together, row_block)
        assert_asked_last(batch, work, threads)
    else:
        assert not batch.blocks


def assert_dealt(batch: Batch, threads: int, together: tuple[int, int], row_block: int) -> None:
    """Threads own the blocks between them, blocks the rows, and items each block's rows."""
    bounds, blocks = batch.block_bounds, batch.blocks
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(blocks) - 1, threads + 1)
    assert bounds == sorted(bounds)
    assert (blocks[0], blocks[-1]) == ((0, 0), (len(batch.tokens), len(batch.items)))
    for (low, item), (high, next_item) in pairwise(blocks):
        assert 0 < high - low <= row_block
        row = low
        for first, count in batch.items[item:next_item]:
            assert first == row
            assert count == 1 or together[0] <= count <= together[1]
            rows = slice(first, first + count)
            assert len(set(batch.sequences[0][rows])) == 1
            assert (np.diff(batch.positions[rows]) == 1).all()
            row += count
        assert row == high


def row_bounds(batch: Batch) -> list[int]:
    """Return where the rows of each thread begin, and at last their end."""
    return [batch.blocks[block][0] for block in batch.block_bounds]


def assert_asked_last(batch: Batch, work: tuple[Work, ...], threads: int) -> None:
    """Rows with an output lie from a thread's ``output_begins`` block on, and little else does."""
    wanted: list[int] = []
    for item, end in zip(work, batch.ends, strict=True):
        first = end - len(item.tokens) if item.targets else end - 1 if item.seeds else end
        wanted += batch.row_of_token[first:end]
    for thread, block in enumerate(batch.output_begins):
        assert batch.block_bounds[thread] <= block <= batch.block_bounds[thread + 1]
    begins, ends = [batch.blocks[block][0] for block in batch.output_begins], row_bounds(batch)[1:]
    asked = [row for low, high in zip(begins, ends, strict=True) for row in range(low, high)]
    assert set(wanted) <= set(asked)
    assert len(asked) <= len(wanted) + 15 * sum(bool(item.seeds) for item in work)


@given(widest=st.integers(1, 100_000), by_tiles=st.booleans())
def test_rows_that_all_share_fit_one_threads_buffers(widest: int, by_tiles: bool) -> None:
    assert mixed_rows(widest, by_tiles=by_tiles) <= row_block(widest, by_tiles=by_tiles)


@given(chunks=chunks, tile=st.integers(1, 4))
def test_threads_get_like_shares(chunks: list[tuple[int, int]], tile: int) -> None:
    """No thread has more than a chunk of rows more than another."""
    work, _ = make_work(chunks)
    if sum(count for _, count in chunks) > MIXED_ROWS:
        bounds = row_bounds(arrange(work, 3, (tile, tile), 1))
        assert np.diff(bounds).max() - np.diff(bounds).min() <= TOKENS


@pytest.mark.parametrize("tile", [1, 3, 4])
def test_threads_write_to_records_of_their_own(tile: int) -> None:
    """Where there are many rows, and wherever a prompt goes on."""
    work, _ = make_work([(0, 200), (7, 90), (33, 40), (16, 1)])
    batch = arrange(work, 2, (tile, tile), 1)
    bounds = row_bounds(batch)
    writers = dict[tuple[int, int], set[int]]()
    for row, (position, first) in enumerate(zip(batch.positions, batch.sequences[0], strict=True)):
        thread = sum(row >= bound for bound in bounds[1:])
        writers.setdefault((first, position // TOKENS), set()).add(thread)
    assert {len(threads) for threads in writers.values()} == {1}


def test_the_last_blocks_are_small() -> None:
    """So that a thread that is done early can help; but not so few rows that weights cost more."""
    work, _ = make_work([(0, 512)])
    sizes = np.diff([row for row, _ in arrange(work, 2, (4, 4), 1).blocks]).tolist()
    assert sizes == [64, 64, 64, 32, 32] * 2
    decodes, _ = make_work([(i, 1) for i in range(64)])
    assert [row for row, _ in arrange(decodes[1::3], 1, (4, 4), 1).blocks] == [0, 21]


def test_a_long_prompt_is_shared_from_front_to_back() -> None:
    """Later rows look at more: each thread has as many late ones as the other."""
    work, _ = make_work([(0, 512)])
    batch = arrange(work, 2, (4, 4), 1)
    halves = np.split(batch.positions, [row_bounds(batch)[1]])
    sums = [int(half.sum()) for half in halves]
    assert abs(sums[0] - sums[1]) < 0.05 * sum(sums)
    assert {count for _, count in batch.items} == {4}


def test_what_is_left_of_a_prompt_attends_together_where_fewer_may() -> None:
    """By matrix tiles, for which a number of rows takes as long as all that fit."""
    work, _ = make_work([(0, 39), (0, 1)])
    counts = {
        together: sorted(count for _, count in arrange(work, 1, together, 1).items)
        for together in ((2, 16), (16, 16), (2, 12))
    }
    assert counts == {
        (2, 16): [1, 7, 16, 16],
        (16, 16): [1] * 8 + [16, 16],
        (2, 12): [1, 3, 12, 12, 12],
    }


def test_decodes_attend_one_by_one() -> None:
    work, _ = make_work([(i, 1) for i in range(70)])
    batch = arrange(work, 2, (4, 4), 1)
    assert {count for _, count in batch.items} == {1}
    assert row_bounds(batch) == [0, 35, 70]
