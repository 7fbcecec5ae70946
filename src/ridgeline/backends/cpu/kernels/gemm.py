"""Matrix products: activations times packed weights, in tiles of rows by outputs.

``layout.formats`` says what tiles, records and activations are.

The sum over inputs runs over the records in order, in one chain per output, with exact integers
inside a record (r8: in all of the row): so an output depends on its own row alone, whatever tile
computed it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.backends.cpu.kernels.ir import (
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
    select,
    vec,
)
from ridgeline.backends.cpu.kernels.isa import (
    Dot,
    Processor,
    broadcast4,
    dot,
    dot_bf16,
    dots,
    lookup,
)
from ridgeline.backends.cpu.kernels.kernel import Kernel, Words
from ridgeline.backends.cpu.kernels.prefetch import RecordPrefetch, TilePrefetch
from ridgeline.backends.cpu.kernels.tiles import (
    LINEAR_TILES,
    OF_ROWS,
    OF_TILES,
    Operand,
    emit_linear_tiles,
)
from ridgeline.backends.cpu.layout.arguments import MATRIX
from ridgeline.backends.cpu.layout.formats import (
    ACT_SCALES_BYTES,
    BLOCK_RECORDS,
    FORMATS,
    KINDS,
    TILE,
    WeightFormat,
)
from ridgeline.backends.cpu.layout.shapes import TILE_ROWS

_NARROW = ((3, 1), (2, 1), (1, 1))  # where registers have 256 bits or less, and are 16
_HALF_RECORD = 512  # bytes of 16 outputs, of weights that are bytes
_ROWS_AT_ONCE = 240  # rows of activations that stay in the second-level cache

_Place = tuple[Value, Value, Value]  # record, what it shares with others of its block, half


MATMUL = Kernel("matmul", ("matrix", "first", "last", *OF_ROWS))


def _linear(kind: str) -> Kernel:
    """Return the kernel that computes outputs 32 * first .. 32 * last of all rows.

    ``next_address`` is where the thread will read next.
    """
    return Kernel(f"linear_{kind}", OF_TILES)


def _tile(kind: str, rows: int, halves: int) -> Kernel:
    """Return the kernel for ``rows`` rows and ``halves`` times 16 outputs, of one tile or several.

    It prefetches ``prefetch_step`` bytes for each record, from ``prefetch_at`` on.
    """
    more_params = (*Operand._fields, "prefetch_at", "prefetch_step")
    return Kernel(f"tile_{kind}_{rows}x{halves}", ("weights", "half", "num_records", *more_params))


def shapes(kind: str, form: Dot) -> tuple[tuple[int, int], ...]:
    """Return the shapes of tiles for a kind, as rows and halves, the largest first."""
    weights = FORMATS[kind]
    is_narrow = weights.has_nibbles and form is not Dot.VNNI512
    return _NARROW if is_narrow else weights.tile_shapes


def emit_linear(module: object, processor: Processor, kinds: Sequence[str]) -> None:
    """Emit the matrix products of these kinds of weights, each with its tiles."""
    for kind in kinds:
        for rows, halves in shapes(kind, processor.dot):
            _emit_tile(module, processor, kind, rows, halves)
        together = processor.streams if processor.dot is Dot.VNNI512 else 1  # as registers go
        if together > 1:
            _emit_tile(module, processor, kind, 1, 2 * together)
        has_tiles = processor.has_tiles and FORMATS[kind].has_pairs
        if has_tiles:
            emit_linear_tiles(module)
        _emit_linear(module, processor.dot, kind, together, has_tiles=has_tiles)


def emit_matmul(module: object, kinds: Sequence[str]) -> None:
    """``matmul``: the product for whatever kind of weights the words at ``matrix`` name."""
    fn = MATMUL.begin(module)
    matrix, first, last, num_rows, *operand, next_address = fn.args
    words = Words(fn, matrix, MATRIX)
    for kind in kinds:
        with fn.when(words["kind"].equals(KINDS.index(kind))):
            _linear(kind).call(
                fn, tiles=words["tiles"], first=first, last=last,
                num_records=words["num_records"], num_rows=num_rows,
                **Operand._make(operand)._asdict(), next_address=next_address,
            )  # fmt: skip
    fn.finish()


def _emit_linear(module: object, form: Dot, kind: str, together: int, *, has_tiles: bool) -> None:
    fn = _linear(kind).begin(module)
    tiles, first, last, num_records, num_rows, *of_operand, next_address = fn.args
    operand = Operand._make(of_operand)
    packed = FORMATS[kind]
    stride = num_records * packed.record_bytes + packed.tail_bytes
    begin = fn.var(first)
    if has_tiles:
        with fn.when(num_rows >= TILE_ROWS):
            LINEAR_TILES.call(fn, **dict(zip(OF_TILES, fn.args, strict=True)))
            begin.set(last)
    if together > 1:
        with fn.loop_while(lambda: num_rows.equals(1) & (begin.get() + together <= last)):
            weights = tiles + begin.get() * stride
            place = operand.moved(fn.i64(0), begin.get() * (TILE * 4))
            begin.set(begin.get() + together)
            next_tile = select(begin.get() < last, weights + stride * together, next_address)
            _tile(kind, 1, 2 * together).call(
                fn, weights=weights, half=0, num_records=num_records, **place._asdict(),
                prefetch_at=next_tile, prefetch_step=0,
            )  # fmt: skip
    with fn.loop(num_rows, step=_ROWS_AT_ONCE) as low:
        high = fn.lower(num_rows, low + _ROWS_AT_ONCE)
        most_rows = shapes(kind, form)[0][0]
        ahead = TilePrefetch(fn, packed, num_groups=(high - low) // most_rows)
        with fn.loop(last, start=begin.get()) as tile:
            weights, column = tiles + tile * stride, tile * (TILE * 4)
            next_tile = select(tile + 1 < last, weights + stride, next_address)
            row = fn.var(low)
            ahead.begin(next_tile)
            for rows, halves in shapes(kind, form):
                step = ahead.step(halves)
                with fn.loop_while(lambda rows=rows: row.get() + rows <= high):  # type: ignore[misc]
                    for half in range(0, 2, halves):
                        place = operand.moved(row.get(), column + half * 64)
                        _tile(kind, rows, halves).call(
                            fn, weights=weights, half=half, num_records=num_records,
                            **place._asdict(), **ahead.arguments(rows, step),
                        )  # fmt: skip
                        ahead.advance(num_records, step)
                    row.set(row.get() + rows)
    fn.finish()


def _emit_tile(module: object, processor: Processor, kind: str, rows: int, halves: int) -> None:
    fn = _tile(kind, rows, halves).begin(module)
    weights, half, num_records, *of_operand, prefetch_at, prefetch_step = fn.args
    operand = Operand._make(of_operand)
    act_scales = [operand.act_scales + operand.act_scales_stride * m for m in range(rows)]
    packed = FORMATS[kind]
    if packed.activations == "rows":
        first = [fn.load(at + 4, I32, 4).splat(16) for at in act_scales]
    else:
        first = [fn.lanes(F32, [0.0] * 16)] * rows
    sums = [[fn.var(value) for _ in range(halves)] for value in first]
    records_bytes = num_records * packed.record_bytes
    stride = records_bytes + packed.tail_bytes
    begin = fn.i64(0) if packed.has_pairs else half  # of pairs both halves are multiplied together
    whence = [(weights + stride * (h // 2), begin + h % 2) for h in range(halves)]
    table = fn.load(weights + records_bytes, vec(I8, 64), 64) if packed.has_table else None
    ahead = RecordPrefetch(
        fn, processor, packed, (rows, halves),
        weights=weights, stride=stride, half=half, at=prefetch_at, step=prefetch_step,
    )  # fmt: skip
    # Processors read ahead at one distance from turn to turn: a turn for a pair. For a lone row
    # addresses of both would not fit the registers.
    together = 2 if packed.has_pairs and rows > 1 else 1
    with fn.loop(num_records, step=together) as first_record:
        for number in range(together):
            ahead.record(first_record + number)
        for number in range(together):
            k = first_record + number
            places = [(*_place(packed, tile, k), part) for tile, part in whence]
            match packed.activations:
                case "groups":
                    _add_groups(fn, processor.dot, packed, table, places, operand, k, sums)
                case "rows":
                    _add_bytes(fn, processor.dot, places, operand, k, sums)
                case "bf16":
                    _add_pairs(fn, processor.has_bf16, places, operand, k, sums)
                case "floats":
                    _add_floats(fn, places, operand, k, sums)
    for m, row in enumerate(sums):
        for h, var in enumerate(row):
            total = var.get()
            if packed.activations == "rows":
                scale, (tile, part) = fn.load(act_scales[m], F32, 4).splat(16), whence[h]
                scales = fn.load(tile + records_bytes + part * 64, vec(F32, 16), 64)
                total = total.signed(F32) * scale * scales
            fn.store(total, operand.y + operand.y_stride * m + 64 * h)
    fn.finish()


def _place(packed: WeightFormat, weights: Value, k: Value) -> tuple[Value, Value]:
    """Return where record ``k`` is, and what it shares with the others of its block, if it does."""
    if packed.has_pairs:  # the other half is behind that of the record beside
        record = weights + (k >> 1) * (2 * packed.record_bytes) + (k & 1) * _HALF_RECORD
        return record, record
    if not packed.head_bytes:
        record = weights + k * packed.record_bytes
        return record, record
    head = packed.head_bytes
    block = weights + (k >> 3) * (BLOCK_RECORDS * packed.record_bytes)
    own_bytes = packed.record_bytes - head // BLOCK_RECORDS
    return block + head + (k & 7) * own_bytes, block


def _add_groups(
    fn: Function,
    form: Dot,
    packed: WeightFormat,
    table: Value | None,
    places: list[_Place],
    operand: Operand,
    k: Value,
    sums: list[list[Var]],
) -> None:
    """Add one record's products to the sums, 32 inputs as exact integers."""
    x_rows = [operand.x + operand.x_stride * m + k * TILE for m in range(len(sums))]
    act_scales = [
        operand.act_scales + operand.act_scales_stride * m + k * ACT_SCALES_BYTES
        for m in range(len(sums))
    ]
    # Where small bytes are quicker to multiply, sums move to the left instead.
    left = packed.shift_to_middle or 0
    before = left if form is Dot.VNNI512 else 0
    max_weight = 255 if table is not None else ((1 << packed.bits) - 1) << before
    for h, (record, block, half) in enumerate(places):
        weights = _values(fn, packed, record, half, before)
        if table is not None:
            weights = [lookup(form, table, places_of) for places_of in weights]
        scale, other = _scales(fn, packed, record, block, half)

        def added(m: int, part: int, weights: list[Value] = weights) -> Value:
            """Return products of a row with the first or the last 16 inputs, added up."""
            which = range(4 * part, 4 * part + 4)
            parts = [broadcast4(fn, x_rows[m] + 4 * v) for v in which]
            own, zero = [weights[v] for v in which], fn.lanes(I32, [0] * 16)
            total = dots(form, zero, own, parts, max_weight=max_weight)
            return (total << (left - before)).signed(F32)

        def act_scale(m: int, number: int) -> Value:
            return fn.load(act_scales[m] + 4 * number, F32, 4).splat(16)

        if packed.bits == 6:  # half by half, as registers are few; take back the 32 in each weight
            for part, factor in enumerate((scale, other)):
                for m, row in enumerate(sums):
                    product = fma(added(m, part), act_scale(m, part), act_scale(m, 4 + part))
                    row[h].set(fma(product, factor, row[h].get()))
            continue
        for m, row in enumerate(sums):
            low, high, s_low, s_high = added(m, 0), added(m, 1), act_scale(m, 0), act_scale(m, 1)
            if packed.shift_to_middle is not None:  # take back the 128
                product = fma(low, s_low, fma(high, s_high, act_scale(m, 3)))
                row[h].set(fma(product, scale, row[h].get()))
            else:
                product = fma(low, s_low, high * s_high)
                row[h].set(fma(other, act_scale(m, 2), fma(product, scale, row[h].get())))


def _values(
    fn: Function, packed: WeightFormat, record: Value, half: Value, left: int
) -> list[Value]:
    """Return the eight byte vectors of a half record; those of nibbles are shifted ``left``."""
    bytes64, words16 = vec(I8, 64), vec(I32, 16)
    if packed.bits == 8:
        return [fn.load(record + half * 512 + 64 * v, bytes64, 64) for v in range(8)]
    base = record + half * 256
    # Shifting words instead of bytes is one instruction; the mask drops what crossed over.
    align = 32 if packed.has_zero else 64
    words = [fn.load(base + 64 * v, bytes64, align).bits(words16) for v in range(4)]
    moved = [word << left for word in words] + [word >> (4 - left) for word in words]
    weights = [word.bits(bytes64) & (15 << left) for word in moved]
    if packed.bits == 5:
        fifth = [fn.load(record + 512 + half * 64 + 8 * v, I64, 8) for v in range(8)]
        masks = [word.bits(vec(I1, 64)) for word in fifth]
        weights = [select(m, w | (16 << left), w) for m, w in zip(masks, weights, strict=True)]
    if packed.bits == 6:
        base = record + 512 + half * 128
        planes = [fn.load(base + 64 * h, bytes64, 64).bits(words16) for h in range(2)]
        upper = [moved for plane in planes for moved in (plane << 4, plane << 2, plane, plane >> 2)]
        weights = [w | (u.bits(bytes64) & 48) for w, u in zip(weights, upper, strict=True)]
    return weights


def _scales(
    fn: Function, packed: WeightFormat, record: Value, block: Value, half: Value
) -> tuple[Value, Value]:
    """Return the scales of a half record, and what else the format has: offsets, or scales again.

    Scales compensate for the left shift of the values.
    """

    def floats(address: Value) -> Value:
        return fn.load(address, vec(F16, 16), 32).signed(F32)

    def factors(address: Value) -> list[Value]:
        parts = [fn.load(address + 16 * i, vec(I8, 16), 16) for i in range(2)]
        is_signed = packed.bits == 6
        wide = [part.signed(I32) if is_signed else part.unsigned(I32) for part in parts]
        return [part.signed(F32) for part in wide]

    if packed.head_bytes:
        values = packed.bits * 128  # bytes of a record
        first, second = factors(record + values + half * 32)
        if packed.bits == 6:
            d = floats(block + half * 32)
            return d * first, d * second
        d, e = (floats(block + half * 64 + 32 * i) for i in range(2))
        return d * first, -(e * second)
    if packed.has_zero:
        scale = floats(record + 512 + half * 32)
        zeros = fn.load(record + 576 + half * 16, vec(I8, 16), 16).unsigned(I32).signed(F32)
        return scale, -(scale * zeros)
    if packed.shift_to_middle is not None:
        scale = floats(record + (packed.record_bytes - 64) + half * 32)
        return scale * 0.5**packed.shift_to_middle, scale  # no offset
    scales = record + (packed.record_bytes - 128) + half * 64
    return floats(scales), floats(scales + 32)


def _add_bytes(
    fn: Function, form: Dot, places: list[_Place], operand: Operand, k: Value, sums: list[list[Var]]
) -> None:
    """Add one record's products to the sums, which stay integers to the end of the row."""
    for v in range(8):
        at = [record + half * (2 * _HALF_RECORD) + 64 * v for record, _, half in places]
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
