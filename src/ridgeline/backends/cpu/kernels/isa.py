"""What differs between instruction sets, and nothing else: dot products, and a few hints.

Every form of the byte dot product gives the same integers, so a processor's features change the
speed of an answer and never the answer. They are chosen from what the processor can do, not from
its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from llvmlite import ir

from ridgeline.backends.cpu.kernels.ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    VOID,
    Function,
    Value,
    fma,
    select,
    vec,
)


class _BFloat(ir.Type):  # type: ignore[misc]
    """bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


BF16 = _BFloat()


class Dot(Enum):
    """Ways to add four byte products to each of 16 sums."""

    VNNI512 = "vpdpbusd, 512 bits"
    VNNI256 = "vpdpbusd, 256 bits"
    AVX2 = "vpmaddubsw and vpmaddwd"
    USDOT = "usdot (ARM i8mm)"
    SDOT = "sdot (ARM dotprod)"
    PLAIN = "widen and multiply"


# The best first; features as LLVM spells them.
_DOTS = {
    "avx512vnni": Dot.VNNI512,
    "avxvnni": Dot.VNNI256,
    "avx2": Dot.AVX2,
    "i8mm": Dot.USDOT,
    "dotprod": Dot.SDOT,
}


class Processor(NamedTuple):
    """What kernels ask of a processor."""

    dot: Dot
    has_bf16: bool  # a dot product of bf16, in 512 bits
    nearest: int  # locality of the cache into which a GEMV had best prefetch its weights
    streams: int  # tiles of weights that a GEMV had best read side by side
    has_tiles: bool  # a unit that multiplies tiles of bytes (AMX), and may be used


def describe(features: Mapping[str, bool]) -> Processor:
    """Return what suits a processor with these features."""
    form = next((form for name, form in _DOTS.items() if features.get(name)), Dot.PLAIN)
    # SSE4a is AMD's: a Zen 4 wants the second cache and one stream (docs/results.md#kernels).
    nearest, streams = (2, 1) if features.get("sse4a") else (3, 4)
    has_tiles = form is Dot.VNNI512 and features.get("amx-int8", False)
    return Processor(form, features.get("avx512bf16", False), nearest, streams, has_tiles)


def arm_features(cpuinfo: str) -> dict[str, bool]:
    """Return the dot products that Linux's /proc/cpuinfo names; LLVM does not look for them."""
    words = cpuinfo.split()
    return {"dotprod": "asimddp" in words, "i8mm": "i8mm" in words}


def dot(form: Dot, sums: Value, weights: Value, x: Value, *, max_weight: int = 255) -> Value:
    """Return ``sums[i] + weights[4 i .. 4 i + 3] . x[4 i .. 4 i + 3]``, exactly.

    Args:
        form: how.
        sums: 16 x i32.
        weights: 64 x u8, none above ``max_weight``.
        x: 64 x s8, none of them -128.
        max_weight: below 128 spares AVX2 half the work: its 16-bit sums cannot saturate then.
    """
    fn = sums.fn
    match form:
        case Dot.VNNI512:
            return fn.intrinsic("llvm.x86.avx512.vpdpbusd.512", sums.type, sums, weights, x)
        case Dot.VNNI256:
            return _in_parts(2, lambda s, w, v: _vnni256(s, w, v), sums, weights, x)
        case Dot.AVX2:
            small = max_weight < 128
            return _in_parts(2, lambda s, w, v: _avx2(s, w, v, small), sums, weights, x)
        case Dot.USDOT:
            return _in_parts(4, _usdot, sums, weights, x)
        case Dot.SDOT:
            return _in_parts(4, lambda s, w, v: _sdot(s, w, v, max_weight), sums, weights, x)
        case Dot.PLAIN:
            return _plain(sums, weights, x)


def dots(
    form: Dot, sums: Value, weights: Sequence[Value], xs: Sequence[Value], *, max_weight: int = 255
) -> Value:
    """Return ``dot`` of one pair after the other; small weights spare AVX2 most of the widening."""
    if form is Dot.AVX2 and 2 * 127 * max_weight * len(weights) < 1 << 15:
        return _in_parts(2, _avx2_small, sums, *weights, *xs)
    for weight, x in zip(weights, xs, strict=True):
        sums = dot(form, sums, weight, x, max_weight=max_weight)
    return sums


def lookup(form: Dot, table: Value, places: Value) -> Value:
    """Return the byte of ``table`` at each of ``places``.

    Args:
        form: the processor, by how it multiplies.
        table: 64 x u8, 16 of them four times.
        places: 64 x u8, none above 15.
    """
    fn, wide = table.fn, table.type
    match form:
        case Dot.VNNI512:
            return fn.intrinsic("llvm.x86.avx512.pshuf.b.512", wide, table, places)
        case Dot.VNNI256 | Dot.AVX2:
            return _in_parts(2, _shuffled_32, table, places)
        case Dot.USDOT | Dot.SDOT:
            return _in_parts(4, _shuffled_16, table, places)
        case Dot.PLAIN:  # halve the table by each bit of the place
            level = [table.lane(i).splat(64) for i in range(16)]
            for bit in (8, 4, 2, 1):
                is_upper, half = (places & bit).equals(bit), len(level) // 2
                level = [select(is_upper, level[half + i], level[i]) for i in range(half)]
            return level[0]


def _shuffled_32(table: Value, places: Value) -> Value:
    return table.fn.intrinsic("llvm.x86.avx2.pshuf.b", table.type, table, places)


def _shuffled_16(table: Value, places: Value) -> Value:
    return table.fn.intrinsic("llvm.aarch64.neon.tbl1.v16i8", table.type, table, places)


def _in_parts(count: int, part: Callable[..., Value], sums: Value, *operands: Value) -> Value:
    """Apply ``part`` to equal slices and put the sums together again."""
    size, size_bytes = sums.type.count // count, 64 // count
    done = []
    for i in range(count):
        lanes = range(i * size, (i + 1) * size)
        slots = range(i * size_bytes, (i + 1) * size_bytes)
        done.append(part(sums.shuffle(lanes), *(value.shuffle(slots) for value in operands)))
    while len(done) > 1:
        width = 2 * done[0].type.count
        done = [a.shuffle(range(width), b) for a, b in zip(done[::2], done[1::2], strict=True)]
    return done[0]


def _vnni256(sums: Value, weights: Value, x: Value) -> Value:
    kind = sums.type
    return sums.fn.intrinsic("llvm.x86.avx512.vpdpbusd.256", kind, sums, weights, x)


def _avx2(sums: Value, weights: Value, x: Value, small: bool) -> Value:
    fn, pairs = sums.fn, vec(I16, 16)
    ones = fn.lanes(I16, [1] * 16)
    # A product of u8 and s8 takes 16 bits, the sum of two may take 17: split off the top bit.
    for part in [weights] if small else [weights & 0x7F, weights & 0x80]:
        products = fn.intrinsic("llvm.x86.avx2.pmadd.ub.sw", pairs, part, x)
        sums = sums + fn.intrinsic("llvm.x86.avx2.pmadd.wd", sums.type, products, ones)
    return sums


def _avx2_small(sums: Value, *weights_and_xs: Value) -> Value:
    """Products that fit 16 bits even added up: widen their sum once."""
    fn, pairs, half = sums.fn, vec(I16, 16), len(weights_and_xs) // 2
    total = None
    for weights, x in zip(weights_and_xs[:half], weights_and_xs[half:], strict=True):
        products = fn.intrinsic("llvm.x86.avx2.pmadd.ub.sw", pairs, weights, x)
        total = products if total is None else total + products
    assert total is not None
    ones = fn.lanes(I16, [1] * 16)
    return sums + fn.intrinsic("llvm.x86.avx2.pmadd.wd", sums.type, total, ones)


def _usdot(sums: Value, weights: Value, x: Value) -> Value:
    name = "llvm.aarch64.neon.usdot.v4i32.v16i8"
    return sums.fn.intrinsic(name, sums.type, sums, weights, x)


def _sdot(sums: Value, weights: Value, x: Value, max_weight: int) -> Value:
    # u8 = s8 with the top bit as two times 64: both signed.
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    if max_weight < 128:
        return sums.fn.intrinsic(name, sums.type, sums, weights, x)
    low, top = weights & 0x7F, (weights & 0x80) >> 1
    for part in (low, top, top):
        sums = sums.fn.intrinsic(name, sums.type, sums, part, x)
    return sums


def _plain(sums: Value, weights: Value, x: Value) -> Value:
    products = weights.unsigned(I32) * x.signed(I32)
    for i in range(4):
        sums = sums + products.shuffle(range(i, 64, 4))
    return sums


def dot_bf16(has_bf16: bool, sums: Value, weights: Value, x: Value) -> Value:
    """Return ``sums[i] + weights[2 i + 1] x[2 i + 1] + weights[2 i] x[2 i]``, in this order.

    ``sums`` are 16 x f32; ``weights`` and ``x`` 64 bytes that hold 32 x bf16. Every addition rounds
    once, and the instruction takes what is smaller than 1e-38 for zero.
    """
    fn = sums.fn
    if has_bf16:
        name, pairs = "llvm.x86.avx512bf16.dpbf16ps.512", vec(BF16, 32)
        return fn.intrinsic(name, sums.type, sums, weights.bits(pairs), x.bits(pairs))
    words = [value.bits(vec(I32, 16)) for value in (weights, x)]
    odd = [(word & -65536).bits(sums.type) for word in words]
    even = [(word << 16).bits(sums.type) for word in words]
    return fma(even[0], even[1], fma(odd[0], odd[1], sums))


def broadcast4(fn: Function, address: Value) -> Value:
    """Return the four bytes at ``address``, sixteen times: 64 x s8."""
    return fn.load(address, I32).splat(16).bits(vec(I8, 64))


def prefetch(fn: Function, address: Value, locality: int = 3) -> None:
    """Ask for the cache line at ``address``; 3 keeps it closest."""
    pointer = fn.builder.inttoptr(address.raw, ir.PointerType())
    hints = [ir.Constant(I32, number) for number in (0, locality, 1)]
    fn.intrinsic("llvm.prefetch.p0", VOID, Value(fn, pointer), *(Value(fn, h) for h in hints))


def spin_hint(fn: Function, is_x86: bool) -> None:
    """Tell the processor that this loop only waits, if it knows a way."""
    if is_x86:
        fn.intrinsic("llvm.x86.sse2.pause", VOID)
    elif fn.raw.module.triple.startswith(("aarch64", "arm64")):
        fn.intrinsic("llvm.aarch64.hint", VOID, fn.value(1, I32))  # yield


def emit_half_floats(module: ir.Module) -> None:
    """Emit conversions to and from half floats, under the names by which LLVM calls them.

    For x86 before F16C, whose compilers keep them in a library that may not be here. They are
    exact and round to even; what is not a number is never made narrower.
    """

    def number(value: int) -> ir.Constant:
        return ir.Constant(I32, value)

    widen = ir.Function(module, ir.FunctionType(F32, [F16]), "__extendhfsf2")
    b = ir.IRBuilder(widen.append_basic_block())
    word = b.zext(b.bitcast(widen.args[0], I16), I32)
    size = b.shl(b.and_(word, number(0x7FFF)), number(13))
    scaled = b.bitcast(b.fmul(b.bitcast(size, F32), ir.Constant(F32, 2.0**112)), I32)
    is_endless = b.icmp_unsigned(">=", size, number(0x0F800000))
    bits = b.select(is_endless, b.or_(size, number(0x7F800000)), scaled)
    b.ret(b.bitcast(b.or_(bits, b.shl(b.and_(word, number(0x8000)), number(16))), F32))

    narrow = ir.Function(module, ir.FunctionType(F16, [F32]), "__truncsfhf2")
    b = ir.IRBuilder(narrow.append_basic_block())
    bits = b.bitcast(narrow.args[0], I32)
    size = b.and_(bits, number(0x7FFFFFFF))
    shifted = b.fadd(b.bitcast(size, F32), ir.Constant(F32, 0.5))  # rounds to steps of 2 ** -24
    tiny = b.sub(b.bitcast(shifted, I32), number(0x3F000000))
    odd = b.and_(b.lshr(size, number(13)), number(1))
    normal = b.lshr(b.add(b.add(size, odd), number(0xFFF - 0x38000000)), number(13))
    half = b.select(b.icmp_unsigned("<", size, number(0x38800000)), tiny, normal)
    half = b.select(b.icmp_signed("<", half, number(0x7C00)), half, number(0x7C00))
    half = b.or_(half, b.lshr(b.and_(bits, number(0x80000000)), number(16)))
    b.ret(b.bitcast(b.trunc(half, I16), F16))
