"""What a layer does with rows, as calls of kernels: norms, sums, gates, products, activations."""

from __future__ import annotations

from typing import Any

from ridgeline.backends.cpu.kernels.gemm import MATMUL
from ridgeline.backends.cpu.kernels.ir import Value
from ridgeline.backends.cpu.kernels.kernel import Words
from ridgeline.backends.cpu.kernels.lora import expand, shrink
from ridgeline.backends.cpu.kernels.rows import ADD, COPY, GATE, NORM
from ridgeline.backends.cpu.kernels.rows import quantise as quantise_kernel
from ridgeline.backends.cpu.kernels.step_emitter import StepEmitter
from ridgeline.backends.cpu.layout.feed_forward import FeedForward
from ridgeline.backends.cpu.layout.formats import ACT_SCALES_BYTES, TILE, VALUE_BYTES


def norm(
    thread: StepEmitter,
    layer: Words,
    name: str,
    x: Value,
    row: Value,
    scope: str,
    readers: tuple[str, ...],
    group: str = "in",
) -> None:
    """Take a row of x, after this norm if the model has it, into row ``row`` of activations.

    ``readers`` are the matrices that read it. Where norms replace the residual stream, it is x
    from then on.
    """
    floats = thread.floats(group, row, scope)
    if name in thread.kind.norm_names:
        only_norm(thread, layer, name, x, floats)
    else:
        COPY.call(thread.fn, x=floats, y=x, size=thread.sizes.hidden)
    shrink(thread, layer, readers, floats, row)
    if thread.kind.norms_replace:
        COPY.call(thread.fn, x=x, y=floats, size=thread.sizes.hidden)
    quantise(thread, group, floats, row, thread.sizes.hidden, scope=scope)


def only_norm(thread: StepEmitter, layer: Words, name: str, x: Value, out: Value) -> None:
    """Put a row of x after this norm at ``out``."""
    NORM.call(
        thread.fn, x=x, weight=layer[name], bias=layer[f"{name}_bias"], out=out,
        size=thread.sizes.hidden,
    )  # fmt: skip


def add(thread: StepEmitter, layer: Words, part: str, x: Value, y: Value) -> None:
    """Add to a row of x the output of "attn", "mlp" or "input", after its norm if any."""
    fn, sizes, post_norm = thread.fn, thread.sizes, f"{part}_post_norm"
    if post_norm in thread.kind.norm_names:
        y, output = thread.local("rotated"), y
        only_norm(thread, layer, post_norm, output, y)
    ADD.call(fn, x=x, y=y, size=sizes.hidden)
    ffn = thread.kind.ffn
    of_ffn = part == "mlp" and ffn.bias and not ffn.experts
    has_bias = thread.kind.o_bias if part == "attn" else of_ffn
    if has_bias:
        bias = layer["o_bias" if part == "attn" else "down_bias"]
        ADD.call(fn, x=x, y=bias, size=sizes.hidden)


def gate(
    thread: StepEmitter,
    layer: Words,
    channel: Any,
    gate: Value,
    up: Value,
    out: Value,
    size: Any,
    ffn: FeedForward,
) -> None:
    """Make inner values of a row, from this channel on, of its gates and ups."""
    at = channel * 4
    GATE.of(thread.sizes.all_ffns.index(ffn)).call(
        thread.fn, gate=gate, up=up, gate_bias=layer["gate_bias"] + at,
        up_bias=layer["up_bias"] + at, out=out, size=size,
    )  # fmt: skip


def quantise(
    thread: StepEmitter,
    group: str,
    source: Value,
    row: Value,
    size: Any,
    at: Any = 0,
    scope: str = "local",
) -> None:
    """Quantise ``size`` floats into a row of activations, from channel ``at`` on.

    Where products take floats there is nothing to do: ``source`` is the row itself.
    """
    form = thread.sizes.activations
    if form != "floats":
        memory = getattr(thread, scope)
        target = memory(f"{group}_values") + row * thread.sizes.value_stride
        act_scales = memory(f"{group}_act_scales") + row * thread.sizes.act_scales_stride
        quantise_kernel(form).call(
            thread.fn, x=source, out=target + at * VALUE_BYTES[form],
            act_scales=act_scales + at // TILE * ACT_SCALES_BYTES, size=size,
            scratch=thread.local("rotated"),
        )  # fmt: skip


def matmul(
    thread: StepEmitter,
    layer: Words,
    matrix: str,
    tiles: tuple[Any, Any],
    num_rows: Value,
    y: Value,
    y_stride: Any,
    next_address: Value,
    group: str = "in",
    scope: str = "local",
) -> None:
    """Multiply activations by tiles of a matrix, first and end; then read ``next_address``."""
    sizes, memory = thread.sizes, getattr(thread, scope)
    if sizes.activations == "floats":
        x, x_stride = memory(f"{group}_floats"), sizes.float_stride
    else:
        x, x_stride = memory(f"{group}_values"), sizes.value_stride
    first, last = tiles
    MATMUL.call(
        thread.fn, matrix=layer.address(f"{matrix}_tiles"), first=first, last=last,
        num_rows=num_rows, x=x, x_stride=x_stride, act_scales=memory(f"{group}_act_scales"),
        act_scales_stride=sizes.act_scales_stride, y=y, y_stride=y_stride,
        next_address=next_address,
    )  # fmt: skip
    expand(thread, layer, matrix, tiles, num_rows, y, y_stride)
