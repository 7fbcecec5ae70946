"""Learnt biases of scores by the distance of two tokens, in buckets (T5; Raffel et al., 2020)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_FARTHEST = 128  # tokens, from where on all distances to one side share a bucket


def biases_by_distance(weights: Floats, max_model_len: int) -> Floats:
    """Return what each head adds to a score, ``[heads, distances]``.

    A key as far from its query as the middle is from a place has its number at that place, those
    before the query to the left; there is room for the rest of a block of 16 keys at both ends.

    Args:
        weights: ``[buckets, heads]``, half of the buckets for keys behind the query.
        max_model_len: tokens of the longest text.
    """
    half = max_model_len + 16
    distance = np.arange(-half, half)
    side = len(weights) // 2
    bucket = np.searchsorted(_starts(side), np.abs(distance), side="right") - 1
    return np.ascontiguousarray(weights[bucket + side * (distance > 0)].T)


def _starts(num_buckets: int) -> list[int]:
    """Return the distance at which each bucket of one side begins.

    Half of them have one distance each; the others grow like powers, in whole numbers.
    """
    exact = num_buckets // 2
    rest = num_buckets - exact
    starts, start = list(range(exact)), exact
    for step in range(rest):
        while start**rest * exact**step < exact**rest * _FARTHEST**step:
            start += 1
        starts.append(start)
    return starts
