"""Which part of the keys' bias stays out of an int8 cache.

``emit.attention`` says how it is used. This module knows arrays, not kernels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.layout.shapes import TOKENS, Heads

Floats = NDArray[np.float32]

_LARGE = 2.0
_SIDE_BY_SIDE = 4  # blocks of positions that a kernel reads together


def spreads(weight: Floats, norm: Floats) -> Floats:
    """Return how large keys are without their bias, by channel: their standard deviation.

    Args:
        weight: of the projection, ``[channels, hidden]``.
        norm: weights of the norm before it, ``[hidden]``; after it, channels are taken to be
            independent and to have a mean square of 1.
    """
    scaled = weight * norm
    size: Floats = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))
    return size


def split(heads: Heads, bias: Floats, spread: Floats) -> tuple[Floats, Floats, NDArray[np.int32]]:
    """Return the bias that stays with queries, keys and values, and what is taken out.

    Args:
        heads: shape.
        bias: of queries, keys and values, heads padded, ``[channels]``.
        spread: of keys without their bias, ``[key channels]``.

    The part taken out is ``[kv heads, first and second channels of pairs]``. The pairs are, for
    each K/V head, their number, then their indices. A pair is among them if its bias is larger than
    the middle one of the head's keys without theirs.
    """
    stays, half = bias.copy(), heads.half
    keys = stays[heads.num_heads * heads.size :][: heads.num_kv_heads * heads.size]
    keys = keys.reshape(heads.num_kv_heads, heads.size)
    keys[:, 2 * half :] = 0  # the same for all keys, and so for all scores of a query
    spread = spread.reshape(keys.shape)
    sizes = np.hypot(spread[:, :half], spread[:, half : 2 * half])
    biases = np.hypot(keys[:, :half], keys[:, half : 2 * half])
    apart = np.zeros((heads.num_kv_heads, 2 * half), np.float32)
    pairs = np.zeros((heads.num_kv_heads, 1 + half), np.int32)
    for head, size in enumerate(sizes):
        known = size[size > 0]  # neither padding nor damaged
        middle = np.median(known) if len(known) else 0
        large = np.flatnonzero(biases[head] > _LARGE * middle)
        pairs[head, 0], pairs[head, 1 : 1 + len(large)] = len(large), large
        for channels in (large, half + large):
            apart[head, channels] = keys[head, channels]
            keys[head, channels] = 0
    return stays, apart, pairs


def rope_by_pair(heads: Heads, cos: Floats, sin: Floats) -> Floats:
    """Return the rope tables by pairs, ``[cosines and sines, half, positions]``, zero behind."""
    if not heads.splits_key_bias:
        return np.zeros((2, 1, 0), np.float32)
    positions, pairs = cos.shape
    length = (-(-positions // TOKENS) + _SIDE_BY_SIDE) * TOKENS
    out = np.zeros((2, heads.half, length), np.float32)
    out[:, :pairs, :positions] = cos.T, sin.T
    return out
