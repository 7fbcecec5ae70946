"""The draw of a token from a row of logits, and its rank: the rule of ``backends.sampling``.

A plain draw adds up the weights of each block of 512 logits, and looks for the token in the block
that reaches the mark. Filters take what ``candidates`` finds. A row is changed in place by
penalties and bias, and changed back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ridgeline.backends.cpu.emit.candidates import VECTORS, add, emit_candidates, weigh
from ridgeline.backends.cpu.emit.ir import (
    F32,
    F64,
    I32,
    I64,
    Function,
    Value,
    Var,
    high_product,
    maximum,
    minimum,
    select,
)
from ridgeline.backends.cpu.emit.rows import FLOATS
from ridgeline.backends.cpu.layout.draw_entries import (
    BLOCK_LOGITS,
    DRAW,
    padded_vocab,
    scratch_bytes,
)
from ridgeline.backends.sampling import (
    LOG2_E,
    MAX_LOGIT,
)

_FIRST_LOOK = 64  # bounds: top-p alone tries so many, then four times as many, ...


def emit_draw(module: object, vocab_size: int) -> None:
    """Emit ``draw(entry, logits, logits_stride, BUFFERS...)`` and what it is made of."""
    num_blocks = padded_vocab(vocab_size) // BLOCK_LOGITS
    emit_candidates(module, num_blocks)
    _emit_sums(module, num_blocks)
    _emit_find(module, num_blocks)
    _emit_adjust(module)
    _emit_restore(module)
    _emit_uniform(module)
    _emit_rank(module, num_blocks)
    _emit_choose(module, num_blocks)
    _emit_draw(module, vocab_size, num_blocks)


# --- weights -----------------------------------------------------------------------------------


def _emit_sums(module: object, num_blocks: int) -> None:
    """``draw_sums(row, greatest, factor, least, sums)``: weights of each block, then of all.

    Those below ``least`` count as 0. ``greatest`` and ``factor`` are the bits of f64.
    """
    fn = Function(module, "draw_sums", 5)
    row, greatest, factor, least, sums = fn.args
    zero = fn.lanes(I64, [0] * 8)
    total = fn.var(fn.i64(0))
    with fn.loop(num_blocks) as block:
        parts = [fn.var(zero) for _ in range(2)]
        with fn.loop(VECTORS) as i:
            x = fn.load(row + block * (BLOCK_LOGITS * 4) + i * 64, FLOATS, 4)
            weights = weigh(x, greatest.bits(F64), factor.bits(F64))
            for part, weight in zip(parts, weights, strict=True):
                part.set(part.get() + select(weight >= least.splat(8), weight, 0))
        of_block = add(parts[0].get() + parts[1].get())
        fn.store(of_block, sums + block * 8, 8)
        total.set(total.get() + of_block)
    fn.store(total.get(), sums + num_blocks * 8, 8)
    fn.finish()


def _emit_find(module: object, num_blocks: int) -> None:
    """``draw_find(row, greatest, factor, least, sums, mark, weights, out)``: the token, or -1.

    It is the first whose running sum passes the mark; ``sums`` are those of ``draw_sums``.
    """
    fn = Function(module, "draw_find", 8)
    row, greatest, factor, least, sums, mark, weights, out = fn.args
    before, found = fn.var(fn.i64(0)), fn.var(fn.i64(-1))
    with fn.loop(num_blocks) as block, fn.when(found.get() < 0):
        reached = before.get() + fn.load(sums + block * 8, I64, 8)
        passes = reached > mark
        found.set(select(passes, block, found.get()))
        before.set(select(passes, before.get(), reached))
    fn.store(found.get(), out, 8)
    with fn.when(found.get() >= 0):
        begin = row + found.get() * (BLOCK_LOGITS * 4)
        with fn.loop(VECTORS) as i:
            x = fn.load(begin + i * 64, FLOATS, 4)
            for half, weight in enumerate(weigh(x, greatest.bits(F64), factor.bits(F64))):
                kept = select(weight >= least.splat(8), weight, 0)
                fn.store(kept, weights + i * 128 + 64 * half, 8)
        fn.call("draw_pick", weights, BLOCK_LOGITS, before.get(), mark, out)
        fn.store(fn.load(out, I64, 8) + found.get() * BLOCK_LOGITS, out, 8)
    fn.finish()


# --- a row -------------------------------------------------------------------------------------


class _Entry:
    """The words of a draw by name."""

    def __init__(self, fn: Function, address: Value) -> None:
        self._fn, self._address = fn, address

    def at(self, name: str) -> Value:
        """Return where a word is."""
        return self._address + 8 * DRAW.index(name)

    def __getitem__(self, name: str) -> Value:
        return self._fn.load(self.at(name), I64, 8)

    def double(self, name: str) -> Value:
        """Return a word that is an f64."""
        return self._fn.load(self.at(name), F64, 8)


def _changed(
    fn: Function, row: Value, token: Value, undo: Value, count: Var, new: Callable[[Value], Value]
) -> None:
    """Change a logit, in float64 and rounded, and note what it was."""
    at, old = row + token * 4, undo + count.get() * 8
    value = fn.load(at, F32, 4)
    fn.store(token.signed(I32), old, 4)
    fn.store(value, old + 4, 4)
    count.set(count.get() + 1)
    changed = maximum(minimum(new(value.signed(F64)), MAX_LOGIT), -MAX_LOGIT)
    fn.store(changed.signed(F32), at, 4)


def _emit_adjust(module: object) -> None:
    """``draw_adjust(entry, row, counts, undo, out)``: penalties, bias, what cannot be chosen."""
    fn = Function(module, "draw_adjust", 5)
    address, row, counts, undo, out = fn.args
    entry = _Entry(fn, address)
    noted = fn.var(fn.i64(0))
    repetition = entry.double("repetition")

    def repeated(value: Value) -> Value:
        return select(value > 0.0, value / repetition, value * repetition)

    # Twice how often a token is in the answer, and 1 once it was met at all.
    with fn.loop(entry["history_len"]) as i:
        token = fn.load(entry["history"] + i * 4, I32, 4).signed(I64)
        seen = fn.load(counts + token * 4, I32, 4)
        more = select(i >= entry["prompt_len"], fn.value(2, I32), 0)
        fn.store((seen + more) | 1, counts + token * 4, 4)
        with fn.when(seen.equals(0)):
            _changed(fn, row, token, undo, noted, repeated)
    num_seen = noted.get()
    with fn.loop(num_seen) as i:
        token = fn.load(undo + i * 8, I32, 4).signed(I64)
        times = fn.load(counts + token * 4, I32, 4) >> 1
        fn.store(fn.value(0, I32), counts + token * 4, 4)
        with fn.when(times > 0):
            penalty = entry.double("frequency") * times.signed(F64) + entry.double("presence")
            _changed(fn, row, token, undo, noted, lambda value: value - penalty)
    with fn.loop(entry["num_biases"]) as i:
        at = entry["biases"] + i * 16
        bias = fn.load(at + 8, F64, 8)
        _changed(fn, row, fn.load(at, I64, 8), undo, noted, lambda value: value + bias)
    with fn.loop(entry["num_suppressed"]) as i:
        token = fn.load(entry["suppressed"] + i * 4, I32, 4).signed(I64)
        _changed(fn, row, token, undo, noted, lambda value: value)
        fn.store(fn.value(-math.inf, F32), row + token * 4, 4)
    fn.store(noted.get(), out, 8)
    fn.finish()


def _emit_restore(module: object) -> None:
    """``draw_restore(row, undo, count)``: change back, the last change first."""
    fn = Function(module, "draw_restore", 3)
    row, undo, count = fn.args
    with fn.loop(count) as i:
        at = undo + (count - 1 - i) * 8
        token = fn.load(at, I32, 4).signed(I64)
        fn.store(fn.load(at + 4, F32, 4), row + token * 4, 4)
    fn.finish()


def _emit_uniform(module: object) -> None:
    """``draw_uniform(seed, position, out)``: Philox4x32-10, 53 bits (Salmon et al., SC 2011)."""
    fn = Function(module, "draw_uniform", 3)
    seed, position, out = fn.args
    low = 0xFFFFFFFF
    x: Sequence[Value] = (position & low, position >> 32, fn.i64(0), fn.i64(0))
    keys = [seed & low, seed >> 32]
    for _ in range(10):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = ((b >> 32) ^ x[1] ^ keys[0], b & low, (a >> 32) ^ x[3] ^ keys[1], a & low)
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    fn.store((x[0] << 21) ^ (x[1] >> 11), out, 8)
    fn.finish()


def _emit_rank(module: object, num_blocks: int) -> None:
    """``draw_rank(row, token, value, ahead)``: a token's logit, and how many come before it."""
    fn = Function(module, "draw_rank", 4)
    row, token, value_at, ahead = fn.args
    value = fn.load(row + token * 4, F32, 4)
    fn.store(value.signed(F64), value_at, 8)
    own, place = value.splat(16), token.signed(I32).splat(16)
    lanes = fn.lanes(I32, list(range(16)))
    count = fn.var(fn.lanes(I32, [0] * 16))
    with fn.loop(num_blocks * VECTORS) as i:
        x = fn.load(row + i * 64, FLOATS, 4)
        index = lanes + (i * 16).signed(I32).splat(16)
        before = (x > own) | (x.equals(own) & (index < place))
        count.set(count.get() + before.unsigned(I32))
    fn.store(add(count.get()).signed(I64), ahead, 8)
    fn.finish()


_BUFFERS = tuple(scratch_bytes(1))  # in this order


def _emit_choose(module: object, num_blocks: int) -> None:
    """``draw_choose(entry, row, BUFFERS...)``: the token of an adjusted row, -1 for none."""
    fn = Function(module, "draw_choose", 2 + len(_BUFFERS))
    address, row, *buffers = fn.args
    entry, of = _Entry(fn, address), dict(zip(_BUFFERS, buffers, strict=True))
    cell, greatest_at = of["draw_cells"], of["draw_cells"] + 8
    peaks, ids, values, weights = (
        of[f"draw_{name}"] for name in ("peaks", "ids", "values", "weights")
    )
    factor, least, out = entry["factor"], entry["least"], entry.at("token")
    fn.call("draw_peaks", row, peaks, greatest_at)
    greatest = fn.load(greatest_at, I64, 8)
    fn.call("draw_uniform", entry["seed"], entry["position"], cell)
    bits = fn.load(cell, I64, 8) << 11
    count = fn.var(fn.i64(-1))

    def kept() -> Value:
        return fn.load(cell, I64, 8)

    def total(least: Value) -> Value:
        fn.call("draw_total", weights, count.get(), least, cell)
        return kept()

    def cut(how: str, wanted: Value) -> None:
        fn.call(f"draw_bound_{how}", values, weights, count.get(), wanted, cell)
        fn.call(f"draw_cut_{how}", ids, values, weights, count.get(), kept(), wanted, cell)
        count.set(kept())

    with fn.when(entry["top_k"] > 0):
        fn.call("draw_narrow", row, peaks, entry["top_k"], ids, values, cell)
        count.set(kept())
        cut("count", entry["top_k"])
        fn.call("draw_weigh_list", values, count.get(), greatest, factor, weights)
    is_share = entry["share"].equals(0).equals(0)
    wanted = fn.var(fn.i64(0))
    with fn.when(is_share & (entry["top_k"] > 0)):
        wanted.set(high_product(entry["share"], total(fn.i64(0))))
    with fn.when(is_share & (entry["top_k"] <= 0)):
        fn.call("draw_sums", row, greatest, factor, fn.i64(1), of["draw_sums"])
        of_all = fn.load(of["draw_sums"] + num_blocks * 8, I64, 8)
        wanted.set(high_product(entry["share"], of_all))
        look, is_enough = fn.var(fn.i64(_FIRST_LOOK)), fn.var(fn.i64(0))
        with fn.loop_while(lambda: is_enough.get().equals(0)):
            fn.call("draw_narrow", row, peaks, look.get(), ids, values, cell)
            count.set(kept())
            fn.call("draw_weigh_list", values, count.get(), greatest, factor, weights)
            reaches = (total(fn.i64(0)) >= wanted.get()) | (look.get() >= num_blocks * 16)
            is_enough.set(reaches.unsigned(I64))
            look.set(look.get() * 4)
    with fn.when(is_share):
        cut("weight", maximum(wanted.get(), 1))
    with fn.when(count.get() < 0):
        fn.call("draw_sums", row, greatest, factor, least, of["draw_sums"])
        mark = high_product(bits, fn.load(of["draw_sums"] + num_blocks * 8, I64, 8))
        fn.call("draw_find", row, greatest, factor, least, of["draw_sums"], mark, weights, out)
    with fn.when(count.get() >= 0):
        mark = high_product(bits, total(least))
        fn.call("draw_pick", weights, count.get(), fn.i64(0), mark, out)
        with fn.when(entry["token"] >= 0):
            fn.store(fn.load(ids + entry["token"] * 4, I32, 4).signed(I64), out, 8)
    fn.finish()


def _emit_draw(module: object, vocab_size: int, num_blocks: int) -> None:
    """``draw(entry, logits, logits_stride, BUFFERS...)``: all that an entry asks for."""
    fn = Function(module, "draw", 3 + len(_BUFFERS))
    address, logits, stride, *buffers = fn.args
    entry, of = _Entry(fn, address), dict(zip(_BUFFERS, buffers, strict=True))
    row, cell = logits + entry["row"] * stride, of["draw_cells"]
    peaks, ids, values = (of[f"draw_{name}"] for name in ("peaks", "ids", "values"))
    with fn.loop(num_blocks * BLOCK_LOGITS, start=vocab_size) as i:
        fn.store(fn.value(-math.inf, F32), row + i * 4, 4)
    with fn.when(entry["draws"] > 0):
        fn.call("draw_adjust", address, row, of["draw_counts"], of["draw_undo"], cell)
        noted = fn.load(cell, I64, 8)
        fn.call("draw_choose", address, row, *buffers)
        fn.call("draw_restore", row, of["draw_undo"], noted)
    with fn.when((entry["num_top"] >= 0) & (entry["token"] >= 0)):
        fn.call("draw_rank", row, entry["token"], entry.at("value"), entry.at("ahead"))
        fn.call("draw_peaks", row, peaks, entry.at("greatest"))
        factor = fn.value(LOG2_E, F64).bits(I64)
        fn.call("draw_sums", row, entry["greatest"], factor, fn.i64(1), of["draw_sums"])
        fn.store(fn.load(of["draw_sums"] + num_blocks * 8, I64, 8), entry.at("total"), 8)
        with fn.when(entry["num_top"] > 0):
            num_top = entry["num_top"]
            fn.call("draw_narrow", row, peaks, num_top, ids, values, cell)
            count = fn.load(cell, I64, 8)
            fn.call("draw_bound_count", values, fn.i64(0), count, num_top, cell)
            bound = fn.load(cell, I64, 8)
            fn.call("draw_cut_count", ids, values, fn.i64(0), count, bound, num_top, cell)
            with fn.loop(num_top) as i:
                at = entry["top"] + i * 8
                fn.store(fn.load(ids + i * 4, I32, 4), at, 4)
                fn.store(fn.load(values + i * 4, F32, 4), at + 4, 4)
    fn.finish()
