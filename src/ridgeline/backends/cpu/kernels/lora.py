"""Adapters (LoRA; Hu et al., 2021): what they add to the products of the rows that have one.

A row of floats, before it is quantised, is multiplied by the A of each matrix that reads it; what
comes out, a float for each rank, waits until the row's product is there, and then B times it is
added. Every sum has one order, by the rank's number and down the row, so what a row gets depends on
the row and its own adapter alone. A row without an adapter is passed over, and keeps its bits.

Where outputs are split (``step``), threads share the ranks of each A and meet once more before the
product; else a row's thread does all of it. Only models loaded with room for adapters have this
code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ridgeline.backends.cpu.kernels.ir import F16, F32, I64, Function, Value, fma, vec
from ridgeline.backends.cpu.kernels.kernel import Kernel, Words
from ridgeline.backends.cpu.kernels.step_emitter import StepEmitter
from ridgeline.backends.cpu.layout.arguments import ADAPTER

_FLOATS = vec(F32, 16)
_TOGETHER = 4  # ranks that are computed side by side: ``layout.lora`` has them so
LORA_DOWN = Kernel("lora_down", ("x", "size", "a", "first", "last", "scale", "out"))
LORA_UP = Kernel("lora_up", ("low", "b", "rank", "y", "first", "last"))


def emit_lora(module: object, value_bytes: int) -> None:
    """``lora_down``: out = scale A x for groups of ranks; ``lora_up``: y += B low for tiles.

    ``layout.lora`` says how A and B lie, ``value_bytes`` whether in floats or halves. ``size``
    counts floats; ``scale`` is where one is kept.
    """
    fn = LORA_DOWN.begin(module)
    x, size, a, first, last, scale, out = fn.args
    factor = fn.load(scale, F32, 4)
    zero = fn.lanes(F32, [0.0] * 16)
    with fn.loop(last, start=first) as group:
        base = a + group * size * (value_bytes * _TOGETHER)
        sums = [[fn.var(zero) for _ in range(2)] for _ in range(_TOGETHER)]
        with fn.loop(size * 4, step=128) as at:
            for half in range(2):
                value = fn.load(x + at + 64 * half, _FLOATS, 4)
                weights = base + ((at + 64 * half) >> 2) * (value_bytes * _TOGETHER)
                for j, parts in enumerate(sums):
                    weight = _weights(fn, weights, j, value_bytes)
                    parts[half].set(fma(value, weight, parts[half].get()))
        for j, (even, odd) in enumerate(sums):
            dot = (even.get() + odd.get()).reduce(lambda p, q: p + q)
            fn.store(dot * factor, out + group * (4 * _TOGETHER) + 4 * j, 4)
    fn.finish()

    fn = LORA_UP.begin(module)
    low, b, rank, y, first, last = fn.args
    zero = fn.lanes(F32, [0.0] * 16)
    with fn.loop(last * 2, start=first * 2, step=2) as vector:
        sums = [[fn.var(zero) for _ in range(_TOGETHER)] for _ in range(2)]
        with fn.loop(rank * 4, step=4 * _TOGETHER) as at:
            for j in range(_TOGETHER):
                factor = fn.load(low + at + 4 * j, F32, 4).splat(16)
                for half, parts in enumerate(sums):
                    weights = b + ((vector + half) * rank + (at >> 2)) * (16 * value_bytes)
                    weight = _weights(fn, weights, j, value_bytes)
                    parts[j].set(fma(weight, factor, parts[j].get()))
        for half, parts in enumerate(sums):
            total = (parts[0].get() + parts[1].get()) + (parts[2].get() + parts[3].get())
            place = y + (vector + half) * 64
            fn.store(fn.load(place, _FLOATS, 4) + total, place, 4)
    fn.finish()


def _weights(fn: Function, base: Value, number: int, value_bytes: int) -> Value:
    """Return the ``number``-th 16 values from an address on, as floats."""
    at = base + number * 16 * value_bytes
    if value_bytes == 4:
        return fn.load(at, _FLOATS, 64)
    return fn.load(at, vec(F16, 16), 32).signed(F32)


def shrink(
    thread: StepEmitter, layer: Words, matrices: tuple[str, ...], x: Value, row: Value
) -> None:
    """Multiply the floats at ``x``, of this row, by the A of each of the matrices that read it."""
    sizes, fn = thread.sizes, thread.fn
    if not sizes.max_lora_rank:
        return
    with fn.when(thread.args["num_adapted"] > 0), _adapter_of(thread, layer, row) as words:
        for place, matrix in enumerate(matrices):
            groups = words[f"{matrix}_rank"] // _TOGETHER
            first, last = fn.i64(0), groups
            if thread.shares_ranks:
                first, last = (thread.first_tile(groups, thread.number + i) for i in range(2))
            LORA_DOWN.call(
                fn, x=x, size=thread.kind.inputs(matrix), a=words[f"{matrix}_a"], first=first,
                last=last, scale=words.address(f"{matrix}_scale"), out=_low(thread, row, place),
            )  # fmt: skip


def expand(
    thread: StepEmitter, layer: Words, matrix: str, tiles: tuple[Any, Any], num_rows: Value,
    y: Value, y_stride: Any,
) -> None:  # fmt: skip
    """Add to these tiles of a product what the adapters of its rows add."""
    sizes, fn = thread.sizes, thread.fn
    places = [group.index(matrix) for group in thread.kind.readers if matrix in group]
    if not sizes.max_lora_rank or not places:
        return
    with (
        fn.when(thread.args["num_adapted"] > 0),
        fn.loop(num_rows) as m,
        _adapter_of(thread, layer, m) as words,
    ):
        rank = words[f"{matrix}_rank"]
        with fn.when(rank > 0):
            LORA_UP.call(
                fn, low=_low(thread, m, places[0]), b=words[f"{matrix}_b"], rank=rank,
                y=y + m * y_stride, first=tiles[0], last=tiles[1],
            )  # fmt: skip


def adapter_barrier(thread: StepEmitter, scope: str = "shared") -> None:
    """Wait for the other threads if they share ranks and there is any adapter in the step."""
    if thread.sizes.max_lora_rank and (thread.shares_ranks or scope == "shared"):
        with thread.fn.when(thread.args["num_adapted"] > 0):
            thread.barrier()


@contextmanager
def _adapter_of(thread: StepEmitter, layer: Words, row: Value) -> Iterator[Words]:
    """Do something with the words of a row's adapter in a layer, if the row has one."""
    fn = thread.fn
    at = thread.args["adapters"] + (thread.first_row + row) * 8
    adapter = fn.load(at, I64, 8)
    with fn.when(adapter > 0):
        yield Words(fn, adapter + layer["number"] * (8 * len(ADAPTER)), ADAPTER)


def _low(thread: StepEmitter, row: Value, place: int) -> Value:
    """Return where a row's products with the A of the ``place``-th of some matrices are kept."""
    room = thread.local if thread.owns_rows else thread.shared
    sizes = thread.sizes
    return room("low_rank") + row * sizes.low_rank_stride + place * sizes.rank_bytes
