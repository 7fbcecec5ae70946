"""Which part of the keys' bias stays out of an int8 cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ridgeline.backends.cpu.layout.model_weights import rope_by_pair, split, spreads
from ridgeline.backends.cpu.layout.shapes import AttentionLayout
from ridgeline.model.shape.model import Attention

ATTENTION = Attention(num_heads=2, num_kv_heads=2, head_dim=44, rope=None, qkv_bias=True)
HEADS = AttentionLayout(
    ATTENTION, 2, half=16, rest=16, num_channels=44, kv_cache_dtype="int8", eps=1e-5
)
KEYS = slice(2 * HEADS.size, 4 * HEADS.size)


def test_large_pairs_go_and_the_rest_stays() -> None:
    rng = np.random.default_rng(0)
    bias = rng.normal(0, 0.1, 6 * HEADS.size).astype(np.float32)
    keys = bias[KEYS].reshape(2, -1)
    keys[0, 3], keys[1, 16 + 5], keys[1, 7] = 100, -90, 1.5
    stays, apart, pairs = split(HEADS, bias, np.ones(2 * HEADS.size, np.float32))
    assert pairs[:, :2].tolist() == [[1, 3], [1, 5]]
    assert (apart[0, 3], apart[1, 16 + 5]) == (100, -90)
    assert np.count_nonzero(apart) == 4  # both channels of a pair
    rotating = slice(0, 2 * HEADS.half)
    whole = stays[KEYS].reshape(2, -1)[:, rotating] + apart
    assert (whole == keys[:, rotating]).all()
    others = np.ones(len(bias), bool)
    others[KEYS] = False
    assert (stays[others] == bias[others]).all()


def test_what_does_not_turn_is_dropped() -> None:
    bias = np.ones(6 * HEADS.size, np.float32)
    stays, apart, _ = split(HEADS, bias, np.ones(2 * HEADS.size, np.float32))
    assert not stays[KEYS].reshape(2, -1)[:, 2 * HEADS.half :].any()
    assert apart.shape == (2, 2 * HEADS.half)


def test_large_is_said_of_the_head_s_own_keys() -> None:
    """A bias of 3 is large for keys of 1 and small for keys of 10; padding counts for nothing."""
    bias = np.full(6 * HEADS.size, 3, np.float32)
    spread = np.ones((2, HEADS.size), np.float32)
    spread[1] = 10
    spread[:, [12, 13, 14, 15, 28, 29, 30, 31]] = 0
    _, _, pairs = split(HEADS, bias, spread.ravel())
    assert pairs[:, 0].tolist() == [16, 0]


def test_spreads_are_standard_deviations() -> None:
    rng = np.random.default_rng(1)
    weight, norm = rng.normal(0, 1, (8, 64)), rng.normal(1, 0.3, 64)
    x = rng.normal(0, 1, (200_000, 64))
    got = spreads(weight.astype(np.float32), norm.astype(np.float32))
    assert got == pytest.approx((x * norm @ weight.T).std(axis=0), rel=0.01)


def test_turns_are_the_rope_tables_by_pair() -> None:
    cos, sin = np.random.default_rng(2).normal(0, 1, (2, 50, 12)).astype(np.float32)
    found = rope_by_pair(HEADS, cos, sin)
    assert (found[0, :12, :50] == cos.T).all()
    assert (found[1, :12, :50] == sin.T).all()
    assert found.shape[2] >= 64 + 48  # blocks that are read side by side
    assert not found[:, :, 50:].any()
    assert not found[:, 12:].any()


def test_only_int8_keys_are_split() -> None:
    assert HEADS.splits_key_bias
    assert not replace(HEADS, kv_cache_dtype="f16").splits_key_bias
    for change in ({"qkv_bias": False}, {"qk_norm": "head"}):
        assert not replace(HEADS, attention=replace(ATTENTION, **change)).splits_key_bias
