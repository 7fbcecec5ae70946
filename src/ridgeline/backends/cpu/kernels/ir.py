"""An expression layer over LLVM IR: kernels written with it read like the mathematics.

A ``Value`` is an LLVM value with operators; Python numbers next to it become constants of its type,
splat over all lanes of a vector. A ``Var`` can be assigned to in loops (LLVM turns it into
registers). A ``Function`` has loops and branches as context managers. Addresses are plain 64-bit
integers, because the layouts that kernels walk are not what C calls arrays.

Floating point means what is written, in the order written: no fast-math, no contraction; ``fma``
is asked for by name. That is what makes results equal bit for bit however work is split.

It knows nothing of models, instruction sets or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from llvmlite import ir

I1, I8, I16, I32, I64, I128 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64, 128))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_FLOAT_BITS = {F16: 16, F32: 32, F64: 64}
VOID = ir.VoidType()
_POINTER = ir.PointerType()
_WHOLE, _WHOLE_BITS = 12582912.0, 0x4B400000  # 1.5 * 2 ** 23; see ``to_whole``

Number = int | float
Operand: TypeAlias = "Value | Var | int | float"


def vec(lane: ir.Type, count: int) -> ir.VectorType:
    """Return the type of ``count`` lanes."""
    return ir.VectorType(lane, count)


def _lane(kind: ir.Type) -> ir.Type:
    return kind.element if isinstance(kind, ir.VectorType) else kind


class Value:
    """An SSA value of a function under construction."""

    __slots__ = ("fn", "raw")

    def __init__(self, fn: Function, raw: ir.Value) -> None:
        self.fn = fn
        self.raw = raw

    @property
    def type(self) -> ir.Type:
        """LLVM type."""
        return self.raw.type

    @property
    def is_float(self) -> bool:
        """Whether lanes are floating point."""
        return not isinstance(_lane(self.type), ir.IntType)

    # --- arithmetic ----------------------------------------------------------------------------

    def _with(self, other: Operand, integer: str, floating: str) -> Value:
        a, b = self.raw, self.fn.value(other, self.type).raw
        build = getattr(self.fn.builder, floating if self.is_float else integer)
        return Value(self.fn, build(a, b))

    def __add__(self, other: Operand) -> Value:
        return self._with(other, "add", "fadd")

    def __sub__(self, other: Operand) -> Value:
        return self._with(other, "sub", "fsub")

    def __mul__(self, other: Operand) -> Value:
        return self._with(other, "mul", "fmul")

    def __truediv__(self, other: Operand) -> Value:
        return self._with(other, "sdiv", "fdiv")

    def __floordiv__(self, other: Operand) -> Value:
        return self._with(other, "udiv", "fdiv")

    def __mod__(self, other: Operand) -> Value:
        return self._with(other, "urem", "frem")

    def __and__(self, other: Operand) -> Value:
        return self._with(other, "and_", "and_")

    def __or__(self, other: Operand) -> Value:
        return self._with(other, "or_", "or_")

    def __xor__(self, other: Operand) -> Value:
        return self._with(other, "xor", "xor")

    def __lshift__(self, other: Operand) -> Value:
        return self._with(other, "shl", "shl")

    def __rshift__(self, other: Operand) -> Value:
        return self._with(other, "lshr", "lshr")

    def __neg__(self) -> Value:
        return Value(self.fn, self.fn.builder.fneg(self.raw)) if self.is_float else 0 - self

    def __radd__(self, other: Number) -> Value:
        return self + other

    def __rmul__(self, other: Number) -> Value:
        return self * other

    def __rsub__(self, other: Number) -> Value:
        return self.fn.value(other, self.type) - self

    def __rtruediv__(self, other: Number) -> Value:
        return self.fn.value(other, self.type) / self

    # --- comparison: i1 per lane ---------------------------------------------------------------

    def _compare(self, sign: str, other: Operand) -> Value:
        a, b = self.raw, self.fn.value(other, self.type).raw
        builder = self.fn.builder
        build = builder.fcmp_ordered if self.is_float else builder.icmp_signed
        return Value(self.fn, build(sign, a, b))

    def __lt__(self, other: Operand) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Operand) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Operand) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Operand) -> Value:
        """Return whether lanes are equal (``==`` stays Python's)."""
        return self._compare("==", other)

    # --- conversion ----------------------------------------------------------------------------

    def _convert(self, operation: str, kind: ir.Type) -> Value:
        return Value(self.fn, getattr(self.fn.builder, operation)(self.raw, kind))

    def bits(self, kind: ir.Type) -> Value:
        """Return the same bits as another type of the same size."""
        return self._convert("bitcast", kind)

    def like(self, lane: ir.Type) -> ir.Type:
        """Return this value's type with other lanes."""
        return vec(lane, self.type.count) if isinstance(self.type, ir.VectorType) else lane

    def signed(self, lane: ir.Type) -> Value:
        """Convert lanes, integers being signed: widen, narrow, or to and from floating point."""
        return self._to(lane, "sext", "sitofp", "fptosi")

    def unsigned(self, lane: ir.Type) -> Value:
        """Convert lanes, integers being unsigned."""
        return self._to(lane, "zext", "uitofp", "fptoui")

    def _to(self, lane: ir.Type, widen: str, to_float: str, to_int: str) -> Value:
        kind, is_float = self.like(lane), not isinstance(lane, ir.IntType)
        if self.is_float and is_float:
            wider = _FLOAT_BITS[lane] > _FLOAT_BITS[_lane(self.type)]
            return self._convert("fpext" if wider else "fptrunc", kind)
        if self.is_float or is_float:
            return self._convert(to_float if is_float else to_int, kind)
        narrower = lane.width < _lane(self.type).width
        return self._convert("trunc" if narrower else widen, kind)

    # --- lanes ---------------------------------------------------------------------------------

    def splat(self, count: int) -> Value:
        """Return a vector with this scalar in every lane."""
        return self.fn.splat(self, count)

    def lane(self, index: int) -> Value:
        """Return one lane."""
        return Value(self.fn, self.fn.builder.extract_element(self.raw, ir.Constant(I32, index)))

    def lane_at(self, index: Value) -> Value:
        """Return the lane of a number that is known when it runs."""
        return Value(self.fn, self.fn.builder.extract_element(self.raw, index.raw))

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Return these lanes; those from ``len(self)`` on are of ``other``."""
        second = ir.Constant(self.type, ir.Undefined) if other is None else other.raw
        order = ir.Constant(vec(I32, len(lanes)), list(lanes))
        return Value(self.fn, self.fn.builder.shuffle_vector(self.raw, second, order))

    def reduce(self, join: Callable[[Value, Value], Value]) -> Value:
        """Join all lanes into one, always in the same order: halves, quarters, ..."""
        value, width = self, self.type.count
        while width > 1:
            width //= 2
            low, high = range(width), range(width, 2 * width)
            value = join(value.shuffle(low), value.shuffle(high))
        return value.lane(0)


class Var:
    """A variable that loops may assign to."""

    __slots__ = ("fn", "slot")

    def __init__(self, fn: Function, initial: Value) -> None:
        self.fn = fn
        with fn.builder.goto_entry_block():
            self.slot = fn.builder.alloca(initial.type)
        self.set(initial)

    def get(self) -> Value:
        """Return the value it has here."""
        return Value(self.fn, self.fn.builder.load(self.slot, typ=self.slot.allocated_type))

    def set(self, value: Value) -> None:
        """Assign."""
        self.fn.builder.store(value.raw, self.slot)


class Function:
    """A function of 64-bit integers under construction; ``args`` are its parameters."""

    def __init__(self, module: ir.Module, name: str, num_args: int) -> None:
        declared = module.globals.get(name)  # by a call that came before
        self.raw = declared or ir.Function(module, ir.FunctionType(VOID, [I64] * num_args), name)
        assert len(self.raw.args) == num_args, f"{name} is called with {len(self.raw.args)} values"
        self.raw.attributes.add("noinline")  # kernels are long; copies of them only cost
        self.builder = ir.IRBuilder(self.raw.append_basic_block("entry"))
        self.args = tuple(Value(self, arg) for arg in self.raw.args)

    def value(self, operand: Operand, kind: ir.Type) -> Value:
        """Return an operand as a value of type ``kind``: numbers become constants."""
        if isinstance(operand, Var):
            operand = operand.get()
        if isinstance(operand, Value):
            same = operand.type == kind or not isinstance(kind, ir.VectorType)
            return operand if same else operand.splat(kind.count)
        if isinstance(kind, ir.VectorType):
            return Value(self, ir.Constant(kind, [operand] * kind.count))
        return Value(self, ir.Constant(kind, operand))

    def i64(self, number: int) -> Value:
        """Return a constant."""
        return self.value(number, I64)

    def lanes(self, lane: ir.Type, numbers: Sequence[Number]) -> Value:
        """Return a constant vector."""
        return Value(self, ir.Constant(vec(lane, len(numbers)), list(numbers)))

    def splat(self, scalar: Value, count: int) -> Value:
        """Return a vector with a scalar in every lane."""
        kind = vec(scalar.type, count)
        first = self.builder.insert_element(
            ir.Constant(kind, ir.Undefined), scalar.raw, ir.Constant(I32, 0)
        )
        return Value(self, first).shuffle([0] * count)

    def lower(self, a: Value, b: Operand) -> Value:
        """Return the lower of two integers."""
        return select(a < b, a, self.value(b, a.type))

    def var(self, initial: Value) -> Var:
        """Return a variable that loops may assign to."""
        return Var(self, initial)

    # --- memory --------------------------------------------------------------------------------

    def load(self, address: Value, kind: ir.Type, align: int = 1) -> Value:
        """Read a value of type ``kind`` at ``address``."""
        pointer = self.builder.inttoptr(address.raw, _POINTER)
        return Value(self, self.builder.load(pointer, align=align, typ=kind))

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        """Write ``value`` at ``address``."""
        self.builder.store(value.raw, self.builder.inttoptr(address.raw, _POINTER), align=align)

    # --- control -------------------------------------------------------------------------------

    @contextmanager
    def loop(self, stop: Operand, start: Operand = 0, step: Operand = 1) -> Iterator[Value]:
        """Repeat the body with an index from ``start`` while it is below ``stop``."""
        builder = self.builder
        index = self.var(self.value(start, I64))
        head, body, end = (self.raw.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        builder.cbranch((index.get() < stop).raw, body, end)
        builder.position_at_end(body)
        current = index.get()
        yield current
        index.set(current + step)
        builder.branch(head)
        builder.position_at_end(end)

    @contextmanager
    def loop_while(self, condition: Callable[[], Value]) -> Iterator[None]:
        """Repeat the body while ``condition``, emitted before each turn, holds."""
        builder = self.builder
        head, body, end = (self.raw.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        builder.cbranch(condition().raw, body, end)
        builder.position_at_end(body)
        yield
        builder.branch(head)
        builder.position_at_end(end)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Run the body if ``condition`` holds."""
        with self.builder.if_then(condition.raw):
            yield

    def call(self, name: str, *args: Operand) -> None:
        """Call a function of this module, or of the process, that takes 64-bit integers."""
        self.intrinsic(name, VOID, *(self.value(arg, I64) for arg in args))

    def intrinsic(self, name: str, result: ir.Type, *args: Value) -> Value:
        """Call a function by name with values of any type."""
        module = self.raw.module
        declared = module.globals.get(name)
        if declared is None:
            kind = ir.FunctionType(result, [arg.type for arg in args])
            declared = ir.Function(module, kind, name)
        assert len(declared.args) == len(args), f"{name} takes {len(declared.args)} values"
        return Value(self, self.builder.call(declared, [arg.raw for arg in args]))

    def finish(self) -> None:
        """End the function."""
        self.builder.ret_void()


# --- mathematics -------------------------------------------------------------------------------


def _named(operation: str, *args: Value) -> Value:
    kind = args[0].type
    vector = isinstance(kind, ir.VectorType)
    suffix = "f64" if _lane(kind) == F64 else "f32"
    suffix = f"v{kind.count}{suffix}" if vector else suffix
    return args[0].fn.intrinsic(f"llvm.{operation}.{suffix}", kind, *args)


def fma(a: Value, b: Operand, c: Operand) -> Value:
    """Return a * b + c, rounded once."""
    return _named("fma", a, a.fn.value(b, a.type), a.fn.value(c, a.type))


def sqrt(x: Value) -> Value:
    """Square root, correctly rounded."""
    return _named("sqrt", x)


def floor(x: Value) -> Value:
    """The greatest whole number that is not above x."""
    return _named("floor", x)


def absolute(x: Value) -> Value:
    """Absolute value."""
    return _named("fabs", x)


def to_whole(x: Value, factor: Operand) -> Value:
    """Return x * factor as the nearest i32, the even one of two; it must be below 2 ** 22.

    One rounding, one instruction: near 1.5 * 2 ** 23 floats are whole, and so are their bits.
    """
    words = fma(x, factor, _WHOLE).bits(x.like(I32))
    return words - _WHOLE_BITS


def high_product(a: Value, b: Value) -> Value:
    """Return the upper 64 bits of the product of two unsigned i64."""
    return ((a.unsigned(I128) * b.unsigned(I128)) >> 64).signed(I64)


def trailing_zeros(x: Value) -> Value:
    """Return how many zero bits an i64 ends with; 64 for 0."""
    is_never_zero = Value(x.fn, ir.Constant(I1, 0))
    return x.fn.intrinsic("llvm.cttz.i64", I64, x, is_never_zero)


def select(condition: Value, yes: Value, no: Operand) -> Value:
    """Return ``yes`` where the condition holds, else ``no``."""
    other = yes.fn.value(no, yes.type)
    return Value(yes.fn, yes.fn.builder.select(condition.raw, yes.raw, other.raw))


def maximum(a: Value, b: Operand) -> Value:
    """Return the larger; ``b`` where either is not a number."""
    return select(a > b, a, b)


def minimum(a: Value, b: Operand) -> Value:
    """Return the smaller; ``b`` where either is not a number."""
    return select(a < b, a, b)


def exp(x: Value) -> Value:
    """e ** x to about 1 unit in the last place: Cody-Waite reduction and a polynomial.

    Its coefficients make the greatest relative error least (Remez, 1934) that starts with 1 + x.
    """
    fn, kind = x.fn, x.type
    x = maximum(minimum(x, 88.0), -87.0)
    shifted = fma(x, 1.4426950408889634, _WHOLE)  # as in ``to_whole``
    n = shifted - _WHOLE
    r = fma(n, -0.693359375, x)
    r = fma(n, 2.12194440e-4, r)
    p = fn.value(1.3814613092e-3, kind)
    for coefficient in (
        8.3687098318e-3, 4.1668387365e-2, 1.6666520690e-1, 4.9999993452e-1, 1.0, 1.0,
    ):  # fmt: skip
        p = fma(p, r, coefficient)
    words = x.like(I32)
    power = shifted.bits(words) << 23  # nothing but n is left of it, and no p becomes subnormal
    return (p.bits(words) + power).bits(kind)
