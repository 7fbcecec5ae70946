"""How threads take a step's rows through mixers that keep a state.

Rows lie in one buffer of the step, whichever way its work is split: a recurrence needs all rows of
a sequence, and threads share channels and heads, not rows.
"""

from __future__ import annotations

from typing import Any

from ridgeline.backends.cpu.kernels import row_parts
from ridgeline.backends.cpu.kernels.feed_forward import share_of_matmul, whole_matmul
from ridgeline.backends.cpu.kernels.ir import Value
from ridgeline.backends.cpu.kernels.kernel import Words
from ridgeline.backends.cpu.kernels.recurrent import (
    CONV_CHANNELS,
    CONVOLVE,
    DELTA,
    GATE_HEADS,
    SCAN,
    UNIT,
)
from ridgeline.backends.cpu.kernels.rows import COPY
from ridgeline.backends.cpu.kernels.step_emitter import StepEmitter
from ridgeline.backends.cpu.layout.recurrent import RATES, Recurrence
from ridgeline.model.shape.recurrent import Delta, Ssm


def share_of_projections(
    thread: StepEmitter, i: Value, layer: Words, shape: Recurrence, scope: str
) -> None:
    """Compute this thread's pieces of all that a layer projects, for all rows."""
    rows, stride = thread.args["mixed"], thread.sizes.mixed_stride
    for matrix, column in shape.columns:
        share_of_matmul(thread, i, layer, matrix, rows + column * 4, stride, "in", scope)


def whole_projections(
    thread: StepEmitter, layer: Words, shape: Recurrence, low: Value, num_rows: Value
) -> None:
    """Compute all that a layer projects of this thread's rows, from row ``low`` on."""
    stride = thread.sizes.mixed_stride
    rows = thread.args["mixed"] + low * stride
    for matrix, column in shape.columns:
        whole_matmul(thread, layer, matrix, num_rows, rows + column * 4, stride)


def recur(thread: StepEmitter, layer: Words, shape: Recurrence) -> None:
    """Take all rows of the step through a layer's states; threads wait for each other after it."""
    fn, args = thread.fn, thread.args
    states = args["states"] + layer["state_at"]
    step = {name: args[name] for name in ("order", "segments", "num_segments", "state_stride")} | {
        "stride": fn.i64(thread.sizes.mixed_stride),
        "non_finite": args["non_finite"],
    }
    first, every = thread.number * (CONV_CHANNELS * 4), args["threads"] * (CONV_CHANNELS * 4)
    channels = args["mixed"] + shape.conv_at * 4
    with fn.loop(shape.channels * 4, start=first, step=every) as at:
        CONVOLVE.call(
            fn, x=channels + at, states=states + at, weights=layer["conv"] + at,
            bias=layer["conv_bias"] + at, in_bias=layer["in_bias"] + shape.conv_at * 4 + at, **step,
        )  # fmt: skip
    thread.barrier()
    memories = states + shape.window * 4
    match shape.mixer:
        case Delta():
            _correct(thread, layer, shape, shape.mixer, memories, step)
            thread.barrier()
        case Ssm():
            _scan(thread, layer, shape, shape.mixer, memories, step)
            thread.barrier()


def _correct(
    thread: StepEmitter, layer: Words, shape: Recurrence, mixer: Delta, memories: Value, step: Any
) -> None:
    """Take this thread's key heads, and the value heads that they serve, through all rows."""
    fn, args = thread.fn, thread.args
    rows, served = args["mixed"], mixer.num_value_heads // mixer.num_key_heads
    gates = rows + dict(shape.columns)["beta"] * 4
    with fn.loop(mixer.num_key_heads, start=thread.number, step=args["threads"]) as key_head:
        q = rows + key_head * (shape.rows * 4)
        UNIT.call(fn, q=q, stride=step["stride"], order=step["order"], num_tokens=args["num_rows"])
        with fn.loop(served) as i:
            head = key_head * served + i
            if mixer.by_turns:
                head = i * mixer.num_key_heads + key_head
            DELTA.call(
                fn, q=q, v=rows + shape.output_at * 4 + head * (shape.head_width * 4),
                gates=gates + head * 4, rates=layer["rates"] + head * (RATES * 4),
                states=memories + head * (shape.rows * shape.head_width * 4), **step,
            )  # fmt: skip


def _scan(
    thread: StepEmitter, layer: Words, shape: Recurrence, mixer: Ssm, memories: Value, step: Any
) -> None:
    """Take this thread's heads through all rows."""
    fn, args = thread.fn, thread.args
    rows = args["mixed"]
    shared = rows + (shape.output_at + shape.output_width) * 4
    paces = rows + (shape.conv_at + shape.channels) * 4
    with fn.loop(shape.num_heads, start=thread.number, step=args["threads"]) as head:
        group = head * mixer.num_groups // mixer.num_heads
        SCAN.call(
            fn, x=rows + shape.output_at * 4 + head * (shape.head_width * 4),
            b=shared + group * (shape.rows * 4), pace=paces + head * 4,
            rates=layer["rates"] + head * (RATES * 4),
            states=memories + head * (shape.rows * shape.head_width * 4), **step,
        )  # fmt: skip


def output_to_activations(
    thread: StepEmitter, layer: Words, shape: Recurrence, row: Value, m: Value, scope: str = "local"
) -> None:
    """Put what was made of the step's row ``row`` into row ``m`` of activations, gated."""
    fn, keeps_floats = thread.fn, thread.sizes.activations == "floats"
    whole = thread.args["mixed"] + row * thread.sizes.mixed_stride
    output = whole + shape.output_at * 4
    if shape.num_heads:
        out = thread.floats("gated", m, scope)
        gate_at = shape.gate_at * 4
        GATE_HEADS.call(
            fn, x=output, gate=whole + gate_at, scale=layer["gated_scale"],
            bias=layer["in_bias"] + gate_at, out=out,
        )  # fmt: skip
        output = out
    elif keeps_floats:
        COPY.call(fn, x=thread.floats("gated", m, scope), y=output, size=shape.output_width)
    row_parts.quantise(thread, "gated", output, m, shape.output_width, scope=scope)
