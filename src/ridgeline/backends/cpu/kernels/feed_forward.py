"""What a token goes through by itself: gated networks, alone, beside experts, and of inputs.

``step`` decides who does which rows. Either threads share the outputs of every product for all rows
(``gated_mlp``), or a thread takes rows of its own through all of it (``whole_mlp``). Both leave
their result in ``y``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.backends.cpu.kernels import row_parts
from ridgeline.backends.cpu.kernels.ir import Value
from ridgeline.backends.cpu.kernels.kernel import Words
from ridgeline.backends.cpu.kernels.lora import adapter_barrier, shrink
from ridgeline.backends.cpu.kernels.prefetch import next_address, next_share
from ridgeline.backends.cpu.kernels.step_emitter import StepEmitter
from ridgeline.backends.cpu.layout.feed_forward import FeedForward
from ridgeline.backends.cpu.layout.formats import TILE


@dataclass(frozen=True, slots=True)
class Network:
    """A gated network of a layer: its shape, what its matrices' names begin with, what it reads."""

    ffn: FeedForward
    prefix: str = ""
    group: str = "in"

    def values(self, thread: StepEmitter, layer: Words, gates: Value) -> tuple[Value, int | Value]:
        """Return where the gated values are, and the bytes from row to row."""
        if not self.ffn.given:
            return gates + self.ffn.size * 4, self.ffn.gate_up_stride
        own = thread.args["inputs"] + layer["number"] * (self.ffn.size * 4)
        stride = thread.sizes.inputs_stride
        return own + thread.first_row * stride, thread.fn.i64(stride)


def networks(thread: StepEmitter) -> tuple[Network | None, Network | None, Network | None]:
    """Return a kind of layer's own network, the one beside experts, and that of its input."""
    kind = thread.kind
    own = None if kind.ffn.experts else Network(kind.ffn)
    dense = None
    if kind.ffn.experts and kind.ffn.dense:
        group = "dense" if kind.ffn.experts.beside else "in"
        dense = Network(kind.ffn.dense, "dense_", group)
    return own, dense, Network(kind.input, "input_") if kind.input else None


def gated_mlp(
    thread: StepEmitter,
    i: Value,
    layer: Words,
    rows: tuple[Value, ...],
    scope: str,
    network: Network,
) -> None:
    """Take all rows through a network, by outputs."""
    fn, sizes, ffn = thread.fn, thread.sizes, network.ffn
    y, x_bytes = thread.shared("y"), sizes.hidden * 4
    _gated_share(thread, i, layer, scope, network)
    thread.barrier()
    gated = "shared"
    if sizes.activations == "rows":  # their scale needs the whole row
        gated = scope
        with fn.loop(rows[1], start=rows[0]) as m:
            whole = thread.shared("gate_up") + m * ffn.gate_up_stride
            row_parts.quantise(thread, "gated", whole, m, ffn.size, scope=scope)
        thread.barrier(scope)
    if sizes.max_lora_rank and not network.prefix:
        _shrink_gated(thread, layer, rows)
    share_of_matmul(thread, i, layer, f"{network.prefix}down", y, x_bytes, "gated", gated)


def _shrink_gated(thread: StepEmitter, layer: Words, rows: tuple[Value, ...]) -> None:
    """Multiply rows of inner values by the A of the matrix that reads them, once all are there."""
    sizes = thread.sizes
    source, stride = thread.shared("gate_up"), thread.kind.ffn.gate_up_stride
    if sizes.activations == "floats":
        source, stride = thread.shared("gated_floats"), sizes.float_stride
    with thread.fn.loop(rows[1], start=rows[0]) as m:
        shrink(thread, layer, ("down",), source + m * stride, m)
    adapter_barrier(thread)


def share_of_matmul(
    thread: StepEmitter, i: Value, layer: Words, matrix: str, y: Value, y_stride: int, *operand: str
) -> None:
    """Compute this thread's pieces of a product for all rows."""
    num_rows, share = thread.args["num_rows"], next_share(thread, i, layer, matrix)
    with thread.pieces(i, matrix, layer[f"{matrix}_num_tiles"]) as tiles:
        behind = next_address(thread, layer, matrix, tiles[1], share)
        row_parts.matmul(thread, layer, matrix, tiles, num_rows, y, y_stride, behind, *operand)


def _gated_share(thread: StepEmitter, i: Value, layer: Words, scope: str, network: Network) -> None:
    """Compute this thread's share of the gated channels, into the shared activations.

    Where their scale needs the whole row they stay floats, in place of the gates; an adapter reads
    them there, too.
    """
    fn, sizes, num_rows = thread.fn, thread.sizes, thread.args["num_rows"]
    ffn, names = network.ffn, [network.prefix + name for name in network.ffn.inner]
    gate, stride = thread.shared("gate_up"), ffn.gate_up_stride
    up, up_stride = network.values(thread, layer, gate)
    targets = [up] if not ffn.gated else [gate, up][: len(names)]
    share = next_share(thread, i, layer, names[-1])
    with thread.pieces(i, f"{network.prefix}gate", layer[f"{names[0]}_num_tiles"]) as tiles:
        for name, target in zip(names, targets, strict=True):
            if name == names[-1]:
                behind = next_address(thread, layer, names[0], tiles[1], share)
            else:
                behind = thread.tile(layer, names[1], tiles[0])
            row_parts.matmul(
                thread, layer, name, tiles, num_rows, target, stride, behind, network.group, scope
            )
        first, size = tiles[0] * TILE, (tiles[1] - tiles[0]) * TILE
        with fn.loop(num_rows) as m:
            at, out = m * stride + first * 4, thread.floats("gated", m, "shared") + first * 4
            if sizes.activations == "rows" or (
                sizes.max_lora_rank and sizes.activations != "floats"
            ):
                out = gate + at
            ups = up + m * up_stride + first * 4 if ffn.given else up + at
            row_parts.gate(thread, layer, first, gate + at, ups, out, size, ffn)
            if sizes.activations != "rows":
                row_parts.quantise(thread, "gated", out, m, size, first, "shared")


def whole_matmul(
    thread: StepEmitter,
    layer: Words,
    matrix: str,
    num_rows: Value,
    y: Value,
    y_stride: int,
    *group: str,
) -> None:
    """Compute all of a product, for this thread's rows."""
    end = layer[f"{matrix}_num_tiles"]
    behind = thread.tile(layer, matrix, end)
    row_parts.matmul(thread, layer, matrix, (0, end), num_rows, y, y_stride, behind, *group)


def whole_mlp(thread: StepEmitter, layer: Words, num_rows: Value, network: Network) -> None:
    """Take this thread's rows through a network."""
    fn, sizes, ffn = thread.fn, thread.sizes, network.ffn
    gate, stride = thread.local("gate_up"), ffn.gate_up_stride
    up, up_stride = network.values(thread, layer, gate)
    for name in ffn.inner:
        target = gate if name == "gate" else up
        matrix = network.prefix + name
        whole_matmul(thread, layer, matrix, num_rows, target, stride, network.group)
    with fn.loop(num_rows) as m:
        out = thread.floats("gated", m)
        row_parts.gate(thread, layer, 0, gate + m * stride, up + m * up_stride, out, ffn.size, ffn)
        if not network.prefix:
            shrink(thread, layer, ("down",), out, m)
        row_parts.quantise(thread, "gated", out, m, ffn.size)
    y, x_bytes = thread.local("y"), sizes.hidden * 4
    whole_matmul(thread, layer, f"{network.prefix}down", num_rows, y, x_bytes, "gated")
