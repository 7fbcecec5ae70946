"""Attention against its numpy twin, bit for bit: every cache, every group, in tiles and alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from llvmlite import ir

from ridgeline.backends.cpu.kernels.attention import emit_attention
from ridgeline.backends.cpu.kernels.tile_attention import NewUnit
from ridgeline.backends.cpu.kernels.tiles import Amx
from ridgeline.backends.cpu.layout.model_weights import rope_by_pair, split
from ridgeline.backends.cpu.layout.shapes import TOKENS, AttentionLayout, to_tile_rows
from ridgeline.model.shape.model import Attention
from tests.backends.cpu import attention_twin as twin
from tests.backends.cpu.machine import LOCAL, TARGETS, Array, at, build, same_bits

LENGTH, MAX_BLOCKS = 100, 9
GARBAGE = 51.25
NONE = 1 << 40


def heads_of(
    num_heads: int = 3,
    num_kv_heads: int = 1,
    half: int = 16,
    rest: int = 0,
    num_channels: int = 32,
    grows: bool = False,
    **of_attention: Any,
) -> AttentionLayout:
    """Heads over a cache of int8."""
    attention = Attention(num_heads, num_kv_heads, num_channels, rope=None, **of_attention)
    return AttentionLayout(attention, num_kv_heads, half, rest, num_channels, "int8", 1e-5, grows)


SHAPES = {
    "group 3": heads_of(),
    "group 1, padded": heads_of(2, 2, num_channels=24),
    "group 4, partial rope": heads_of(8, 2, rest=16, num_channels=44),
    "group 7, biases": heads_of(14, 2, half=32, num_channels=64, qkv_bias=True),
    "group 8, norms": heads_of(8, half=48, num_channels=96, qk_norm="head"),
    "group 2, norms behind rope": heads_of(4, 2, qk_norm="head", norm_turned=True, grows=True),
    "group 2, sinks, slopes": heads_of(4, 2, sinks=True, slopes=(0.5, 0.2, 0.1, 0.03)),
}
WIDE = {"group 1, wide": heads_of(1, half=128, num_channels=256)}
# As group 4, which compiles for half a minute where a processor has no instruction for it.
NARROW = {"group 2, partial rope": heads_of(4, 2, rest=16, num_channels=44)}
# What is built on which processor: everything here, and one of each elsewhere.
CASES = [("host", shape, "int8") for shape in SHAPES]
CASES += [
    ("host", shape, kind)
    for shape in [*list(SHAPES)[::2], "group 2, sinks, slopes"]
    for kind in ("f16", "f32")
]
CASES += [("host", shape, "int8-int4") for shape in SHAPES | WIDE]
CASES += [(name, "group 3", kind) for kind in ("int8", "int8-int4") for name in LOCAL[1:-1]]
CASES += [(LOCAL[-1], "group 2, partial rope", "int8-int4")]
CASES += [(LOCAL[-1], "group 1, padded", "f16")]
CASES += [("arm-i8mm", "group 4, partial rope", "int8"), ("arm", "group 8, norms", "f16")]
CASES += [(name, "group 3", "int8-int4") for name in ("arm-dotprod", "arm-i8mm")]


def channels(heads: AttentionLayout, rng: np.random.Generator, *shape: int) -> Array:
    """Random heads, zero where they are padding."""
    out = rng.normal(0, 1, (*shape, heads.size))
    rest = heads.size - 2 * heads.half
    pairs = (heads.num_channels - rest + (rest and 4)) // 2
    out[..., pairs : heads.half] = out[..., heads.half + pairs : 2 * heads.half] = 0
    if rest:
        out[..., heads.size - 4 :] = 0
    return out.astype(np.float32)


@dataclass
class Text:
    """A sequence of activations, and what is made of them."""

    heads: AttentionLayout
    rows: Array  # [tokens, all heads, channels]: queries, keys, values
    bias: Array
    norms: Array
    cos: Array
    sin: Array
    growth: Array  # [tokens]: what queries are multiplied by
    q: Array
    key_bias: Array  # [kv heads, first and second channels of pairs]: what is kept out of keys
    pairs: Array  # [kv heads, how many and which]
    sinks: Array  # [heads]
    cached: twin.Cached
    known: dict[tuple[int, int | None], Array] = field(default_factory=dict)


@cache
def text(shape: str, kind: str) -> Text:
    heads, rng = (
        replace((SHAPES | WIDE | NARROW)[shape], kv_cache_dtype=kind),
        np.random.default_rng(len(shape)),
    )
    total = heads.num_heads + 2 * heads.num_kv_heads
    rows, bias = channels(heads, rng, LENGTH, total), channels(heads, rng, total)
    rows[7, :, :] = 0  # a token without anything
    rows[9] *= 30
    norms = 1 + channels(heads, rng, 2) / 4
    angles = np.arange(LENGTH)[:, None] / 10.0 ** np.linspace(0, 3, heads.half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    key_bias, pairs = np.zeros((2, 2)), np.zeros((2, 1), np.int32)
    if heads.splits_key_bias:
        bias[heads.num_heads + 1, heads.half - 3] = 150  # what breaks int8 keys
        bias[heads.num_heads :, 5] = 40
        spread = np.ones(heads.num_kv_heads * heads.size, np.float32)
        flat, key_bias, pairs = split(heads, bias.ravel(), spread)
        assert pairs[:, 0].tolist() == [1, 4]
        bias = flat.reshape(bias.shape)
    x = rows + bias if heads.attention.qkv_bias else rows
    q, k, v = np.split(x, [heads.num_heads, heads.num_heads + heads.num_kv_heads], axis=1)
    q = twin.rotated(heads, q, norms[0], cos, sin)
    growth = np.linspace(1, 2, LENGTH, dtype=np.float32)
    q = q * growth[:, None, None] if heads.grows else q
    k = twin.rotated(heads, k, norms[1], cos, sin)
    return Text(
        heads, at(rows), at(bias), at(norms), cos, sin, growth, q, at(key_bias), at(pairs),
        at(np.linspace(-3, 12, heads.num_heads, dtype=np.float32)), twin.cached(heads, k, v),
    )  # fmt: skip


class Built:
    """Kernels, and a cache of which only some slots are written: the rest is garbage."""

    def __init__(self, name: str, shape: str, kind: str, unit: NewUnit | None = None) -> None:
        """Build them for a processor; with a ``unit``, several queries attend by matrix tiles."""
        self.text, self.heads = text(shape, kind), text(shape, kind).heads
        if unit is not None:
            self.heads = replace(self.heads, by_tiles=True, most_together=TOKENS)
            assert self.heads.suits_tiles

        def emit(module: ir.Module) -> None:
            emit_attention(module, TARGETS[name].processor.dot, self.heads, new_unit=unit or Amx)

        self.machine = build(emit, name)
        heads, rng = self.heads, np.random.default_rng(3)
        self.records = at(
            rng.integers(0, 256, (MAX_BLOCKS, heads.num_kv_heads, heads.record_bytes), np.uint8)
        )
        if not heads.is_quantised:  # any keys at all, and any values that a cache can have
            floats = self.records.view(f"f{heads.value_bytes}")
            keys, values = np.moveaxis(floats.reshape(-1, 2, TOKENS * heads.size), 1, 0)
            keys[:] = np.nan
            values[:] = rng.choice([-1, 1], values.shape) * twin.MOST[kind]
        else:
            self.records[:, :, heads.scales_at :].view(np.float32)[:] = np.nan
        self.rope_by_pair = rope_by_pair(heads, self.text.cos, self.text.sin)
        self.table = at(np.int32([4, 7, 0, 2, 8, 1, 3])[: -(-LENGTH // TOKENS)])
        self.queries = at(np.full((LENGTH, heads.query_bytes), 200, np.uint8))
        self.non_finite = np.zeros(1, np.float32)
        self.length = 0

    def store(self, position: int, rows: Array | None = None) -> None:
        """Let a token's queries be made, and its keys and values be kept."""
        known, heads = self.text, self.heads
        block, token = self.table[position // TOKENS], position % TOKENS
        row = at((known.rows if rows is None else rows)[position])
        for kv_head in range(heads.num_kv_heads):
            self.machine.run(
                "rope", row, known.bias, known.key_bias[kv_head],
                at(known.cos[position]), at(known.sin[position]), at(known.growth[position:]),
                known.norms, self.queries[position], self.records[block, kv_head], token, kv_head,
                self.non_finite,
            )  # fmt: skip

    def grow(self, length: int) -> None:
        """Store tokens until there are so many."""
        for position in range(self.length, length):
            self.store(position)
        self.length = max(length, self.length)

    def attend(self, position: int, count: int = 1, window: int | None = None) -> Array:
        """Return what ``count`` queries from a position on see, ``[count, heads, channels]``."""
        heads, reach = self.heads, window or NONE
        begin = max(0, position - reach + 1) // TOKENS * TOKENS
        blocks = -(-(position + count - begin) // TOKENS)
        num_rows, stride = count * heads.group, self.records[0].nbytes
        width, by_tiles = -(-blocks // 4) * 64 + 32, heads.by_tiles and count > 1
        room_rows = to_tile_rows(num_rows) if by_tiles else num_rows
        scratch = at(np.full(heads.tile_room.num_bytes, 77, np.uint8))
        of_many = (count,) if by_tiles else ()
        out = at(np.full((count, heads.num_heads + 1, heads.size), GARBAGE, np.float32))
        flat = self.records.reshape(-1)
        for kv_head in range(heads.num_kv_heads):
            walk = (
                flat[kv_head * heads.record_bytes :], stride, self.table[begin // TOKENS :], blocks
            )  # fmt: skip
            scores = at(np.full((room_rows, width), GARBAGE, np.float32))
            planes = at(np.full((room_rows, width * 2), 77, np.uint8))
            scales = at(np.zeros(num_rows, np.float32))
            run = self.machine.run
            source, kernel = self.queries[position : position + count], f"scores_{count}"
            if by_tiles:
                kernel = "tile_scores"
            at_last = (scratch,) if by_tiles else ()
            run(kernel, source, *walk, kv_head, *of_many, scores, scores.strides[0], *at_last)
            if heads.splits_key_bias:
                run(
                    "add_key_bias", source, self.text.pairs[kv_head],
                    self.rope_by_pair[0, 0, begin:], self.rope_by_pair.strides[1], blocks,
                    kv_head, count, scores, scores.strides[0],
                )  # fmt: skip
            for n in range(count):
                high, row = position + n + 1 - begin, n * heads.group
                low = max(0, high + begin - reach) - begin
                run(
                    "softmax", scores[row:], scores.strides[0], low, high, blocks, walk[0], stride,
                    walk[2], planes[row:], scales[row:], self.text.sinks[kv_head * heads.group :],
                    0, kv_head,
                )  # fmt: skip
            weights = planes if heads.is_quantised else scores
            group = out.reshape(count, -1)[:, kv_head * heads.group * heads.size :]
            part = at(group)
            kernel = "tile_values" if by_tiles else f"weighted_values_{count}"
            run(
                kernel, weights, weights.strides[0], *walk, scales, *of_many,
                part, part.strides[0], *at_last,
            )  # fmt: skip
            group[:] = part
        assert (out[:, -1] == GARBAGE).all()
        return out[:, :-1]

    def wanted(self, position: int, count: int = 1, window: int | None = None) -> Array:
        """Return the same from the twin, which is asked once for each."""
        for i in range(position, position + count):
            if (i, window) not in self.text.known:
                self.text.known[i, window] = twin.attend(
                    self.heads, self.text.q[i], self.text.cached, i, window, self.text
                )
        return np.stack([self.text.known[i, window] for i in range(position, position + count)])


@pytest.fixture(scope="module", params=CASES, ids=lambda case: ", ".join(case))
def attention(request: pytest.FixtureRequest) -> Built:
    return Built(*request.param)


# --- rope and store ----------------------------------------------------------------------------


def assert_stored(attention: Built, length: int) -> None:
    got = twin.layout(attention.heads, attention.records, attention.table.tolist(), length)
    for name, wanted in vars(attention.text.cached).items():
        if wanted is not None:
            assert same_bits(np.ascontiguousarray(getattr(got, name)), wanted[:length]), name


def test_what_is_stored(attention: Built) -> None:
    attention.grow(21)
    assert_stored(attention, 21)
    assert not attention.non_finite.any()


def test_a_slot_is_written_and_nothing_else(attention: Built) -> None:
    """Neighbours in a word may belong to another thread at that moment."""
    attention.grow(21)
    before = attention.records.copy()
    attention.store(17, np.roll(attention.text.rows, 1, axis=0))
    changed = attention.records != before
    assert changed.any(axis=2).sum() == attention.heads.num_kv_heads
    attention.store(17)
    assert same_bits(attention.records, before)


def test_the_query(attention: Built) -> None:
    attention.grow(3)
    heads, softmax_scale = attention.heads, np.float32(attention.heads.num_channels**-0.5)
    for position in (0, 2):
        q, row = attention.text.q[position], attention.queries[position]
        if not heads.is_quantised:
            got = row.view(np.float32)[: q.size].reshape(q.shape)
            assert same_bits(np.ascontiguousarray(got), q * softmax_scale)
            continue
        wanted, scale = twin.spans_to_bytes(heads, q)
        assert row[: q.size].view(np.int8).tolist() == wanted.ravel().tolist()
        act_scales = row[q.size : q.size + 8 * scale.size].copy()
        assert same_bits(act_scales.view(np.float32)[::2].copy(), (scale * softmax_scale).ravel())
        sums = wanted.reshape(-1, heads.span).sum(axis=1, dtype=np.int32) * -128
        assert act_scales.view(np.int32)[1::2].tolist() == sums.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_said_and_not_kept(attention: Built, bad: float) -> None:
    heads, rows = attention.heads, attention.text.rows.copy()
    attention.grow(LENGTH if attention.machine.is_local else 21)
    before = attention.records.copy()
    for head in (0, heads.num_heads - 1, heads.num_heads, -1):  # queries, a key, a value
        channel = (17 * abs(head) + 3) % heads.size
        sick = rows.copy()
        sick[17, head, channel] = bad
        attention.non_finite[:] = 0
        attention.store(17, sick)
        assert attention.non_finite[0] == 1, (head, channel)
        if not heads.is_quantised:
            kept = attention.records[attention.table[1]].view(f"f{heads.value_bytes}")
            assert np.isfinite(kept.reshape(heads.num_kv_heads, 2, -1)[:, 1, heads.size]).all()
    attention.non_finite[:] = 0
    attention.store(17)
    assert not attention.non_finite.any()
    assert same_bits(attention.records, before)


def test_garbage_stays_garbage() -> None:
    """A value that was not finite is finite in the cache: zero times it must be zero."""
    for kind in ("f16", "f32"):
        attention = Built("host", "group 3", kind)
        rows = attention.text.rows.copy()
        rows[:, -1] = np.tile([np.nan, np.inf, -np.inf, 1e38], attention.heads.size // 4)
        for position in range(16):
            attention.store(position, rows)
        values = attention.records[attention.table[0]].view(f"f{attention.heads.value_bytes}")
        assert np.isfinite(values[0, TOKENS * attention.heads.size :]).all()
        attention.grow(5)  # the next owner of the block
        assert same_bits(attention.attend(4), attention.wanted(4))


# --- what a query sees -------------------------------------------------------------------------

POSITIONS = {
    None: [0, 1, 2, 15, 16, 17, 30, 31, 32, 47, 64, 80, 99],
    1: [0, 16, 99],
    5: [3, 18, 99],
    16: [15, 16, 99],
    17: [31, 32, 99],
}


@pytest.mark.parametrize("window", POSITIONS)
def test_one_query(attention: Built, window: int | None) -> None:
    """With the cache just as long as it must be: what is behind is garbage, also its scales."""
    few = [16, 20] if window in (None, 5) else []
    for position in POSITIONS[window] if attention.machine.is_local else few:
        attention.grow(position + 1)
        got = attention.attend(position, window=window)
        assert same_bits(got, attention.wanted(position, window=window)), position


@pytest.mark.parametrize("window", [None, 5, 17])
def test_a_tile_of_queries_sees_what_each_sees_alone(attention: Built, window: int | None) -> None:
    tile = attention.heads.tile
    assert tile > 1
    attention.grow(LENGTH if attention.machine.is_local else 21)
    here = attention.machine.is_local
    for position in [0, 15, 30, LENGTH - tile] if here else [15] * (window == 5):
        together = attention.attend(position, tile, window)
        assert same_bits(together, attention.wanted(position, tile, window)), position
        for i in range(tile if here else 0):
            assert same_bits(together[i], attention.attend(position + i, window=window)[0])


def test_the_twin_is_attention(attention: Built) -> None:
    """The twin above follows the kernels; this follows the mathematics, in float64."""
    heads, known = attention.heads, attention.text
    x = (known.rows + known.bias if heads.attention.qkv_bias else known.rows).astype(np.float64)
    v = x[:, heads.num_heads + heads.num_kv_heads :]
    position, window = 60, 33
    seen = slice(position - window + 1, position + 1)
    keys = known.cached.keys
    if heads.splits_key_bias:
        apart = np.broadcast_to(known.key_bias, (LENGTH, *known.key_bias.shape))
        keys = keys + twin.rotated(heads, apart, known.norms[1], known.cos, known.sin)
    for head in range(heads.num_heads):
        kv_head = head // heads.group
        scores = keys[seen, kv_head] @ known.q[position, head]
        scores = scores * heads.num_channels**-0.5
        if heads.attention.slopes:
            scores = scores - heads.attention.slopes[head] * (position - np.arange(LENGTH)[seen])
        p = np.exp(scores)
        lost = np.exp(float(known.sinks[head])) if heads.attention.sinks else 0.0
        exact = p @ v[seen, kv_head] / (p.sum() + lost)
        got = attention.wanted(position, window=window)[0, head]
        error = np.abs(got - exact).max() / np.abs(v).max()
        assert (
            error < {"int8": 0.02, "int8-int4": 0.1, "f16": 1e-3, "f32": 1e-6}[heads.kv_cache_dtype]
        )
