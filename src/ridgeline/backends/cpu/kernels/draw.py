"""The draw of a token from a row of logits, and its rank: the rule of ``backends.sampler.rule``.

A plain draw adds up the weights of each block of 512 logits, and looks for the token in the block
that reaches the mark. Filters take what ``candidates`` finds. A row is changed in place by
penalties and bias, and changed back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ridgeline.backends.cpu.kernels.candidates import (
    BOUND_COUNT,
    BOUND_WEIGHT,
    CUT_COUNT,
    CUT_WEIGHT,
    NARROW,
    PEAKS,
    PICK,
    TOTAL,
    VECTORS,
    WEIGH_LIST,
    add,
    emit_candidates,
    weigh,
)
from ridgeline.backends.cpu.kernels.filters import (
    DEPTH,
    EXCLUDE,
    LEAST,
    REACHING,
    TYPICAL,
    emit_filters,
)
from ridgeline.backends.cpu.kernels.ir import (
    F32,
    F64,
    I16,
    I32,
    I64,
    Function,
    Operand,
    Value,
    Var,
    absolute,
    high_product,
    maximum,
    minimum,
    select,
)
from ridgeline.backends.cpu.kernels.kernel import Kernel, Words
from ridgeline.backends.cpu.kernels.rows import FLOATS
from ridgeline.backends.cpu.layout.sampling_table import (
    BLOCK_LOGITS,
    ENTRY,
    padded_vocab,
    scratch_bytes,
)
from ridgeline.backends.sampler.rule import (
    LOG2_E,
    MAX_LOGIT,
)

_BUFFERS = tuple(scratch_bytes(1))
DRAW = Kernel("draw", ("entry", "logits", "logits_stride", *_BUFFERS))
_CHOOSE = Kernel("draw_choose", ("entry", "row", *_BUFFERS))
_SUMS = Kernel("draw_sums", ("row", "greatest", "factor", "least", "sums"))
_FIND = Kernel(
    "draw_find", ("row", "greatest", "factor", "least", "sums", "mark", "weights", "out")
)
_ADJUST = Kernel("draw_adjust", ("entry", "row", "counts", "undo", "out"))
_RESTORE = Kernel("draw_restore", ("row", "undo", "count"))
_MASK = Kernel("draw_mask", ("row", "mask", "out"))
_UNIFORM = Kernel("draw_uniform", ("seed", "position", "stream", "out"))
_RANK = Kernel("draw_rank", ("row", "token", "value", "ahead"))
_ROUNDING = 2.0**-20  # of a logit: more than it changes by becoming f32
_FIRST_LISTED = 64  # bounds: top-p alone tries this many, then four times as many, ...


def emit_draw(module: object, vocab_size: int) -> None:
    """Emit ``draw`` and what it is made of."""
    num_blocks = padded_vocab(vocab_size) // BLOCK_LOGITS
    emit_candidates(module, num_blocks)
    emit_filters(module, num_blocks)
    _emit_sums(module, num_blocks)
    _emit_find(module, num_blocks)
    _emit_adjust(module)
    _emit_restore(module)
    _emit_mask(module, num_blocks)
    _emit_uniform(module)
    _emit_rank(module, num_blocks)
    _emit_choose(module, num_blocks)
    _emit_draw(module, vocab_size, num_blocks)


# --- weights -----------------------------------------------------------------------------------


def _emit_sums(module: object, num_blocks: int) -> None:
    """``draw_sums``: weights of each block, then of all.

    Those below ``least`` count as 0. ``greatest`` and ``factor`` are the bits of f64.
    """
    fn = _SUMS.begin(module)
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
    """``draw_find``: the token, or -1.

    It is the first whose running sum passes the mark; ``sums`` are those of ``draw_sums``.
    """
    fn = _FIND.begin(module)
    row, greatest, factor, least, sums, mark, weights, out = fn.args
    before, block_index = fn.var(fn.i64(0)), fn.var(fn.i64(-1))
    with fn.loop(num_blocks) as block, fn.when(block_index.get() < 0):
        reached = before.get() + fn.load(sums + block * 8, I64, 8)
        passes = reached > mark
        block_index.set(select(passes, block, block_index.get()))
        before.set(select(passes, before.get(), reached))
    fn.store(block_index.get(), out, 8)
    with fn.when(block_index.get() >= 0):
        begin = row + block_index.get() * (BLOCK_LOGITS * 4)
        with fn.loop(VECTORS) as i:
            x = fn.load(begin + i * 64, FLOATS, 4)
            for half, weight in enumerate(weigh(x, greatest.bits(F64), factor.bits(F64))):
                weight = select(weight >= least.splat(8), weight, 0)
                fn.store(weight, weights + i * 128 + 64 * half, 8)
        PICK.call(fn, weights=weights, count=BLOCK_LOGITS, before=before.get(), mark=mark, out=out)
        fn.store(fn.load(out, I64, 8) + block_index.get() * BLOCK_LOGITS, out, 8)
    fn.finish()


# --- a row -------------------------------------------------------------------------------------


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
    """``draw_adjust``: penalties, bias, what cannot be chosen."""
    fn = _ADJUST.begin(module)
    address, row, counts, undo, out = fn.args
    entry = Words(fn, address, ENTRY)
    noted = fn.var(fn.i64(0))
    repetition = entry.double("repetition")

    def repeated(value: Value) -> Value:
        return select(value > 0.0, value / repetition, value * repetition)

    # Twice how often a token is in the answer, plus 1 if it occurs at all.
    with fn.loop(entry["history_len"]) as i:
        token = fn.load(entry["history"] + i * 4, I32, 4).signed(I64)
        count = fn.load(counts + token * 4, I32, 4)
        increment = select(i >= entry["prompt_len"], fn.value(2, I32), 0)
        fn.store((count + increment) | 1, counts + token * 4, 4)
        with fn.when(count.equals(0)):
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
    """``draw_restore``: change back, the last change first."""
    fn = _RESTORE.begin(module)
    row, undo, count = fn.args
    with fn.loop(count) as i:
        at = undo + (count - 1 - i) * 8
        token = fn.load(at, I32, 4).signed(I64)
        fn.store(fn.load(at + 4, F32, 4), row + token * 4, 4)
    fn.finish()


def _emit_mask(module: object, num_blocks: int) -> None:
    """``draw_mask``: a copy of a row, at minus infinity where its mask has no bit."""
    fn = _MASK.begin(module)
    row, mask, out = fn.args
    lanes = fn.lanes(I32, [1 << i for i in range(16)])
    with fn.loop(num_blocks * VECTORS) as i:
        bits = fn.load(mask + i * 2, I16, 2).unsigned(I32).splat(16)
        is_allowed = (bits & lanes).equals(0).equals(0)
        x = fn.load(row + i * 64, FLOATS, 4)
        fn.store(select(is_allowed, x, -math.inf), out + i * 64, 4)
    fn.finish()


def _emit_uniform(module: object) -> None:
    """``draw_uniform``: Philox4x32-10, 53 bits (Salmon et al., SC 2011)."""
    fn = _UNIFORM.begin(module)
    seed, position, stream, out = fn.args
    low = 0xFFFFFFFF
    x: Sequence[Value] = (position & low, position >> 32, stream, fn.i64(0))
    keys = [seed & low, seed >> 32]
    for _ in range(10):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = ((b >> 32) ^ x[1] ^ keys[0], b & low, (a >> 32) ^ x[3] ^ keys[1], a & low)
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    fn.store((x[0] << 21) ^ (x[1] >> 11), out, 8)
    fn.finish()


def _emit_rank(module: object, num_blocks: int) -> None:
    """``draw_rank``: a token's logit, and how many come before it."""
    fn = _RANK.begin(module)
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


class _List:
    """The list of candidates, while what works on it is emitted; ``count`` is -1 before it is."""

    def __init__(self, fn: Function, row: Value, scale: dict[str, Value], of: dict[str, Value]):
        self.fn, self.row, self.scale, self.of = fn, row, scale, of
        self.count = fn.var(fn.i64(-1))
        self._cell = of["draw_cells"]
        names = ("peaks", "ids", "values", "weights")
        self.peaks, self.ids, self.values, self.weights = (of[f"draw_{name}"] for name in names)

    def result(self) -> Value:
        """Return the result of the last call of a kernel."""
        return self.fn.load(self._cell, I64, 8)

    def lowest(self) -> Value:
        """Return the lowest value, as f64."""
        lowest = self.fn.var(self.fn.value(math.inf, F32))
        with self.fn.loop(self.count.get()) as i:
            lowest.set(minimum(lowest.get(), self.fn.load(self.values + i * 4, F32, 4)))
        return lowest.get().signed(F64)

    def narrow(self, wanted: Value) -> None:
        """List that number of the largest, and perhaps some more."""
        NARROW.call(
            self.fn, row=self.row, peaks=self.peaks, wanted=wanted, ids=self.ids,
            values=self.values, out=self._cell,
        )  # fmt: skip
        self.count.set(self.result())

    def reach(self, least: Value) -> None:
        """List what may have this weight, if there is no list yet."""
        with self.fn.when(self.count.get() < 0):
            REACHING.call(
                self.fn, row=self.row, peaks=self.peaks, **self.scale, least=least, ids=self.ids,
                values=self.values, weights=self.weights, out=self._cell,
            )  # fmt: skip
            self.count.set(self.result())

    def weigh(self) -> None:
        """Make the weights."""
        WEIGH_LIST.call(
            self.fn, values=self.values, count=self.count.get(), **self.scale, weights=self.weights
        )

    def total(self, least: Value) -> Value:
        """Return the sum of the weights; make 0 what is below ``least``."""
        TOTAL.call(
            self.fn, weights=self.weights, count=self.count.get(), least=least, out=self._cell
        )
        return self.result()

    def cut(self, bound: Kernel, cut: Kernel, wanted: Value) -> None:
        """Keep the largest, by number or by weight."""
        count = self.count.get()
        bound.call(
            self.fn, values=self.values, weights=self.weights, count=count, wanted=wanted,
            out=self._cell,
        )  # fmt: skip
        cut.call(
            self.fn, ids=self.ids, values=self.values, weights=self.weights, count=count,
            bound=self.result(), wanted=wanted, out=self._cell,
        )  # fmt: skip
        self.count.set(self.result())

    def take_typical(self, share: Value) -> None:
        """Keep the most typical that have this share."""
        TYPICAL.call(
            self.fn, row=self.row, **self.scale, share=share, ids=self.ids, values=self.values,
            weights=self.weights, count=self.count.get(), out=self._cell,
        )  # fmt: skip
        self.count.set(self.result())

    def take_top(self, share: Value, num_blocks: int) -> None:
        """Keep the largest that have this share; of the whole row if there is no list yet."""
        fn, wanted = self.fn, self.fn.var(self.fn.i64(0))
        is_listed = self.count.get() >= 0
        with fn.when(is_listed):
            wanted.set(high_product(share, self.total(fn.i64(0))))
        with fn.when(is_listed.equals(0)):
            sums = self.of["draw_sums"]
            _SUMS.call(fn, row=self.row, **self.scale, least=1, sums=sums)
            wanted.set(high_product(share, fn.load(sums + num_blocks * 8, I64, 8)))
            num_listed, is_enough = fn.var(fn.i64(_FIRST_LISTED)), fn.var(fn.i64(0))
            with fn.loop_while(lambda: is_enough.get().equals(0)):
                self.narrow(num_listed.get())
                self.weigh()
                reaches = self.total(fn.i64(0)) >= wanted.get()
                is_enough.set((reaches | (num_listed.get() >= num_blocks * 16)).unsigned(I64))
                num_listed.set(num_listed.get() * 4)
        self.cut(BOUND_WEIGHT, CUT_WEIGHT, maximum(wanted.get(), 1))


def _emit_choose(module: object, num_blocks: int) -> None:
    """``draw_choose``: the token of an adjusted row, -1 for none."""
    fn = _CHOOSE.begin(module)
    address, row, *buffers = fn.args
    entry, of = Words(fn, address, ENTRY), dict(zip(_BUFFERS, buffers, strict=True))
    cell, greatest_at, out = of["draw_cells"], of["draw_cells"] + 8, entry.address("token")
    PEAKS.call(fn, row=row, peaks=of["draw_peaks"], out=greatest_at)
    scale = {"greatest": fn.load(greatest_at, I64, 8), "factor": entry["factor"]}

    def uniform(stream: int) -> Value:
        place = {"seed": entry["seed"], "position": entry["position"]}
        _UNIFORM.call(fn, **place, stream=stream, out=cell)
        return fn.load(cell, I64, 8)

    bits = uniform(0) << 11
    left = _List(fn, row, scale, of)
    top = scale["greatest"].bits(F64)
    fn.store(top - entry.double("depth") - absolute(top) * _ROUNDING, entry.address("lowest"), 8)
    with fn.when(entry["top_k"] > 0):
        left.narrow(entry["top_k"])
        left.cut(BOUND_COUNT, CUT_COUNT, entry["top_k"])
        fn.store(left.lowest(), entry.address("lowest"), 8)
        left.weigh()
    is_typical = entry["typical"].equals(0).equals(0)
    with fn.when(is_typical):
        left.reach(fn.i64(1))
        left.take_typical(entry["typical"])
    with fn.when(entry["share"].equals(0).equals(0)):
        left.take_top(entry["share"], num_blocks)
    least = fn.var(entry["least"])
    has_sigmas = entry.double("sigmas") > 0.0
    with fn.when(is_typical | has_sigmas):
        fn.store(fn.value(-1.0, F64), cell, 8)
        with fn.when(has_sigmas):
            DEPTH.call(fn, row=row, greatest=scale["greatest"], sigmas=entry["sigmas"], out=cell)
        LEAST.call(
            fn, values=left.values, count=left.count.get(), **scale, least=least.get(),
            depth=left.result(), out=cell,
        )  # fmt: skip
        least.set(left.result())
    with fn.when(entry["chance"] > 0), fn.when(uniform(1) < entry["chance"]):
        left.reach(least.get())
        left.total(least.get())
        EXCLUDE.call(
            fn, values=left.values, weights=left.weights, count=left.count.get(),
            threshold=entry["threshold"],
        )  # fmt: skip
    with fn.when((least.get() > 1) & (left.count.get() < 0)):
        left.reach(least.get())
    with fn.when(left.count.get() < 0):
        weighed = {"row": row, **scale, "least": least.get()}
        _SUMS.call(fn, **weighed, sums=of["draw_sums"])
        mark = high_product(bits, fn.load(of["draw_sums"] + num_blocks * 8, I64, 8))
        _FIND.call(fn, **weighed, sums=of["draw_sums"], mark=mark, weights=left.weights, out=out)
    with fn.when(left.count.get() >= 0):
        mark = high_product(bits, left.total(least.get()))
        count = left.count.get()
        PICK.call(fn, weights=left.weights, count=count, before=0, mark=mark, out=out)
        with fn.when(entry["token"] >= 0):
            fn.store(fn.load(left.ids + entry["token"] * 4, I32, 4).signed(I64), out, 8)
    fn.finish()


def _emit_draw(module: object, vocab_size: int, num_blocks: int) -> None:
    """``draw``: all that an entry asks for."""
    fn = DRAW.begin(module)
    address, logits, stride, *buffers = fn.args
    entry, of = Words(fn, address, ENTRY), dict(zip(_BUFFERS, buffers, strict=True))
    row, cell = logits + entry["row"] * stride, of["draw_cells"]
    peaks, ids, values = (of[f"draw_{name}"] for name in ("peaks", "ids", "values"))
    with fn.loop(num_blocks * BLOCK_LOGITS, start=vocab_size) as i:
        fn.store(fn.value(-math.inf, F32), row + i * 4, 4)
    with fn.when(entry["draws"] > 0):
        undo = of["draw_undo"]
        _ADJUST.call(fn, entry=address, row=row, counts=of["draw_counts"], undo=undo, out=cell)
        noted = fn.load(cell, I64, 8)
        chosen_from = fn.var(row)
        with fn.when(entry["mask"].equals(0).equals(0)):
            _MASK.call(fn, row=row, mask=entry["mask"], out=of["draw_masked"])
            chosen_from.set(of["draw_masked"])
        _CHOOSE.call(fn, entry=address, row=chosen_from.get(), **of)
        _RESTORE.call(fn, row=row, undo=undo, count=noted)
    with fn.when((entry["num_top"] >= 0) & (entry["token"] >= 0)):
        _RANK.call(
            fn, row=row, token=entry["token"], value=entry.address("value"),
            ahead=entry.address("ahead"),
        )  # fmt: skip
        PEAKS.call(fn, row=row, peaks=peaks, out=entry.address("greatest"))
        factor = fn.value(LOG2_E, F64).bits(I64)
        _SUMS.call(
            fn, row=row, greatest=entry["greatest"], factor=factor, least=1, sums=of["draw_sums"]
        )
        fn.store(fn.load(of["draw_sums"] + num_blocks * 8, I64, 8), entry.address("total"), 8)
        with fn.when(entry["num_top"] > 0):
            num_top = entry["num_top"]
            NARROW.call(fn, row=row, peaks=peaks, wanted=num_top, ids=ids, values=values, out=cell)
            count = fn.load(cell, I64, 8)
            unweighed: dict[str, Operand] = {"values": values, "weights": 0, "count": count}
            BOUND_COUNT.call(fn, **unweighed, wanted=num_top, out=cell)
            bound = fn.load(cell, I64, 8)
            CUT_COUNT.call(fn, ids=ids, **unweighed, bound=bound, wanted=num_top, out=cell)
            with fn.loop(num_top) as i:
                at = entry["top"] + i * 8
                fn.store(fn.load(ids + i * 4, I32, 4), at, 4)
                fn.store(fn.load(values + i * 4, F32, 4), at + 4, 4)
    fn.finish()
