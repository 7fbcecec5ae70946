"""Filters of a draw that look at more than the largest logits: typical, top-n-sigma and XTC.

They work on the list of ``candidates``, by id, of all tokens that may have the least weight. Only
the spread of top-n-sigma is of the whole row.
"""

from __future__ import annotations

import math

from ridgeline.backends.cpu.kernels.candidates import (
    BOUND_WEIGHT,
    CUT_WEIGHT,
    GATHER,
    VECTORS,
    WEIGH_LIST,
    add,
    exponent,
    exponents,
    power,
)
from ridgeline.backends.cpu.kernels.ir import (
    F32,
    F64,
    I32,
    I64,
    Value,
    absolute,
    high_product,
    maximum,
    select,
    sqrt,
    vec,
)
from ridgeline.backends.cpu.kernels.kernel import Kernel
from ridgeline.backends.cpu.kernels.rows import FLOATS
from ridgeline.backends.sampler.rule import WEIGHT_BITS

# ``greatest``, ``factor``, ``depth`` and ``sigmas`` are the bits of f64.
REACHING = Kernel(
    "draw_reaching",
    ("row", "peaks", "greatest", "factor", "least", "ids", "values", "weights", "out"),
)
TYPICAL = Kernel(
    "draw_typical",
    ("row", "greatest", "factor", "share", "ids", "values", "weights", "count", "out"),
)
DEPTH = Kernel("draw_depth", ("row", "greatest", "sigmas", "out"))
LEAST = Kernel("draw_least", ("values", "count", "greatest", "factor", "least", "depth", "out"))
EXCLUDE = Kernel("draw_exclude", ("values", "weights", "count", "threshold"))
_WEIGHTS, _DOUBLES = vec(I64, 8), vec(F64, 8)


def emit_filters(module: object, num_blocks: int) -> None:
    """Emit all of them."""
    _emit_reaching(module)
    _emit_typical(module)
    _emit_depth(module, num_blocks)
    _emit_least(module)
    _emit_exclude(module)


def _emit_reaching(module: object) -> None:
    """``draw_reaching``: list and weigh what may have the least weight, and perhaps a little less.

    A weight of 2 ** n or more has a z of at least n - 40. The bound is one lower, and the next f32
    to it is not above any f32 that is above it.
    """
    fn = REACHING.begin(module)
    row, peaks, greatest, factor, least, ids, values, weights, out = fn.args
    exponent_of_least = (least.signed(F64).bits(I64) >> 52) - (1023 + WEIGHT_BITS + 1)
    bound = greatest.bits(F64) + exponent_of_least.signed(F64) / factor.bits(F64)
    bits = bound.signed(F32).bits(I32).signed(I64)
    GATHER.call(fn, row=row, peaks=peaks, bound=bits, ids=ids, values=values, out=out)
    WEIGH_LIST.call(
        fn, values=values, count=fn.load(out, I64, 8), greatest=greatest, factor=factor,
        weights=weights,
    )  # fmt: skip
    fn.finish()


def _emit_typical(module: object) -> None:
    """``draw_typical``: cut a list by the distance of z from its mean."""
    fn = TYPICAL.begin(module)
    row, greatest, factor, share, ids, values, weights, count, out = fn.args
    zeros = fn.lanes(I64, [0] * 8)
    total, surprise = fn.var(zeros), fn.var(zeros)
    num_vectors = (count + 15) // 16
    scale = greatest.bits(F64), factor.bits(F64)
    with fn.loop(num_vectors) as i:
        for half, z in enumerate(exponents(fn.load(values + i * 64, FLOATS, 4), *scale)):
            weight = fn.load(weights + i * 128 + 64 * half, _WEIGHTS, 8)
            total.set(total.get() + weight)
            surprise.set(surprise.get() + (weight.signed(F64) * -z).signed(I64))
    of_all = add(total.get())
    mean = -(add(surprise.get()).signed(F64)) / maximum(of_all, 1).signed(F64)
    with fn.loop(num_vectors) as i:
        halves = exponents(fn.load(values + i * 64, FLOATS, 4), *scale)
        low, high = (-(absolute(z - mean.splat(8)).signed(F32)) for z in halves)
        fn.store(low, values + i * 64, 4)
        fn.store(high, values + i * 64 + 32, 4)
    wanted = maximum(high_product(share, of_all), 1)
    BOUND_WEIGHT.call(fn, values=values, weights=weights, count=count, wanted=wanted, out=out)
    CUT_WEIGHT.call(
        fn, ids=ids, values=values, weights=weights, count=count, bound=fn.load(out, I64, 8),
        wanted=wanted, out=out,
    )  # fmt: skip
    with fn.loop(fn.load(out, I64, 8)) as i:
        token = fn.load(ids + i * 4, I32, 4).signed(I64)
        fn.store(fn.load(row + token * 4, F32, 4), values + i * 4, 4)
    fn.finish()


def _emit_depth(module: object, num_blocks: int) -> None:
    """``draw_depth``: a number of standard deviations of a row's logits, as f64."""
    fn = DEPTH.begin(module)
    row, greatest, sigmas, out = fn.args
    zeros = fn.value(0.0, _DOUBLES)
    sums, squares = [fn.var(zeros) for _ in range(2)], [fn.var(zeros) for _ in range(2)]
    count = fn.var(fn.lanes(I64, [0] * 8))
    top = greatest.bits(F64).splat(8)
    with fn.loop(num_blocks * VECTORS) as i:
        x = fn.load(row + i * 64, FLOATS, 4)
        for half in range(2):
            part = x.shuffle(range(8 * half, 8 * half + 8)).signed(F64)
            is_there = part > -math.inf
            depth = select(is_there, top - part, 0.0)
            sums[half].set(sums[half].get() + depth)
            squares[half].set(squares[half].get() + depth * depth)
            count.set(count.get() + is_there.unsigned(I64))
    num_logits = maximum(add(count.get()), 1).signed(F64)
    mean, square = (add(low.get() + high.get()) / num_logits for low, high in (sums, squares))
    fn.store(sigmas.bits(F64) * sqrt(square - mean * mean), out, 8)
    fn.finish()


def _emit_least(module: object) -> None:
    """``draw_least``: the weight that min-p and top-n-sigma ask for.

    ``least`` is for a likeliest token of weight 2 ** 40. Of a list the greatest value counts, but
    ``count`` is -1 where the likeliest is left. ``depth`` below it is the lowest logit; it is
    negative if there is none.
    """
    fn = LEAST.begin(module)
    values, count, greatest, factor, least, depth, out = fn.args
    scale = greatest.bits(F64), factor.bits(F64)
    peak = fn.var(select(count < 0, greatest.bits(F64), -math.inf))
    with fn.loop(count) as i:
        peak.set(maximum(fn.load(values + i * 4, F32, 4).signed(F64), peak.get()))

    def weight(logit: Value) -> Value:
        return power(exponent(logit.splat(8), *scale)).lane(0)

    # Twice, and half: a least of 2 ** 40 must not become 2 ** 64.
    least = high_product(least << (63 - WEIGHT_BITS), weight(peak.get()) << 1)
    lowest = weight(peak.get() - depth.bits(F64))
    lowest = select(depth.bits(F64) >= 0.0, lowest, 0)
    fn.store(maximum(maximum(least, lowest), 1), out, 8)
    fn.finish()


def _emit_exclude(module: object) -> None:
    """``draw_exclude``: take their weight from all tokens of the least share but the last.

    Weights are those that count, and 0.
    """
    fn = EXCLUDE.begin(module)
    values, weights, count, threshold = fn.args
    total, lowest, last = fn.var(fn.i64(0)), fn.var(fn.value(math.inf, F32)), fn.var(fn.i64(-1))
    with fn.loop(count) as i:
        total.set(total.get() + fn.load(weights + i * 8, I64, 8))
    least = maximum(high_product(threshold, total.get()), 1)
    with fn.loop(count) as i, fn.when(fn.load(weights + i * 8, I64, 8) >= least):
        value = fn.load(values + i * 4, F32, 4)
        is_last = value <= lowest.get()
        last.set(select(is_last, i, last.get()))
        lowest.set(select(is_last, value, lowest.get()))
    with fn.loop(count) as i:
        weight = fn.load(weights + i * 8, I64, 8)
        is_excluded = (weight >= least) & (i.equals(last.get()).equals(0))
        fn.store(select(is_excluded, fn.i64(0), weight), weights + i * 8, 8)
    fn.finish()
