"""Biases of scores by distance: which bucket a distance is in, and where its numbers stand."""

from __future__ import annotations

import numpy as np

from ridgeline.backends.inputs import biases_by_distance


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
