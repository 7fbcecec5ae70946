"""What happens to one row of activations between matrix products: norms, gates, quantising.

Rows are floats, padded with zeros to a multiple of 32; padding stays zero through everything here.
Every sum has one fixed order: two vectors side by side down the row, then halves of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.backends.cpu.kernels.activations import activated, gated
from ridgeline.backends.cpu.kernels.ir import (
    F32,
    I8,
    I16,
    I32,
    Function,
    Value,
    absolute,
    exp,
    fma,
    maximum,
    select,
    sqrt,
    to_whole,
    vec,
)
from ridgeline.backends.cpu.kernels.kernel import Kernel
from ridgeline.backends.cpu.layout.feed_forward import FeedForward
from ridgeline.backends.cpu.layout.formats import ACT_SCALES_BYTES, MAX_ROTATED, TILE
from ridgeline.backends.cpu.layout.shapes import AttentionLayout, KernelConfig

FLOATS = vec(F32, 16)
_GROUP_BYTES = TILE * 4
NOTHING = 1e-30  # what is smaller counts as zero where it would divide
_CHUNK = 64  # channels that are mixed in one go

NORM = Kernel("norm", ("x", "weight", "bias", "out", "size"))
NORM_ROWS = Kernel("norm_rows", ("x", "weight", "bias", "num_rows"))
ADD, ADD_BIAS, COPY = (Kernel(name, ("x", "y", "size")) for name in ("add", "add_bias", "copy"))
SCALE = Kernel("scale", ("x", "factor", "size"))
GATE = Kernel("gate", ("gate", "up", "gate_bias", "up_bias", "out", "size"))
GATE_ATTENDED = Kernel("gate_attended", ("x", "gate", "out", "size"))
_HADAMARD = Kernel("hadamard", ("x", "out", "size"))


def quantise(form: str) -> Kernel:
    """Return the kernel that makes a row of activations of this form (see ``layout.formats``).

    ``scratch`` is as long as x.
    """
    return Kernel(f"quantise_{form}", ("x", "out", "act_scales", "size", "scratch"))


def emit_rows(module: object, sizes: KernelConfig, eps: float, activations: Sequence[str]) -> None:
    """Emit the row kernels for a model of these sizes; ``size`` counts floats everywhere.

    ``activations`` are the forms that there is a ``quantise`` for; floats need none. There is a
    ``gate`` for each shape of feed-forward network.
    """
    _emit_norm(module, sizes, eps)
    _emit_norm_rows(module, sizes)
    _emit_add(module, sizes.residual_scale)
    if any(kind.out_scale for kind in sizes.kinds):
        fn = SCALE.begin(module)
        x, factor, size = fn.args
        times = fn.load(factor, F32, 4).splat(16)
        with fn.loop(size * 4, step=64) as at:
            fn.store(fn.load(x + at, FLOATS, 4) * times, x + at, 4)
        fn.finish()
    for number, heads in enumerate(sizes.all_heads):
        if heads.changes_attended:
            _emit_gate_attended(module, heads, number)
    for number, ffn in enumerate(sizes.all_ffns):
        _emit_gate(module, ffn, number)
    emitters = {"groups": _emit_groups, "rows": _emit_row_bytes, "bf16": _emit_bf16}
    for form in activations:
        if form in emitters:
            emitters[form](module)


def _emit_gate_attended(module: object, heads: AttentionLayout, number: int) -> None:
    """``gate_attended``: out = x times the sigmoid of gates, and times the model's scale.

    Where there are no gates, or no scale, what stands for them is ignored.
    """
    fn = GATE_ATTENDED.of(number).begin(module)
    x, gate, out, size = fn.args
    with fn.loop(size * 4, step=64) as at:
        value = fn.load(x + at, FLOATS, 4)
        if heads.attention.gated:
            through = fn.load(gate + at, FLOATS, 4)
            value = value / (exp(-through) + 1.0) + through * 0.0  # not a number stays one
        if heads.attention.out_scale != 1.0:
            value = value * heads.attention.out_scale
        fn.store(value, out + at, 4)
    fn.finish()


def _emit_norm(module: object, sizes: KernelConfig, eps: float) -> None:
    """``norm``: out = x / rms(x) * weight + bias, over ``num_channels`` of ``size``.

    RMS norm (Zhang & Sennrich, 2019), or layer norm (Ba et al., 2016), which subtracts the mean
    first. A model without biases ignores ``bias``.
    """
    fn, num_channels = NORM.begin(module), sizes.num_channels
    x, weight, bias, out, size = fn.args
    lanes, end = fn.lanes(I32, list(range(16))), fn.value(num_channels, I32).splat(16)
    middle = _mean(fn, x, size, num_channels) if sizes.norm == "layer" else None

    def load(at: Value) -> Value:
        value = fn.load(x + at, FLOATS, 4)
        if middle is None:
            return value
        channel = lanes + (at >> 2).signed(I32).splat(16)
        return select(channel < end, value - middle, 0.0)  # padding stays zero

    squares = [fn.var(fn.lanes(F32, [0.0] * 16)) for _ in range(2)]
    with fn.loop(size * 4, step=_GROUP_BYTES) as at:
        for i, total in enumerate(squares):
            value = load(at + 64 * i)
            total.set(fma(value, value, total.get()))
    mean = (squares[0].get() + squares[1].get()).reduce(lambda a, b: a + b) * (1.0 / num_channels)
    scale = (1.0 / sqrt(mean + eps)).splat(16)
    with fn.loop(size * 4, step=64) as at:
        value = load(at) * scale * fn.load(weight + at, FLOATS, 4)
        if sizes.norm_bias:
            value = value + fn.load(bias + at, FLOATS, 4)
        fn.store(value, out + at, 4)
    fn.finish()


def _emit_norm_rows(module: object, sizes: KernelConfig) -> None:
    """``norm_rows``: ``norm`` of rows that stand one behind another, in place."""
    fn = NORM_ROWS.begin(module)
    x, weight, bias, num_rows = fn.args
    with fn.loop(num_rows) as row:
        at = x + row * (sizes.hidden * 4)
        NORM.call(fn, x=at, weight=weight, bias=bias, out=at, size=sizes.hidden)
    fn.finish()


def _mean(fn: Function, x: Value, size: Value, num_channels: int) -> Value:
    """Return the mean of a row's channels, 16 times."""
    total = fn.var(fn.lanes(F32, [0.0] * 16))
    with fn.loop(size * 4, step=64) as at:
        total.set(total.get() + fn.load(x + at, FLOATS, 4))
    return (total.get().reduce(lambda a, b: a + b) * (1.0 / num_channels)).splat(16)


def _emit_add(module: object, residual_scale: float) -> None:
    """``add``: x += y, times the model's scale. ``add_bias``: x += y. ``copy``: x = y."""
    for kernel in (ADD, ADD_BIAS, COPY):
        fn = kernel.begin(module)
        x, y, size = fn.args
        with fn.loop(size * 4, step=64) as at:
            value = fn.load(y + at, FLOATS, 4)
            if kernel is ADD and residual_scale != 1.0:
                value = value * residual_scale
            if kernel is not COPY:
                value = fn.load(x + at, FLOATS, 4) + value
            fn.store(value, x + at, 4)
        fn.finish()


def _emit_gate(module: object, ffn: FeedForward, number: int) -> None:
    """``gate``: out = activation(gate) * up (SwiGLU; Shazeer, 2020), or activation(up).

    The biases are added before; a model without them, or without gates, ignores what it lacks.
    """
    fn = GATE.of(number).begin(module)
    gate, up, gate_bias, up_bias, out, size = fn.args

    def load(values: Value, biases: Value, at: Value) -> Value:
        value = fn.load(values + at, FLOATS, 4)
        return value + fn.load(biases + at, FLOATS, 4) if ffn.bias else value

    with fn.loop(size * 4, step=64) as at:
        inner = load(up, up_bias, at)
        if ffn.gated:
            through = load(gate, gate_bias, at)
            through = through * ffn.gate_scale if ffn.gate_scale != 1.0 else through
            inner = gated(ffn.activation, through, inner)
        else:
            inner = activated(ffn.activation, inner)
        inner = inner * ffn.out_scale if ffn.out_scale != 1.0 else inner
        fn.store(inner, out + at, 4)
    fn.finish()


def scale_to_bytes(largest: Value) -> tuple[Value, Value]:
    """Return the scale that maps ``largest`` to 127, and its inverse; 0 for next to nothing."""
    scale = largest * (1.0 / 127.0)
    return scale, select(largest > NOTHING, 127.0 / largest, largest.fn.value(0.0, F32))


def largest_of(values: list[Value]) -> Value:
    """Return the largest magnitude in some vectors; not a number if there is one that is not."""
    words = [absolute(value).bits(vec(I32, 16)) for value in values]  # the same order
    largest = words[0]
    for word in words[1:]:
        largest = maximum(largest, word)
    return largest.reduce(maximum).bits(F32)


def to_integers(value: Value, inverse: Value) -> Value:
    """Return 16 x i32, -127 to 127."""
    return to_whole(value, inverse.splat(16))


def _emit_groups(module: object) -> None:
    """``quantise_groups``: groups of 16 as signed bytes."""
    fn = quantise("groups").begin(module)
    x, out, act_scales, size, _ = fn.args
    with fn.loop(size // TILE) as pair:
        scales, sums = act_scales + pair * ACT_SCALES_BYTES, []
        for i in range(2):
            value = fn.load(x + pair * _GROUP_BYTES + 64 * i, FLOATS, 4)
            scale, inverse = scale_to_bytes(largest_of([value]))
            integers = to_integers(value, inverse)
            fn.store(integers.signed(I8), out + pair * TILE + 16 * i, 1)
            fn.store(scale, scales + 4 * i, 4)
            sums.append(scale * integers.reduce(lambda a, b: a + b).signed(F32))
            fn.store(sums[i] * -32.0, scales + 16 + 4 * i, 4)
        total = sums[0] + sums[1]
        fn.store(total, scales + 8, 4)
        fn.store(total * -128.0, scales + 12, 4)
    fn.finish()


def _emit_bf16(module: object) -> None:
    """``quantise_bf16``: rounded to nearest even."""
    fn = quantise("bf16").begin(module)
    x, out, _, size, _ = fn.args
    with fn.loop(size * 4, step=64) as at:
        bits = fn.load(x + at, FLOATS, 4).bits(vec(I32, 16))
        odd = (bits >> 16) & 1
        fn.store(((bits + 0x7FFF + odd) >> 16).signed(I16), out + (at >> 1), 2)
    fn.finish()


def _emit_row_bytes(module: object) -> None:
    """``quantise_rows``: Hadamard-rotated, then signed bytes with one scale.

    A few channels of a row are many times larger than the rest, and one scale for all would leave
    nothing of the others. A rotation spreads them evenly; the weights were rotated too, so products
    are the same (QuaRot; Ashkboos et al., 2024).
    """
    _emit_hadamard(module)
    fn = quantise("rows").begin(module)
    x, out, scales, size, rotated = fn.args
    _HADAMARD.call(fn, x=x, out=rotated, size=size)
    zero = fn.lanes(I32, [0] * 16)
    largest, total = fn.var(zero), fn.var(zero)
    with fn.loop(size * 4, step=64) as at:
        word = absolute(fn.load(rotated + at, FLOATS, 4)).bits(vec(I32, 16))  # the same order
        largest.set(maximum(largest.get(), word))
    scale, inverse = scale_to_bytes(largest.get().reduce(maximum).bits(F32))
    with fn.loop(size, step=16) as i:
        integers = to_integers(fn.load(rotated + i * 4, FLOATS, 4), inverse)
        fn.store(integers.signed(I8), out + i, 1)
        total.set(total.get() + integers)
    fn.store(scale, scales, 4)
    fn.store(total.get().reduce(lambda a, b: a + b) * -128, scales + 4, 4)
    fn.finish()


def _emit_hadamard(module: object) -> None:
    """``hadamard``: multiply by a Hadamard matrix, not scaled, block by block.

    A block is the largest power of two that divides ``size``, at most ``MAX_ROTATED``. Butterflies
    of distance 1, 2, 4, ...: those up to 32 (16 where a row is no whole number of 64) in the first
    walk down the row, the others in a second.
    """
    fn = _HADAMARD.begin(module)
    x, out, size = fn.args
    is_wide = (size & TILE).equals(0)
    for count, condition in ((4, is_wide), (2, is_wide.equals(0))):
        with fn.when(condition), fn.loop(size * 4, step=64 * count) as at:
            loaded = (fn.load(x + at + 64 * i, FLOATS, 4) for i in range(count))
            values = [_lane_butterflies(fn, value) for value in loaded]
            for i, value in enumerate(_butterflies(values)):
                fn.store(value, out + at + 64 * i, 4)
    block, stride = fn.lower(size & (0 - size), fn.i64(MAX_ROTATED)), _CHUNK * 4
    for count in (2, 4, 8):
        with (
            fn.when(block.equals(_CHUNK * count)),
            fn.loop(size * 4, step=stride * count) as low,
            fn.loop(stride, step=64) as at,
        ):
            first = out + low + at
            values = [fn.load(first + stride * i, FLOATS, 4) for i in range(count)]
            for i, value in enumerate(_butterflies(values)):
                fn.store(value, first + stride * i, 4)
    fn.finish()


def hadamard(fn: Function, values: list[Value]) -> list[Value]:
    """Return some vectors times a Hadamard matrix, not scaled, block by block.

    A block is the largest power of two that divides their channels.
    """
    values = [_lane_butterflies(fn, value) for value in values]
    block = len(values) & -len(values)
    parts = (values[low : low + block] for low in range(0, len(values), block))
    return [value for part in parts for value in _butterflies(part)]


def _butterflies(values: list[Value]) -> list[Value]:
    """Return sums and differences at distance 1, 2, 4, ... in a list of vectors."""
    distance = 1
    while distance < len(values):
        for i in (i for i in range(len(values)) if not i & distance):
            a, b = values[i], values[i + distance]
            values[i], values[i + distance] = a + b, a - b
        distance *= 2
    return values


def _lane_butterflies(fn: Function, value: Value) -> Value:
    """Return butterflies of distance 1, 2, 4 and 8 of a vector."""
    for distance in (1, 2, 4, 8):
        signs = fn.lanes(F32, [-1.0 if i & distance else 1.0 for i in range(16)])
        value = fma(value, signs, value.shuffle([i ^ distance for i in range(16)]))
    return value
