"""Attention over the paged cache: rope and store, scores, softmax, and the weighted sum.

The cache is made of records, one for 16 tokens of one key/value head in one layer:

    int8  K: [D / 4][16 tokens][4] u8 (value + 128), V: [4][D][4 tokens] s8, then scales, 16 f32
          each: of the tokens' values, and of each span of channels of their keys
    int8-int4  the same with values of 4 bits: see ``narrow_values``
    f16, f32  K: [D][16 tokens], V: [16 tokens][D]

Records of latent attention have no V, and no scales of values (``latent``).

D is the padded head: the first channels of the rotating pairs, the second channels, the rest, each
padded to 16 with zeros. A row's query is D signed bytes per head, then (scale, -128 * sum) of each
span of each head; or floats. A span has 32 channels if D is a multiple of that, else 16.

Some models add a bias to keys that is a hundred times as large as what it is added to (Qwen2). The
scale of a span would follow the bias and leave a few steps for the rest, so int8 keys are stored
without it, and each score gets what it would have contributed. For a pair of channels with bias
(a, b), rotated by the angle t of the key's position, that is

    (q0 a + q1 b) cos t + (q1 a - q0 b) sin t

for the rotated query's (q0, q1): two factors per query and pair, and the rope table. Only pairs
whose bias is large are treated so. Channels that do not rotate add the same to all scores of a
query, so softmax never sees their bias and it is dropped.

A row's softmax has a fixed order: all scores, their maximum, then exponentials added up lane by
lane from its first visible block. Nothing is rescaled on the way, and what is masked is exactly
zero, so neither the tile a row is in nor the blocks around it change a bit of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ridgeline.backends.cpu.kernels.activations import softcapped
from ridgeline.backends.cpu.kernels.float_attention import (
    emit_float_scores,
    emit_float_weighted_values,
)
from ridgeline.backends.cpu.kernels.ir import (
    F32,
    I8,
    I32,
    I64,
    Function,
    Value,
    exp,
    fma,
    maximum,
    select,
    sqrt,
    to_whole,
    vec,
)
from ridgeline.backends.cpu.kernels.isa import Dot, broadcast4, dot
from ridgeline.backends.cpu.kernels.kernel import Kernel
from ridgeline.backends.cpu.kernels.latent import emit_latent
from ridgeline.backends.cpu.kernels.narrow_values import load_narrow_values, rotate_back
from ridgeline.backends.cpu.kernels.prefetch import (
    BLOCKS_AHEAD,
    emit_prefetch_next_head,
    prefetch_keys_and_values,
)
from ridgeline.backends.cpu.kernels.records import (
    PLANES_OF,
    QUADS_APART,
    plane_at,
    record_at,
    rotated,
    row_parts,
    scores,
    store_keys,
    store_query,
    store_values,
    weighted_values,
)
from ridgeline.backends.cpu.kernels.rows import (
    FLOATS,
    NOTHING,
    hadamard,
    largest_of,
)
from ridgeline.backends.cpu.kernels.tile_attention import (
    NewUnit,
    emit_tile_scores,
    emit_tile_values,
)
from ridgeline.backends.cpu.kernels.tiles import Amx
from ridgeline.backends.cpu.layout.shapes import TOKENS, AttentionLayout

ROPE = Kernel(
    "rope",
    (
        "row", "bias", "key_bias", "cos", "sin", "query_scale", "norms",
        "query", "record", "token", "kv_head", "non_finite",
    ),
)  # fmt: skip
ADD_KEY_BIAS = Kernel(
    "add_key_bias",
    (
        "query",
        "pairs",
        "rope_by_pair",
        "stride",
        "count",
        "kv_head",
        "num_queries",
        "out",
        "out_stride",
    ),
)
SOFTMAX = Kernel(
    "softmax",
    (
        "scores", "score_stride", "low", "high", "count", "records", "stride", "table",
        "planes", "scales", "sinks", "biases", "kv_head",
    ),
)  # fmt: skip
_BYTES, _WORDS = vec(I8, 64), vec(I32, 16)
_LOWEST = -1e30  # below every score
_STEPS = 65535.0  # probabilities have 16 bits, as two planes of bytes
_MOST_ROWS = 6  # that are handled side by side: as many as fit the registers
_Rows = list[tuple[Value, Value]]  # where their queries are, and the act_scales of these
HeadNorm = tuple[Value, Value | None]  # where its weights are, and its scale if it is known


def emit_attention(
    module: object, form: Dot, heads: AttentionLayout, number: int = 0, new_unit: NewUnit = Amx
) -> None:
    """Emit all that ``attend`` calls, and ``rope``, for the module's ``number``-th shape."""
    if heads.latent:
        emit_latent(module, heads, number)
    else:
        _emit_rope(module, heads, number)
    if heads.splits_key_bias:
        _emit_add_key_bias(module, heads, number)
    _emit_softmax(module, heads, number)
    emit_prefetch_next_head(module, heads, number)
    if heads.by_tiles:
        emit_tile_scores(module, heads, number, new_unit)
        emit_tile_values(module, form, heads, number, new_unit)
    for queries in dict.fromkeys((1, 1 if heads.by_tiles else heads.tile)):
        if heads.is_quantised:
            _emit_scores(module, form, heads, queries, number)
        else:
            emit_float_scores(module, heads, queries, number)
        if heads.has_planes:
            _emit_weighted_values(module, form, heads, queries, number)
        elif not heads.latent:
            emit_float_weighted_values(module, heads, queries, number)


# --- rope, and into the cache ------------------------------------------------------------------


def _emit_rope(module: object, heads: AttentionLayout, number: int) -> None:
    """``rope``: rotate one K/V head and its queries; store keys and values in the cache.

    ``row`` has the floats of all query heads, keys and values, ``bias`` what is added to them,
    ``key_bias`` what is kept out of the cache of this head's keys; ``record`` is where its keys and
    values of these 16 tokens are, ``token`` the place among them. ``norms`` are the weights of the
    norms of q and k, and ``query_scale`` is where the number is that multiplies queries here. A
    model without them ignores ``bias``, ``key_bias``, ``norms`` and ``query_scale``. A layer that
    reads another's keys and values stores none. If any result is not finite, the f32 at
    ``non_finite`` becomes 1.
    """
    fn = ROPE.of(number).begin(module)
    row, bias, key_bias, cos, sin, query_scale, norms, *places = fn.args
    query, record, token, kv_head, non_finite = places

    def load(offset: Value) -> list[Value]:
        at = [offset + 64 * i for i in range(heads.size // 16)]
        x = [fn.load(row + a, FLOATS, 4) for a in at]
        if heads.attention.qkv_bias:
            x = [value + fn.load(bias + a, FLOATS, 4) for value, a in zip(x, at, strict=True)]
        return x

    head_bytes = heads.size * 4
    q_heads = kv_head * (heads.group * head_bytes)
    keys = (kv_head + heads.num_heads) * head_bytes
    size = fn.value(0.0, F32)
    of_queries, of_keys = qk_norms(fn, heads, row, norms, kv_head)

    def finish() -> None:
        with fn.when((size - size).equals(0.0).equals(0)):
            fn.store(fn.value(1.0, F32), non_finite, 4)
        fn.finish()

    for g in range(heads.group):
        x = _rotated(fn, heads, load(q_heads + g * head_bytes), cos, sin, of_queries(g))
        if heads.grows:
            growth = fn.load(query_scale, F32, 4).splat(16)
            x = [value * growth for value in x]
        head = kv_head * heads.group + g
        store_query(fn, heads, x, query, head)
        if heads.splits_key_bias:
            _store_bias_factors(fn, heads, x, key_bias, query, head)
        size = size + largest_of(x)
    if not heads.owns:
        finish()
        return
    x = _rotated(fn, heads, load(keys), cos, sin, of_keys(0))
    plain = load(keys if heads.attention.v_is_k else keys + heads.num_kv_heads * head_bytes)
    if heads.attention.v_norm:
        scale = scale_of_head(heads, plain)
        plain = [value * scale for value in plain]
    if heads.has_narrow_values:
        plain = hadamard(fn, plain)
    store_keys(fn, heads, x, record, token)
    store_values(fn, heads, plain, record, token)
    # Check for non-finite values here: rounding and max() would hide them.
    size = size + largest_of(x) + largest_of(plain)
    finish()


def _rotated(
    fn: Function, heads: AttentionLayout, x: list[Value], cos: Value, sin: Value, of_norm: HeadNorm
) -> list[Value]:
    """Return a head's vectors after rope and its norm, if any, which stands before or behind."""
    if heads.attention.norm_turned:
        return _normed(fn, heads, rotated(fn, heads, x, cos, sin), of_norm)
    if heads.attention.qk_norm:
        x = _normed(fn, heads, x, of_norm)
    return rotated(fn, heads, x, cos, sin)


def _normed(fn: Function, heads: AttentionLayout, x: list[Value], of_norm: HeadNorm) -> list[Value]:
    """Return a head's vectors after its norm."""
    norm, scale = of_norm
    if scale is None:
        scale = scale_of_head(heads, x)
    return [value * scale * fn.load(norm + 64 * i, FLOATS, 4) for i, value in enumerate(x)]


def _store_bias_factors(
    fn: Function, heads: AttentionLayout, x: list[Value], key_bias: Value, query: Value, head: Value
) -> None:
    """Store what cosines, then what sines are multiplied by: see the top of the file."""
    pairs, softmax_scale = heads.half // 16, heads.num_channels**-0.5
    target = query + heads.bias_factors_at + head * (8 * heads.half)
    for i in range(pairs):
        a, b = (fn.load(key_bias + 64 * j, FLOATS, 4) for j in (i, pairs + i))
        q0, q1 = x[i] * softmax_scale, x[pairs + i] * softmax_scale
        fn.store(fma(q1, b, q0 * a), target + 64 * i, 4)
        fn.store(q1 * a - q0 * b, target + 64 * (pairs + i), 4)


# --- scores, softmax, weighted sum, in bytes ---------------------------------------------------


def _emit_scores(
    module: object, form: Dot, heads: AttentionLayout, queries: int, number: int
) -> None:
    fn = scores(queries).of(number).begin(module)
    query, records, stride, table, count, kv_head, out, out_stride = fn.args
    first = kv_head * heads.group
    base = query + first * heads.size
    act_scales = query + heads.num_heads * heads.size + first * (8 * heads.spans)
    rows = [
        (base + n * heads.query_bytes + g * heads.size,
         act_scales + n * heads.query_bytes + g * (8 * heads.spans))
        for n in range(queries)
        for g in range(heads.group)
    ]  # fmt: skip

    def score(block: Value, num_blocks: int) -> None:
        at = [fn.lower(block + b, count - 1) for b in range(num_blocks + BLOCKS_AHEAD)]
        places = [record_at(fn, records, stride, table, b) for b in at]
        for low in range(0, len(rows), _MOST_ROWS):
            part = rows[low : low + _MOST_ROWS]
            ahead = places[BLOCKS_AHEAD:] if low == 0 else []
            of_part = _scores(fn, form, heads, part, places[:num_blocks], ahead)
            for r, of_row in enumerate(of_part, start=low):
                for b, value in enumerate(of_row):
                    fn.store(value, out + out_stride * r + (block + b) * 64, 4)

    # Blocks side by side: what is loaded of a query serves all, and no sum waits for itself.
    side = 2 if len(rows) > 3 else 4
    together = count // side * side
    with fn.loop(together, step=side) as block:
        score(block, side)
    with fn.loop(count, start=together) as block:
        score(block, 1)
    fn.finish()


def _scores(
    fn: Function,
    form: Dot,
    heads: AttentionLayout,
    rows: _Rows,
    records: list[Value],
    ahead: list[Value],
) -> list[list[Value]]:
    """Return each row's scores in each record; ``ahead`` are records to prefetch."""
    scores = [[fn.lanes(F32, [0.0] * 16) for _ in records] for _ in rows]
    for span in range(heads.spans):
        starts = [fn.load(q_scales + 8 * span + 4, I32, 4).splat(16) for _, q_scales in rows]
        sums = [[start for _ in records] for start in starts]
        for quad in range(span * heads.span // 4, (span + 1) * heads.span // 4):
            keys = [fn.load(record + quad * 64, _BYTES, 64) for record in records]
            prefetch_keys_and_values(fn, heads, quad, records, ahead)
            for (query, _), of_row in zip(rows, sums, strict=True):
                part = broadcast4(fn, query + quad * 4)
                of_row[:] = [dot(form, s, k, part) for s, k in zip(of_row, keys, strict=True)]
        scales_at = heads.key_scales_at + 64 * span
        scales = [fn.load(record + scales_at, FLOATS, 64) for record in records]
        for (_, q_scales), of_row, totals in zip(rows, sums, scores, strict=True):
            scale = fn.load(q_scales + 8 * span, F32, 4).splat(16)
            for b, total in enumerate(totals):
                totals[b] = fma(of_row[b].signed(F32) * scales[b], scale, total)
    return scores


def _emit_add_key_bias(module: object, heads: AttentionLayout, number: int) -> None:
    """``add_key_bias``: add to scores what keys' bias contributes.

    ``pairs`` are i32: how many, then which. ``rope_by_pair`` is the cosine of pair 0 for the first
    visible position; a pair's are ``stride`` bytes behind the pair's before, and sines behind all
    cosines.
    """
    fn = ADD_KEY_BIAS.of(number).begin(module)
    query, pairs, rope_by_pair, stride, count, kv_head, num_queries, out, out_stride = fn.args
    num_pairs = fn.load(pairs, I32, 4).signed(I64)
    first = query + heads.bias_factors_at + kv_head * (heads.group * 8 * heads.half)

    def add(factors: Value, scores: Value, block: Value, num_blocks: int) -> None:
        at = [scores + (block + b) * 64 for b in range(num_blocks)]
        totals = [fn.var(fn.load(place, FLOATS, 4)) for place in at]
        with fn.loop(num_pairs) as i:
            pair = fn.load(pairs + 4 + i * 4, I32, 4).signed(I64)
            angle = rope_by_pair + pair * stride + block * 64
            for part in range(2):
                factor = fn.load(factors + (pair + part * heads.half) * 4, F32, 4).splat(16)
                for b, total in enumerate(totals):
                    place = angle + stride * (part * heads.half) + 64 * b
                    total.set(fma(fn.load(place, FLOATS, 4), factor, total.get()))
        for place, total in zip(at, totals, strict=True):
            fn.store(total.get(), place, 4)

    with fn.when(num_pairs > 0), fn.loop(num_queries) as n, fn.loop(heads.group) as g:
        factors = first + n * heads.query_bytes + g * (8 * heads.half)
        scores = out + (n * heads.group + g) * out_stride
        together = count // 4 * 4
        with fn.loop(together, step=4) as block:
            add(factors, scores, block, 4)
        with fn.loop(count, start=together) as block:
            add(factors, scores, block, 1)
    fn.finish()


def _emit_softmax(module: object, heads: AttentionLayout, number: int) -> None:
    """``softmax`` of a row's heads of one group.

    Scores ``low`` up to ``high`` are visible. Leaves probabilities, times each value's scale for
    bytes: of 16 bits, as ``planes`` half as far apart as scores; else, and of latents, as floats in
    place. ``scales`` receive factors of the weighted sums; scores gain ``biases`` by distance.
    """
    fn = SOFTMAX.of(number).begin(module)
    scores, score_stride, low, high, count, records, stride, table, *others = fn.args
    planes, scales, sinks, biases, kv_head = others
    lanes = fn.lanes(I32, list(range(16)))
    low_v, high_v = low.signed(I32).splat(16), high.signed(I32).splat(16)
    first_whole = fn.lower((low + TOKENS - 1) // TOKENS, count)
    end_of_whole = maximum(high // TOKENS, first_whole)

    def blocks() -> Iterator[tuple[Value, Callable[[Value, float], Value]]]:
        """Loop over blocks in order, each with what puts a number where a token is masked."""
        with fn.loop(first_whole) as block:
            yield block, partial(masked, block)
        with fn.loop(end_of_whole, start=first_whole) as block:
            yield block, lambda value, _: value
        with fn.loop(count, start=end_of_whole) as block:
            yield block, partial(masked, block)

    def masked(block: Value, value: Value, instead: float) -> Value:
        position = lanes + (block.signed(I32) * 16).splat(16)
        return select((position >= low_v) & (position < high_v), value, instead)

    for first in range(0, heads.group, _MOST_ROWS):
        group = range(first, min(first + _MOST_ROWS, heads.group))
        rows = [scores + score_stride * g for g in group]
        tops, totals, row_maxima = (
            [fn.var(fn.lanes(F32, [initial] * 16)) for _ in group]
            for initial in (_LOWEST, 0.0, 0.0)
        )
        slopes = _slopes(fn, heads, kv_head, group)
        for block, visible in blocks():
            for row, top, slope in zip(rows, tops, slopes, strict=True):
                score = product = fn.load(row + block * 64, FLOATS, 4)
                if heads.attention.softcap:
                    score = softcapped(score, heads.attention.softcap)
                if heads.attention.slopes:
                    before = lanes + (block.signed(I32) * 16).splat(16) - high_v + 1
                    score = fma(before.signed(F32), slope, score)
                if heads.attention.bias_buckets:
                    score = score + fn.load(biases + block * 64, FLOATS, 4)
                if score is not product:
                    fn.store(score, row + block * 64, 4)
                top.set(maximum(visible(score, _LOWEST), top.get()))
        if heads.attention.sinks:
            of_rows = [fn.load(sinks + 4 * g, F32, 4).splat(16) for g in group]
            for top, sink in zip(tops, of_rows, strict=True):
                top.set(maximum(sink, top.get()))
        highest = [top.get().reduce(maximum).splat(16) for top in tops]
        for block, visible in blocks():
            values = record_at(fn, records, stride, table, block) + heads.scales_at
            for row, peak, total, row_max in zip(rows, highest, totals, row_maxima, strict=True):
                p = visible(exp(fn.load(row + block * 64, FLOATS, 4) - peak), 0.0)
                total.set(total.get() + p)
                if heads.has_planes:
                    p = visible(p * fn.load(values, FLOATS, 64), 0.0)
                    row_max.set(maximum(p, row_max.get()))
                fn.store(p, row + block * 64, 4)
        if heads.attention.sinks:  # in one lane, as the sums have sixteen
            for sink, peak, total in zip(of_rows, highest, totals, strict=True):
                total.set(total.get() + select(lanes < 1, exp(sink - peak), 0.0))
        factors = [fn.value(1.0, F32) for _ in group]
        if heads.has_planes:
            largest = [row_max.get().reduce(maximum) for row_max in row_maxima]
            factors = [value * (1.0 / _STEPS) for value in largest]
            steps = [select(x > NOTHING, _STEPS / x, fn.value(0.0, F32)) for x in largest]
            whole = count // PLANES_OF * PLANES_OF
            at = planes + (score_stride >> 1) * first
            with fn.loop(whole, step=PLANES_OF) as block:
                _store_planes(fn, rows, steps, at, score_stride, block, None)
            with fn.when(whole < count):
                _store_planes(fn, rows, steps, at, score_stride, whole, count)
        for g, factor, total in zip(group, factors, totals, strict=True):
            fn.store(factor / total.get().reduce(lambda a, b: a + b), scales + 4 * g, 4)
    fn.finish()


def _store_planes(
    fn: Function,
    rows: list[Value],
    steps: list[Value],
    planes: Value,
    score_stride: Value,
    block: Value,
    end: Value | None,
) -> None:
    """Store the probabilities of a group of records as bytes: those from ``end`` on as zeros."""
    for g, (row, step) in enumerate(zip(rows, steps, strict=True)):
        words = []
        for i in range(PLANES_OF):
            p = fn.load(row + (block + i) * 64, FLOATS, 4)
            if end is not None:
                p = p if i == 0 else select((block + i < end).splat(16), p, 0.0)
            words.append(to_whole(p, step.splat(16)))
        pairs = [words[i] | (words[i + 1] << 16) for i in (0, 2)]  # a byte of each plane of each
        in_lanes = [
            16 * lane + 4 * i + byte for lane in range(4) for byte in range(4) for i in range(4)
        ]
        quads = [pair.bits(_BYTES).shuffle(in_lanes).bits(_WORDS) for pair in pairs]
        for plane, odd in enumerate((1, 0)):
            lanes = [4 * lane + odd + j for lane in range(4) for j in (0, 2, 16, 18)]
            at = plane_at(planes + (score_stride >> 1) * g, block, plane)
            fn.store(quads[0].shuffle(lanes, quads[1]), at, 64)


def _slopes(
    fn: Function, heads: AttentionLayout, kv_head: Value, group: Sequence[int]
) -> list[Value]:
    """Return the slope of each of a group's heads, in all lanes; where there are none, zeros."""
    if not heads.attention.slopes:
        return [fn.lanes(F32, [0.0] * 16) for _ in group]
    of_all = fn.lanes(F32, heads.attention.slopes)
    first = kv_head.signed(I32) * heads.group
    return [of_all.lane_at(first + g).splat(16) for g in group]


def _emit_weighted_values(
    module: object, form: Dot, heads: AttentionLayout, queries: int, number: int
) -> None:
    fn = weighted_values(queries).of(number).begin(module)
    planes, plane_stride, records, stride, table, count, scales, out, out_stride = fn.args
    rows = [(n, g) for n in range(queries) for g in range(heads.group)]
    narrow = int(heads.has_narrow_values)
    line = 64 >> narrow  # 16 channels of 4 tokens

    def load(at: Value) -> Value:
        return load_narrow_values(fn, form, at) if narrow else fn.load(at, _BYTES, 64)

    for part, wide in row_parts(heads, len(rows), sums_per_vector=2):
        with fn.loop(heads.size // 16, step=wide) as column:
            zero = fn.lanes(I32, [0] * 16)
            sums = [[[fn.var(zero) for _ in range(2)] for _ in range(wide)] for _ in part]
            with fn.loop(count) as block:
                record = record_at(fn, records, stride, table, block) + heads.values_at
                for quad in range(4):
                    at = record + quad * (heads.size * 4 >> narrow) + column * line
                    values = [load(at + line * j) for j in range(wide)]
                    for row, row_sums in zip(part, sums, strict=True):
                        for plane in range(2):
                            p_at = plane_at(planes + plane_stride * row, block, plane)
                            p = broadcast4(fn, p_at + QUADS_APART * quad)
                            for j, value in enumerate(values):
                                total = row_sums[j][plane]
                                total.set(dot(form, total.get(), p, value))
            for row, row_sums in zip(part, sums, strict=True):
                n, g = rows[row]
                scale = fn.load(scales + 4 * row, F32, 4).splat(16)
                for j, (high, low) in enumerate(row_sums):
                    joined = fma(high.get().signed(F32), 256.0, low.get().signed(F32))
                    at = out + out_stride * n + g * heads.size * 4 + (column + j) * 64
                    fn.store(joined * scale, at, 4)
    if narrow:
        with fn.loop(queries) as query, fn.loop(heads.group) as head:
            rotate_back(fn, heads, out + out_stride * query + head * (heads.size * 4))
    fn.finish()


def qk_norms(
    fn: Function, heads: AttentionLayout, row: Value, norms: Value, kv_head: Value
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


def _scale_of_width(fn: Function, heads: AttentionLayout, x: Value, num_bytes: int) -> Value:
    """Return what divides all heads by their root mean square, 16 times."""
    total = fn.var(fn.lanes(F32, [0.0] * 16))
    with fn.loop(fn.i64(num_bytes), step=64) as at:
        value = fn.load(x + at, FLOATS, 4)
        total.set(fma(value, value, total.get()))
    num_heads = num_bytes // (4 * heads.size)
    mean = total.get().reduce(lambda a, b: a + b) * (1.0 / (num_heads * heads.num_channels))
    return (1.0 / sqrt(mean + heads.eps)).splat(16)


def scale_of_head(heads: AttentionLayout, x: list[Value]) -> Value:
    """Return what divides a head by its root mean square, 16 times."""
    total = x[0] * x[0]
    for value in x[1:]:
        total = fma(value, value, total)
    mean = total.reduce(lambda a, b: a + b) * (1.0 / heads.num_channels)
    return (1.0 / sqrt(mean + heads.eps)).splat(16)
