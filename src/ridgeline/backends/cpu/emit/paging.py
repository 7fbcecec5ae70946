"""Where attention finds the records of a sequence, and how its rows share registers."""

from __future__ import annotations

from ridgeline.backends.cpu.emit.ir import I32, I64, Function, Value
from ridgeline.backends.cpu.layout.shapes import Heads


def record_at(fn: Function, records: Value, stride: Value, table: Value, index: Value) -> Value:
    """Return the address of a sequence's ``index``-th visible record."""
    return records + fn.load(table + index * 4, I32, 4).signed(I64) * stride


def row_parts(heads: Heads, num_rows: int, sums_per_vector: int) -> list[tuple[range, int]]:
    """Cut rows into parts whose sums fit the registers; with each, vectors side by side.

    As many vectors as go: a row's factor is loaded once for all of them.
    """
    vectors = heads.size // 16
    wide = max(w for w in (4, 3, 2, 1) if vectors % w == 0)
    size = 24 // sums_per_vector // wide
    return [(range(low, min(low + size, num_rows)), wide) for low in range(0, num_rows, size)]
