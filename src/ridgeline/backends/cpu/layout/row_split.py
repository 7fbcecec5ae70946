"""How a step's work is split between threads, by how many rows (tokens) it has.

Up to ``OUTPUT_SPLIT_ROWS`` by output features; up to ``mixed_rows`` both ways; more by tokens, in
blocks of at most ``row_block``. ``emit.step`` says what each means.
"""

from __future__ import annotations

OUTPUT_SPLIT_ROWS = 6
MIXED_ROWS = 16  # without matrix tiles
ROW_BLOCK = 64  # without matrix tiles
_WIDE = 4096  # inputs of a product: its weights take long to read, its rows much of a cache


def mixed_rows(widest: int, *, by_tiles: bool) -> int:
    """Return the most rows whose work is split both ways; ``widest`` is the longest of all rows.

    By tokens each thread reads all weights. With tiles, reading takes longer than multiplying up
    to many more rows, the more so the larger the matrices are.
    """
    if not by_tiles:
        return MIXED_ROWS
    return MIXED_ROWS * (4 if widest <= _WIDE else 8)


def row_block(widest: int, *, by_tiles: bool) -> int:
    """Return the most rows that a thread takes through a layer together, not below ``mixed_rows``.

    Rows of bytes are so quickly multiplied by tiles that more of them must share a weight.
    """
    if not by_tiles:
        return ROW_BLOCK
    return ROW_BLOCK * (4 if widest <= _WIDE else 2)  # what the second-level cache holds
