"""Records of the cache: what rope leaves in them, and how kernels of attention walk over them.

Rope leaves a rotated head: its query in a row, its keys and values in a record. ``attention`` has
the layout.

Where kernels walk over the records of a sequence, ``records`` is where record 0 of this layer and
head is, ``stride`` the bytes from block to block, ``table`` the sequence's blocks (i32) from the
first visible one on, and ``count`` how many. Attention over bytes and over floats share that, and
how rows share registers.
"""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.backends.cpu.kernels.ir import (
    F16,
    I8,
    I32,
    I64,
    Function,
    Value,
    maximum,
    minimum,
    vec,
)
from ridgeline.backends.cpu.kernels.kernel import Kernel
from ridgeline.backends.cpu.kernels.narrow_values import store_narrow_values
from ridgeline.backends.cpu.kernels.rows import FLOATS, largest_of, scale_to_bytes, to_integers
from ridgeline.backends.cpu.layout.shapes import TOKENS, AttentionLayout

WALK = ("records", "stride", "table", "count")
PLANES_OF = 4  # records whose probabilities lie together
QUADS_APART = 4 * PLANES_OF


def scores(queries: int) -> Kernel:
    """Return the kernel for scores of this many rows of queries, each with all heads of a group."""
    return Kernel(f"scores_{queries}", ("query", *WALK, "kv_head", "out", "out_stride"))


def weighted_values(queries: int) -> Kernel:
    """Return the kernel for weighted sums of values (the PV product), for all rows of a tile.

    ``out`` is this group's first head, ``out_stride`` the bytes from a query's row to the next.
    """
    planes = ("planes", "plane_stride")
    return Kernel(f"weighted_values_{queries}", (*planes, *WALK, "scales", "out", "out_stride"))


def record_at(fn: Function, records: Value, stride: Value, table: Value, index: Value) -> Value:
    """Return the address of a sequence's ``index``-th visible record."""
    return records + fn.load(table + index * 4, I32, 4).signed(I64) * stride


def plane_at(row: Value, block: Value, plane: int) -> Value:
    """Return where a row has a record's first four probabilities in a plane of bytes.

    The next four are ``QUADS_APART`` bytes behind. A plane has 64 tokens side by side, as many as a
    matrix tile multiplies at once: the first four of each of ``PLANES_OF`` records, and so on.
    """
    group, place = block // PLANES_OF, block & (PLANES_OF - 1)
    return row + group * (2 * 64) + place * 4 + plane * 64


def row_parts(
    heads: AttentionLayout, num_rows: int, sums_per_vector: int
) -> list[tuple[range, int]]:
    """Cut rows into parts whose sums fit the registers; with each, vectors side by side.

    As many vectors as go: a row's factor is loaded once for all of them.
    """
    vectors = heads.size // 16
    wide = max(w for w in (4, 3, 2, 1) if vectors % w == 0)
    size = 24 // sums_per_vector // wide
    return [(range(low, min(low + size, num_rows)), wide) for low in range(0, num_rows, size)]


def rotated(
    fn: Function, heads: AttentionLayout, x: list[Value], cos: Value, sin: Value
) -> list[Value]:
    """Return a head's vectors after rope (Su et al., 2021)."""
    pairs = heads.half // 16
    first, second, rest = x[:pairs], x[pairs : 2 * pairs], x[2 * pairs :]
    c = [fn.load(cos + 64 * i, FLOATS, 4) for i in range(pairs)]
    s = [fn.load(sin + 64 * i, FLOATS, 4) for i in range(pairs)]
    turned = [a * c[i] - b * s[i] for i, (a, b) in enumerate(zip(first, second, strict=True))]
    turned += [b * c[i] + a * s[i] for i, (a, b) in enumerate(zip(first, second, strict=True))]
    return turned + rest


def store_query(
    fn: Function, heads: AttentionLayout, x: list[Value], query: Value, head: Value
) -> None:
    """Store a head's query in its row, times the scale of scores."""
    softmax_scale = heads.attention.score_scale
    if not heads.is_quantised:
        for i, value in enumerate(x):
            fn.store(value * softmax_scale, query + head * (heads.size * 4) + 64 * i, 4)
        return
    target = query + head * heads.size
    act_scales = query + heads.num_heads * heads.size + head * (8 * heads.spans)
    for span, (first, vectors) in enumerate(_spans(heads, x)):
        scale, inverse = scale_to_bytes(largest_of(vectors))
        total = fn.value(0, I32)
        for i, value in enumerate(vectors, start=first):
            integers = to_integers(value, inverse)
            fn.store(integers.signed(I8), target + 16 * i, 1)
            total = total + integers.reduce(lambda a, b: a + b)
        fn.store(scale * softmax_scale, act_scales + 8 * span, 4)
        fn.store(total * -128, act_scales + 8 * span + 4, 4)


def _spans(heads: AttentionLayout, x: list[Value]) -> Iterator[tuple[int, list[Value]]]:
    """Yield the vectors that share a scale, with the index of the first."""
    wide = heads.span // 16
    for first in range(0, len(x), wide):
        yield first, x[first : first + wide]


def store_keys(
    fn: Function, heads: AttentionLayout, k: list[Value], record: Value, token: Value
) -> None:
    """Store a token's key in its record."""
    if not heads.is_quantised:
        for i, value in enumerate(k):
            key = _as_cached(heads, value)
            for j in range(16):
                at = ((16 * i + j) * TOKENS + token) * heads.value_bytes
                fn.store(key.lane(j), record + at, heads.value_bytes)
        return
    scales = record + heads.key_scales_at + token * 4
    for span, (first, vectors) in enumerate(_spans(heads, k)):
        scale, inverse = scale_to_bytes(largest_of(vectors))
        fn.store(scale, scales + 64 * span, 4)
        for i, value in enumerate(vectors, start=first):
            unsigned = to_integers(value, inverse).signed(I8) ^ -128
            quads = unsigned.bits(vec(I32, 4))
            for j in range(4):
                fn.store(quads.lane(j), record + (4 * i + j) * 64 + token * 4, 4)


def store_values(
    fn: Function, heads: AttentionLayout, v: list[Value], record: Value, token: Value
) -> None:
    """Store a token's value in its record."""
    if not heads.is_quantised:
        size = heads.value_bytes
        row = record + heads.values_at + token * (heads.size * size)
        for i, value in enumerate(v):
            fn.store(_as_cached(heads, value), row + 16 * size * i, size)
        return
    scale, inverse = scale_to_bytes(largest_of(v))
    fn.store(scale, record + heads.scales_at + token * 4, 4)
    if heads.has_narrow_values:
        store_narrow_values(fn, heads, v, inverse, record, token)
        return
    # Single bytes: the four tokens of a word may belong to different threads.
    column = record + heads.values_at + (token >> 2) * (heads.size * 4) + (token & 3)
    for i, value in enumerate(v):
        signed = to_integers(value, inverse).signed(I8)
        for j in range(16):
            fn.store(signed.lane(j), column + (16 * i + j) * 4, 1)


def _as_cached(heads: AttentionLayout, x: Value) -> Value:
    """Return floats as the cache has them.

    Only finite values: a block is read whole, later by its next owner, and 0 times infinity is not
    a number.
    """
    narrow = heads.kv_cache_dtype == "f16"
    most = 65504.0 if narrow else 3.4028234663852886e38
    x = maximum(minimum(x, most), -most)
    return x.signed(F16) if narrow else x
