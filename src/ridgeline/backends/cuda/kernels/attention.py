"""Attention over a paged cache, for any mix of lengths, and the fold of partial results.

A row's bits depend on its own tokens alone. A query at position p takes its keys in an order that p
alone decides: keys are cut at absolute multiples of a tile (one product) and of SPLIT (one partial
result), and partial results are folded in order by one function, whether other programs found them
(single tokens with long contexts) or this one. What is masked changes nothing. The matrix unit sums
the weights too, beside the values, so the order of the sum does not depend on the number of
threads. Where a fused multiply-add is meant, it is written; the compiler adds none of its own.

So the instance for single tokens (16 rows, 2 warps) and that for prompts (64 rows, 4 warps) give
the same bits. Algorithm: FlashAttention-2 (Dao, 2023) over blocks (Kwon et al., 2023), with splits
of keys (Flash-Decoding, 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.backends.cuda import tiles
from ridgeline.backends.cuda.kernels.launching import launch

LOG2_E = 1.4426950408889634
ITEM = 6  # words of an item: table row, first token, queries, first position, split, slot
FOLD = 3  # words of a fold: token, first slot, number of slots
LANES = 16  # columns of ones: as few as a warpgroup's product takes
STAGES = 2


@triton.jit
def folded(top, total, acc, top_new, total_new, acc_new):
    """Return a result with one more part: greatest score, sum of weights, weighted values."""
    greatest = tl.maximum(top, top_new)
    safe = tl.where(greatest == float("-inf"), 0.0, greatest)
    old, new = tl.exp2(top - safe), tl.exp2(top_new - safe)
    total = tl.fma(total, old, total_new * new)
    return greatest, total, tl.fma(acc, old[:, None], acc_new * new[:, None])


@triton.jit
def with_sink(top, total, acc, sink):
    """Return the sum and the values after a score without a value has taken its share."""
    greatest = tl.maximum(top, sink)
    old = tl.exp2(top - greatest)
    return tl.fma(total, old, tl.exp2(sink - greatest)), acc * old[:, None]


@triton.jit
def scored(
    products, scale, cap, slope, position, key,
    CAPPED: tl.constexpr, SLOPES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return scores, in exponents of 2 unless ``scale`` is still to come, and -inf if not seen."""
    if CAPPED:  # tanh(y) = 1 - 2 / (2 ** (2 y log2(e)) + 1)
        twice = products * scale / cap * 2.8853900817779268
        products = cap * (1.0 - 2.0 / (tl.exp2(tl.minimum(twice, 126.0)) + 1.0))
    if SLOPES:
        if not CAPPED:
            products = products * scale
        distance = (position[:, None] - key[None, :]).to(tl.float32)
        products = tl.fma(-slope[:, None], distance, products)
    seen = key[None, :] <= position[:, None]
    if WINDOW > 0:
        seen = seen & (key[None, :] > position[:, None] - WINDOW)
    return tl.where(seen, products, float("-inf"))


@triton.jit
def met_keys(
    queries, turning, table, k_head, begin, stop, first, last, position, slope, scale, cap,
    block_stride,
    KIND_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    VALUE_AT: tl.constexpr, TURNING: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SLOPES: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return one partial result: attention of rows to the keys from ``begin`` to ``stop``."""
    d, t = tl.arange(0, PADDED), tl.arange(0, TURNING)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    totals = tl.zeros([ROWS, LANES], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(begin, stop, TILE):
        i = tl.arange(0, TILE)
        key = start + i
        there = (key >= first) & (key <= last)
        nth, slot = key // BLOCK_SIZE, key % BLOCK_SIZE
        if TILE % BLOCK_SIZE == 0:  # the same, as constants for the compiler
            nth, slot = start // BLOCK_SIZE + i // BLOCK_SIZE, i % BLOCK_SIZE
        block = tl.load(table + nth, mask=there, other=0).to(tl.int64)
        at = block * block_stride + slot * SLOT_STRIDE
        inside = there[:, None] & (d[None, :] < D)
        k = tl.load(k_head + VALUE_AT + at[:, None] + d[None, :], mask=inside, other=0.0)
        products = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if VALUE_AT > 0:
            turns = there[:, None] & (t[None, :] < VALUE_AT)
            turned = tl.load(k_head + at[:, None] + t[None, :], mask=turns, other=0.0)
            products = tl.dot(turning, tl.trans(turned), products, input_precision="ieee")
        scores = scored(products, scale, cap, slope, position, key, CAPPED, SLOPES, WINDOW)
        if CAPPED or SLOPES:
            greatest = tl.maximum(top, tl.max(scores, axis=1))
        else:
            greatest = tl.maximum(top, tl.max(scores, axis=1) * scale)
        safe = tl.where(greatest == float("-inf"), 0.0, greatest)
        if CAPPED or SLOPES:
            weights = tl.exp2(scores - safe[:, None])
        else:
            weights = tl.exp2(tl.fma(scores, scale, -safe[:, None]))
        shrink = tl.exp2(top - safe)
        v = k  # of a latent
        if VALUE_AT == 0:
            v = tl.load(k_head + KIND_STRIDE + at[:, None] + d[None, :], mask=inside, other=0.0)
        narrow = weights.to(v.dtype)
        ones = tl.full([TILE, LANES], 1.0, v.dtype)
        totals = tl.dot(narrow, ones, totals * shrink[:, None], input_precision="ieee")
        acc = tl.dot(narrow, v, acc * shrink[:, None], input_precision="ieee")
        top = greatest
    return top, tl.max(totals, axis=1), acc  # the columns are equal


@triton.jit(do_not_specialize_on_alignment=["tables", "items", "num_items"])
def attend_kernel(
    q, cache, tables, items, num_items, out, part_acc, part_sums, slopes, sinks, scale, cap,
    table_stride, block_stride, head_stride,
    KIND_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, PER_KEY: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    VALUE_AT: tl.constexpr, TURNING: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    ITEM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Attend: programs stride over items and K runs of query heads, PER_KEY of a key head.

    ``scale`` and ``cap`` have log2(e) in them. An item with a slot is one split of a single query,
    whose partial result goes there. Queries and keys have VALUE_AT channels, then D that are values
    too; or D, where VALUE_AT is 0 and values are apart.
    """
    G: tl.constexpr = H // K
    LOG2_E: tl.constexpr = 1.4426950408889634
    query, member = tl.arange(0, ROWS) // G, tl.arange(0, ROWS) % G
    d, t = tl.arange(0, PADDED), tl.arange(0, TURNING)
    for work in range(tl.program_id(0), tl.load(num_items) * K, tl.num_programs(0)):
        item, kv_head = items + (work // K) * ITEM, work % K
        table = tables + tl.load(item).to(tl.int64) * table_stride
        token, count, position0 = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        split0, slot = tl.load(item + 4), tl.load(item + 5)
        live = (query < count) & (query < ROWS // G)
        position = position0 + query
        head = kv_head * G + member
        row = (token + query).to(tl.int64) * H + head
        q_at, out_at = row * (VALUE_AT + D), row * D
        inside = live[:, None] & (d[None, :] < D)
        queries = tl.load(q + VALUE_AT + q_at[:, None] + d[None, :], mask=inside, other=0.0)
        turning = queries
        if VALUE_AT > 0:
            turns = live[:, None] & (t[None, :] < VALUE_AT)
            turning = tl.load(q + q_at[:, None] + t[None, :], mask=turns, other=0.0)
        slope = position.to(tl.float32)
        if SLOPES:
            slope = tl.load(slopes + head, mask=live, other=0.0) * LOG2_E
        last = position0 + count - 1
        first = position0 * 0
        if WINDOW > 0:
            first = tl.maximum(position0 - WINDOW + 1, 0)
        split1 = split0 + 1
        if slot < 0:
            split0, split1 = first // SPLIT, last // SPLIT + 1
        k_head = cache + tl.cast(kv_head // PER_KEY, tl.int64) * head_stride
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED], tl.float32)
        for split in range(split0, split1):
            begin = tl.maximum(split * SPLIT, first // TILE * TILE)
            stop = tl.minimum((split + 1) * SPLIT, last + 1)
            top_new, total_new, acc_new = met_keys(
                queries, turning, table, k_head, begin, stop, first, last, position, slope, scale,
                cap, block_stride, KIND_STRIDE, SLOT_STRIDE, D, PADDED, VALUE_AT, TURNING,
                BLOCK_SIZE, WINDOW, CAPPED, SLOPES, ROWS, TILE, LANES,
            )  # fmt: skip
            top, total, acc = folded(top, total, acc, top_new, total_new, acc_new)
        if slot < 0:
            if SINKS:
                sink = tl.load(sinks + head, mask=live, other=0.0) * LOG2_E
                total, acc = with_sink(top, total, acc, sink)
            tl.store(out + out_at[:, None] + d[None, :], acc / total[:, None], mask=inside)
        else:
            part = slot.to(tl.int64) * H + head
            tl.store(part_acc + part[:, None] * D + d[None, :], acc, mask=inside)
            tl.store(part_sums + part * 2, top, mask=live)
            tl.store(part_sums + part * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize_on_alignment=["folds", "num_folds"])
def fold_kernel(
    out, part_acc, part_sums, folds, num_folds, sinks,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
    SINKS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Fold the splits of a token in order: programs stride over folds and key heads."""
    G: tl.constexpr = H // K
    member, d = tl.arange(0, HEADS), tl.arange(0, PADDED)
    live = member < G
    inside = live[:, None] & (d[None, :] < D)
    for work in range(tl.program_id(0), tl.load(num_folds) * K, tl.num_programs(0)):
        fold, head = folds + (work // K) * FOLD, work % K * G + member
        token, slot, count = tl.load(fold), tl.load(fold + 1), tl.load(fold + 2)
        top = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, PADDED], tl.float32)
        for split in range(slot, slot + count):
            part = tl.cast(split, tl.int64) * H + head
            top_new = tl.load(part_sums + part * 2, mask=live, other=float("-inf"))
            total_new = tl.load(part_sums + part * 2 + 1, mask=live, other=0.0)
            acc_new = tl.load(part_acc + part[:, None] * D + d[None, :], mask=inside, other=0.0)
            top, total, acc = folded(top, total, acc, top_new, total_new, acc_new)
        if SINKS:
            sink = tl.load(sinks + head, mask=live, other=0.0) * 1.4426950408889634
            total, acc = with_sink(top, total, acc, sink)
        at = (token.to(tl.int64) * H + head)[:, None] * D + d[None, :]
        tl.store(out + at, acc / total[:, None], mask=inside)


def attend(q, cache, tables, plan, slopes, sinks, spec):
    """Return softmax(scale q k) v: see the twin.

    ``plan`` has, on the device, ``items`` ``[items, ITEM]`` and ``folds`` ``[folds, FOLD]`` int32,
    of which ``num_items`` and ``num_folds`` are to be done; ``part_a`` and ``part_ml``, room
    for partial results of ``H * value_dim`` and ``2 * H`` float32 each; and as numbers ``rows``,
    ``programs`` and ``folds_at_most``. Tokens of no item are left as they are: anything.
    """
    H, D = spec.H, spec.value_dim
    K = H // spec.shared  # runs of query heads
    padded = triton.next_power_of_2(D)
    out = q.new_empty(len(q), H, D)
    launch(
        attend_kernel, (plan.programs,),
        q, cache, tables, plan.items, plan.num_items, out, plan.part_a, plan.part_ml,
        slopes, sinks, spec.scale * LOG2_E, spec.softcap * LOG2_E,
        tables.stride(0), cache.stride(0), cache.stride(2),
        KIND_STRIDE=cache.stride(1), SLOT_STRIDE=cache.stride(3), BLOCK_SIZE=cache.shape[3],
        H=H, K=K, PER_KEY=K // spec.K, D=D, PADDED=padded, VALUE_AT=spec.value_at,
        TURNING=max(16, triton.next_power_of_2(spec.value_at)), WINDOW=spec.window,
        CAPPED=spec.softcap > 0,
        SLOPES=slopes is not None, SINKS=sinks is not None,
        ROWS=plan.rows, TILE=tiles.keys_per_tile(D), SPLIT=tiles.SPLIT, ITEM=ITEM, LANES=LANES,
        num_warps=tiles.attention_warps(plan.rows, D), num_stages=STAGES, enable_fp_fusion=False,
    )  # fmt: skip
    if plan.folds_at_most:
        fold_kernel[(min(plan.folds_at_most * K, plan.programs),)](
            out, plan.part_a, plan.part_ml, plan.folds, plan.num_folds, sinks,
            H=H, K=K, D=D, PADDED=padded, HEADS=triton.next_power_of_2(spec.shared),
            SINKS=sinks is not None, FOLD=FOLD, enable_fp_fusion=False,
        )  # fmt: skip
    return out
