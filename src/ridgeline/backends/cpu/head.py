"""After the last layer: the likeliest token of each row, without keeping all its logits."""

from __future__ import annotations

import math

from ridgeline.backends.cpu.ir import F32, I32, I64, Function, fma, maximum, select
from ridgeline.backends.cpu.rows import FLOATS

# A row's best so far: value f32, poison f32 (0, or NaN if a logit was not finite), index i64.
BEST_BYTES = 16
_NOWHERE = (1 << 31) - 1


def emit_head(module: object) -> None:
    """Emit ``best(logits, size, first_id, best)``: fold ``size`` logits into the entry at ``best``.

    They are of ids from ``first_id`` on; the last vector is read whole, its surplus ignored. Of
    equal logits the lowest id wins, in whatever order they come.
    """
    fn = Function(module, "best", 4)
    logits, size, first_id, best = fn.args
    lanes = fn.lanes(I32, list(range(16)))
    end = size.signed(I32).splat(16)
    top = fn.var(fn.lanes(F32, [-math.inf] * 16))
    place = fn.var(fn.lanes(I32, [_NOWHERE] * 16))
    poison = fn.var(fn.lanes(F32, [0.0] * 16))
    with fn.loop(size, step=16) as at:
        value, index = fn.load(logits + at * 4, FLOATS, 4), lanes + at.signed(I32).splat(16)
        better = (value > top.get()) & (index < end)
        place.set(select(better, index, place.get()))
        top.set(select(better, value, top.get()))
        poison.set(fma(value, 0.0, poison.get()))
    highest = top.get().reduce(maximum)
    among = select(top.get().equals(highest.splat(16)), place.get(), _NOWHERE)
    first = among.reduce(lambda a, b: select(a < b, a, b))
    so_far, its_id = fn.load(best, F32, 4), fn.load(best + 8, I64, 8)
    is_first = highest.equals(so_far) & (first.signed(I64) + first_id < its_id)
    with fn.when((first < _NOWHERE) & ((highest > so_far) | is_first)):
        fn.store(highest, best, 4)
        fn.store(first.signed(I64) + first_id, best + 8, 8)
    poisoned = poison.get().reduce(lambda a, b: a + b) + fn.load(best + 4, F32, 4)
    fn.store(poisoned, best + 4, 4)
    fn.finish()
