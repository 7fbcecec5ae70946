"""Candidates of a draw: the largest logits of a row, gathered into a list by id.

Nothing is sorted. Of each block of a row the greatest of every 32 logits, 16 apart, is kept. The
k-th largest of these is a bound that at least k logits reach, seldom many more: those are gathered,
and all else happens in the list. A bound is found bit by bit, by counting, or adding up the weights
of, what reaches it (as radix selection does).
"""

from __future__ import annotations

import math

from ridgeline.backends.cpu.kernels.ir import (
    F32,
    F64,
    I16,
    I32,
    I64,
    Value,
    floor,
    maximum,
    select,
    trailing_zeros,
    vec,
)
from ridgeline.backends.cpu.kernels.kernel import Kernel
from ridgeline.backends.cpu.kernels.rows import FLOATS
from ridgeline.backends.cpu.layout.sampling_table import BLOCK_LOGITS
from ridgeline.backends.sampler.rule import LEAST_EXPONENT, POLYNOMIAL, WEIGHT_BITS

PEAKS = Kernel("draw_peaks", ("row", "peaks", "out"))
KTH = Kernel("draw_kth", ("values", "count", "wanted", "out"))
NARROW = Kernel("draw_narrow", ("row", "peaks", "wanted", "ids", "values", "out"))
GATHER = Kernel("draw_gather", ("row", "peaks", "bound", "ids", "values", "out"))
WEIGH_LIST = Kernel("draw_weigh_list", ("values", "count", "greatest", "factor", "weights"))
TOTAL = Kernel("draw_total", ("weights", "count", "least", "out"))
PICK = Kernel("draw_pick", ("weights", "count", "before", "mark", "out"))
# By number, or by weight.
BOUND_COUNT, BOUND_WEIGHT = (
    Kernel(f"draw_bound_{by}", ("values", "weights", "count", "wanted", "out"))
    for by in ("count", "weight")
)
CUT_COUNT, CUT_WEIGHT = (
    Kernel(f"draw_cut_{by}", ("ids", "values", "weights", "count", "bound", "wanted", "out"))
    for by in ("count", "weight")
)
VECTORS = BLOCK_LOGITS // 16
_WEIGHTS, _DOUBLES = vec(I64, 8), vec(F64, 8)
_MAGIC = 1.5 * 2.0**52  # near it doubles are whole, and so are their bits
_MAGIC_BITS = 0x4338000000000000
_MANTISSA, _ONE = (1 << 52) - 1, 1 << 52
_LOWEST = -(1 << 31)
_ALL_BUT_SIGN = 0x7FFFFFFF


def emit_candidates(module: object, num_blocks: int) -> None:
    """Emit ``PEAKS``, ``KTH``, ``NARROW`` and what works on its list."""
    _emit_peaks(module, num_blocks)
    _emit_kth(module)
    _emit_gather(module, num_blocks)
    _emit_narrow(module, num_blocks)
    for by_weight in (False, True):
        _emit_bound(module, by_weight)
        _emit_cut(module, by_weight)
    _emit_weigh_list(module)
    _emit_total(module)
    _emit_pick(module)


def weigh(x: Value, greatest: Value, factor: Value) -> list[Value]:
    """Return the weights of 16 logits: 2 vectors of 8 x i64."""
    return [power(z) for z in exponents(x, greatest, factor)]


def exponents(x: Value, greatest: Value, factor: Value) -> list[Value]:
    """Return z of 16 logits: 2 vectors of 8 x f64, at least -41."""
    halves = (x.shuffle(lanes).signed(F64) for lanes in (range(8), range(8, 16)))
    return [exponent(half, greatest, factor) for half in halves]


def exponent(x: Value, greatest: Value, factor: Value) -> Value:
    """Return z of 8 logits, both f64."""
    return maximum((x - greatest.splat(8)) * factor.splat(8), LEAST_EXPONENT)


def power(z: Value) -> Value:
    """Return the weights of 8 exponents."""
    whole = floor(z)
    fraction = z - whole
    power = z.fn.value(POLYNOMIAL[-1], _DOUBLES)
    for coefficient in POLYNOMIAL[-2::-1]:
        power = power * fraction + coefficient
    # It is from 1 to 2, so its mantissa is 2 ** 52 times it.
    mantissa = (power.bits(_WEIGHTS) & _MANTISSA) | _ONE
    exponent = (whole + _MAGIC).bits(_WEIGHTS) - _MAGIC_BITS
    return mantissa >> ((52 - WEIGHT_BITS) - exponent)


def add(values: Value) -> Value:
    """Return the sum of all lanes."""
    return values.reduce(lambda a, b: a + b)


def _emit_pick(module: object) -> None:
    """``draw_pick``: the first that passes the mark, or -1."""
    fn = PICK.begin(module)
    weights, count, before, mark, out = fn.args
    reached, picked = fn.var(before), fn.var(fn.i64(-1))
    i = fn.var(fn.i64(0))
    with fn.loop_while(lambda: (i.get() < count) & (picked.get() < 0)):
        reached.set(reached.get() + fn.load(weights + i.get() * 8, I64, 8))
        picked.set(select(reached.get() > mark, i.get(), picked.get()))
        i.set(i.get() + 1)
    fn.store(picked.get(), out, 8)
    fn.finish()


def _key(x: Value) -> Value:
    """Return i32 in the order of f32, the two zeros being one; its own inverse on bits."""
    return _in_order((x + 0.0).bits(x.like(I32)))


def _in_order(words: Value) -> Value:
    return select(words < 0, words ^ _ALL_BUT_SIGN, words)


def _emit_peaks(module: object, num_blocks: int) -> None:
    """``draw_peaks``: the greatest logit of every lane of a block, and of all.

    The greatest of all is an f64.
    """
    fn = PEAKS.begin(module)
    row, peaks, out = fn.args
    lowest = fn.lanes(F32, [-math.inf] * 16)
    top = fn.var(lowest)
    with fn.loop(num_blocks) as block:
        begin = row + block * (BLOCK_LOGITS * 4)
        sides = [lowest] * 4
        for i in range(VECTORS):
            sides[i % 4] = maximum(fn.load(begin + 64 * i, FLOATS, 4), sides[i % 4])
        peak = maximum(maximum(sides[0], sides[1]), maximum(sides[2], sides[3]))
        fn.store(peak, peaks + block * 64, 4)
        top.set(maximum(peak, top.get()))
    fn.store(top.get().reduce(maximum).signed(F64), out, 8)
    fn.finish()


def _emit_gather(module: object, num_blocks: int) -> None:
    """``draw_gather``: list, by id, what reaches the bound.

    ``bound`` are the bits of an f32. Behind the list come 16 values of minus infinity.
    """
    fn = GATHER.begin(module)
    row, peaks, bound, ids, values, out = fn.args
    threshold = bound.signed(I32).bits(F32).splat(16)
    count = fn.var(fn.i64(0))

    def reaching(at: Value) -> Value:
        return (fn.load(at, FLOATS, 4) >= threshold).bits(I16).unsigned(I64)

    with (
        fn.loop(num_blocks) as block,
        fn.when(reaching(peaks + block * 64) > 0),
        fn.loop(VECTORS) as i,
    ):
        first = block * BLOCK_LOGITS + i * 16
        left = fn.var(reaching(row + first * 4))  # a bit for each that reaches it
        with fn.loop_while(lambda: left.get() > 0):
            token = first + trailing_zeros(left.get())
            fn.store(token.signed(I32), ids + count.get() * 4, 4)
            fn.store(fn.load(row + token * 4, F32, 4), values + count.get() * 4, 4)
            count.set(count.get() + 1)
            left.set(left.get() & (left.get() - 1))
    fn.store(fn.lanes(F32, [-math.inf] * 16), values + count.get() * 4, 4)
    fn.store(count.get(), out, 8)
    fn.finish()


def _emit_bound(module: object, by_weight: bool) -> None:
    """``draw_bound_count``, ``draw_bound_weight``: store a bound.

    It is the highest key that the wanted number of values, or the wanted weight of them, reaches.
    Whole vectors are read.
    """
    fn = (BOUND_WEIGHT if by_weight else BOUND_COUNT).begin(module)
    values, weights, count, wanted, out = fn.args
    bound, step = fn.var(fn.value(_LOWEST, I32)), fn.var(fn.value(_LOWEST, I32))
    num_vectors = (count + 15) // 16
    with fn.loop(32):
        trial = bound.get() + step.get()
        if by_weight:
            sums = [fn.var(fn.lanes(I64, [0] * 8)) for _ in range(2)]
        else:
            sums = [fn.var(fn.lanes(I32, [0] * 16))]
        with fn.loop(num_vectors) as i:
            reaches = _key(fn.load(values + i * 64, FLOATS, 4)) >= trial.splat(16)
            if by_weight:
                for half, total in enumerate(sums):
                    weight = fn.load(weights + i * 128 + 64 * half, _WEIGHTS, 8)
                    lanes = range(8 * half, 8 * half + 8)
                    total.set(total.get() + select(reaches.shuffle(lanes), weight, 0))
            else:
                sums[0].set(sums[0].get() + reaches.unsigned(I32))
        if by_weight:
            reached = add(sums[0].get() + sums[1].get())
        else:
            reached = add(sums[0].get()).signed(I64)
        bound.set(select(reached >= wanted, trial, bound.get()))
        step.set(step.get() >> 1)
    fn.store(bound.get().signed(I64), out, 8)
    fn.finish()


def _emit_cut(module: object, by_weight: bool) -> None:
    """``draw_cut_count``, ``draw_cut_weight``: cut a list at a bound.

    Keep what is above the bound, and of what equals it the first that are still wanted: by number,
    or until weights reach what is wanted. Weights are moved along where they count.
    """
    fn = (CUT_WEIGHT if by_weight else CUT_COUNT).begin(module)
    ids, values, weights, count, bound, wanted, out = fn.args
    limit = _in_order(bound.signed(I32)).bits(F32)
    left, length = fn.var(wanted), fn.var(fn.i64(0))

    def amount(i: Value) -> Value:
        return fn.load(weights + i * 8, I64, 8) if by_weight else fn.i64(1)

    with fn.loop(count) as i, fn.when(fn.load(values + i * 4, F32, 4) > limit):
        left.set(left.get() - amount(i))
    with fn.loop(count) as i:
        value, part = fn.load(values + i * 4, F32, 4), amount(i)
        is_tie = value.equals(limit)
        with fn.when((value > limit) | (is_tie & (left.get() > 0))):
            fn.store(fn.load(ids + i * 4, I32, 4), ids + length.get() * 4, 4)
            fn.store(value, values + length.get() * 4, 4)
            if by_weight:
                fn.store(part, weights + length.get() * 8, 8)
            length.set(length.get() + 1)
            left.set(select(is_tie, left.get() - part, left.get()))
    fn.store(fn.lanes(F32, [-math.inf] * 16), values + length.get() * 4, 4)
    fn.store(length.get(), out, 8)
    fn.finish()


def _emit_weigh_list(module: object) -> None:
    """``draw_weigh_list``: store the weights of a list, whole vectors."""
    fn = WEIGH_LIST.begin(module)
    values, count, greatest, factor, weights = fn.args
    with fn.loop((count + 15) // 16) as i:
        x = fn.load(values + i * 64, FLOATS, 4)
        for half, weight in enumerate(weigh(x, greatest.bits(F64), factor.bits(F64))):
            fn.store(weight, weights + i * 128 + 64 * half, 8)
    fn.finish()


def _emit_total(module: object) -> None:
    """``draw_total``: add up, and make 0 what is below ``least``."""
    fn = TOTAL.begin(module)
    weights, count, least, out = fn.args
    total = fn.var(fn.i64(0))
    with fn.loop(count) as i:
        weight = fn.load(weights + i * 8, I64, 8)
        weight = select(weight >= least, weight, 0)
        fn.store(weight, weights + i * 8, 8)
        total.set(total.get() + weight)
    fn.store(total.get(), out, 8)
    fn.finish()


def _emit_kth(module: object) -> None:
    """``draw_kth``: store the bits of the k-th largest value, an f32.

    It is minus infinity if there are no more than k. Whole vectors are read.
    """
    fn = KTH.begin(module)
    values, count, wanted, out = fn.args
    fn.store(_key(fn.value(-math.inf, F32)).signed(I64), out, 8)
    with fn.when(wanted < count):
        BOUND_COUNT.call(fn, values=values, weights=0, count=count, wanted=wanted, out=out)
    fn.store(_in_order(fn.load(out, I64, 8).signed(I32)).signed(I64), out, 8)
    fn.finish()


def _emit_narrow(module: object, num_blocks: int) -> None:
    """``draw_narrow``: list at least that number of the largest."""
    fn = NARROW.begin(module)
    row, peaks, wanted, ids, values, out = fn.args
    KTH.call(fn, values=peaks, count=num_blocks * 16, wanted=wanted, out=out)
    bound = fn.load(out, I64, 8)
    GATHER.call(fn, row=row, peaks=peaks, bound=bound, ids=ids, values=values, out=out)
    fn.finish()
