"""What the first layer reads of a row, and biases of scores by distance: nothing of other rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ridgeline.backends.inputs import FirstInputs, biases_by_distance, segments
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Work
from tests.tiny import PLAIN

_ALL = Sampling(SamplingParams(), 0, ())
SEPARATOR = 9


def work(*tokens: int, start: int = 0) -> Work:
    return Work((0, 0), start, tokens, (0,), (), _ALL, (), ())


def test_segments_change_behind_the_first_separator() -> None:
    items = (work(5, 9, 6, 9), work(1, 2), work(9, 1))
    assert [*segments(items, SEPARATOR)] == [0, 0, 1, 1, 0, 0, 0, 1]


def test_rows_in_any_order_are_normed_scaled_and_get_positions_and_segments() -> None:
    arch = replace(
        PLAIN, embed_scale=2.0, position_rows=12, position_offset=1, num_segments=2,
        separator=SEPARATOR,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    width = arch.hidden_size + 3  # with padding
    table, rows = rng.random((12, width), np.float32), rng.random((5, width), np.float32)
    inputs = FirstInputs(arch, table, lambda channels: channels + np.float32(1))
    items = work(5, 9, 6), work(1, 2, start=2)
    places = [1, 2, 3 + 6, 3, 4]  # of tokens: behind the offset, those of the second half
    wanted = rows.copy()
    wanted[:, : arch.hidden_size] += np.float32(1)
    wanted = wanted * np.float32(2) + table[places]
    for row_of_token in ([0, 1, 2, 3, 4], [3, 0, 4, 1, 2]):
        found, positions = np.empty_like(rows), np.empty(5, np.intp)
        found[row_of_token], positions[row_of_token] = rows, [0, 1, 2, 2, 3]
        inputs.make(found, positions, items, row_of_token)
        assert np.array_equal(found[row_of_token], wanted)


def test_a_model_without_any_of_them_reads_the_rows_as_they_are() -> None:
    rows = np.ones((2, PLAIN.hidden_size), np.float32)
    FirstInputs(PLAIN, None, None).make(rows, [0, 1], (work(1, 2),))
    assert np.array_equal(rows, np.ones_like(rows))


# --- biases by distance -------------------------------------------------------------------------


def test_buckets_grow_with_the_distance() -> None:
    """The first distance of each bucket of one side, as T5 and MPNet have them."""
    buckets = np.arange(32, dtype=np.float32)[:, None]
    (row,) = biases_by_distance(buckets, 300)
    half = len(row) // 2
    before, behind = row[half::-1], row[half:]
    starts = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert [int(np.flatnonzero(before == i)[0]) for i in range(16)] == starts
    assert [int(np.flatnonzero(behind == 16 + i)[0]) for i in range(1, 16)] == starts[1:]
    assert before[-1] == 15
    assert behind[-1] == 31


def test_each_head_has_its_own() -> None:
    weights = np.random.default_rng(3).normal(0, 1, (32, 5)).astype(np.float32)
    found = biases_by_distance(weights, 20)
    assert found.shape == (5, 2 * (20 + 16))
    np.testing.assert_array_equal(found[:, 36], weights[0])
    np.testing.assert_array_equal(found[:, 36 - 9], weights[8])
    np.testing.assert_array_equal(found[:, 36 + 30], weights[16 + 11])
