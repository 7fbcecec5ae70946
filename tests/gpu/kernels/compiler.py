"""Compile what the launchers launch, on a machine without a GPU: one JSON line a kernel.

Run as ``python -m tests.gpu.kernels.compiler [--full] [--for 89]``, without Triton's interpreter;
the default is Hopper, 90. The launchers run as they are, on tensors without memory behind them;
Triton compiles for the target that this driver names, a kernel with more shared memory than that
has is refused as a GPU refuses it, and nothing is started. ptxas and cuobjdump are in Triton's own
wheel.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from ridgeline.backends.cuda import kernels, tiles
from ridgeline.backends.cuda.kernels import launching
from ridgeline.backends.cuda.kernels.products import packed, plain
from ridgeline.backends.cuda.layer_spec import HeadSpec
from ridgeline.backends.cuda.packed import Packed

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Of matrix units, the copy engine, loads that nobody waits for, and spilled registers.
OPCODES = ("HGMMA", "HMMA", "UTMALDG", "LDGSTS", "DFMA", "LDL", "STL")
BF16, F16, F32, I32, I64 = (
    torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64,
)  # fmt: skip


# Bytes of shared memory that a program may have, by capability (CUDA's programming guide).
MOST_SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


class Driver:
    """What Triton asks a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def attention(name: str, H: int, K: int, D: int, **how: Any) -> Iterator[tuple[str, Any]]:
    """Yield both instances of attention for heads; ``how`` has facts of a HeadSpec, and sinks."""
    sinks = numbers(H, dtype=F32) if how.pop("sinks", False) else None
    slopes = numbers(H, dtype=F32) if how.pop("slopes", False) else None
    spec = HeadSpec(H, K, D, D // 2, D**-0.5, **how)
    cache = numbers(64, 2, K, 16, D)
    integers = numbers(64, dtype=I32)
    for rows in (tiles.DECODE_ROWS,) if spec.is_wide else (tiles.DECODE_ROWS, tiles.PROMPT_ROWS):
        plan = SimpleNamespace(
            items=integers, num_items=integers, folds=integers, num_folds=integers,
            part_a=numbers(64, dtype=F32), part_ml=numbers(64, dtype=F32), programs=264,
            folds_at_most=int(rows == tiles.DECODE_ROWS), rows=rows,
        )  # fmt: skip
        given = (numbers(8, H, D), cache, integers.reshape(4, 16), plan, slopes, sinks, spec)
        yield f"attend {name}, {rows} rows", lambda given=given: kernels.attend(*given)


def latents(name: str, H: int, rank: int, turning: int) -> Iterator[tuple[str, Any]]:
    """Yield latent attention's instances for some query heads."""
    spec = HeadSpec(H, 1, rank + turning, turning // 2, 0.1, value_at=turning)
    cache, integers = numbers(64, 1, 1, 16, rank + turning), numbers(64, dtype=I32)
    plan = SimpleNamespace(
        items=integers, num_items=integers, folds=integers, num_folds=integers,
        part_a=numbers(64, dtype=F32), part_ml=numbers(64, dtype=F32), programs=264,
        folds_at_most=1, rows=tiles.DECODE_ROWS,
    )  # fmt: skip
    given = (numbers(8, H, rank + turning), cache, integers.reshape(4, 16), plan, None, None, spec)
    yield f"latents {name}", lambda: kernels.attend(*given)


def products() -> Iterator[tuple[str, Any]]:
    """Yield products of every tile, packed ones whole and in parts, and those of experts."""
    for rows in (1, 48, 100, 200, 400, 2048):
        for N in (4096, 28672):
            tile = tiles.product_tile(rows, N, can_stream=True, is_float32=False)
            x, weight = numbers(rows, 4096), numbers(N, 4096)
            name = f"product of {tile.rows} x {tile.outputs} x {tile.inputs}"
            yield name, lambda x=x, weight=weight: kernels.product(x, weight, None)
    x, head = numbers(1, 4096), numbers(128256, 4096)
    yield "product for logits", lambda: kernels.product(x, head, None, F32)
    for bits in (8, 4):
        for rows in (1, 64, 512):
            values = numbers(4096, 4096 * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
            scales = numbers(4096, 128, dtype=F16)
            matrix = Packed(bits, values, scales, scales if bits == 4 else None, (4096, 4096))
            name = f"{bits} bits, {rows} rows"
            x = numbers(rows, 4096)
            yield name, lambda x=x, matrix=matrix: kernels.packed_product(x, matrix, None)
    for rows in (16, 64, 128):
        lists = dict.fromkeys(
            ("order", "offsets", "tile_expert", "tile_begin"), numbers(64, dtype=I64)
        )
        lists["offsets"] = numbers(17, dtype=I64)
        met = SimpleNamespace(per_token=8, rows=rows, **lists)
        x = numbers(8, 2048)
        for bits in (0, 8, 4):
            weight: Any = numbers(16, 1536, 2048)
            if bits:
                kind = torch.int8 if bits == 8 else torch.uint8
                values = numbers(16 * 1536, 256 * bits, dtype=kind)
                scales = numbers(16 * 1536, 64, dtype=F16)
                least = scales if bits == 4 else None
                weight = Packed(bits, values, scales, least, (16 * 1536, 2048))
            given = (x, weight, None, met, True)
            name = f"experts of {bits or 16} bits, {rows} rows"
            yield name, lambda given=given: kernels.grouped_product(*given)


def adapters(rows: int, tile: int) -> Iterator[tuple[str, Any]]:
    """Yield what adapters add to queries, keys and values, and to what comes after them."""
    lists = dict.fromkeys(("order", "offsets", "tile_expert", "tile_begin"), numbers(64, dtype=I64))
    met = SimpleNamespace(rows=tile, **lists)
    plan = SimpleNamespace(words=numbers(64, dtype=I64), max_lora_rank=64)
    x, out = numbers(rows, 4096), numbers(rows, 6144)
    for first, sizes in ((0, (4096, 1024, 1024)), (3, (4096,)), (8, (1024, 1024))):
        given = (out, x, met, plan, first, sizes)
        yield f"adapters, {tile} rows", lambda given=given: kernels.add_low_rank(*given)


def small_kernels() -> Iterator[tuple[str, Any]]:
    """Yield norms, rope, gates, draws and copies."""
    x, row = numbers(8, 4096, dtype=F32), numbers(4096, dtype=F32)
    given = (x, numbers(8, 4096), 1.0, None, row, None, 1e-5, "rms", BF16)
    yield "norm", lambda: kernels.add_norm(*given)
    integers, angles = numbers(64, dtype=I32), numbers(4096, 64, dtype=F32)
    heads = HeadSpec(32, 8, 128, 64, 1.0, qk_norm=1)
    rope = (
        numbers(8, 48 * 128), numbers(64, 2, 8, 16, 128), integers.reshape(4, 16), integers,
        integers, angles, angles, row, row, integers, heads,
    )  # fmt: skip
    yield "rope and cache", lambda: kernels.rope_and_cache(*rope)
    yield "gate", lambda: kernels.gate(numbers(8, 28672), "silu", True, 1.0)
    long = numbers(8, dtype=I64)
    draws = (numbers(8, 128256, dtype=F32), long, numbers(8, dtype=torch.float64), *5 * (long,))
    yield "draw", lambda: kernels.draw(*draws)
    yield "draw of adjusted rows", lambda: kernels.draw(*draws, is_adjusted=True)
    masks = numbers(2, 16032, dtype=torch.uint8)
    edits = (long, masks, long, long, long, numbers(8, 4, dtype=torch.float64))
    yield "adjust", lambda: kernels.adjust(draws[0], *edits)
    yield "rank", lambda: kernels.rank(draws[0], long, integers)
    blocks = numbers(64, 65536)
    yield "copies of blocks", lambda: kernels.copy_blocks(blocks, long, long)


def recurrences(rows: int) -> Iterator[tuple[str, Any]]:
    """Yield what recurrent layers launch: heads of Nemotron-H and Qwen3-Next."""
    integers = numbers(64, dtype=I32)[rows % 4 :]
    plan = SimpleNamespace(
        items=integers, num_items=integers, cuts=integers, num_cuts=integers, item_of=integers,
        programs=rows,
    )  # fmt: skip

    def wide(*shape: int) -> torch.Tensor:
        return numbers(*shape, dtype=F32)

    convolved = (wide(rows, 8192), numbers(8192, 4), None, wide(2, 3, 8192), plan)
    yield "convolve", lambda: kernels.convolve(*convolved)
    groups, pace = wide(rows, 8, 128), wide(rows, 128)
    scanned = (wide(rows, 128, 64), groups, groups, pace, pace, wide(128), wide(2, 128, 64, 128))
    yield "scan", lambda: kernels.scan(*scanned, plan)
    keys, pace = wide(rows, 16, 128), wide(rows, 32)
    met = (keys, keys, wide(rows, 32, 128), pace, pace, wide(2, 32, 128, 128), False)
    yield "remember", lambda: kernels.remember(*met, plan)


def step(rows: int) -> Iterator[tuple[str, Any]]:
    """Yield the calls of a step of some single tokens, whose numbers lie at odd places."""

    def part(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return numbers(2 * rows + 128, dtype=dtype)[rows:].as_strided(shape, (1,) * len(shape))

    integers, long, row = part(I32, rows), part(I64, rows), numbers(4096, dtype=F32)
    heads = HeadSpec(32, 8, 128, 64, 1.0)
    cache, table, angles = numbers(64, 2, 8, 16, 128), integers.as_strided((4, 16), (16, 1)), row
    rope = (cache, table, integers, integers, angles, angles, None, None, integers, heads)
    plan = SimpleNamespace(
        items=integers, num_items=integers, folds=integers, num_folds=integers,
        part_a=row, part_ml=row, programs=264, folds_at_most=1, rows=16,
    )  # fmt: skip
    x = numbers(rows, 4096)
    yield "rope", lambda: kernels.rope_and_cache(numbers(rows, 6144), *rope)
    queries = numbers(rows, 32, 128)
    yield "attend", lambda: kernels.attend(queries, cache, table, plan, None, None, heads)
    yield "product", lambda: kernels.product(x, numbers(4096, 4096), None)
    yield "norm", lambda: kernels.norm(x, row, None, 1e-5, "rms", BF16)
    yield "gate", lambda: kernels.gate(x, "silu", True, 1.0)
    draws = (numbers(rows, 128256, dtype=F32), long, part(torch.float64, rows), *5 * (long,))
    yield "draw", lambda: kernels.draw(*draws)
    edits = (long, numbers(rows, 16032, dtype=torch.uint8), long, long, long)
    changes = part(torch.float64, rows, 4)
    yield "adjust", lambda: kernels.adjust(draws[0], *edits, changes)
    yield "draw of adjusted rows", lambda: kernels.draw(*draws, is_adjusted=True)
    yield "rank", lambda: kernels.rank(draws[0], long, integers)
    yield from recurrences(rows)
    yield from adapters(rows, 16)


def cases(is_full: bool) -> Iterator[tuple[str, Any]]:
    """Yield names and calls."""
    yield from attention("Llama-3-8B", 32, 8, 128)
    yield from attention("gpt-oss-20b", 64, 8, 64, window=128, sinks=True)
    yield from latents("DeepSeek-V3", 128, 512, 64)
    yield from latents("DeepSeek-V2-Lite", 16, 512, 64)
    if is_full:
        yield from attention("Qwen2.5-7B", 28, 4, 128)
        yield from attention("Gemma-3-4B", 8, 4, 256, window=1024)
        yield from attention("heads of 512, as of Gemma 4", 8, 1, 512)
        yield from attention("Gemma-2-9B", 16, 8, 256, softcap=50.0)
        yield from attention("SmolLM2-1.7B", 32, 32, 64)
        yield from attention("MPT-7B", 32, 32, 128, slopes=True)
    yield from products()
    for tile in (16, 64, 128):
        yield from adapters(64, tile)
    yield from small_kernels()
    yield from recurrences(8)


def measured(binary: Any) -> dict[str, int]:
    """Return registers, shared memory in bytes, and how often some instructions occur."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                [TOOLS / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True
            ).stdout
            for flag in ("-res-usage", "-sass")
        )
    found = {"shared": binary.metadata.shared, "warps": binary.metadata.num_warps}
    found["registers"] = int(re.findall(r"\bREG:(\d+)", usage)[0])
    return found | {name: len(re.findall(rf"\b{name}\b", code)) for name in OPCODES}


def main() -> None:
    """Compile every kernel that each case launches, and print a line for each.

    Then print whether steps of other sizes had to compile anything anew, and which kernels have
    fewer loads under way than the tables say, for want of shared memory.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--for", dest="capability", type=int, default=90, choices=MOST_SHARED)
    wanted = parser.parse_args()
    triton.runtime.driver.set_active(Driver(wanted.capability))
    plain.num_processors = packed.num_processors = lambda device: 132
    plain.has_copy_engine = lambda device: wanted.capability >= 90
    compile_only, compiled = JITFunction.run, {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        binary = compile_only(self, *args, grid=grid, warmup=True, **options)
        if (room := MOST_SHARED[wanted.capability]) < binary.metadata.shared:
            raise OutOfResources(binary.metadata.shared, room, "shared memory")
        compiled[self.__name__, binary.hash] = binary

    JITFunction.run = run
    seen: set[tuple[str, str]] = set()
    for name, call in cases(wanted.full):
        call()
        for kernel, key in compiled.keys() - seen:
            facts = measured(compiled[kernel, key])
            print(json.dumps({"case": name, "kernel": kernel} | facts), flush=True)
        seen |= compiled.keys()
    for rows in (2, 1, 3, 16):
        for _, call in step(rows):
            call()
        anew = sorted(kernel for kernel, _ in compiled.keys() - seen) if rows != 2 else []
        seen |= compiled.keys()
        print(json.dumps({"step": rows, "anew": anew}), flush=True)
    fewer = sorted({kernel.__name__ for kernel, _ in launching.fewer_stages})  # type: ignore[attr-defined]
    print(json.dumps({"fewer_stages": fewer}), flush=True)


if __name__ == "__main__":
    main()
