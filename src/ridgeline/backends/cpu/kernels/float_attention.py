"""Scores and weighted sums over a cache of floats: f32, or f16 that is widened when it is read.

The layout and the order of sums are those of ``attention``.
"""

from __future__ import annotations

from ridgeline.backends.cpu.kernels.ir import F16, F32, Function, Value, fma, vec
from ridgeline.backends.cpu.kernels.records import record_at, row_parts, scores, weighted_values
from ridgeline.backends.cpu.kernels.rows import FLOATS
from ridgeline.backends.cpu.layout.shapes import TOKENS, AttentionLayout


def load_cached(fn: Function, heads: AttentionLayout, at: Value) -> Value:
    """Return 16 values of the cache as floats."""
    if heads.kv_cache_dtype == "f32":
        return fn.load(at, FLOATS, 4)
    return fn.load(at, vec(F16, 16), 2).signed(F32)


def emit_float_scores(module: object, heads: AttentionLayout, queries: int, number: int) -> None:
    """``scores_N`` for a cache of floats."""
    fn = scores(queries).of(number).begin(module)
    query, records, stride, table, count, kv_head, out, out_stride = fn.args
    base = query + kv_head * (heads.group * heads.size * 4)
    q_at = [
        base + n * heads.query_bytes + g * heads.size * 4
        for n in range(queries)
        for g in range(heads.group)
    ]
    with fn.loop(count) as block:
        record = record_at(fn, records, stride, table, block)
        sums = [fn.var(fn.lanes(F32, [0.0] * 16)) for _ in q_at]
        with fn.loop(heads.size) as channel:
            keys = load_cached(fn, heads, record + channel * (TOKENS * heads.value_bytes))
            for total, q in zip(sums, q_at, strict=True):
                x = fn.load(q + channel * 4, F32, 4).splat(16)
                total.set(fma(keys, x, total.get()))
        for r, total in enumerate(sums):
            fn.store(total.get(), out + out_stride * r + block * 64, 4)
    fn.finish()


def emit_float_weighted_values(
    module: object, heads: AttentionLayout, queries: int, number: int
) -> None:
    """``weighted_values_N`` for a cache of floats; ``planes`` are the probabilities themselves."""
    fn = weighted_values(queries).of(number).begin(module)
    planes, plane_stride, records, stride, table, count, scales, out, out_stride = fn.args
    rows = [(n, g) for n in range(queries) for g in range(heads.group)]
    row_bytes = heads.size * heads.value_bytes
    for part, wide in row_parts(heads, len(rows), sums_per_vector=1):
        with fn.loop(heads.size // 16, step=wide) as column:
            zero = fn.lanes(F32, [0.0] * 16)
            sums = [[fn.var(zero) for _ in range(wide)] for _ in part]
            with fn.loop(count) as block:
                record = record_at(fn, records, stride, table, block) + TOKENS * row_bytes
                with fn.loop(TOKENS) as token:
                    at = record + token * row_bytes + column * (16 * heads.value_bytes)
                    step = 16 * heads.value_bytes
                    values = [load_cached(fn, heads, at + step * j) for j in range(wide)]
                    for row, row_sums in zip(part, sums, strict=True):
                        p_at = planes + plane_stride * row + block * 64 + token * 4
                        p = fn.load(p_at, F32, 4).splat(16)
                        for total, value in zip(row_sums, values, strict=True):
                            total.set(fma(value, p, total.get()))
            for row, row_sums in zip(part, sums, strict=True):
                n, g = rows[row]
                scale = fn.load(scales + 4 * row, F32, 4).splat(16)
                for j, total in enumerate(row_sums):
                    at = out + out_stride * n + g * heads.size * 4 + (column + j) * 64
                    fn.store(total.get() * scale, at, 4)
    fn.finish()
