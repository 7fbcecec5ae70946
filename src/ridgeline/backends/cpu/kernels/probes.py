"""Kernels that do nothing but read, or nothing but multiply: what the roof is measured with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from ridgeline.backends.cpu.kernels.compile import Kernels, Target, compile_object
from ridgeline.backends.cpu.kernels.ir import F32, I8, I32, I64, Function, Value, fma, vec
from ridgeline.backends.cpu.kernels.isa import broadcast4, dot, dot_bf16, prefetch

STREAMS, STRIDE_BYTES = 4, 256  # that are read side by side, and of each in one go
_AHEAD_BYTES = 1024
OPERANDS_BYTES, _RESULT_AT = 4096, 2048
_BYTES, _FLOATS = vec(I8, 64), vec(F32, 16)

_Step = Callable[[Value, Value, Value], Value]


def compile_probes(names: Sequence[str], target: Target) -> Kernels:
    """Compile the probes of these names: read, int8, bf16 and f32."""
    module = ir.Module("roof")
    module.triple = target.triple
    steps: dict[str, tuple[ir.Type, _Step]] = {
        "int8": (I32, partial(dot, target.processor.dot, max_weight=15)),
        "bf16": (F32, partial(dot_bf16, True)),
        "f32": (F32, lambda s, w, x: fma(w.bits(_FLOATS), x.bits(_FLOATS), s)),
    }
    for name in names:
        if name == "read":
            _emit_read(module, target.processor.nearest)
        else:
            _emit_tile(module, name, target, *steps[name])
    return Kernels(compile_object(str(module), target), target)


def tile_shape(target: Target) -> tuple[int, int]:
    """Return rows, and vectors of 16 outputs, of a tile whose sums fill the registers."""
    return (6 if target.features.get("avx512f") else 3), 2


def _emit_tile(module: ir.Module, name: str, target: Target, lane: ir.Type, step: _Step) -> None:
    """``NAME(memory, _, count)``: a tile of products, ``count`` times, from 1 KiB of operands."""
    fn = Function(module, name, 3)
    memory, _, count = fn.args
    rows, halves = tile_shape(target)
    sums = [[fn.var(fn.lanes(lane, [0] * 16)) for _ in range(halves)] for _ in range(rows)]
    with fn.loop(count) as k:
        at = memory + (k & 7) * (halves * 64)  # so that nothing can be kept from turn to turn
        weights = [fn.load(at + 64 * h, _BYTES, 64) for h in range(halves)]
        for m, row in enumerate(sums):
            x = broadcast4(fn, at + 4 * m)
            for total, weight in zip(row, weights, strict=True):
                total.set(step(total.get(), weight, x))
    for m, row in enumerate(sums):
        for h, total in enumerate(row):
            fn.store(total.get(), memory + _RESULT_AT + 64 * (m * halves + h), 64)
    fn.finish()


def _emit_read(module: ir.Module, nearest: int) -> None:
    """``read(memory, size, count)``: read ``size`` bytes, ``count`` times, in parallel streams."""
    fn = Function(module, "read", 3)
    memory, size, count = fn.args
    part = size // STREAMS
    words = vec(I64, 8)
    totals = [fn.var(fn.lanes(I64, [0] * 8)) for _ in range(STREAMS)]
    with fn.loop(count), fn.loop(part, step=STRIDE_BYTES) as at:
        for stream, total in enumerate(totals):
            here = memory + part * stream + at
            for offset in range(0, STRIDE_BYTES, 64):
                prefetch(fn, here + (_AHEAD_BYTES + offset), nearest)
                total.set(total.get() ^ fn.load(here + offset, words, 64))
    for stream, total in enumerate(totals):
        fn.store(total.get(), memory + 64 * stream, 64)
    fn.finish()
