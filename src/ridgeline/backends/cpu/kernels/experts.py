"""A mixture of experts: which ones a row goes to, and the product of its rows with each.

The matrices of all experts lie one below the other as one matrix, so an expert is a run of its
tiles. Experts come in the order of their numbers, each with all rows at hand that chose it: those
that no row chose are not read, and a row's sum has one order, whatever rows are beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ridgeline.backends.cpu.kernels import row_parts
from ridgeline.backends.cpu.kernels.clock import count_expert
from ridgeline.backends.cpu.kernels.ir import (
    F32,
    I32,
    I64,
    Function,
    Value,
    exp,
    fma,
    maximum,
    select,
)
from ridgeline.backends.cpu.kernels.kernel import Kernel, Words
from ridgeline.backends.cpu.kernels.rows import COPY, FLOATS
from ridgeline.backends.cpu.kernels.step_emitter import StepEmitter
from ridgeline.backends.cpu.kernels.top_k_experts import choose_limited, take_one_by_one
from ridgeline.backends.cpu.layout.feed_forward import FeedForward, is_limited, route_stride
from ridgeline.backends.cpu.layout.formats import ACT_SCALES_BYTES, TILE
from ridgeline.model.shape.model import Experts

ROUTE = Kernel("route", ("x", "router", "bias", "size", "out", "choice"))
_ADD_WEIGHTED = Kernel("add_weighted", ("x", "y", "weight", "size"))
_SHARE = Kernel("share", ("x", "weights", "size", "out"))
_OWN_SCALES = Kernel("own_scales", ("routes", "scales", "count"))
_SCALE = Kernel("scale_row", ("x", "weight", "size"))
_MOVE = Kernel("move", ("x", "y", "num_bytes"))


def emit_experts(module: object, ffns: Sequence[FeedForward]) -> None:
    """Emit ``route`` of each mixture of experts, and what moves rows to experts and back."""
    if not any(ffn.experts for ffn in ffns):
        return
    for number, ffn in enumerate(ffns):
        if ffn.experts:
            _emit_route(module, ffn.experts, number)
    if any(ffn.experts and ffn.experts.shared_gated for ffn in ffns):
        _emit_share(module)
    if any(ffn.experts and ffn.experts.own_scales for ffn in ffns):
        _emit_own_scales(module)
    fn = _ADD_WEIGHTED.begin(module)
    x, y, weight, size = fn.args
    times = fn.load(weight, F32, 4).splat(16)
    with fn.loop(size * 4, step=64) as at:
        value = fma(fn.load(y + at, FLOATS, 4), times, fn.load(x + at, FLOATS, 4))
        fn.store(value, x + at, 4)
    fn.finish()
    if any(ffn.experts and ffn.experts.scales_input for ffn in ffns):
        fn = _SCALE.begin(module)
        x, weight, size = fn.args
        times = fn.load(weight, F32, 4).splat(16)
        with fn.loop(size * 4, step=64) as at:
            fn.store(fn.load(x + at, FLOATS, 4) * times, x + at, 4)
        fn.finish()
    fn = _MOVE.begin(module)
    x, y, num_bytes = fn.args
    with fn.loop(num_bytes, step=16) as at:
        for word in (0, 8):
            fn.store(fn.load(y + at + word, I64, 8), x + at + word, 8)
    fn.finish()


def _emit_own_scales(module: object) -> None:
    """``own_scales``: multiply a row's weights by those of the experts themselves."""
    fn = _OWN_SCALES.begin(module)
    routes, scales, count = fn.args
    with fn.loop(count * 4, step=4) as at:
        fn.store(fn.load(routes + at, F32, 4) * fn.load(scales + at, F32, 4), routes + at, 4)
    fn.finish()


def _emit_share(module: object) -> None:
    """``share``: the sigmoid of a row's product with one more row of weights."""
    fn = _SHARE.begin(module)
    x, weights, size, out = fn.args
    total = fn.var(fn.lanes(F32, [0.0] * 16))
    with fn.loop(size * 4, step=64) as at:
        total.set(fma(fn.load(x + at, FLOATS, 4), fn.load(weights + at, FLOATS, 4), total.get()))
    product = total.get().reduce(lambda a, b: a + b)
    fn.store((1.0 / (exp(-product.splat(16)) + 1.0)).lane(0), out, 4)
    fn.finish()


def _emit_route(module: object, experts: Experts, number: int) -> None:
    """``route``: each expert's weight for a row, 0 for those that it does not go to.

    The softmax of the router's products, or their sigmoids; of these the ``per_token`` largest, of
    equals the first. They are then divided by their sum where the model asks for it. ``bias`` is
    added to the products, or where experts are chosen; ``choice`` is room for that.
    """
    fn = ROUTE.of(number).begin(module)
    x, router, bias, size, out, choice = fn.args
    with fn.loop(experts.num) as e:
        sums = [fn.var(fn.lanes(F32, [0.0] * 16)) for _ in range(2)]
        row = router + e * (size * 4)
        with fn.loop(size * 4, step=TILE * 4) as at:
            for i, total in enumerate(sums):
                place = at + 64 * i
                value = fn.load(x + place, FLOATS, 4)
                total.set(fma(value, fn.load(row + place, FLOATS, 4), total.get()))
        dot = (sums[0].get() + sums[1].get()).reduce(lambda a, b: a + b)
        if experts.bias:
            dot = dot + fn.load(bias + e * 4, F32, 4)
        fn.store(dot, out + e * 4, 4)
    lanes = fn.lanes(I32, list(range(16)))
    highest = fn.var(fn.lanes(F32, [-math.inf] * 16))
    row_bytes = route_stride(experts)

    def visible(at: Value) -> Value:
        index = lanes + (at >> 2).signed(I32).splat(16)
        return select(index < experts.num, fn.load(out + at, FLOATS, 4), -1e30)

    if experts.router == "sparsemixer":
        take_one_by_one(fn, visible, out, choice, experts)
        fn.finish()
        return
    if experts.router == "sigmoid":
        with fn.loop(fn.i64(row_bytes), step=64) as at:
            if experts.scales_input:  # chosen by products, for sigmoids of large ones are all 1
                fn.store(visible(at), choice + at, 4)
            fn.store(1.0 / (exp(-visible(at)) + 1.0) + visible(at) * 0.0, out + at, 4)
    else:
        with fn.loop(fn.i64(row_bytes), step=64) as at:
            highest.set(maximum(highest.get(), visible(at)))
        top = highest.get().reduce(maximum).splat(16)
        with fn.loop(fn.i64(row_bytes), step=64) as at:
            fn.store(exp(visible(at) - top), out + at, 4)
    if is_limited(experts):
        choose_limited(fn, out, bias, choice, experts)
    else:
        _choose(fn, out, experts)
    fn.finish()


def _choose(fn: Function, out: Value, experts: Experts) -> None:
    """Keep the largest of the exponentials at ``out``, as shares."""
    everything = fn.var(fn.value(0.0, F32))
    with fn.loop(experts.num) as e:
        everything.set(everything.get() + fn.load(out + e * 4, F32, 4))
    chosen = fn.var(fn.value(0.0, F32))
    with fn.loop(experts.per_token):
        best, place = fn.var(fn.value(-1.0, F32)), fn.var(fn.i64(0))
        with fn.loop(experts.num) as e:
            value = fn.load(out + e * 4, F32, 4)
            better = value > best.get()
            best.set(select(better, value, best.get()))
            place.set(select(better, e, place.get()))
        chosen.set(chosen.get() + best.get())
        fn.store(-best.get(), out + place.get() * 4, 4)  # exponentials are positive: it is marked
    whole = chosen.get() if experts.normalised else everything.get()
    with fn.loop(experts.num) as e:
        value = fn.load(out + e * 4, F32, 4)
        fn.store(select(value < 0.0, -value / whole * experts.scale, 0.0), out + e * 4, 4)
    # Not a number stays one: nothing compares with it, so no expert would be met.
    fn.store(fn.load(out, F32, 4) + everything.get() * 0.0, out, 4)


def route(
    thread: StepEmitter, layer: Words, experts: Experts, x: Value, row: Value, scope: str
) -> None:
    """Find which experts a row goes to; leave their weights, and that of the dense network.

    What experts read is in the activations "in" already, or made of ``x``.
    """
    fn, size = thread.fn, thread.sizes.hidden
    out = getattr(thread, scope)("routes") + row * route_stride(experts)
    reads = thread.floats("in", row, scope)
    if experts.beside:
        reads = thread.local("rotated")
        row_parts.only_norm(thread, layer, "router_norm", x, reads)
    bias = layer["choice_bias" if experts.choice_bias else "router_bias"]
    thread.of_ffn(ROUTE).call(
        fn, x=reads, router=layer["router"], bias=bias, size=size, out=out,
        choice=thread.local("choice"),
    )  # fmt: skip
    if experts.own_scales:
        _OWN_SCALES.call(fn, routes=out, scales=layer["expert_scales"], count=experts.num)
    if experts.shared_gated:
        _SHARE.call(
            fn, x=reads, weights=layer["shared_scale"], size=size, out=out + experts.num * 4
        )
    elif experts.shared or experts.beside:
        fn.store(fn.value(1.0, F32), out + experts.num * 4, 4)
    if experts.beside:
        row_parts.norm(thread, layer, "experts_norm", x, row, scope, ())


def add_dense(
    thread: StepEmitter, layer: Words, sums: Value, dense: Value, row: Value, scope: str
) -> Value:
    """Return where a row's sum of the outputs of experts and of the dense network is.

    It has a place of its own: all threads may read both.
    """
    fn, experts, size = thread.fn, thread.kind.ffn.experts, thread.sizes.hidden
    assert experts is not None
    out = thread.local("joined")
    if experts.beside:
        dense, beside = thread.local("rotated"), dense
        row_parts.only_norm(thread, layer, "experts_post_norm", sums, out)
        row_parts.only_norm(thread, layer, "beside_post_norm", beside, dense)
    else:
        COPY.call(fn, x=out, y=sums, size=size)
    weights = getattr(thread, scope)("routes") + row * route_stride(experts)
    _ADD_WEIGHTED.call(fn, x=out, y=dense, weight=weights + experts.num * 4, size=size)
    return out


def routed_experts(
    thread: StepEmitter, layer: Words, num_rows: Value, scope: str, *, shares_tiles: bool
) -> None:
    """Take the rows of activations through the experts that they go to; leave their sums.

    Either all threads have the same rows and share each expert's tiles, or a thread has rows of
    its own and takes all tiles. The sums are not in ``y``: others may still read it.
    """
    fn, sizes = thread.fn, thread.sizes
    ffn = thread.kind.ffn
    experts = ffn.experts
    assert experts is not None
    room = thread.shared if shares_tiles else thread.local
    routes, y, y_stride = getattr(thread, scope)("routes"), room("expert_sums"), sizes.hidden * 4
    inner, outer = ffn.size // TILE, sizes.hidden // TILE

    def own(num_tiles: int) -> tuple[Value, Value]:
        if not shares_tiles:
            return fn.i64(0), fn.i64(num_tiles)
        tiles = fn.i64(num_tiles)
        return thread.first_tile(tiles, thread.number), thread.first_tile(tiles, thread.number + 1)

    first, end = own(outer)
    with fn.loop(num_rows) as m, fn.loop(end * (TILE * 4), start=first * (TILE * 4), step=64) as at:
        fn.store(fn.lanes(F32, [0.0] * 16), y + m * y_stride + at, 4)
    with fn.loop(experts.num) as e:
        count = _gather(thread, routes + e * 4, num_rows, scope)
        if sizes.profiled:
            counts = thread.number.equals(0) if shares_tiles else fn.i64(1) > 0
            with fn.when((count > 0) & counts):
                count_expert(fn, thread.args_address, thread.number)
        with fn.when(count > 0):
            weights = routes + e * 4
            _inner_values(thread, layer, e * inner, own(inner), count, shares_tiles, weights)
            output = thread.local("expert_y") - e * (outer * TILE * 4)
            tiles = e * outer + first, e * outer + end
            behind = thread.tile(layer, "down", tiles[1])
            gated = "shared" if shares_tiles else "local"
            row_parts.matmul(
                thread, layer, "down", tiles, count, output, y_stride, behind, "gated", gated
            )
            at, width = first * (TILE * 4), (end - first) * TILE
            with fn.loop(count) as j:
                m = thread.index(thread.local("picked") + j * 4)
                weight = routes + m * route_stride(experts) + e * 4
                if experts.scales_input:  # then the dense network's weight is 1, and this one too
                    weight = routes + m * route_stride(experts) + experts.num * 4
                parts = [thread.local("expert_y") + j * y_stride]
                if experts.bias:
                    parts.append(layer["down_bias"] + e * y_stride)
                for part in parts:
                    _ADD_WEIGHTED.call(
                        fn, x=y + m * y_stride + at, y=part + at,
                        weight=weight, size=width,
                    )  # fmt: skip
            if shares_tiles:
                thread.barrier()


def _gather(thread: StepEmitter, weights: Value, num_rows: Value, scope: str) -> Value:
    """Copy the activations of rows with a weight, not 0, side by side; return how many."""
    fn, sizes = thread.fn, thread.sizes
    experts, memory = thread.kind.ffn.experts, getattr(thread, scope)
    assert experts is not None
    count = fn.var(fn.i64(0))
    with fn.loop(num_rows) as m:
        weight = fn.load(weights + m * route_stride(experts), F32, 4)
        with fn.when(weight.equals(0.0).equals(0)):
            j = count.get()
            fn.store(m.signed(I32), thread.local("picked") + j * 4, 4)
            if sizes.activations == "floats":
                source = memory("in_floats") + m * sizes.float_stride
                target = thread.local("gathered_floats") + j * sizes.float_stride
                COPY.call(fn, x=target, y=source, size=sizes.hidden)
            else:
                stride, scales = sizes.value_stride, sizes.act_scales_stride
                for name, step, size in (
                    ("values", stride, sizes.hidden * sizes.value_bytes),
                    ("act_scales", scales, sizes.hidden // TILE * ACT_SCALES_BYTES),
                ):
                    _MOVE.call(
                        fn, x=thread.local(f"gathered_{name}") + j * step,
                        y=memory(f"in_{name}") + m * step, num_bytes=size,
                    )  # fmt: skip
            count.set(j + 1)
    return count.get()


def _inner_values(
    thread: StepEmitter,
    layer: Words,
    before: Value,
    own: tuple[Value, Value],
    count: Value,
    shared: bool,
    weights: Value,
) -> None:
    """Make an expert's inner values of the gathered rows; ``weights`` are those of all rows."""
    fn, sizes, ffn = thread.fn, thread.sizes, thread.kind.ffn
    room, scope = (thread.shared, "shared") if shared else (thread.local, "local")
    stride, gate = ffn.gate_up_stride, room("gate_up")
    up = gate + ffn.size * 4
    tiles = before + own[0], before + own[1]
    for matrix, target in [("gate", gate), ("up", up)][2 - len(ffn.inner) :]:
        behind = thread.tile(layer, matrix, tiles[1])
        place = target - before * (TILE * 4)
        row_parts.matmul(thread, layer, matrix, tiles, count, place, stride, behind, "gathered")
    first, size = own[0] * TILE, (own[1] - own[0]) * TILE
    of_expert = before * TILE + first
    whole_rows = sizes.activations == "rows"  # whose scale needs all of a row
    with fn.loop(count) as m:
        at = m * stride + first * 4
        if ffn.experts and ffn.experts.scales_input:  # which are linear in what they read
            row = thread.index(thread.local("picked") + m * 4)
            for target in (gate, up):
                _SCALE.call(
                    fn, x=target + at, weight=weights + row * route_stride(ffn.experts), size=size
                )
        if whole_rows:
            row_parts.gate(thread, layer, of_expert, gate + at, up + at, gate + at, size, ffn)
        else:
            out = thread.floats("gated", m, scope) + first * 4
            row_parts.gate(thread, layer, of_expert, gate + at, up + at, out, size, ffn)
            row_parts.quantise(thread, "gated", out, m, size, first, scope)
    if shared:
        thread.barrier()
    if whole_rows:
        rows = (thread.number, thread.args["threads"]) if shared else (fn.i64(0), 1)
        with fn.loop(count, start=rows[0], step=rows[1]) as m:
            row_parts.quantise(thread, "gated", gate + m * stride, m, ffn.size, scope=scope)
        if shared:
            thread.barrier()
