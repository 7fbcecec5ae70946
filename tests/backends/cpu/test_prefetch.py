"""What a thread reads next: its own share of the next matrix, and the next head of the cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from llvmlite import ir

from ridgeline.backends.arrays import address, aligned
from ridgeline.backends.cpu.kernels.ir import Function
from ridgeline.backends.cpu.kernels.prefetch import (
    emit_prefetch_next_head,
    next_address,
    next_share,
)
from ridgeline.backends.cpu.kernels.step_emitter import StepEmitter
from ridgeline.backends.cpu.layout.arguments import ARGUMENTS, LAYER, MATRICES
from ridgeline.backends.cpu.layout.model_sizes import model_sizes
from ridgeline.backends.cpu.layout.shapes import TOKENS
from tests.backends.cpu.machine import Machine, at, build, prefetched
from tests.backends.cpu.test_compile import PLAIN

NUM_LAYERS = 2
SIZES = model_sizes(PLAIN, "int8", "int8")


def emit(module: ir.Module) -> None:
    """``share(args, thread)`` and ``next(args, thread, end)``, of each matrix; results go to x."""
    for name, num_args in (("share", 2), ("next", 3)):
        fn = Function(module, name, num_args)
        thread = StepEmitter(fn, SIZES)
        out = thread.args["x"]
        for i in range(NUM_LAYERS):
            number = fn.i64(i)
            layer, _ = thread.layer(number)
            for j, matrix in enumerate(MATRICES):
                value = next_share(thread, number, layer, matrix)
                if name == "next":
                    value = next_address(thread, layer, matrix, fn.args[2], value)
                fn.store(value, out + 8 * (i * len(MATRICES) + j), 8)
        fn.finish()


@pytest.fixture(scope="module")
def machine() -> Machine:
    assert SIZES.num_layers == NUM_LAYERS
    return build(emit)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_thread_goes_on_with_its_own_next_share(machine: Machine, threads: int) -> None:
    """Through a layer's matrices, then the next layer's; behind the last there is none."""
    shape = (NUM_LAYERS, len(MATRICES))
    tiles = 10_000 * (1 + np.arange(14).reshape(shape))
    num_tiles = 5 + np.arange(14).reshape(shape)
    tile_bytes = 100 + np.arange(14).reshape(shape)
    layers = at(np.zeros((NUM_LAYERS, len(LAYER)), np.int64))
    for j, matrix in enumerate(MATRICES):
        for part, words in (("tiles", tiles), ("num_tiles", num_tiles), ("tile_bytes", tile_bytes)):
            layers[:, LAYER.index(f"{matrix}_{part}")] = words[:, j]
    found, args = at(np.zeros(shape, np.int64)), at(np.zeros(len(ARGUMENTS), np.int64))
    for name, value in (
        ("threads", threads), ("layers", address(layers)), ("x", address(found)),
    ):  # fmt: skip
        args[ARGUMENTS.index(name)] = value
    for thread in range(threads):
        begins = tiles + num_tiles * thread // threads * tile_bytes
        after = np.roll(begins.reshape(-1), -1).reshape(shape)
        after[-1, -1] = begins[-1, 0]
        machine.run("share", args, thread)
        np.testing.assert_array_equal(found, after)
        for end in range(1, 19):
            is_last = end == num_tiles * (thread + 1) // threads
            machine.run("next", args, thread, end)
            np.testing.assert_array_equal(found, np.where(is_last, after, tiles + end * tile_bytes))


@pytest.mark.parametrize(("kv_cache_dtype", "value_share"), [("int8", 1.0), ("int8-int4", 0.5)])
def test_keys_and_scales_of_the_next_head_are_prefetched(
    kv_cache_dtype: str, value_share: float
) -> None:
    """Of the blocks in the table and no others; its values come with the scores."""
    heads = replace(SIZES.kinds[0].heads, kv_cache_dtype=kv_cache_dtype)
    stride = 3 * heads.record_bytes
    records, table = aligned(8 * stride, np.uint8), at(np.int32([6, 0, 3, 5]))
    lines = prefetched(
        lambda module: emit_prefetch_next_head(module, heads),
        "prefetch_next_head", address(records), stride, address(table), 3,
    )  # fmt: skip
    key_bytes, wanted = TOKENS * heads.size * heads.value_bytes, []
    for block in (6, 0, 3):
        begin = address(records) + block * stride
        scales_at = key_bytes + int(key_bytes * value_share)
        keys, scales = range(0, key_bytes, 64), range(scales_at, heads.record_bytes, 64)
        wanted += [(begin + offset) // 64 for offset in (*keys, *scales)]
    assert lines == wanted
