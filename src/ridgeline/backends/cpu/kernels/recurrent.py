"""Kernels of recurrent layers: a convolution over the last tokens, and memories of heads.

Each takes some channels, or a head, through all rows of a step: token after token, in the order of
each sequence. So a state and a result have the same bits, whatever is in the step beside them,
however a text was cut, and on any thread. Rows and states are as ``layout.recurrent`` says.

``order`` has the row (i32) of each token, sequence by sequence. ``segments`` are four i32 each: the
first and the end of some tokens, the slot that has the state before them, -1 for zeros, and the one
that it is kept in; a segment without tokens copies a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ridgeline.backends.cpu.kernels.ir import (
    F32,
    I32,
    I64,
    Function,
    Value,
    Var,
    absolute,
    exp,
    fma,
    maximum,
    select,
    sqrt,
)
from ridgeline.backends.cpu.kernels.kernel import Kernel
from ridgeline.backends.cpu.kernels.rows import FLOATS
from ridgeline.backends.cpu.layout.recurrent import Recurrence, has_conv_bias
from ridgeline.model.shape.recurrent import Conv, Delta, Ssm

CONV_CHANNELS = 16  # that ``convolve`` takes
SEGMENT_BYTES = 16
_UNIT_EPS = 1e-6  # of the length of queries and keys, as in their authors' kernels
_CHAINS = 4  # sums side by side of rows of a memory

_STEP = ("stride", "order", "segments", "num_segments", "states", "state_stride")
CONVOLVE = Kernel("convolve", ("x", *_STEP, "weights", "bias", "in_bias", "non_finite"))
UNIT = Kernel("unit", ("q", "stride", "order", "num_tokens"))
DELTA = Kernel("delta", ("q", "v", "gates", "rates", *_STEP, "non_finite"))
SCAN = Kernel("scan", ("x", "b", "pace", "rates", *_STEP, "non_finite"))
GATE_HEADS = Kernel("gate_heads", ("x", "gate", "scale", "bias", "out"))


def emit_recurrent(module: object, shape: Recurrence, eps: float) -> None:
    """Emit the kernels of a recurrent mixer; ``eps`` is of the norm behind its gate."""
    _emit_convolve(module, shape)
    match mixer := shape.mixer:
        case Delta():
            _emit_unit(module, shape, mixer)
            _emit_delta(module, shape, mixer)
            _emit_gate_heads(module, shape, eps)
        case Ssm():
            _emit_scan(module, shape, mixer)
            _emit_gate_heads(module, shape, eps)


# --- the convolution ---------------------------------------------------------------------------


def _emit_convolve(module: object, shape: Recurrence) -> None:
    """``convolve``: some channels' weighted sums over their last tokens, in place.

    ``x`` is in row 0, ``states`` in the window of slot 0. Between two gates (LFM2) it is the first
    gate's; the other gate and what they gate follow. Elsewhere SiLU follows the sum.
    """
    fn = CONVOLVE.begin(module)
    x, stride, order, segments, num_segments, states, state_stride, *vectors = fn.args
    weights, bias, in_bias, non_finite = vectors
    mixer, channel_bytes = shape.mixer, shape.channels * 4
    gates = isinstance(mixer, Conv)
    in_biases = not isinstance(mixer, Delta) and mixer.bias
    taps = [fn.load(weights + i * channel_bytes, FLOATS, 4) for i in range(mixer.kernel)]

    def load(row: Value, part: int) -> Value:
        value = fn.load(row + part * channel_bytes, FLOATS, 4)
        return value + fn.load(in_bias + part * channel_bytes, FLOATS, 4) if in_biases else value

    with _segments(fn, segments, num_segments) as (first, end, source, target):
        before = states + maximum(source, 0) * state_stride  # that of slot 0 is not used
        window = [
            fn.var(select(source >= 0, fn.load(before + i * channel_bytes, FLOATS, 4), 0.0))
            for i in range(mixer.kernel - 1)
        ]
        with _tokens(fn, order, first, end) as row:
            here = x + row * stride
            value = load(here, 0) * load(here, 2) if gates else load(here, 0)
            output = _weighted([*(var.get() for var in window), value], taps)
            if has_conv_bias(mixer):
                output = output + fn.load(bias, FLOATS, 4)
            output = load(here, 1) * output if gates else output / (exp(-output) + 1.0)
            fn.store(output, here, 4)
            if gates:
                _note(fn, output, non_finite + row * 4)
            for i, var in enumerate(window):
                var.set(window[i + 1].get() if i + 1 < len(window) else value)
        after = states + target * state_stride
        for i, var in enumerate(window):
            fn.store(var.get(), after + i * channel_bytes, 4)
    fn.finish()


def _weighted(values: list[Value], weights: list[Value]) -> Value:
    """Return a weighted sum, the first first."""
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = fma(value, weight, total)
    return total


# --- the delta rule ----------------------------------------------------------------------------


def _emit_unit(module: object, shape: Recurrence, mixer: Delta) -> None:
    """``unit``: a head's queries and keys become as long as 1, and 1 / sqrt(channels)."""
    fn = UNIT.begin(module)
    q, stride, order, num_tokens = fn.args
    keys = q + (shape.output_at // 2) * 4  # queries and keys have as many columns
    with _tokens(fn, order, fn.i64(0), num_tokens) as row:
        for at, factor in ((q, mixer.key_dim**-0.5), (keys, 1.0)):
            here, total = at + row * stride, fn.var(fn.lanes(F32, [0.0] * 16))
            with fn.loop(shape.rows * 4, step=64) as place:
                value = fn.load(here + place, FLOATS, 4)
                total.set(fma(value, value, total.get()))
            length = sqrt(total.get().reduce(lambda a, b: a + b) + _UNIT_EPS)
            with fn.loop(shape.rows * 4, step=64) as place:
                value = fn.load(here + place, FLOATS, 4) / length.splat(16)
                fn.store(value * factor if factor != 1.0 else value, here + place, 4)
    fn.finish()


def _emit_delta(module: object, shape: Recurrence, mixer: Delta) -> None:
    """``delta``: what a value head's queries read from a memory that keys and values correct.

    The gated delta rule (Yang et al., "Gated Delta Networks", 2024), in its recurrent form. What is
    read replaces the values. ``gates`` are how much of an error is corrected and, a padded number
    of heads behind, the pace of forgetting, both before their activations, which replace them.
    """
    fn = DELTA.begin(module)
    q, v, gates, rates, stride, order, segments, num_segments, states, *others = fn.args
    state_stride, non_finite = others
    keys = q + (shape.output_at // 2) * 4
    columns = dict(shape.columns)
    apart = (columns["decay"] - columns["beta"]) * 4
    rate, dt_bias = fn.load(rates, F32, 4), fn.load(rates + 4, F32, 4)
    with _tokens(fn, order, fn.i64(0), _num_tokens(fn, segments, num_segments)) as row:
        here = gates + row * stride
        strength = fn.load(here, F32, 4)
        fn.store(1.0 / (exp(-strength) + 1.0) + strength * 0.0, here, 4)
        decay = fn.load(here + apart, F32, 4) + dt_bias
        fn.store(exp(rate * softplus(decay)) + decay * 0.0, here + apart, 4)

    with (
        _segments(fn, segments, num_segments) as (first, end, source, target),
        fn.loop(shape.head_width * 4, step=64) as column,
    ):
        memory = _memory(fn, shape, states, state_stride, (source, target), column)
        with _tokens(fn, order, first, end) as row:
            here = row * stride
            strength, decay = (
                fn.load(gates + here + offset, F32, 4).splat(16) for offset in (0, apart)
            )
            key, query, value = keys + here, q + here, v + here + column
            read = _sums(fn)
            with fn.loop(shape.rows * 4, step=4 * _CHAINS) as at:
                for i, total in enumerate(read):
                    weight = fn.load(key + at + 4 * i, F32, 4).splat(16)
                    state = fn.load(memory + at * 16 + 64 * i, FLOATS, 4)
                    total.set(fma(state, weight, total.get()))
            error = (fn.load(value, FLOATS, 4) - decay * _added(read)) * strength
            read = _sums(fn)
            with fn.loop(shape.rows * 4, step=4 * _CHAINS) as at:
                for i, total in enumerate(read):
                    place = memory + at * 16 + 64 * i
                    weight = fn.load(key + at + 4 * i, F32, 4).splat(16)
                    state = fma(error, weight, fn.load(place, FLOATS, 4) * decay)
                    fn.store(state, place, 4)
                    weight = fn.load(query + at + 4 * i, F32, 4).splat(16)
                    total.set(fma(state, weight, total.get()))
            output = _added(read)
            fn.store(output, value, 4)
            _note(fn, output, non_finite + row * 4)
    fn.finish()


# --- the state space ---------------------------------------------------------------------------


def _emit_scan(module: object, shape: Recurrence, mixer: Ssm) -> None:
    """``scan``: what a head's C reads from a memory that forgets and takes in B times x.

    A state space with one decay a head (Mamba-2; Dao and Gu, 2024), in its recurrent form. What is
    read, and x times ``skip``, replaces x. ``pace`` is of forgetting, before its activation; that
    replaces it, and what is kept comes a padded number of heads behind.
    """
    fn = SCAN.begin(module)
    x, b, pace, rates, stride, order, segments, num_segments, states, *others = fn.args
    state_stride, non_finite = others
    groups_bytes = (shape.channels - shape.output_width) * 2  # of B, and of C
    apart = (shape.width - shape.conv_at - shape.channels) * 2
    rate, dt_bias, skip = (fn.load(rates + 4 * i, F32, 4) for i in range(3))
    factor = mixer.in_scale * mixer.part_scales[4]
    with _tokens(fn, order, fn.i64(0), _num_tokens(fn, segments, num_segments)) as row:
        here = pace + row * stride
        value = fn.load(here, F32, 4)
        value = (value * factor if factor != 1.0 else value) + dt_bias
        step = softplus(value)
        fn.store(step, here, 4)
        fn.store(exp(rate * step) + value * 0.0, here + apart, 4)

    with (
        _segments(fn, segments, num_segments) as (first, end, source, target),
        fn.loop(shape.head_width * 4, step=64) as column,
    ):
        memory = _memory(fn, shape, states, state_stride, (source, target), column)
        with _tokens(fn, order, first, end) as row:
            here = row * stride
            step, decay = (fn.load(pace + here + offset, F32, 4).splat(16) for offset in (0, apart))
            value = fn.load(x + here + column, FLOATS, 4)
            taken, read = value * step, _sums(fn)
            with fn.loop(shape.rows * 4, step=4 * _CHAINS) as at:
                for i, total in enumerate(read):
                    place, weights = memory + at * 16 + 64 * i, b + here + at + 4 * i
                    weight = fn.load(weights, F32, 4).splat(16)
                    state = fma(taken, weight, fn.load(place, FLOATS, 4) * decay)
                    fn.store(state, place, 4)
                    weight = fn.load(weights + groups_bytes, F32, 4).splat(16)
                    total.set(fma(state, weight, total.get()))
            output = fma(value, skip.splat(16), _added(read))
            fn.store(output, x + here + column, 4)
            _note(fn, output, non_finite + row * 4)
    fn.finish()


# --- after the memories ------------------------------------------------------------------------


def _emit_gate_heads(module: object, shape: Recurrence, eps: float) -> None:
    """``gate_heads``: norm and gate what memories gave to a row, in the mixer's order.

    RMS norm, over each group of heads, with ``scale``; SiLU of the gate, whose ``bias`` is added
    before.
    """
    fn = GATE_HEADS.begin(module)
    x, gate, scale, bias, out = fn.args
    mixer = shape.mixer
    match mixer:
        case Delta():
            groups, size, norms, norm_first = mixer.num_value_heads, mixer.value_dim, True, True
            factor, gate_factor, has_bias = 1.0, 1.0, False
        case Ssm():
            groups, size = mixer.num_groups, mixer.inner_size // mixer.num_groups
            norms, norm_first, has_bias = mixer.gated_norm, mixer.norm_first, mixer.bias
            factor, gate_factor = mixer.out_scale, mixer.in_scale * mixer.part_scales[0]
    lanes = shape.num_heads // groups * shape.head_width

    def gated(value: Value, at: Value) -> Value:
        through = fn.load(gate + at, FLOATS, 4)
        if has_bias:
            through = through + fn.load(bias + at, FLOATS, 4)
        if gate_factor != 1.0:
            through = through * gate_factor
        return value * (through / (exp(-through) + 1.0))

    with fn.loop(groups * lanes * 4, step=lanes * 4) as first:
        total = fn.var(fn.lanes(F32, [0.0] * 16))
        if norms:
            with fn.loop(first + lanes * 4, start=first, step=64) as at:
                value = fn.load(x + at, FLOATS, 4)
                value = value if norm_first else gated(value, at)
                fn.store(value, out + at, 4)
                total.set(fma(value, value, total.get()))
        mean = total.get().reduce(lambda a, b: a + b) * (1.0 / size)
        inverse = (1.0 / sqrt(mean + eps)).splat(16)
        with fn.loop(first + lanes * 4, start=first, step=64) as at:
            value = fn.load((out if norms else x) + at, FLOATS, 4)
            if norms:
                value = value * inverse * fn.load(scale + at, FLOATS, 4)
            if norm_first or not norms:
                value = gated(value, at)
            fn.store(value * factor if factor != 1.0 else value, out + at, 4)
    for padding in range(groups * lanes * 4, shape.output_width * 4, 64):
        fn.store(fn.lanes(F32, [0.0] * 16), out + padding, 4)
    fn.finish()


# --- parts -------------------------------------------------------------------------------------


def softplus(x: Value) -> Value:
    """Return log(1 + exp(x)), with log(1 + y) as 2 atanh(y / (2 + y)): a series in y's ninth."""
    y = exp(-absolute(x))
    s = y / (y + 2.0)
    square = s * s
    series = x.fn.value(2.0 / 15.0, x.type)
    for odd in (13, 11, 9, 7, 5, 3, 1):
        series = fma(series, square, 2.0 / odd)
    return maximum(x, 0.0) + series * s


@contextmanager
def _segments(
    fn: Function, segments: Value, num_segments: Value
) -> Iterator[tuple[Value, Value, Value, Value]]:
    """Loop over segments: first token, end, source and target."""
    with fn.loop(num_segments * SEGMENT_BYTES, step=SEGMENT_BYTES) as at:
        first, end, source, target = (_index(fn, segments + at + 4 * i) for i in range(4))
        yield first, end, source, target


def _num_tokens(fn: Function, segments: Value, num_segments: Value) -> Value:
    """Return where the last segment ends."""
    return _index(fn, segments + num_segments * SEGMENT_BYTES - (SEGMENT_BYTES - 4))


@contextmanager
def _tokens(fn: Function, order: Value, first: Value, end: Value) -> Iterator[Value]:
    """Loop over tokens: the row of each."""
    with fn.loop(end, start=first) as token:
        yield _index(fn, order + token * 4)


def _index(fn: Function, address: Value) -> Value:
    return fn.load(address, I32, 4).signed(I64)


def _memory(
    fn: Function,
    shape: Recurrence,
    states: Value,
    state_stride: Value,
    slots: tuple[Value, Value],
    column: Value,
) -> Value:
    """Return where 16 columns of a head's memory are; what a segment begins with is there then."""
    source, target = slots
    size = shape.rows * 64
    here = states + target * state_stride + column * shape.rows
    there = states + source * state_stride + column * shape.rows
    with fn.when(source < 0), fn.loop(size, step=64) as at:
        fn.store(fn.lanes(F32, [0.0] * 16), here + at, 4)
    with fn.when((source >= 0) & (source.equals(target).equals(0))), fn.loop(size, step=64) as at:
        fn.store(fn.load(there + at, FLOATS, 4), here + at, 4)
    return here


def _sums(fn: Function) -> list[Var]:
    return [fn.var(fn.lanes(F32, [0.0] * 16)) for _ in range(_CHAINS)]


def _added(sums: list[Var]) -> Value:
    first, second, third, fourth = (total.get() for total in sums)
    return (first + second) + (third + fourth)


def _note(fn: Function, output: Value, non_finite: Value) -> None:
    """Note in a row's word if what was made of it is not finite."""
    with fn.when((output * 0.0).reduce(lambda a, b: a + b).equals(0.0).equals(0)):
        fn.store(fn.value(1.0, F32), non_finite, 4)
