"""What attention over bytes and over floats share: kernels, records, how rows share registers.

Where kernels walk over the records of a sequence, ``records`` is where record 0 of this layer and
head is, ``stride`` the bytes from block to block, ``table`` the sequence's blocks (i32) from the
first visible one on, and ``count`` how many.
"""

from __future__ import annotations

from ridgeline.backends.cpu.emit.ir import I32, I64, Function, Value
from ridgeline.backends.cpu.emit.kernel import Kernel
from ridgeline.backends.cpu.layout.shapes import Heads

WALK = ("records", "stride", "table", "count")
PLANES_OF = 4  # records whose probabilities lie together
QUADS_APART = 4 * PLANES_OF


def scores(queries: int) -> Kernel:
    """Return the kernel for scores of this many rows of queries, each with all heads of a group."""
    return Kernel(f"scores_{queries}", ("query", *WALK, "kv_head", "out", "out_stride"))


def weighted_values(queries: int) -> Kernel:
    """Return the kernel for weighted sums of values (the PV product), for all rows of a tile.

    ``out`` is this group's first head, ``out_stride`` the bytes from a query's row to the next.
    """
    planes = ("planes", "plane_stride")
    return Kernel(f"weighted_values_{queries}", (*planes, *WALK, "scales", "out", "out_stride"))


def record_at(fn: Function, records: Value, stride: Value, table: Value, index: Value) -> Value:
    """Return the address of a sequence's ``index``-th visible record."""
    return records + fn.load(table + index * 4, I32, 4).signed(I64) * stride


def plane_at(row: Value, block: Value, plane: int) -> Value:
    """Return where a row has a record's first four probabilities in a plane of bytes.

    The next four are ``QUADS_APART`` bytes behind. A plane has 64 tokens side by side, as many as a
    matrix tile multiplies at once: the first four of each of ``PLANES_OF`` records, and so on.
    """
    group, place = block // PLANES_OF, block & (PLANES_OF - 1)
    return row + group * (2 * 64) + place * 4 + plane * 64


def row_parts(heads: Heads, num_rows: int, sums_per_vector: int) -> list[tuple[range, int]]:
    """Cut rows into parts whose sums fit the registers; with each, vectors side by side.

    As many vectors as go: a row's factor is loaded once for all of them.
    """
    vectors = heads.size // 16
    wide = max(w for w in (4, 3, 2, 1) if vectors % w == 0)
    size = 24 // sums_per_vector // wide
    return [(range(low, min(low + size, num_rows)), wide) for low in range(0, num_rows, size)]
