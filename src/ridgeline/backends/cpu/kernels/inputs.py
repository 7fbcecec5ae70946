"""Each layer's own input of a token (Gemma 3n, 2025): of its row in a table and its embedding.

The table is larger than the rest of the model, so it stays in the file: a step finds the rows of
its tokens decoded. ``ModelArch.input_scales`` says what is added up.
"""

from __future__ import annotations

from ridgeline.backends.cpu.kernels import row_parts
from ridgeline.backends.cpu.kernels.gemm import MATMUL
from ridgeline.backends.cpu.kernels.ir import F32, Value, fma, sqrt
from ridgeline.backends.cpu.kernels.kernel import Kernel
from ridgeline.backends.cpu.kernels.rows import COPY, FLOATS
from ridgeline.backends.cpu.kernels.step_emitter import StepEmitter
from ridgeline.backends.cpu.layout.shapes import ROW_BLOCK, Inputs, KernelConfig

_MAKE = Kernel("make_inputs", ("product", "row", "weight"))


def emit_inputs(module: object, sizes: KernelConfig, inputs: Inputs, eps: float) -> None:
    """``make_inputs``: (norm(product) * weight + row) of all layers, in place of ``row``."""
    fn = _MAKE.begin(module)
    product, row, weight = fn.args
    of_row, of_product, of_sum = inputs.scales
    layer_bytes = inputs.size * 4

    def load(at: Value) -> Value:
        return fn.load(product + at, FLOATS, 4) * of_product

    with fn.loop(sizes.num_layers) as i:
        first = i * layer_bytes
        total = fn.var(fn.lanes(F32, [0.0] * 16))
        with fn.loop(layer_bytes, step=64) as at:
            value = load(first + at)
            total.set(fma(value, value, total.get()))
        mean = total.get().reduce(lambda a, b: a + b) * (1.0 / inputs.num_channels)
        scale = (1.0 / sqrt(mean + eps)).splat(16)
        with fn.loop(layer_bytes, step=64) as at:
            normed = load(first + at) * scale * fn.load(weight + at, FLOATS, 4)
            place = row + first + at
            output = fma(fn.load(place, FLOATS, 4), of_row, normed) * of_sum
            fn.store(output, place, 4)
    fn.finish()


def make_inputs(thread: StepEmitter) -> None:
    """Make all layers' inputs of all rows; threads share the outputs of the product."""
    fn, args, sizes = thread.fn, thread.args, thread.sizes
    num_rows, stride, x_bytes = args["num_rows"], sizes.inputs_stride, sizes.hidden * 4
    tiles = [thread.first_tile(args["inputs_num_tiles"], thread.number + i) for i in (0, 1)]
    with fn.loop(num_rows, step=ROW_BLOCK) as low:
        count = fn.lower(num_rows - low, ROW_BLOCK)
        with fn.loop(count) as m:
            floats = thread.floats("in", m)
            COPY.call(fn, x=floats, y=args["x"] + (low + m) * x_bytes, size=sizes.hidden)
            row_parts.quantise(thread, "in", floats, m, sizes.hidden)
        has_floats = sizes.activations == "floats"
        MATMUL.call(
            fn, matrix=args.address("inputs_tiles"), first=tiles[0], last=tiles[1],
            num_rows=count, x=thread.local("in_floats" if has_floats else "in_values"),
            x_stride=sizes.float_stride if has_floats else sizes.value_stride,
            act_scales=thread.local("in_act_scales"), act_scales_stride=sizes.act_scales_stride,
            y=args["input_products"] + low * stride, y_stride=stride,
            next_address=thread.tile(args, "inputs", tiles[0]),
        )  # fmt: skip
    thread.barrier()
    with fn.loop(num_rows, start=thread.number, step=args["threads"]) as m:
        _MAKE.call(
            fn, product=args["input_products"] + m * stride, row=args["inputs"] + m * stride,
            weight=args["inputs_norm"],
        )  # fmt: skip
    thread.barrier()
