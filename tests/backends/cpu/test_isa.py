"""The byte dot product: every form that this machine can run gives numpy's integers, exactly."""

from __future__ import annotations

import re
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from numpy.typing import NDArray

from ridgeline.backends.cpu.kernels.compile import assembly
from ridgeline.backends.cpu.kernels.gemm import emit_linear
from ridgeline.backends.cpu.kernels.ir import F16, F32, I8, I32, Function, vec
from ridgeline.backends.cpu.kernels.isa import Dot, arm_features, broadcast4, describe, dot, lookup
from ridgeline.backends.cpu.layout.model_sizes import model_sizes
from tests.backends.cpu.machine import (
    HOST,
    LOCAL,
    TARGETS,
    Emit,
    Machine,
    at,
    build,
    initialize_all,
    same_bits,
    source,
)
from tests.tiny import PLAIN, changed

CPUINFO = Path("/proc/cpuinfo")

RNG = np.random.default_rng(11)
CASES = 64
EXTREMES = {  # of bytes that a weight may be, none above the key
    15: [0, 1, 7, 15],
    127: [0, 1, 15, 64, 126, 127],
    255: [0, 1, 15, 127, 128, 129, 254, 255],
}
X_EXTREMES = [-127, -126, -64, -1, 0, 1, 63, 126, 127]


def emit_dots(form: Dot) -> Emit:
    """``dot_MOST(sums, weights, x, count)``: one dot product after the other, in place."""

    def emit(module: ir.Module) -> None:
        for most in EXTREMES:
            fn = Function(module, f"dot_{most}", 4)
            sums, weights, x, count = fn.args
            with fn.loop(count * 64, step=64) as i:
                total = fn.load(sums + i, vec(I32, 16))
                bytes64 = (fn.load(part + i, vec(I8, 64)) for part in (weights, x))
                fn.store(dot(form, total, *bytes64, max_weight=most), sums + i)
            fn.finish()

    return emit


@pytest.fixture(scope="module", params=TARGETS)
def machine(request: pytest.FixtureRequest) -> Machine:
    return build(emit_dots(TARGETS[request.param].processor.dot), request.param)


def twin(
    sums: NDArray[np.int32], weights: NDArray[np.uint8], x: NDArray[np.int8]
) -> NDArray[np.int32]:
    products = weights.astype(np.int32) * x.astype(np.int32)
    return sums + products.reshape(*sums.shape, 4).sum(axis=-1, dtype=np.int32)


def assert_exact(
    machine: Machine, most: int, weights: NDArray[np.uint8], x: NDArray[np.int8]
) -> None:
    sums = RNG.integers(-(1 << 24), 1 << 24, (len(weights), 16), np.int32)
    sums[0] = 0
    got = at(sums)
    machine.run(f"dot_{most}", got, at(weights), at(x), len(weights))
    np.testing.assert_array_equal(got, twin(sums, weights, x))


@pytest.mark.parametrize("most", EXTREMES)
def test_random_and_extreme_bytes(machine: Machine, most: int) -> None:
    shape = (CASES, 64)
    random = RNG.integers(0, most + 1, shape, np.uint8)
    random_x = RNG.integers(-127, 128, shape, np.int8)
    extreme = RNG.choice(EXTREMES[most], shape).astype(np.uint8)
    extreme_x = RNG.choice(X_EXTREMES, shape).astype(np.int8)
    for weights in (random, extreme):
        for x in (random_x, extreme_x):
            assert_exact(machine, most, weights, x)


@pytest.mark.parametrize("most", EXTREMES)
def test_no_sum_of_neighbours_saturates(machine: Machine, most: int) -> None:
    """Every pair of a largest weight with every other, and of both ends of x."""
    a, b = np.meshgrid(np.uint8([0, most // 2, most // 2 + 1, most]), np.uint8([0, most]))
    weights = np.tile(np.stack([a.ravel(), b.ravel()], 1), (4, 32))[:32]
    for x in (-127, 127):
        assert_exact(machine, most, weights, np.full(weights.shape, x, np.int8))


@given(bytes_=st.binary(min_size=128, max_size=128))
@settings(max_examples=20)
def test_any_bytes(machine: Machine, bytes_: bytes) -> None:
    both = np.frombuffer(bytes_, np.uint8).reshape(2, 1, 64)
    assert_exact(machine, 255, both[0], both[1].view(np.int8).clip(-127, 127))


def test_four_bytes_sixteen_times() -> None:
    def emit(module: ir.Module) -> None:
        fn = Function(module, "spread", 2)
        fn.store(broadcast4(fn, fn.args[0]), fn.args[1])
        fn.finish()

    out = np.zeros(64, np.uint8)
    build(emit).run("spread", np.uint8([9, 200, 0, 7]), out)
    assert out.tolist() == [9, 200, 0, 7] * 16


@pytest.mark.parametrize("name", TARGETS)
def test_bytes_of_a_table(name: str) -> None:
    """Every place of every vector's slot, in a table of any bytes."""

    def emit(module: ir.Module) -> None:
        fn, kind = Function(module, "look", 3), vec(I8, 64)
        table, places = (fn.load(address, kind) for address in fn.args[:2])
        fn.store(lookup(TARGETS[name].processor.dot, table, places), fn.args[2])
        fn.finish()

    machine, table = build(emit, name), np.random.default_rng(1).permutation(256)[:16]
    for shift in range(16):
        places = (np.arange(64) * 5 + shift) % 16
        out = at(np.zeros(64, np.uint8))
        machine.run(
            "look", at(np.tile(table, 4).astype(np.uint8)), at(places.astype(np.uint8)), out
        )
        np.testing.assert_array_equal(out, table[places])


# --- half floats -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["host", *LOCAL[-1:]])
def test_half_floats(name: str) -> None:
    """Wide and narrow again, as numpy does it, with and without instructions for that."""

    def emit(module: ir.Module) -> None:
        for function, old, new in (("widen", F16, F32), ("narrow", F32, F16)):
            fn = Function(module, function, 3)
            with fn.loop(fn.args[2], step=16) as i:
                x = fn.load(fn.args[0] + i * (2 if old is F16 else 4), vec(old, 16))
                fn.store(x.signed(new), fn.args[1] + i * (2 if new is F16 else 4))
            fn.finish()

    machine = build(emit, name)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = np.zeros(len(halves), np.float32)
    machine.run("widen", halves, wide, len(halves))
    wanted = halves.astype(np.float32)
    assert np.array_equal(wide, wanted, equal_nan=True)
    numbers = wanted[np.isfinite(wanted)]
    between = (numbers[:-1] / 2 + numbers[1:] / 2).astype(np.float32)  # ties
    x = np.concatenate([numbers, between, np.nextafter(between, np.float32(np.inf)), RNG.normal(
        0, 1e-5, 4096), RNG.normal(0, 1e4, 4096), [65519, 65520, -65521, 1e30, -np.inf, 1e-45, 0]
    ]).astype(np.float32)  # fmt: skip
    x = x[: len(x) // 16 * 16]
    narrow = np.zeros(len(x), np.float16)
    machine.run("narrow", x, narrow, len(x))
    with np.errstate(over="ignore", under="ignore"):
        assert same_bits(narrow, x.astype(np.float16))


# --- choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "form"),
    [
        ({}, Dot.PLAIN),
        ({"sse4.2": True, "avx": True}, Dot.PLAIN),
        ({"avx2": True}, Dot.AVX2),
        ({"avx2": True, "avx512f": True, "avx512bw": True, "avx512vl": True}, Dot.AVX2),
        ({"avx2": True, "avxvnni": True}, Dot.VNNI256),
        ({"avx2": True, "avxvnni": True, "avx512vnni": True}, Dot.VNNI512),
        ({"avx2": True, "avxvnni": False, "avx512vnni": False}, Dot.AVX2),
        ({"neon": True}, Dot.PLAIN),
        ({"neon": True, "dotprod": True}, Dot.SDOT),
        ({"neon": True, "dotprod": True, "i8mm": True}, Dot.USDOT),
    ],
)
def test_features_choose_the_form(features: dict[str, bool], form: Dot) -> None:
    assert describe(features).dot is form


@pytest.mark.parametrize(
    ("maker", "locality", "lone_rows"),
    [("sse4a", 2, ["tile_w8_1x2"]), ("another", 3, ["tile_w8_1x2", "tile_w8_1x8"])],
)
def test_a_lone_row_reads_as_suits(maker: str, locality: int, lone_rows: list[str]) -> None:
    """A Zen 4, told by SSE4a as all of AMD's, lost a third with what suits an Ice Lake."""
    module = ir.Module()
    emit_linear(module, describe({maker: True, "avx512vnni": True}), ["w8"])
    found = {f.name: str(f) for f in module.functions if f.name.startswith("tile_w8_1x")}
    assert sorted(found) == lone_rows
    for text in found.values():
        hints = re.findall(r"llvm.prefetch.p0.*, i32 0, i32 (\d), i32 1\)", text)
        assert set(hints) == {str(locality)}


@pytest.mark.skipif("x86" not in HOST.triple, reason="the forms of x86")
def test_what_runs_here_is_tested_here() -> None:
    """With AVX2 there are at least two forms to compare with: never one alone, by mistake."""
    forms = {TARGETS[name].processor.dot for name in LOCAL}
    assert {HOST.processor.dot, Dot.PLAIN} <= forms
    assert (Dot.AVX2 in forms) == HOST.features["avx2"]
    assert (Dot.VNNI256 in forms) >= HOST.features["avxvnni"]


INSTRUCTIONS = {  # what the form exists for, and what must not be there
    Dot.VNNI512: ("vpdpbusd", "vpmaddubsw"),
    Dot.VNNI256: ("vpdpbusd", "zmm"),
    Dot.AVX2: ("vpmaddubsw", "zmm"),
    Dot.SDOT: ("\tsdot", "\tusdot"),
    Dot.USDOT: ("\tusdot", "\tsdot"),
    Dot.PLAIN: ("mul", "dot\t"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_form_becomes_its_instruction(name: str) -> None:
    target = TARGETS[name]
    initialize_all()
    module = llvm.parse_assembly(source(emit_dots(target.processor.dot), target))
    text = target.machine.emit_assembly(module)
    wanted, unwanted = INSTRUCTIONS[target.processor.dot]
    assert wanted in text or target.processor.dot is Dot.PLAIN
    assert unwanted not in text


# --- ARM ---------------------------------------------------------------------------------------


def test_linux_names_what_arm_can_do() -> None:
    """The lines are of a Neoverse N2, a Cortex-A76 and a Cortex-A72."""
    line = "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp asimddp sve svei8mm i8mm bf16\n"
    assert describe({"neon": True} | arm_features(line)).dot is Dot.USDOT
    assert describe({"neon": True} | arm_features(line.replace(" i8mm", ""))).dot is Dot.SDOT
    older = "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid\n"
    assert describe({"neon": True} | arm_features(older)).dot is Dot.PLAIN


def test_this_processor_is_known() -> None:
    """LLVM's word for what the operating system says."""
    if not CPUINFO.exists():
        pytest.skip("no /proc/cpuinfo here")
    flags = CPUINFO.read_text().split()
    assert (HOST.processor.dot is Dot.VNNI512) == ("avx512_vnni" in flags)
    assert (HOST.processor.dot in (Dot.SDOT, Dot.USDOT)) == ("asimddp" in flags)


@pytest.mark.parametrize(
    ("name", "dtype", "kv_cache_dtype"),
    [
        ("arm-i8mm", "auto", "int8"),
        ("arm-dotprod", "int8", "f16"),
        pytest.param("arm", "f32", "int8", marks=pytest.mark.full),
        pytest.param("arm-i8mm", "f32", "f16", marks=pytest.mark.full),
        pytest.param("arm-dotprod", "int8-row", "int8", marks=pytest.mark.full),
        ("arm", "bf16", "f16"),
    ],
)
def test_all_of_a_model_compiles_for_arm(name: str, dtype: str, kv_cache_dtype: str) -> None:
    arch = changed(PLAIN, qkv_bias=True, qk_norm="head", o_bias=True)
    target = TARGETS[name]
    kinds = {
        "auto": ("w4", "s4", "s5", "z4", "t4", "w8"),
        "int8": ("s4", "w8"),
        "int8-row": ("s4", "r8", "w8"),
    }.get(dtype, (dtype,))
    text = assembly(model_sizes(arch, dtype, kv_cache_dtype), kinds, arch.norm_eps, target)
    initialize_all()
    module = llvm.parse_assembly(text)
    instructions = target.machine.emit_assembly(module)
    has_bytes = dtype not in ("f32", "bf16") or kv_cache_dtype == "int8"
    assert ("\tusdot" in instructions) == (target.processor.dot is Dot.USDOT and has_bytes)
    assert ("\tsdot" in instructions) == (target.processor.dot is Dot.SDOT and has_bytes)
    assert "\thint" in instructions or "\tyield" in instructions
