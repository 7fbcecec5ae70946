"""How a step's tokens become rows: each once, dealt to threads, attending in whole tiles."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.backends.cpu.batch import Batch, arrange
from ridgeline.backends.cpu.plan import BLOCK, MIXED_ROWS
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
    num_threads=st.integers(1, 5),
    tile=st.integers(1, 4),
    per_block=st.integers(1, 3),
)
def test_any_step(
    chunks: list[tuple[int, int]], num_threads: int, tile: int, per_block: int
) -> None:
    work, tables = make_work(chunks, 16 * per_block)
    batch = arrange(work, num_threads, tile, per_block)
    num_tokens = sum(count for _, count in chunks)
    assert len(batch.tokens) == num_tokens
    assert sorted(batch.places) == list(range(num_tokens))  # one row for each token
    assert batch.ends == np.cumsum([count for _, count in chunks]).tolist()
    i = 0
    for item, table in zip(work, tables, strict=True):
        records = [block * per_block + part for block in table for part in range(per_block)]
        for offset, token in enumerate(item.tokens):
            row = batch.places[i]
            assert batch.tokens[row] == token
            assert batch.positions[row] == item.start + offset
            first = batch.sequences[row]
            assert batch.tables[first : first + len(records)] == records
            i += 1
    if num_tokens > MIXED_ROWS:
        assert_dealt(batch, num_threads, tile)
        assert_asked_last(batch, work, num_threads)


def assert_dealt(batch: Batch, num_threads: int, tile: int) -> None:
    """Threads own the rows between them, and the items own each thread's rows."""
    bounds, item_bounds = batch.row_bounds, batch.item_bounds
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(batch.tokens), num_threads + 1)
    assert (item_bounds[0], item_bounds[-1]) == (0, len(batch.items) - 1)
    assert batch.items[-1][0] == len(batch.tokens)  # the end, which the kernels look at
    for thread in range(num_threads):
        row = bounds[thread]
        for first, count in batch.items[item_bounds[thread] : item_bounds[thread + 1]]:
            assert first == row
            assert count in (1, tile)
            rows = slice(first, first + count)
            assert len(set(batch.sequences[rows])) == 1
            assert (np.diff(batch.positions[rows]) == 1).all()
            # Blocks begin with a thread's rows; in the last layer, with those asked for.
            asked = batch.asked[thread][0]
            for begin in (bounds[thread], asked) if first >= asked else (bounds[thread],):
                place = first - begin
                assert place // BLOCK == (place + count - 1) // BLOCK
            row += count
        assert row == bounds[thread + 1]


def assert_asked_last(batch: Batch, work: tuple[Work, ...], num_threads: int) -> None:
    """What somebody asks for lies from a thread's ``asked`` row on, and little else does."""
    wanted: list[int] = []
    for item, end in zip(work, batch.ends, strict=True):
        first = end - len(item.tokens) if item.targets else end - 1 if item.seeds else end
        wanted += batch.places[first:end]
    begins, ends = [row for row, _ in batch.asked], batch.row_bounds[1:]
    asked = [row for low, high in zip(begins, ends, strict=True) for row in range(low, high)]
    assert set(wanted) <= set(asked)
    assert len(asked) <= len(wanted) + 7 * sum(bool(item.seeds) for item in work)
    for thread in range(num_threads):
        item, row = batch.asked[thread][1], begins[thread]
        assert batch.item_bounds[thread] <= item <= batch.item_bounds[thread + 1]
        assert row == ends[thread] or batch.items[item][0] == row


@given(chunks=chunks, tile=st.integers(1, 4))
def test_threads_get_like_shares(chunks: list[tuple[int, int]], tile: int) -> None:
    """No thread has more than a hand of rows more than another."""
    work, _ = make_work(chunks)
    if sum(count for _, count in chunks) > MIXED_ROWS:
        bounds = arrange(work, 3, tile, 1).row_bounds
        assert np.diff(bounds).max() - np.diff(bounds).min() <= 8


def test_a_long_prompt_is_shared_from_front_to_back() -> None:
    """Later rows look at more: each thread has as many late ones as the other."""
    work, _ = make_work([(0, 512)])
    batch = arrange(work, 2, 4, 1)
    halves = np.split(batch.positions, [batch.row_bounds[1]])
    sums = [int(half.sum()) for half in halves]
    assert abs(sums[0] - sums[1]) < 0.05 * sum(sums)
    assert {count for _, count in batch.items[:-1]} == {4}


def test_decodes_attend_one_by_one() -> None:
    work, _ = make_work([(i, 1) for i in range(70)])
    batch = arrange(work, 2, 4, 1)
    assert {count for _, count in batch.items[:-1]} == {1}
    assert batch.row_bounds == [0, 35, 70]
