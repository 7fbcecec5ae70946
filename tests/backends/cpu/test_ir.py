"""The expression layer by itself: what is written is what is computed, in the order written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numpy.typing import NDArray

from ridgeline.backends.cpu.kernels.ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    Function,
    Value,
    absolute,
    exp,
    fma,
    maximum,
    minimum,
    select,
    sqrt,
    to_whole,
    vec,
)
from tests.backends.cpu.machine import at, build, halves, same_bits

LANES = {
    np.dtype(np.int8): I8,
    np.dtype(np.int16): I16,
    np.dtype(np.int32): I32,
    np.dtype(np.int64): I64,
    np.dtype(np.float16): F16,
    np.dtype(np.float32): F32,
}
DTYPES = {str(kind): dtype for dtype, kind in LANES.items()}
RNG = np.random.default_rng(3)


def evaluate(body: Callable[..., Value], *inputs: Any) -> NDArray[Any]:
    """Return ``body`` of some arrays (vectors) and numpy scalars; comparisons come back as 0, 1."""
    made: list[Any] = []

    def emit(module: ir.Module) -> None:
        fn = Function(module, "body", len(inputs) + 1)
        values = []
        for x, arg in zip(inputs, fn.args[:-1], strict=True):
            lane = LANES[x.dtype]
            values.append(fn.load(arg, vec(lane, x.size) if x.ndim else lane))
        result = body(*values)
        kind = result.type
        count = kind.count if isinstance(kind, ir.VectorType) else 0
        lane = kind.element if count else kind
        if lane == ir.IntType(1):
            result, lane = result.unsigned(I8), I8
        made.append(np.zeros(count or (), DTYPES[str(lane)]))
        fn.store(result, fn.args[-1])
        fn.finish()

    machine = build(emit)
    machine.run("body", *(np.array(x) for x in inputs), made[0])
    return made[0]


def loop_body(body: Callable[[Function, Value], Value], number: int = 0) -> int:
    """Return what ``body`` makes of a number."""

    def emit(module: ir.Module) -> None:
        fn = Function(module, "body", 2)
        fn.store(body(fn, fn.args[0]), fn.args[1])
        fn.finish()

    out = np.zeros((), np.int64)
    build(emit).run("body", number, out)
    return int(out)


INTS = np.array([0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 12345], np.int32)
OTHERS = np.array([3, 2, 5, -2, 3, 2, 7, -12345], np.int32)
FLOATS = np.array([0.0, -0.0, 1.5, -2.25, 1e-40, 3e38, np.inf, np.nan], np.float32)
NEXT = np.array([0.0, 1.0, -2.25, -2.25, 1e-40, 3e38, 1.0, 2.0], np.float32)

# --- operators ---------------------------------------------------------------------------------


def unsigned(a: NDArray[Any], b: NDArray[Any], name: str) -> NDArray[Any]:
    result: NDArray[Any] = getattr(np, name)(a.view(np.uint32), b.view(np.uint32)).view(np.int32)
    return result


INTEGER: dict[str, tuple[Callable[..., Value], Callable[..., Any]]] = {
    "+": (lambda a, b: a + b, lambda a, b: a + b),
    "-": (lambda a, b: a - b, lambda a, b: a - b),
    "*": (lambda a, b: a * b, lambda a, b: a * b),
    "/ is signed, towards zero": (
        lambda a, b: a / b,
        lambda a, b: np.sign(a) * np.sign(b) * (abs(a.astype(int)) // abs(b.astype(int))),
    ),
    "// is unsigned": (lambda a, b: a // b, lambda a, b: unsigned(a, b, "floor_divide")),
    "% is unsigned": (lambda a, b: a % b, lambda a, b: unsigned(a, b, "remainder")),
    "&": (lambda a, b: a & b, lambda a, b: a & b),
    "|": (lambda a, b: a | b, lambda a, b: a | b),
    "^": (lambda a, b: a ^ b, lambda a, b: a ^ b),
    "<<": (lambda a, b: a << 3, lambda a, b: a << 3),
    ">> is unsigned": (lambda a, b: a >> 3, lambda a, b: (a.view(np.uint32) >> 3).view(np.int32)),
    "-x": (lambda a, b: -a, lambda a, b: -a),
    "numbers on the left": (lambda a, b: 3 - 2 * (5 + a), lambda a, b: 3 - 2 * (5 + a)),
    "<": (lambda a, b: a < b, lambda a, b: a < b),
    "<=": (lambda a, b: a <= b, lambda a, b: a <= b),
    ">": (lambda a, b: a > b, lambda a, b: a > b),
    ">=": (lambda a, b: a >= b, lambda a, b: a >= b),
    "equals": (lambda a, b: a.equals(b), lambda a, b: a == b),
}


@pytest.mark.parametrize("name", INTEGER)
def test_integers(name: str) -> None:
    body, twin = INTEGER[name]
    with np.errstate(all="ignore"):
        wanted = np.array(twin(INTS, OTHERS)).astype(np.int32)
    assert evaluate(body, INTS, OTHERS).tolist() == wanted.tolist()
    scalars = [evaluate(body, a, b).item() for a, b in zip(INTS[3:6], OTHERS[3:6], strict=True)]
    assert scalars == wanted[3:6].tolist()


FLOATING: dict[str, tuple[Callable[..., Value], Callable[..., Any]]] = {
    "+": (lambda a, b: a + b, lambda a, b: a + b),
    "-": (lambda a, b: a - b, lambda a, b: a - b),
    "*": (lambda a, b: a * b, lambda a, b: a * b),
    "/": (lambda a, b: a / b, lambda a, b: a / b),
    "-x": (lambda a, b: -a, lambda a, b: -a),
    "numbers on the left": (
        lambda a, b: 1.0 / (3.0 - 2.0 * (0.5 + a)),
        lambda a, b: np.float32(1) / (np.float32(3) - np.float32(2) * (np.float32(0.5) + a)),
    ),
    "no fma unless asked": (lambda a, b: a * a + b, lambda a, b: a * a + b),
    "absolute": (lambda a, b: absolute(a), lambda a, b: np.abs(a)),
}


@pytest.mark.parametrize("name", FLOATING)
def test_floats_to_the_last_bit(name: str) -> None:
    body, twin = FLOATING[name]
    a, b = (np.concatenate([x, RNG.normal(size=56).astype(np.float32)]) for x in (FLOATS, NEXT))
    with np.errstate(all="ignore"):
        wanted = np.asarray(twin(a, b), np.float32)
    got = evaluate(body, a, b)
    assert np.array_equal(np.isnan(got), np.isnan(wanted))
    assert same_bits(got[~np.isnan(got)], wanted[~np.isnan(wanted)])


@pytest.mark.parametrize(
    ("body", "twin"),
    [
        (lambda a, b: a < b, np.less),
        (lambda a, b: a <= b, np.less_equal),
        (lambda a, b: a > b, np.greater),
        (lambda a, b: a >= b, np.greater_equal),
        (lambda a, b: a.equals(b), np.equal),
    ],
)
def test_nothing_compares_with_what_is_not_a_number(
    body: Callable[..., Value], twin: np.ufunc
) -> None:
    assert evaluate(body, FLOATS, NEXT).tolist() == twin(FLOATS, NEXT).tolist()
    assert not evaluate(body, NEXT, np.full(8, np.nan, np.float32)).any()


def test_scalars_and_variables_next_to_vectors() -> None:
    two = np.int32(2)
    assert evaluate(lambda v, s: v * s + s, INTS, two).tolist() == (INTS * two + two).tolist()
    assert evaluate(lambda v, s: v + v.fn.var(s), INTS, two).tolist() == (INTS + two).tolist()
    assert evaluate(lambda s: s.splat(8), two).tolist() == [2] * 8


# --- conversions -------------------------------------------------------------------------------

BYTES = np.array([0, 1, 127, -128, -1, 15, 16, -127], np.int8)


@pytest.mark.parametrize(
    ("body", "x", "wanted"),
    [
        (lambda v: v.signed(I32), BYTES, BYTES.astype(np.int32)),
        (lambda v: v.unsigned(I32), BYTES, BYTES.view(np.uint8).astype(np.int32)),
        (lambda v: v.signed(I64), INTS, INTS.astype(np.int64)),
        (lambda v: v.signed(I8), INTS, INTS.astype(np.int8)),
        (lambda v: v.signed(F32), BYTES, BYTES.astype(np.float32)),
        (lambda v: v.unsigned(F32), BYTES, BYTES.view(np.uint8).astype(np.float32)),
        (lambda v: v.signed(F32), INTS, INTS.astype(np.float32)),
        (lambda v: v.signed(I32), NEXT[:4] * 3, np.int32([0, 3, -6, -6])),
        (lambda v: v.unsigned(I32), np.float32([3e9, 2.9]), np.uint32([3e9, 2]).view(np.int32)),
        (lambda v: v.signed(F16), FLOATS[:6], None),
        (lambda v: v.signed(F32), np.float16([1, -0.1, 6e-8, 65504, np.inf]), None),
        (lambda v: v.signed(F32), NEXT, NEXT),
        (lambda v: v.signed(I32), INTS, INTS),
        (lambda v: v.bits(vec(I32, 8)), NEXT, NEXT.view(np.int32)),
        (lambda v: v.bits(vec(I16, 4)), BYTES, BYTES.view(np.int16)),
    ],
)
def test_conversions(body: Callable[..., Value], x: NDArray[Any], wanted: Any) -> None:
    if wanted is None:
        with np.errstate(over="ignore", under="ignore"):
            wanted = x.astype(np.float16 if x.dtype == np.float32 else np.float32)
    assert same_bits(evaluate(body, x), wanted)


# --- lanes -------------------------------------------------------------------------------------


def test_lanes_and_shuffles() -> None:
    assert evaluate(lambda v: v.lane(3), INTS).item() == INTS[3]
    assert evaluate(lambda v: v.shuffle([7, 0, 0]), INTS).tolist() == INTS[[7, 0, 0]].tolist()
    both = evaluate(lambda v, w: v.shuffle([1, 8, 15, 0], w), INTS, OTHERS)
    assert both.tolist() == [INTS[1], OTHERS[0], OTHERS[7], INTS[0]]
    counted = evaluate(lambda v: v + v.fn.lanes(I32, range(8)), OTHERS)
    assert counted.tolist() == (OTHERS + np.arange(8)).tolist()


@pytest.mark.parametrize("count", [1, 2, 8, 16, 64])
def test_reduce_joins_halves(count: int) -> None:
    x = (RNG.normal(size=count) * 10.0 ** RNG.integers(-4, 5, count)).astype(np.float32)
    got = evaluate(lambda v: v.reduce(lambda a, b: a + b), x)
    assert same_bits(got, halves(x))
    assert evaluate(lambda v: v.reduce(maximum), x) == x.max()


def test_the_order_of_a_sum_is_visible() -> None:
    """Otherwise the test above would pass whatever the order."""
    x = np.float32([1e8, 1, -1e8, 1])
    assert halves(x) == 2
    assert x[0] + x[1] + x[2] + x[3] != 2


# --- control -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 5, 1), (0, 0, 1), (3, 3, 2), (5, 2, 1), (2, 11, 4), (-3, 2, 2)]
)
def test_loops_turn_as_often_as_range_does(start: int, stop: int, step: int) -> None:
    def body(fn: Function, last: Value) -> Value:
        trace = fn.var(fn.i64(1))
        with fn.loop(last, start=start, step=fn.i64(step)) as i:
            trace.set(trace.get() * 10 + i)
        return trace.get()

    wanted = 1
    for i in range(start, stop, step):
        wanted = wanted * 10 + i
    assert loop_body(body, stop) == wanted


def test_loops_inside_loops() -> None:
    def body(fn: Function, size: Value) -> Value:
        total = fn.var(fn.i64(0))
        with fn.loop(size) as i, fn.loop(size, start=i) as j:
            inner = fn.var(fn.i64(0))  # set anew in each turn
            with fn.loop(j):
                inner.set(inner.get() + 1)
            total.set(total.get() + inner.get())
        return total.get()

    assert loop_body(body, 6) == sum(j for i in range(6) for j in range(i, 6))


def test_a_loop_sees_a_stop_that_moves() -> None:
    def body(fn: Function, stop: Value) -> Value:
        end, turns = fn.var(stop), fn.var(fn.i64(0))
        with fn.loop(end):
            end.set(end.get() - 1)
            turns.set(turns.get() + 1)
        return turns.get()

    assert loop_body(body, 10) == 5


def test_loop_while() -> None:
    def body(fn: Function, number: Value) -> Value:
        x, turns = fn.var(number), fn.var(fn.i64(0))
        with fn.loop_while(lambda: x.get() > 1):
            x.set(x.get() >> 1)
            turns.set(turns.get() + 1)
        return turns.get()

    assert [loop_body(body, n) for n in (0, 1, 2, 1000)] == [0, 0, 1, 9]


def test_when_and_lower() -> None:
    def body(fn: Function, number: Value) -> Value:
        x = fn.var(number)
        with fn.when(number > 3), fn.loop(2):
            x.set(x.get() + 100)
        return fn.lower(x.get(), 150)

    assert [loop_body(body, n) for n in (3, 4)] == [3, 150]


def test_calls_reach_functions_that_come_later() -> None:
    def emit(module: ir.Module) -> None:
        fn = Function(module, "first", 2)
        fn.call("second", fn.args[1], 40, fn.args[0])
        fn.finish()
        fn = Function(module, "second", 3)
        target, a, b = fn.args
        fn.store(a + b, target)
        fn.finish()
        with pytest.raises(AssertionError, match="second takes 3 values"):
            fn.call("second", 1)

    out = np.zeros((), np.int64)
    build(emit).run("first", 2, out)
    assert out == 42


def test_values_may_lie_anywhere() -> None:
    """No alignment is promised unless it is asked for."""
    memory = at(RNG.integers(0, 256, 200, np.uint8))

    def emit(module: ir.Module) -> None:
        fn = Function(module, "move", 2)
        fn.store(fn.load(fn.args[0], vec(F32, 16)), fn.args[1])
        fn.finish()

    before = memory.tobytes()
    build(emit).run("move", memory[3:], memory[101:])
    assert memory.tobytes() == before[:101] + before[3:67] + before[165:]


# --- mathematics -------------------------------------------------------------------------------


def test_select_takes_lane_by_lane() -> None:
    got = evaluate(lambda a, b: select(a > b, a, 9), INTS, OTHERS)
    assert got.tolist() == np.where(INTS > OTHERS, INTS, 9).tolist()


def test_of_what_is_not_a_number_max_and_min_take_the_second() -> None:
    nan, one = np.float32(np.nan), np.float32(1)
    for function, choice in ((maximum, max), (minimum, min)):
        assert evaluate(function, one, np.float32(2)) == choice(1, 2)
        assert np.isnan(evaluate(function, one, nan))
        assert evaluate(function, nan, one) == 1


def test_fma_rounds_once() -> None:
    a = (1 + RNG.normal(size=64) / 8).astype(np.float32)
    b = (1 + RNG.normal(size=64) / 8).astype(np.float32)
    exact = a.astype(np.float64) * b  # 48 bits: no rounding
    c = (-exact).astype(np.float32)
    wanted = (exact + c).astype(np.float32)  # few bits are left: exact as well
    assert same_bits(evaluate(fma, a, b, c), wanted)
    assert np.count_nonzero(wanted) > 50  # where rounding twice gives zero
    assert not evaluate(lambda x, y, z: x * y + z, a, b, c).any()


def test_roots_and_rounding() -> None:
    x = np.abs(RNG.normal(size=64)).astype(np.float32) * np.float32(1e5)
    assert same_bits(evaluate(sqrt, x), np.sqrt(x))
    x = np.float32([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 65534.5, -3.4, 4194302.5, -4194303])
    assert evaluate(lambda x: to_whole(x, 1.0), x).tolist() == np.rint(x).tolist()
    x, factor = np.float32([1.97265625] * 2), np.float32([3659.7861328125, -3659.7861328125])
    assert evaluate(to_whole, x, factor).tolist() == [7219, -7219]  # 7219.49999, rounded once
    assert np.rint(x * factor).tolist() == [7220, -7220]  # rounded twice


def test_exp_is_exact_to_about_a_unit_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 1 << 16, dtype=np.float32)
    got = np.zeros_like(x)

    def emit(module: ir.Module) -> None:
        fn = Function(module, "exps", 3)
        source, target, count = fn.args
        with fn.loop(count, step=16) as i:
            fn.store(exp(fn.load(source + i * 4, vec(F32, 16))), target + i * 4)
        fn.finish()

    build(emit).run("exps", x, got, len(x))
    wanted = np.exp(x.astype(np.float64))
    units = np.abs(got - wanted) / np.spacing(wanted.astype(np.float32))
    assert units.max() < 1.5
    assert units.mean() < 0.35


def test_exp_at_and_beyond_its_ends() -> None:
    assert evaluate(exp, np.float32(0)) == 1
    high = evaluate(exp, np.float32([88, 89, 1e30, np.inf]))
    low = evaluate(exp, np.float32([-87, -88, -1e30, -np.inf]))
    assert high.tolist() == [high[0]] * 4
    assert low.tolist() == [low[0]] * 4
    np.testing.assert_allclose([high[0], low[0]], np.exp([88.0, -87.0]), rtol=2e-7)
