"""Matrix products by tiles: 16 rows by 16 outputs by 64 inputs at once.

The integers are those of ``gemm`` for rows of bytes, and so are the floats that are made of them.

``Operand`` is what a product reads and writes besides its weights, with tile units or without. A
tile unit (``Unit``) has eight registers of 16 lines of 64 bytes. ``Amx`` is Intel's. ``Emulated``
is the same in memory, with any processor's dot products: the kernels are written once, and tests
run them everywhere. A process must be granted the use of AMX (``machine.tiles_refusal``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from llvmlite import ir

from ridgeline.backends.cpu.kernels.ir import (
    F32,
    I8,
    I32,
    I64,
    VOID,
    Function,
    Value,
    Var,
    select,
    vec,
)
from ridgeline.backends.cpu.kernels.isa import Dot, broadcast4, dot, prefetch
from ridgeline.backends.cpu.kernels.kernel import Kernel
from ridgeline.backends.cpu.layout.formats import FORMATS
from ridgeline.backends.cpu.layout.shapes import LINE, REGISTER, TILE_ROWS

_ROWS_AT_ONCE = 256  # rows of activations that stay in the second-level cache
_PAIR_BYTES = 2 * FORMATS["r8"].record_bytes
_SECOND_CACHE = 2
_BYTES, _WORDS, _FLOATS = vec(I8, 64), vec(I32, 16), vec(F32, 16)


class Operand(NamedTuple):
    """Where a tile's activations and results are: addresses, and bytes from row to row."""

    x: Value
    x_stride: Value
    act_scales: Value
    act_scales_stride: Value
    y: Value
    y_stride: Value

    def moved(self, row: Value, y_offset: Value) -> Operand:
        """Return the same from another row on, with results further right."""
        return self._replace(
            x=self.x + row * self.x_stride,
            act_scales=self.act_scales + row * self.act_scales_stride,
            y=self.y + row * self.y_stride + y_offset,
        )


OF_ROWS = ("num_rows", *Operand._fields, "next_address")
# Outputs 32 * first .. 32 * last of all rows; results begin at column 32 * first of y.
OF_TILES = ("tiles", "first", "last", "num_records", *OF_ROWS)
LINEAR_TILES = Kernel("linear_tiles", OF_TILES)


class Unit(Protocol):
    """A tile unit, for use between ``begin`` and ``end``. Registers are known by number."""

    def begin(self) -> None:
        """Make the registers ready."""

    def zero(self, register: int) -> None:
        """Fill a register with zeros."""

    def load(self, register: int, address: Value, stride: Value | int) -> None:
        """Read 16 lines of 64 bytes, ``stride`` bytes apart."""

    def store(self, register: int, address: Value, stride: Value | int) -> None:
        """Write them."""

    def multiply(self, sums: int, rows: int, weights: int, *, signed: str = "rows") -> None:
        """Add products to 16 sums of each of 16 rows, 64 inputs each.

        ``rows`` has a row of bytes in each line. A line of ``weights`` has four for each sum, as
        ``isa.dot`` takes them. The bytes of those that ``signed`` names are, the others are not.
        """

    def end(self) -> None:
        """Leave the registers."""


class Amx:
    """Intel's tiles. LLVM neither moves nor spills them: they are named by number."""

    def __init__(self, fn: Function) -> None:
        self._fn, self._shapes = fn, room(fn, LINE)

    def begin(self) -> None:
        """Make each of the eight registers 16 lines of 64 bytes."""
        palette, widths, lines = [1] + [0] * 15, [LINE, 0] * 8, [TILE_ROWS] * 8
        shapes = palette + widths + [0] * 16 + lines + [0] * 8
        self._fn.store(self._fn.lanes(I8, shapes), self._shapes, LINE)
        self._do("ldtilecfg", self._pointer(self._shapes))

    def zero(self, register: int) -> None:
        """See ``Unit``."""
        self._do("tilezero", self._number(register))

    def load(self, register: int, address: Value, stride: Value | int) -> None:
        """See ``Unit``."""
        self._move("tileloadd64", register, address, stride)

    def store(self, register: int, address: Value, stride: Value | int) -> None:
        """See ``Unit``."""
        self._move("tilestored64", register, address, stride)

    def multiply(self, sums: int, rows: int, weights: int, *, signed: str = "rows") -> None:
        """See ``Unit``."""
        name = "tdpbsud" if signed == "rows" else "tdpbusd"
        self._do(name, *(self._number(register) for register in (sums, rows, weights)))

    def end(self) -> None:
        """Leave them empty, or the system would save 8 KB at each switch of threads."""
        self._do("tilerelease")

    def _move(self, name: str, register: int, address: Value, stride: Value | int) -> None:
        where = self._pointer(address), self._fn.value(stride, I64)
        self._do(name, self._number(register), *where)

    def _do(self, name: str, *operands: Value) -> None:
        self._fn.intrinsic(f"llvm.x86.{name}", VOID, *operands)

    def _number(self, register: int) -> Value:
        return self._fn.value(register, I8)

    def _pointer(self, address: Value) -> Value:
        return Value(self._fn, self._fn.builder.inttoptr(address.raw, ir.PointerType()))


class Emulated:
    """A tile unit in memory, on any processor."""

    def __init__(self, fn: Function, form: Dot = Dot.PLAIN) -> None:
        self._fn, self._form, self._registers = fn, form, room(fn, 8 * REGISTER)

    def begin(self) -> None:
        """Nothing is to be done."""

    def zero(self, register: int) -> None:
        """See ``Unit``."""
        with self._fn.loop(TILE_ROWS) as line:
            self._fn.store(self._fn.lanes(I8, [0] * 64), self._at(register, line), LINE)

    def load(self, register: int, address: Value, stride: Value | int) -> None:
        """See ``Unit``."""
        with self._fn.loop(TILE_ROWS) as line:
            content = self._fn.load(address + line * stride, _BYTES)
            self._fn.store(content, self._at(register, line), LINE)

    def store(self, register: int, address: Value, stride: Value | int) -> None:
        """See ``Unit``."""
        with self._fn.loop(TILE_ROWS) as line:
            content = self._fn.load(self._at(register, line), _BYTES, LINE)
            self._fn.store(content, address + line * stride)

    def multiply(self, sums: int, rows: int, weights: int, *, signed: str = "rows") -> None:
        """See ``Unit``."""
        fn = self._fn
        with fn.loop(TILE_ROWS) as row, fn.loop(TILE_ROWS) as quad:
            place = self._at(sums, row)
            x = broadcast4(fn, self._at(rows, row) + quad * 4)
            weight = fn.load(self._at(weights, quad), _BYTES, LINE)
            pair = (weight, x) if signed == "rows" else (x, weight)
            fn.store(dot(self._form, fn.load(place, _WORDS, LINE), *pair), place, LINE)

    def end(self) -> None:
        """Nothing is to be done."""

    def _at(self, register: int, line: Value) -> Value:
        return self._registers + (line * LINE + register * REGISTER)


def room(fn: Function, num_bytes: int) -> Value:
    """Return the address of some bytes on the stack, at a multiple of 64."""
    with fn.builder.goto_entry_block():
        place = fn.builder.alloca(ir.ArrayType(I8, num_bytes))
        place.align = LINE
    return Value(fn, fn.builder.ptrtoint(place, I64))


def emit_linear_tiles(module: object, new_unit: Callable[[Function], Unit] = Amx) -> None:
    """``linear_tiles``: the product of at least 16 rows with weights of r8.

    Blocks of 32 rows, then of 16. The last of each begins earlier rather than be smaller: its first
    rows come out the same once more.
    """
    fn = LINEAR_TILES.begin(module)
    tiles, first, last, num_records, num_rows, *of_operand, next_address = fn.args
    operand, num_pairs = Operand._make(of_operand), num_records >> 1
    stride = num_pairs * _PAIR_BYTES + FORMATS["r8"].tail_bytes
    unit, sums = new_unit(fn), room(fn, 4 * REGISTER)
    unit.begin()
    with fn.loop(num_rows, step=_ROWS_AT_ONCE) as low:
        end = fn.lower(num_rows, low + _ROWS_AT_ONCE)
        num_blocks = (end - low + 31) // 32
        with fn.loop(last, start=first) as tile:
            weights = tiles + tile * stride
            ahead = fn.var(select(tile + 1 < last, weights + stride, next_address))
            row = fn.var(low)
            for count in (2, 1):
                size = TILE_ROWS * count
                with fn.loop_while(
                    lambda size=size: (row.get() + (size - TILE_ROWS) < end) & (end >= size)  # type: ignore[misc]
                ):
                    place = operand.moved(fn.lower(row.get(), end - size), tile * 128)
                    _multiply(fn, unit, weights, num_pairs, place, count, ahead, num_blocks)
                    for register in range(2 * count):
                        unit.store(register, sums + register * REGISTER, LINE)
                    _scale(
                        fn, sums, weights + num_records * FORMATS["r8"].record_bytes, place, count
                    )
                    row.set(row.get() + size)
    unit.end()
    fn.finish()


def _multiply(
    fn: Function,
    unit: Unit,
    weights: Value,
    num_pairs: Value,
    operand: Operand,
    count: int,
    ahead: Var,
    num_blocks: Value,
) -> None:
    """Leave sums of ``count`` times 16 rows by 32 outputs in the first registers.

    They are 2 m + h of the rows from 16 m on and half h. Each of ``num_blocks`` such blocks
    prefetches its share of what is read next, from ``ahead`` on.
    """
    for register in range(2 * count):
        unit.zero(register)
    lines = (_PAIR_BYTES // LINE + num_blocks - 1) // num_blocks
    with fn.loop(num_pairs) as pair:
        with fn.loop(lines) as line:
            prefetch(fn, ahead.get() + line * LINE, _SECOND_CACHE)
        ahead.set(ahead.get() + lines * LINE)
        for half in range(2):
            unit.load(6 + half, weights + pair * _PAIR_BYTES + half * REGISTER, LINE)
        for m in range(count):
            rows = operand.x + operand.x_stride * (TILE_ROWS * m) + pair * LINE
            unit.load(4 + m, rows, operand.x_stride)
            for half in range(2):
                unit.multiply(2 * m + half, 4 + m, 6 + half)


def _scale(fn: Function, sums: Value, scales: Value, operand: Operand, count: int) -> None:
    """Make floats of sums, 16 rows of a half one behind another, and store them as results."""
    of_outputs = [fn.load(scales + LINE * half, _FLOATS, LINE) for half in range(2)]
    with fn.loop(TILE_ROWS) as line:
        for m in range(count):
            row = line + TILE_ROWS * m
            act_scales = operand.act_scales + row * operand.act_scales_stride
            scale = fn.load(act_scales, F32, 4).splat(16)
            first = fn.load(act_scales + 4, I32, 4).splat(16)
            for half in range(2):
                at = sums + (line * LINE + (2 * m + half) * REGISTER)
                total = (fn.load(at, _WORDS, LINE) + first).signed(F32)
                result = total * scale * of_outputs[half]
                fn.store(result, operand.y + row * operand.y_stride + LINE * half)
