"""A thread's room for attention by matrix tiles, whose registers have 16 lines of 64 bytes.

scores          queries of each 16 rows, a tile for each span; then sums; then scales
weighted values of ``CHUNK`` records, a tile for 64 tokens and 16 channels; then sums
"""

from __future__ import annotations

from typing import NamedTuple

TILE_ROWS, LINE, REGISTER = 16, 64, 1024  # lines of a register, and bytes
CHUNK = 16  # records whose values are copied together; the second-level cache holds them
TOGETHER = 2  # records whose scores are made side by side
MOST_ROWS = 48  # heads of queries that attend together


class TileRoom(NamedTuple):
    """Offsets, and the bytes of all."""

    score_sums: int
    scales: int
    value_sums: int
    num_bytes: int


def to_tile_rows(num_rows: int) -> int:
    """Return a number of rows with those that fill their last tile."""
    return -(-num_rows // TILE_ROWS) * TILE_ROWS


def tile_room(num_rows: int, size: int, spans: int) -> TileRoom:
    """Return the room for rows of heads of ``size`` channels, in whole tiles."""
    score_sums = num_rows * spans * LINE
    scales = score_sums + TOGETHER * spans * REGISTER
    value_sums = CHUNK * TILE_ROWS * size
    of_values = value_sums + num_rows * size * 2 * 4
    return TileRoom(score_sums, scales, value_sums, max(of_values, scales + num_rows * 8 * spans))
