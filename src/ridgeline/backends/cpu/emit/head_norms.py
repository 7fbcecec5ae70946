"""RMS norms of queries, keys and values: over a head, or over all heads together."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.backends.cpu.emit.ir import F32, Function, Value, fma, sqrt
from ridgeline.backends.cpu.emit.rows import FLOATS
from ridgeline.backends.cpu.layout.shapes import Heads

HeadNorm = tuple[Value, Value | None]  # where its weights are, and its scale if it is known


def qk_norms(
    fn: Function, heads: Heads, row: Value, norms: Value, kv_head: Value
) -> tuple[Callable[[int], HeadNorm], Callable[[int], HeadNorm]]:
    """Return where the weights of a query's or key's norm are, and its scale if known."""
    head_bytes = heads.size * 4
    if heads.attention.qk_norm != "width":
        return lambda g: (norms, None), lambda g: (norms + head_bytes, None)
    q_bytes, k_bytes = heads.num_heads * head_bytes, heads.num_kv_heads * head_bytes
    q_scale, k_scale = (
        _scale_of_width(fn, heads, row + first, size)
        for first, size in ((0, q_bytes), (q_bytes, k_bytes))
    )
    first = norms + kv_head * (heads.group * head_bytes)
    key = norms + q_bytes + kv_head * head_bytes
    return lambda g: (first + g * head_bytes, q_scale), lambda g: (key, k_scale)


def _scale_of_width(fn: Function, heads: Heads, x: Value, num_bytes: int) -> Value:
    """Return what divides all heads by their root mean square, 16 times."""
    total = fn.var(fn.lanes(F32, [0.0] * 16))
    with fn.loop(fn.i64(num_bytes), step=64) as at:
        value = fn.load(x + at, FLOATS, 4)
        total.set(fma(value, value, total.get()))
    num_heads = num_bytes // (4 * heads.size)
    mean = total.get().reduce(lambda a, b: a + b) * (1.0 / (num_heads * heads.num_channels))
    return (1.0 / sqrt(mean + heads.eps)).splat(16)


def scale_of_head(heads: Heads, x: list[Value]) -> Value:
    """Return what divides a head by its root mean square, 16 times."""
    total = x[0] * x[0]
    for value in x[1:]:
        total = fma(value, value, total)
    mean = total.reduce(lambda a, b: a + b) * (1.0 / heads.num_channels)
    return (1.0 / sqrt(mean + heads.eps)).splat(16)
