"""Matrix products: activations times packed weights, in tiles of rows by outputs.

Weights are packed in tiles of 32 outputs; a tile is a sequence of records, one for each 32 inputs,
read front to back exactly once:

    w4   640 bytes  [2 halves][4][64] bytes + [2 halves][2][16] f16
                    byte (v, 4 o + i) of a half: output o; low nibble input 4 v + i, high nibble
                    input 16 + 4 v + i. Then scale d and offset m of each output: weight = d q + m.
    w5   768 bytes  the nibbles as in w4; [2 halves][8] words of 64 bits, bit 4 o + i of word v the
                    fifth bit of input 4 v + i; then d and m as in w4
    s4   576 bytes  the nibbles as in w4; [2 halves][16] f16 scales d: weight = d (q - 8)
    s5   704 bytes  nibbles and fifth bits as in w5; scales d as in s4: weight = d (q - 16)
    k4   592 bytes  in blocks of 8: [2 halves][2][16] f16 d and e, then 8 times the nibbles as in
                    w4 and [2 halves][2][16] bytes f and g: weight = d f q - e g
    k5   720 bytes  the same with nibbles and fifth bits as in w5
    k6   840 bytes  in blocks of 8: [2 halves][16] f16 d, then 8 times the nibbles as in w4;
                    [2 halves][2][64] bytes, bits 2 v and 2 v + 1 of byte (h, 4 o + i) the upper
                    two of input 16 h + 4 v + i; and [2 halves][2][16] signed bytes, f of the first
                    and g of the last 16 inputs: weight = d f (q - 32) or d g (q - 32)
    w8  1088 bytes  [2 halves][8][64] bytes + [2 halves][16] f16
                    byte (v, 4 o + i): input 4 v + i as q + 128. Then scale d: weight = d q.
    r8  1024 bytes  [2 halves][8][64] bytes as in w8; behind a tile's records its scales, 32 f32
    bf16 2048 bytes [2 halves][16 pairs of inputs][16 outputs][2] bf16
    f32  4096 bytes [32 inputs][32 outputs] f32

What a row of activations is depends on the kind (``ACTIVATIONS``):

    groups  signed bytes, and for each 32 of them an entry of six floats: the scales of the first
            and of the last 16, their sum (of bytes times scale), -128 times that, and -32 times the
            sum of the first and of the last 16. Scales for 16 instead of 32 halve the error of
            quantising (LOG.md), which is nearly all there is.
    rows    signed bytes with one scale, after a rotation that spreads outliers (``rows``). One
            entry: the scale as f32, and -128 times the sum of the bytes as i32.
    bf16, floats  the numbers themselves

The sum over inputs runs over the records in order, in one chain per output, with exact integers
inside a record (r8: in all of the row): so an output depends on its own row alone, whatever tile
computed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.backends.cpu.emit.ir import (
    F16,
    F32,
    I1,
    I8,
    I32,
    I64,
    Function,
    Value,
    Var,
    fma,
    maximum,
    select,
    vec,
)
from ridgeline.backends.cpu.emit.isa import (
    Dot,
    Processor,
    broadcast4,
    dot,
    dot_bf16,
    dots,
    prefetch,
)

TILE = 32  # outputs of a tile, and inputs of a record
ENTRY_BYTES = 24
RECORD_BYTES = {
    "w4": 640, "w5": 768, "s4": 576, "s5": 704, "k4": 592, "k5": 720, "k6": 840,
    "w8": 1088, "r8": 1024, "bf16": 2048, "f32": 4096,
}  # fmt: skip
BLOCK_RECORDS = 8  # of the kinds that have blocks, with these bytes before a block's records
HEAD_BYTES = {"k4": 128, "k5": 128, "k6": 64}
TAIL_BYTES = {"r8": TILE * 4}  # behind a tile's records
KINDS = tuple(RECORD_BYTES)
NIBBLES = ("w4", "w5", "s4", "s5", "k4", "k5", "k6")
FIFTHS = ("w5", "s5", "k5")  # nibbles with a plane of fifth bits behind them
ACTIVATIONS = dict.fromkeys((*NIBBLES, "w8"), "groups") | {
    "r8": "rows", "bf16": "bf16", "f32": "floats",
}  # fmt: skip
VALUE_BYTES = {"groups": 1, "rows": 1, "bf16": 2, "floats": 4}  # of an activation

# Rows x halves that a kernel computes at once; the largest first. They fill the registers without
# spilling, and spread the cost of unpacking a record over as many rows as possible.
_SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys((*NIBBLES, "w8"), ((8, 1), (4, 1), (2, 2), (1, 2))),
    "r8": ((8, 2), (4, 2), (2, 2), (1, 2)),
    "bf16": ((8, 2), (4, 2), (2, 2), (1, 2)),
    "f32": ((6, 2), (2, 2), (1, 2)),
}
_NARROW = ((3, 1), (2, 1), (1, 1))  # where registers have 256 bits or less, and are 16
# Where memory sets the pace, few rows ask for weights in so many pages at once, as processors read
# ahead within a page; a lone row in so many tiles, where that helps (``Processor``; LOG.md).
TOGETHER = 4
_PAGE_BYTES, _AHEAD_BYTES = 4096, 8192  # the second, a lone row asks ahead in all, at least
# Symmetric kinds, and by how many bits their values become bytes around 128, as those of w8 are:
# then all share the last float of an entry.
_MIDDLED = {"s4": 4, "s5": 3, "w8": 0}
_ROWS_AT_ONCE = 240  # so many rows of activations stay in the second-level cache

_Place = tuple[Value, Value, Value]  # record, what it shares with others of its block, half


class Operand(NamedTuple):
    """Where a tile's activations and results are: addresses, and bytes from row to row."""

    x: Value
    x_stride: Value
    entries: Value
    entry_stride: Value
    y: Value
    y_stride: Value

    def moved(self, row: Value, y_offset: Value) -> Operand:
        """Return the same from another row on, with results further right."""
        return self._replace(
            x=self.x + row * self.x_stride,
            entries=self.entries + row * self.entry_stride,
            y=self.y + row * self.y_stride + y_offset,
        )


def shapes(kind: str, form: Dot) -> tuple[tuple[int, int], ...]:
    """Return the shapes of tiles for a kind, as rows and halves, the largest first."""
    is_narrow = kind in NIBBLES and form is not Dot.VNNI512
    return _NARROW if is_narrow else _SHAPES[kind]


def tile_bytes(kind: str, num_records: int) -> int:
    """Return the bytes of a tile with so many records."""
    return num_records * RECORD_BYTES[kind] + TAIL_BYTES.get(kind, 0)


def emit_linear(module: object, processor: Processor, kinds: Sequence[str]) -> None:
    """Emit ``linear_KIND(tiles, first, last, num_records, num_rows, operand..., then)``.

    Computes outputs 32 * first .. 32 * last of all rows; results begin at column 32 * first of y.
    ``then`` is where the thread will read next: each tile asks for the one after it.
    """
    for kind in kinds:
        for rows, halves in shapes(kind, processor.dot):
            _emit_tile(module, processor, kind, rows, halves)
        together = processor.streams if processor.dot is Dot.VNNI512 else 1  # as registers go
        if together > 1:
            _emit_tile(module, processor, kind, 1, 2 * together)
        _emit_product(module, processor.dot, kind, together)


def _emit_product(module: object, form: Dot, kind: str, together: int) -> None:
    fn = Function(module, f"linear_{kind}", 12)
    tiles, first, last, num_records, num_rows, *rest, then = fn.args
    operand = Operand(*rest)
    stride = num_records * RECORD_BYTES[kind] + TAIL_BYTES.get(kind, 0)
    begin = fn.var(first)
    if together > 1:
        with fn.loop_while(lambda: num_rows.equals(1) & (begin.get() + together <= last)):
            weights = tiles + begin.get() * stride
            place = operand.moved(fn.i64(0), begin.get() * (TILE * 4))
            begin.set(begin.get() + together)
            coming = select(begin.get() < last, weights + stride * together, then)
            name = f"tile_{kind}_1x{2 * together}"
            fn.call(name, weights, fn.i64(0), num_records, *place, coming, fn.i64(0))
    with fn.loop(num_rows, step=_ROWS_AT_ONCE) as low:
        high = fn.lower(num_rows, low + _ROWS_AT_ONCE)
        most_rows = shapes(kind, form)[0][0]
        # Memory would rest, and then not keep up, did the first rows ask for all of the next tile.
        share = fn.i64(RECORD_BYTES[kind]) // maximum((high - low) // most_rows, 1)
        with fn.loop(last, start=begin.get()) as tile:
            weights, column = tiles + tile * stride, tile * (TILE * 4)
            coming = select(tile + 1 < last, weights + stride, then)
            row, wanted = fn.var(low), fn.var(coming)
            for rows, halves in shapes(kind, form):
                step = share * halves >> 1
                with fn.loop_while(lambda rows=rows: row.get() + rows <= high):  # type: ignore[misc]
                    for half in range(0, 2, halves):
                        place = operand.moved(row.get(), column + half * 64)
                        name = f"tile_{kind}_{rows}x{halves}"
                        asked = wanted.get() if rows > 1 else coming
                        fn.call(name, weights, fn.i64(half), num_records, *place, asked, step)
                        wanted.set(wanted.get() + num_records * step)
                    row.set(row.get() + rows)
    fn.finish()


def _emit_tile(module: object, processor: Processor, kind: str, rows: int, halves: int) -> None:
    """Emit the kernel for ``rows`` rows and ``halves`` times 16 outputs, of one tile or several."""
    fn = Function(module, f"tile_{kind}_{rows}x{halves}", 11)
    weights, half, num_records, *rest, coming, step = fn.args
    operand = Operand(*rest)
    entries = [operand.entries + operand.entry_stride * m for m in range(rows)]
    if kind == "r8":
        first = [fn.load(entry + 4, I32, 4).splat(16) for entry in entries]
    else:
        first = [fn.lanes(F32, [0.0] * 16)] * rows
    sums = [[fn.var(value) for _ in range(halves)] for value in first]
    part_bytes = RECORD_BYTES[kind] * min(halves, 2) // 2
    records_bytes = num_records * RECORD_BYTES[kind]
    records_ahead = -(-_AHEAD_BYTES // processor.streams // RECORD_BYTES[kind])
    stride = records_bytes + TAIL_BYTES.get(kind, 0)
    whence = [(weights + stride * (h // 2), half + h % 2) for h in range(halves)]
    with fn.loop(num_records) as k:
        if rows > 1:
            is_paced_by_memory = (step * 2 >= part_bytes) & int(rows <= 4 or kind == "r8")
            _ask(fn, coming + k * step, part_bytes, is_paced_by_memory)
        else:
            ahead = (k + records_ahead) * RECORD_BYTES[kind]
            wanted = select(ahead < stride, weights, coming - stride) + ahead + half * part_bytes
            for number in range((halves + 1) // 2):
                _prefetch(fn, wanted + stride * number, part_bytes, processor.nearest)
        places = [(*_place(kind, tile, k), part) for tile, part in whence]
        match ACTIVATIONS[kind]:
            case "groups":
                _add_groups(fn, processor.dot, kind, places, operand, k, sums)
            case "rows":
                _add_bytes(fn, processor.dot, places, operand, k, sums)
            case "bf16":
                _add_pairs(fn, processor.has_bf16, places, operand, k, sums)
            case "floats":
                _add_floats(fn, places, operand, k, sums)
    for m, row in enumerate(sums):
        for h, var in enumerate(row):
            total = var.get()
            if kind == "r8":
                scale, (tile, part) = fn.load(entries[m], F32, 4).splat(16), whence[h]
                scales = fn.load(tile + records_bytes + part * 64, vec(F32, 16), 64)
                total = total.signed(F32) * scale * scales
            fn.store(total, operand.y + operand.y_stride * m + 64 * h)
    fn.finish()


def _place(kind: str, weights: Value, k: Value) -> tuple[Value, Value]:
    """Return where record ``k`` is, and what it shares with the others of its block, if it does."""
    if kind not in HEAD_BYTES:
        record = weights + k * RECORD_BYTES[kind]
        return record, record
    head = HEAD_BYTES[kind]
    block = weights + (k >> 3) * (BLOCK_RECORDS * RECORD_BYTES[kind])
    own_bytes = RECORD_BYTES[kind] - head // BLOCK_RECORDS
    return block + head + (k & 7) * own_bytes, block


def _ask(fn: Function, wanted: Value, num_bytes: int, is_paced_by_memory: Value) -> None:
    """Ask for part of the next tile, in one place or in several pages; the parts add up to all."""
    with fn.when(is_paced_by_memory):
        inside = wanted & (TOGETHER * _PAGE_BYTES - 1)
        for page in range(TOGETHER):
            at = wanted - inside + inside // TOGETHER + page * _PAGE_BYTES
            _prefetch(fn, at, -(-num_bytes // TOGETHER), locality=2)
    with fn.when(is_paced_by_memory.equals(0)):
        _prefetch(fn, wanted, num_bytes, locality=2)


def _prefetch(fn: Function, address: Value, num_bytes: int, locality: int) -> None:
    for offset in range(0, num_bytes, 64):
        prefetch(fn, address + offset, locality)


def _add_groups(
    fn: Function,
    form: Dot,
    kind: str,
    places: list[_Place],
    operand: Operand,
    k: Value,
    sums: list[list[Var]],
) -> None:
    """Add one record's products to the sums, 32 inputs as exact integers."""
    x_rows = [operand.x + operand.x_stride * m + k * TILE for m in range(len(sums))]
    entries = [
        operand.entries + operand.entry_stride * m + k * ENTRY_BYTES for m in range(len(sums))
    ]
    # Where small bytes are quicker to multiply, sums move to the left instead.
    left = _MIDDLED.get(kind, 0)
    before = left if form is Dot.VNNI512 else 0
    bits = 8 if kind == "w8" else 6 if kind == "k6" else 5 if kind in FIFTHS else 4
    most = ((1 << bits) - 1) << before
    for h, (record, block, half) in enumerate(places):
        weights = _values(fn, kind, record, half, before)
        scale, other = _scales(fn, kind, record, block, half)

        def added(m: int, part: int, weights: list[Value] = weights) -> Value:
            """Return products of a row with the first or the last 16 inputs, added up."""
            which = range(4 * part, 4 * part + 4)
            parts = [broadcast4(fn, x_rows[m] + 4 * v) for v in which]
            own, zero = [weights[v] for v in which], fn.lanes(I32, [0] * 16)
            total = dots(form, zero, own, parts, max_weight=most)
            return (total << (left - before)).signed(F32)

        def entry(m: int, number: int) -> Value:
            return fn.load(entries[m] + 4 * number, F32, 4).splat(16)

        if kind == "k6":  # half by half, as registers are few; take back the 32 in each weight
            for part, factor in enumerate((scale, other)):
                for m, row in enumerate(sums):
                    product = fma(added(m, part), entry(m, part), entry(m, 4 + part))
                    row[h].set(fma(product, factor, row[h].get()))
            continue
        for m, row in enumerate(sums):
            low, high, s_low, s_high = added(m, 0), added(m, 1), entry(m, 0), entry(m, 1)
            if kind in _MIDDLED:  # take back the 128
                product = fma(low, s_low, fma(high, s_high, entry(m, 3)))
                row[h].set(fma(product, scale, row[h].get()))
            else:
                product = fma(low, s_low, high * s_high)
                row[h].set(fma(other, entry(m, 2), fma(product, scale, row[h].get())))


def _values(fn: Function, kind: str, record: Value, half: Value, left: int) -> list[Value]:
    """Return the eight byte vectors of a half record; those of nibbles are shifted ``left``."""
    bytes64, words16 = vec(I8, 64), vec(I32, 16)
    if kind == "w8":
        return [fn.load(record + half * 512 + 64 * v, bytes64, 64) for v in range(8)]
    base = record + half * 256
    # Shifting words instead of bytes is one instruction; the mask drops what crossed over.
    words = [fn.load(base + 64 * v, bytes64, 64).bits(words16) for v in range(4)]
    moved = [word << left for word in words] + [word >> (4 - left) for word in words]
    weights = [word.bits(bytes64) & (15 << left) for word in moved]
    if kind in FIFTHS:
        fifth = [fn.load(record + 512 + half * 64 + 8 * v, I64, 8) for v in range(8)]
        masks = [word.bits(vec(I1, 64)) for word in fifth]
        weights = [select(m, w | (16 << left), w) for m, w in zip(masks, weights, strict=True)]
    if kind == "k6":
        base = record + 512 + half * 128
        planes = [fn.load(base + 64 * h, bytes64, 64).bits(words16) for h in range(2)]
        upper = [moved for plane in planes for moved in (plane << 4, plane << 2, plane, plane >> 2)]
        weights = [w | (u.bits(bytes64) & 48) for w, u in zip(weights, upper, strict=True)]
    return weights


def _scales(
    fn: Function, kind: str, record: Value, block: Value, half: Value
) -> tuple[Value, Value]:
    """Return the scales of a half record, and what else the kind has: offsets, or scales again.

    Scales are such that nobody notices how values were shifted.
    """

    def floats(address: Value) -> Value:
        return fn.load(address, vec(F16, 16), 32).signed(F32)

    def factors(address: Value) -> list[Value]:
        parts = [fn.load(address + 16 * i, vec(I8, 16), 16) for i in range(2)]
        is_signed = kind == "k6"
        wide = [part.signed(I32) if is_signed else part.unsigned(I32) for part in parts]
        return [part.signed(F32) for part in wide]

    if kind in HEAD_BYTES:
        values = {"k4": 512, "k5": 640, "k6": 768}[kind]
        first, second = factors(record + values + half * 32)
        if kind == "k6":
            d = floats(block + half * 32)
            return d * first, d * second
        d, e = (floats(block + half * 64 + 32 * i) for i in range(2))
        return d * first, -(e * second)
    if kind in _MIDDLED:
        scale = floats(record + (RECORD_BYTES[kind] - 64) + half * 32)
        return scale * 0.5 ** _MIDDLED[kind], scale  # no offset
    scales = record + (RECORD_BYTES[kind] - 128) + half * 64
    return floats(scales), floats(scales + 32)


def _add_bytes(
    fn: Function, form: Dot, places: list[_Place], operand: Operand, k: Value, sums: list[list[Var]]
) -> None:
    """Add one record's products to the sums, which stay integers to the end of the row."""
    for v in range(8):
        at = [record + half * 512 + 64 * v for record, _, half in places]
        weights = [fn.load(place, vec(I8, 64), 64) for place in at]
        for m, row in enumerate(sums):
            x = broadcast4(fn, operand.x + operand.x_stride * m + k * TILE + 4 * v)
            for total, weight in zip(row, weights, strict=True):
                total.set(dot(form, total.get(), weight, x))


def _add_pairs(
    fn: Function,
    has_bf16: bool,
    places: list[_Place],
    operand: Operand,
    k: Value,
    sums: list[list[Var]],
) -> None:
    """Add one record's products to the sums, two inputs at a time."""
    with fn.loop(TILE // 2) as pair:
        at = [record + half * 1024 + pair * 64 for record, _, half in places]
        weights = [fn.load(place, vec(I8, 64), 64) for place in at]
        for m, row in enumerate(sums):
            x = broadcast4(fn, operand.x + operand.x_stride * m + k * (TILE * 2) + pair * 4)
            for total, weight in zip(row, weights, strict=True):
                total.set(dot_bf16(has_bf16, total.get(), weight, x))


def _add_floats(
    fn: Function, places: list[_Place], operand: Operand, k: Value, sums: list[list[Var]]
) -> None:
    """Add one record's products to the sums, input by input."""
    with fn.loop(TILE) as i:
        at = [record + half * 64 + i * 128 for record, _, half in places]
        weights = [fn.load(place, vec(F32, 16), 64) for place in at]
        for m, row in enumerate(sums):
            x = fn.load(operand.x + operand.x_stride * m + (k * TILE + i) * 4, F32, 4).splat(16)
            for total, weight in zip(row, weights, strict=True):
                total.set(fma(weight, x, total.get()))
