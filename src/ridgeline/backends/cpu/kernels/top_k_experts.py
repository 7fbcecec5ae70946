"""Which experts a row goes to where more than their shares counts: groups, and a bias (DeepSeek).

``experts`` has the router's products and the rule for plain shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ridgeline.backends.cpu.kernels.ir import (
    F32,
    Function,
    Value,
    absolute,
    exp,
    maximum,
    select,
)
from ridgeline.backends.cpu.kernels.rows import FLOATS
from ridgeline.backends.cpu.layout.feed_forward import choice_bytes, route_stride
from ridgeline.model.shape.model import Experts

_TAKEN = -1e30  # below every product; its exponential is 0


def choose_limited(fn: Function, out: Value, bias: Value, choice: Value, experts: Experts) -> None:
    """Keep the shares at ``out`` of the experts that a row goes to, as weights.

    With a softmax they are exponentials. ``choice`` is room: what experts are chosen by, then the
    same of groups, and whether a group is chosen.
    """
    everything = fn.var(fn.value(0.0, F32))
    with fn.loop(experts.num) as e:
        everything.set(everything.get() + fn.load(out + e * 4, F32, 4))
    with fn.loop(experts.num) as e:
        value = fn.load((choice if experts.scales_input else out) + e * 4, F32, 4)
        if experts.router == "softmax":
            value = value / everything.get()
            fn.store(value, out + e * 4, 4)
        if experts.choice_bias:
            value = value + fn.load(bias + e * 4, F32, 4)
        fn.store(value, choice + e * 4, 4)
    if experts.num_groups > 1:
        _limit_to_groups(fn, choice, experts)
    chosen = fn.var(fn.value(0.0, F32))
    with fn.loop(experts.per_token):
        at = _take_largest(fn, choice, experts.num)
        share = absolute(fn.load(out + at, F32, 4))
        chosen.set(chosen.get() + share)
        fn.store(-share, out + at, 4)  # shares are positive: it is marked
    whole = chosen.get() if experts.normalised else fn.value(1.0, F32)
    with fn.loop(experts.num) as e:
        value = fn.load(out + e * 4, F32, 4)
        fn.store(select(value < 0.0, -value / whole * experts.scale, 0.0), out + e * 4, 4)
    # Not a number stays one: nothing compares with it, so no expert would be met.
    fn.store(fn.load(out, F32, 4) + everything.get() * 0.0, out, 4)


def take_one_by_one(
    fn: Function, visible: Callable[[Value], Value], out: Value, choice: Value, experts: Experts
) -> None:
    """Put weights as "sparsemixer" has them at ``out``: see ``arch.model.Experts``.

    ``visible`` returns 16 of the products that are there. ``choice`` is room for all of them, and
    for those of experts that are left.
    """
    row_bytes, zero = fn.i64(route_stride(experts)), fn.lanes(F32, [0.0] * 16)
    left, whole = choice + route_stride(experts), fn.var(zero)
    with fn.loop(row_bytes, step=64) as at:
        product = visible(at)
        whole.set(whole.get() + product * 0.0)
        for place in (choice, left):
            fn.store(product, place + at, 4)
        fn.store(zero, out + at, 4)
    with fn.loop(experts.per_token):
        best, total = fn.var(fn.lanes(F32, [_TAKEN] * 16)), fn.var(zero)
        with fn.loop(row_bytes, step=64) as at:
            best.set(maximum(best.get(), fn.load(left + at, FLOATS, 4)))
        top = best.get().reduce(maximum).splat(16)
        with fn.loop(row_bytes, step=64) as at:
            product = fn.load(choice + at, FLOATS, 4)
            distance = (top - product) / maximum(absolute(product), top)
            share = exp(fn.load(left + at, FLOATS, 4) - top)
            is_near = (distance > 2 * experts.jitter).equals(0)
            total.set(total.get() + select(is_near, share, 0.0))
        at = _take_largest(fn, left, experts.num)
        fn.store(fn.value(_TAKEN, F32), left + at, 4)
        fn.store(1.0 / total.get().reduce(lambda a, b: a + b), out + at, 4)
    # Not a number stays one: nothing compares with it, so no expert would be met.
    lost = whole.get().reduce(lambda a, b: a + b)
    fn.store(fn.load(out, F32, 4) + lost, out, 4)


def _limit_to_groups(fn: Function, choice: Value, experts: Experts) -> None:
    """Leave minus infinity at ``choice`` for experts of groups that are not chosen."""
    size, least = experts.num // experts.num_groups, -math.inf
    of_groups = choice + route_stride(experts)
    is_met = of_groups + (choice_bytes(experts) - route_stride(experts)) // 2
    with fn.loop(experts.num_groups) as group:
        best, second = (fn.var(fn.value(least, F32)) for _ in range(2))
        with fn.loop(size) as i:
            value = fn.load(choice + (group * size + i) * 4, F32, 4)
            second.set(select(value > best.get(), best.get(), maximum(value, second.get())))
            best.set(maximum(value, best.get()))
        total = best.get() + second.get() if experts.router == "sigmoid" else best.get()
        fn.store(total, of_groups + group * 4, 4)
        fn.store(fn.value(0.0, F32), is_met + group * 4, 4)
    with fn.loop(experts.groups_met):
        at = _take_largest(fn, of_groups, experts.num_groups)
        fn.store(fn.value(1.0, F32), is_met + at, 4)
    with fn.loop(experts.num) as e:
        met = fn.load(is_met + e // size * 4, F32, 4) > 0.0
        fn.store(select(met, fn.load(choice + e * 4, F32, 4), least), choice + e * 4, 4)


def _take_largest(fn: Function, values: Value, count: int) -> Value:
    """Return where the largest of some floats is, in bytes, of equals the first; take it away."""
    best, place = fn.var(fn.value(-math.inf, F32)), fn.var(fn.i64(0))
    with fn.loop(count) as i:
        value = fn.load(values + i * 4, F32, 4)
        better = value > best.get()
        best.set(select(better, value, best.get()))
        place.set(select(better, i * 4, place.get()))
    at = place.get()
    fn.store(fn.value(-math.inf, F32), values + at, 4)
    return at
