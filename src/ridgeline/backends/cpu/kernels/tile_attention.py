"""Attention of many queries by matrix tiles: the integers, and so the bits, of ``attention``.

A row is one head of one query; those of a group lie together, and are multiplied 16 at a time.

Scores: a tile of weights is 64 channels of a record's keys as they lie. Each span has a scale of
its own, so queries are copied into a tile for each span, with zeros for the channels of others.

Weighted values: a tile of rows is 64 tokens of a plane of probabilities. The values of the four
records that they are of do not lie together, so they are copied side by side, once for all rows.
Sums of a part of the context stay in memory while the next is copied.
"""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.backends.cpu.kernels.ir import F32, I8, I32, I64, Function, Value, fma, vec
from ridgeline.backends.cpu.kernels.isa import Dot
from ridgeline.backends.cpu.kernels.kernel import Kernel
from ridgeline.backends.cpu.kernels.narrow_values import load_narrow_values, rotate_back
from ridgeline.backends.cpu.kernels.prefetch import prefetch_keys_and_values
from ridgeline.backends.cpu.kernels.records import PLANES_OF, WALK, plane_at, record_at
from ridgeline.backends.cpu.kernels.rows import FLOATS
from ridgeline.backends.cpu.kernels.tiles import Amx, Unit
from ridgeline.backends.cpu.layout.shapes import (
    CHUNK,
    LINE,
    REGISTER,
    TILE_ROWS,
    TOGETHER,
    AttentionLayout,
)

TILE_SCORES = Kernel(
    "tile_scores", ("query", *WALK, "kv_head", "num_queries", "out", "out_stride", "scratch")
)
TILE_VALUES = Kernel(
    "tile_values",
    (
        *("planes", "plane_stride", *WALK, "scales", "num_queries"),
        *("out", "out_stride", "scratch"),
    ),
)
_RESIDENT = 4  # spans whose queries stay in registers
_BYTES, _WORDS = vec(I8, 64), vec(I32, 16)

NewUnit = Callable[[Function], Unit]


def emit_tile_scores(
    module: object, heads: AttentionLayout, number: int, new_unit: NewUnit = Amx
) -> None:
    """``tile_scores``: see ``records.scores``, for ``num_queries`` of them.

    Behind the last record's scores there is room for those of another.
    """
    fn = TILE_SCORES.of(number).begin(module)
    query, records, stride, table, count, kv_head, num_queries, out, out_stride, scratch = fn.args
    unit, num_rows, room = new_unit(fn), num_queries * heads.group, heads.tile_room
    _copy_queries(fn, heads, query, kv_head, num_queries, scratch)
    unit.begin()
    with fn.loop(count, step=TOGETHER) as block:
        at = [fn.lower(block + i, count - 1) for i in range(2 * TOGETHER)]
        places = [record_at(fn, records, stride, table, index) for index in at]
        here, ahead = places[:TOGETHER], places[TOGETHER:]
        for quad in range(heads.size // 4):
            prefetch_keys_and_values(fn, heads, quad, here, ahead)
        with fn.loop(num_rows, step=TILE_ROWS) as low:  # while keys are in the nearest cache
            queries, sums = scratch + low * (heads.spans * LINE), scratch + room.score_sums
            if heads.spans <= _RESIDENT:
                for span in range(heads.spans):
                    unit.load(span, queries + span * REGISTER, LINE)
            _multiply_keys(unit, heads, here, queries, sums)
            row_at = out + low * out_stride + block * LINE
            scales = scratch + room.scales + low * (8 * heads.spans)
            with fn.loop(fn.lower(num_rows - low, TILE_ROWS)) as row:
                _add_spans(
                    fn, heads, here, scales + row * (8 * heads.spans), sums + row * LINE,
                    row_at + row * out_stride,
                )  # fmt: skip
    unit.end()
    fn.finish()


def _copy_queries(
    fn: Function,
    heads: AttentionLayout,
    query: Value,
    kv_head: Value,
    num_queries: Value,
    scratch: Value,
) -> None:
    """Put the rows' bytes of each span into a tile of its own, and their scales behind all."""
    first = kv_head * heads.group
    at = query + first * heads.size
    act_scales = query + heads.num_heads * heads.size + first * (8 * heads.spans)
    zeros = fn.lanes(I8, [0] * heads.span)
    with fn.loop(num_queries) as n, fn.loop(heads.group) as g:
        row = n * heads.group + g
        own, scales = n * heads.query_bytes + g * heads.size, n * heads.query_bytes
        scales = act_scales + scales + g * (8 * heads.spans)
        tile = scratch + (row >> 4) * (heads.spans * REGISTER) + (row & 15) * LINE
        for span in range(heads.spans):
            x = fn.load(at + own + span * heads.span, vec(I8, heads.span), heads.span)
            before = span * heads.span % LINE
            lanes = [heads.span] * before + list(range(heads.span))
            lanes += [heads.span] * (LINE - len(lanes))
            fn.store(x.shuffle(lanes, zeros), tile + span * REGISTER, LINE)
            target = scratch + heads.tile_room.scales + row * (8 * heads.spans) + 8 * span
            fn.store(fn.load(scales + 8 * span, I64, 8), target, 8)


def _multiply_keys(
    unit: Unit, heads: AttentionLayout, records: list[Value], queries: Value, sums: Value
) -> None:
    """Leave sums of 16 rows by 16 tokens in memory, one tile for each record and span.

    A sum takes three times as long as it keeps the unit busy, so several are under way.
    """
    is_resident = heads.spans <= _RESIDENT
    under_way = 4 if heads.spans <= _RESIDENT // 2 else 2
    places = [(record, span) for record in records for span in range(heads.spans)]
    for first in range(0, len(places), under_way):
        part = places[first : first + under_way]
        for i, (record, span) in enumerate(part):
            total, rows = 6 - under_way + i, span if is_resident else i
            if not is_resident:
                unit.load(rows, queries + span * REGISTER, LINE)
            keys, place = 6 + (first + i) * heads.span // LINE % 2, span * heads.span
            if place % LINE == 0 or not i:
                unit.load(keys, record + place // LINE * REGISTER, LINE)
            unit.zero(total)
            unit.multiply(total, rows, keys)
        for i in range(len(part)):
            unit.store(6 - under_way + i, sums + (first + i) * REGISTER, LINE)


def _add_spans(
    fn: Function,
    heads: AttentionLayout,
    records: list[Value],
    scales: Value,
    sums: Value,
    out: Value,
) -> None:
    """Make a row's scores in some records of their sums."""
    totals = [fn.lanes(F32, [0.0] * 16) for _ in records]
    for span in range(heads.spans):
        scale = fn.load(scales + 8 * span, F32, 4).splat(16)
        start = fn.load(scales + 8 * span + 4, I32, 4).splat(16)
        for i, record in enumerate(records):
            of_keys = fn.load(record + heads.key_scales_at + LINE * span, FLOATS, LINE)
            total = fn.load(sums + (i * heads.spans + span) * REGISTER, _WORDS, LINE) + start
            totals[i] = fma(total.signed(F32) * of_keys, scale, totals[i])
    for i, total in enumerate(totals):
        fn.store(total, out + i * LINE, 4)


def emit_tile_values(
    module: object, form: Dot, heads: AttentionLayout, number: int, new_unit: NewUnit = Amx
) -> None:
    """``tile_values``: see ``records.weighted_values``, for ``num_queries`` rows of queries.

    The planes have whole groups of records, and room for whole tiles of rows.
    """
    fn = TILE_VALUES.of(number).begin(module)
    planes, plane_stride, records, stride, table, count, scales, *others = fn.args
    num_queries, out, out_stride, scratch = others
    num_rows, columns = num_queries * heads.group, heads.size // 16
    unit, sums = new_unit(fn), scratch + heads.tile_room.value_sums
    unit.begin()
    with fn.loop(count, step=CHUNK) as low:
        here = fn.lower(count - low, CHUNK)
        with fn.loop(here) as block:
            record = record_at(fn, records, stride, table, low + block)
            _copy_values(fn, form, heads, record, block, scratch)
        groups = (here + (PLANES_OF - 1)) // PLANES_OF
        with fn.loop(num_rows, step=TILE_ROWS) as first, fn.loop(columns // 2) as pair:
            own_sums = sums + ((first >> 4) * (columns // 2) + pair) * (4 * REGISTER)
            with fn.when(low.equals(0)):
                for total in range(4):
                    unit.zero(total)
            with fn.when(low > 0):
                for total in range(4):
                    unit.load(total, own_sums + total * REGISTER, LINE)
            of_rows = plane_at(planes + first * plane_stride, low, 0)
            with fn.loop(groups) as group:
                for plane in range(2):
                    at = of_rows + group * (2 * LINE) + plane * LINE
                    unit.load(4 + plane, at, plane_stride)
                for j in range(2):
                    at = scratch + (group * columns + pair * 2 + j) * REGISTER
                    unit.load(6 + j, at, LINE)
                for plane in range(2):
                    for j in range(2):
                        unit.multiply(2 * plane + j, 4 + plane, 6 + j, signed="weights")
            for total in range(4):
                unit.store(total, own_sums + total * REGISTER, LINE)
    unit.end()
    _join_planes(fn, heads, sums, scales, num_queries, out, out_stride)
    fn.finish()


def _copy_values(
    fn: Function, form: Dot, heads: AttentionLayout, record: Value, block: Value, target: Value
) -> None:
    """Put a record's values beside those of its group: four lines of each 16 channels."""
    narrow, columns = int(heads.has_narrow_values), heads.size // 16
    line = LINE >> narrow
    group, first = block // PLANES_OF, (block & (PLANES_OF - 1)) * LINE
    for quad in range(4):
        for column in range(columns):
            at = record + heads.values_at + (quad * columns + column) * line
            values = load_narrow_values(fn, form, at) if narrow else fn.load(at, _BYTES, LINE)
            place = target + (group * columns + column) * REGISTER + first
            fn.store(values, place + quad * (PLANES_OF * LINE), LINE)


def _join_planes(
    fn: Function,
    heads: AttentionLayout,
    sums: Value,
    scales: Value,
    num_queries: Value,
    out: Value,
    out_stride: Value,
) -> None:
    """Store the rows' weighted values."""
    pairs = heads.size // 32
    with fn.loop(num_queries) as n, fn.loop(heads.group) as g:
        row, target = n * heads.group + g, out + n * out_stride + g * (heads.size * 4)
        scale = fn.load(scales + row * 4, F32, 4).splat(16)
        of_row = sums + (row >> 4) * (pairs * 4 * REGISTER) + (row & 15) * LINE
        for column in range(2 * pairs):
            at = of_row + (column // 2 * 4 + column % 2) * REGISTER
            high, low = (
                fn.load(at + plane * (2 * REGISTER), _WORDS, LINE).signed(F32) for plane in range(2)
            )
            fn.store(fma(high, 256.0, low) * scale, target + column * LINE, 4)
        if heads.has_narrow_values:
            rotate_back(fn, heads, target)
