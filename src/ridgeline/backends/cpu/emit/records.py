"""What rope leaves: a rotated head, its query in a row, its keys and values in a record.

``attention`` has the layout.
"""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.backends.cpu.emit.ir import F16, I8, I32, Function, Value, maximum, minimum, vec
from ridgeline.backends.cpu.emit.narrow_values import store_narrow_values
from ridgeline.backends.cpu.emit.rows import FLOATS, largest_of, scale_to_bytes, to_integers
from ridgeline.backends.cpu.layout.shapes import TOKENS, Heads


def rotated(fn: Function, heads: Heads, x: list[Value], cos: Value, sin: Value) -> list[Value]:
    """Return a head's vectors after rope (Su et al., 2021)."""
    pairs = heads.half // 16
    first, second, rest = x[:pairs], x[pairs : 2 * pairs], x[2 * pairs :]
    c = [fn.load(cos + 64 * i, FLOATS, 4) for i in range(pairs)]
    s = [fn.load(sin + 64 * i, FLOATS, 4) for i in range(pairs)]
    turned = [a * c[i] - b * s[i] for i, (a, b) in enumerate(zip(first, second, strict=True))]
    turned += [b * c[i] + a * s[i] for i, (a, b) in enumerate(zip(first, second, strict=True))]
    return turned + rest


def store_query(fn: Function, heads: Heads, x: list[Value], query: Value, head: Value) -> None:
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


def _spans(heads: Heads, x: list[Value]) -> Iterator[tuple[int, list[Value]]]:
    """Yield the vectors that share a scale, with the index of the first."""
    wide = heads.span // 16
    for first in range(0, len(x), wide):
        yield first, x[first : first + wide]


def store_keys(fn: Function, heads: Heads, k: list[Value], record: Value, token: Value) -> None:
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


def store_values(fn: Function, heads: Heads, v: list[Value], record: Value, token: Value) -> None:
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


def _as_cached(heads: Heads, x: Value) -> Value:
    """Return floats as the cache has them.

    Only finite values: a block is read whole, later by its next owner, and 0 times infinity is not
    a number.
    """
    narrow = heads.cache == "f16"
    most = 65504.0 if narrow else 3.4028234663852886e38
    x = maximum(minimum(x, most), -most)
    return x.signed(F16) if narrow else x
