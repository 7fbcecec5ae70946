"""Latent attention (DeepSeek-V2, 2024): absorbed queries, one key, and values that are part of it.

A query head is multiplied by its part of "k_b", and attends to the latents themselves; the result
is multiplied by its part of "v_b". Both are small products in f32 of weights that stay floats, with
one order of sums, so a row's bits do not depend on how many others there are.

A record has no values: they are the channels of its keys that do not turn. Keys lie with the tokens
side by side, so a weighted sum has a lane for each token, and adds the lanes up once, at its end.
"""

from __future__ import annotations

from ridgeline.backends.cpu.kernels.float_attention import load_cached
from ridgeline.backends.cpu.kernels.ir import F16, F32, I32, Value, fma, sqrt, vec
from ridgeline.backends.cpu.kernels.kernel import Kernel, Words
from ridgeline.backends.cpu.kernels.records import (
    record_at,
    rotated,
    store_keys,
    store_query,
    weighted_values,
)
from ridgeline.backends.cpu.kernels.rows import FLOATS, largest_of
from ridgeline.backends.cpu.kernels.step_emitter import StepEmitter
from ridgeline.backends.cpu.layout.latent import LatentHeads, head_shape
from ridgeline.backends.cpu.layout.shapes import TOKENS, AttentionLayout

_ROPE = Kernel(
    "latent_rope",
    (
        "q", "absorbed", "key", "cos", "sin", "norm",
        "query", "record", "token", "group", "non_finite",
    ),
)  # fmt: skip
_PRODUCT = {name: Kernel(f"head_{name}", ("x", "weights", "out")) for name in ("k_b", "v_b")}
COMPRESSED_NORM = Kernel("latent_norm", ("x", "weight", "out"))
_WIDE = 8  # vectors of a head's product side by side
_MOST_ROWS, _CHANNELS = 6, 4  # of a weighted sum side by side
_WORDS = vec(I32, 16)


def emit_latent(module: object, heads: AttentionLayout, number: int) -> None:
    """Emit what only latent attention calls, for the module's ``number``-th shape."""
    latent = heads.latent
    assert latent is not None
    _emit_rope(module, heads, latent, number)
    for name in _PRODUCT:
        _emit_product(module, name, latent, number)
    if latent.q_rank:
        _emit_norm(module, latent, number)
    for queries in dict.fromkeys((1, heads.tile)):
        _emit_weighted_values(module, heads, latent, queries, number)


def _emit_product(module: object, name: str, latent: LatentHeads, number: int) -> None:
    """``head_k_b``, ``head_v_b``: out = a head's weights ``[in, out]`` times x, input by input."""
    fn = _PRODUCT[name].of(number).begin(module)
    x, weights, out = fn.args
    num_inputs, num_outputs = head_shape(name, latent)
    value_bytes = latent.weight_type().itemsize
    kind = FLOATS if latent.is_wide else vec(F16, 16)
    vectors = num_outputs // 16
    wide = max(w for w in range(1, _WIDE + 1) if vectors % w == 0)
    with fn.loop(vectors, step=wide) as first:
        sums = [fn.var(fn.lanes(F32, [0.0] * 16)) for _ in range(wide)]
        with fn.loop(num_inputs) as i:
            factor = fn.load(x + i * 4, F32, 4).splat(16)
            row = weights + (i * num_outputs + first * 16) * value_bytes
            for j, total in enumerate(sums):
                weight = fn.load(row + 16 * value_bytes * j, kind, value_bytes)
                weight = weight if latent.is_wide else weight.signed(F32)
                total.set(fma(weight, factor, total.get()))
        for j, total in enumerate(sums):
            fn.store(total.get(), out + (first + j) * 64, 4)
    fn.finish()


def _emit_norm(module: object, latent: LatentHeads, number: int) -> None:
    """``latent_norm``: the RMS norm of a compressed query."""
    fn = COMPRESSED_NORM.of(number).begin(module)
    x, weight, out = fn.args
    total = fn.var(fn.lanes(F32, [0.0] * 16))
    with fn.loop(fn.i64(latent.q_rank * 4), step=64) as at:
        value = fn.load(x + at, FLOATS, 4)
        total.set(fma(value, value, total.get()))
    mean = total.get().reduce(lambda a, b: a + b) * (1.0 / latent.num_q_channels)
    scale = (1.0 / sqrt(mean + latent.eps)).splat(16)
    with fn.loop(fn.i64(latent.q_rank * 4), step=64) as at:
        fn.store(fn.load(x + at, FLOATS, 4) * scale * fn.load(weight + at, FLOATS, 4), out + at, 4)
    fn.finish()


def _emit_rope(module: object, heads: AttentionLayout, latent: LatentHeads, number: int) -> None:
    """``latent_rope``: rotate a group's queries, and with the first group the key; store them.

    ``q`` is the group's first head before it is absorbed, ``absorbed`` what was made of the rest of
    each; ``norm`` is the weight of the latent's norm. If any result is not finite, the f32 at
    ``non_finite`` becomes 1.
    """
    fn = _ROPE.of(number).begin(module)
    q, absorbed, key, cos, sin, norm, query, record, token, group, non_finite = fn.args

    def load(at: Value, size: int) -> list[Value]:
        return [fn.load(at + 64 * i, FLOATS, 4) for i in range(size // 16)]

    def check(size: Value) -> None:
        with fn.when((size - size).equals(0.0).equals(0)):
            fn.store(fn.value(1.0, F32), non_finite, 4)

    size = fn.value(0.0, F32)
    for g in range(heads.group):
        x = load(q + g * (latent.q_head * 4), latent.turning)
        x += load(absorbed + g * (latent.rank * 4), latent.rank)
        x = rotated(fn, heads, x, cos, sin)
        store_query(fn, heads, x, query, group * heads.group + g)
        size = size + largest_of(x)
    check(size)
    with fn.when(group.equals(0)):
        turning, rest = load(key, latent.turning), load(key + latent.turning * 4, latent.rank)
        total = rest[0] * rest[0]
        for value in rest[1:]:
            total = fma(value, value, total)
        mean = total.reduce(lambda a, b: a + b) * (1.0 / latent.num_channels)
        scale = (1.0 / sqrt(mean + latent.eps)).splat(16)
        weights = load(norm, latent.rank)
        rest = [value * scale * weight for value, weight in zip(rest, weights, strict=True)]
        x = rotated(fn, heads, turning + rest, cos, sin)
        store_keys(fn, heads, x, record, token)
        check(largest_of(x))
    fn.finish()


def _emit_weighted_values(
    module: object, heads: AttentionLayout, latent: LatentHeads, queries: int, number: int
) -> None:
    """``weighted_values_N``; ``planes`` are the probabilities themselves, ``out`` are latents."""
    fn = weighted_values(queries).of(number).begin(module)
    planes, plane_stride, records, stride, table, count, scales, out, out_stride = fn.args
    rows = [(n, g) for n in range(queries) for g in range(heads.group)]

    def latents(record: Value, channel: Value) -> list[Value]:
        """Return some channels of 16 tokens, from this one of the key on."""
        if not heads.is_quantised:
            at = record + channel * (TOKENS * heads.value_bytes)
            step = TOKENS * heads.value_bytes
            return [load_cached(fn, heads, at + step * j) for j in range(_CHANNELS)]
        words = fn.load(record + channel * TOKENS, _WORDS, 64)
        scale_at = record + heads.key_scales_at + channel // heads.span * 64
        scale = fn.load(scale_at, FLOATS, 64)
        parts = [(words >> (8 * j)) & 255 for j in range(_CHANNELS)]
        return [(part - 128).signed(F32) * scale for part in parts]

    for low in range(0, len(rows), _MOST_ROWS):
        part = range(low, min(low + _MOST_ROWS, len(rows)))
        with fn.loop(latent.rank, step=_CHANNELS) as channel:
            zero = fn.lanes(F32, [0.0] * 16)
            sums = [[fn.var(zero) for _ in range(_CHANNELS)] for _ in part]
            with fn.loop(count) as block:
                record = record_at(fn, records, stride, table, block)
                values = latents(record, channel + latent.turning)
                for row, of_row in zip(part, sums, strict=True):
                    p = fn.load(planes + plane_stride * row + block * 64, FLOATS, 4)
                    for total, value in zip(of_row, values, strict=True):
                        total.set(fma(value, p, total.get()))
            for row, of_row in zip(part, sums, strict=True):
                n, g = rows[row]
                scale = fn.load(scales + 4 * row, F32, 4)
                at = out + out_stride * n + g * (latent.rank * 4) + channel * 4
                for j, total in enumerate(of_row):
                    fn.store(total.get().reduce(lambda a, b: a + b) * scale, at + 4 * j, 4)
    fn.finish()


# --- what a thread does with them --------------------------------------------------------------


def latent_rope(
    thread: StepEmitter, layer: Words, cache: Value, row: Value, qkv: Value, group: Value
) -> None:
    """Absorb, rotate and store a group's queries of a row, and its key with the first group."""
    fn, args, heads = thread.fn, thread.args, thread.kind.heads
    latent = heads.latent
    assert latent is not None
    columns = latent.columns(heads.num_heads)
    q = qkv + group * (heads.group * latent.q_head * 4)
    absorbed = thread.local("absorbed")
    nope, rank = head_shape("k_b", latent)
    head_bytes = nope * rank * latent.weight_type().itemsize
    with fn.loop(heads.group) as g:
        thread.of_heads(_PRODUCT["k_b"]).call(
            fn, x=q + g * (latent.q_head * 4) + latent.turning * 4,
            weights=layer["k_b"] + (group * heads.group + g) * head_bytes,
            out=absorbed + g * (rank * 4),
        )  # fmt: skip
    position, record = thread.place(layer, cache, row)
    angle = position * (heads.half * 4)
    thread.of_heads(_ROPE).call(
        fn, q=q, absorbed=absorbed, key=qkv + columns["kv_a"] * 4, cos=layer["cos"] + angle,
        sin=layer["sin"] + angle, norm=layer["kv_a_norm"],
        query=args["queries"] + row * heads.query_bytes, record=record,
        token=position & (TOKENS - 1), group=group, non_finite=args["non_finite"] + row * 4,
    )  # fmt: skip


def expand_latents(
    thread: StepEmitter, layer: Words, count: Value, group: Value, out: Value
) -> None:
    """Make a group's values of the latents that ``count`` rows of queries saw."""
    fn, heads = thread.fn, thread.kind.heads
    latent = heads.latent
    assert latent is not None
    rank, size = head_shape("v_b", latent)
    head_bytes = rank * size * latent.weight_type().itemsize
    with fn.loop(heads.group) as g, fn.loop(count) as n:
        head = group * heads.group + g
        thread.of_heads(_PRODUCT["v_b"]).call(
            fn, x=thread.local("latents") + (n * heads.group + g) * (rank * 4),
            weights=layer["v_b"] + head * head_bytes,
            out=out + n * (thread.kind.attention * 4) + g * (size * 4),
        )  # fmt: skip
