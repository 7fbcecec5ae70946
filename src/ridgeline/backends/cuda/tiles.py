"""How the kernels cut their work: literal tables, from what a prototype measured on an H200.

What affects bits is fixed: how many keys a partial result has, and how a weight's inputs are cut.
Everything else (rows, outputs, warps, programs) changes only who computes what. Nothing is tuned
while a program runs.
"""

from __future__ import annotations

from typing import NamedTuple

# Attention. Rows of a program are queries, times the query heads of a key head.
DECODE_ROWS = 16  # for single tokens, where few rows keep a processor's memory busy
PROMPT_ROWS = 64  # for prompts: what a warpgroup multiplies at a time
SPLIT = 256  # keys of a partial result: it decides bits
PROGRAMS_PER_PROCESSOR = {DECODE_ROWS: 8, PROMPT_ROWS: 2}

PIECE = 8192  # logits of a program that draws

INPUTS_PER_STEP = {8: 128, 4: 256}  # of a packed product, by bits
WANTED_PROGRAMS = 256  # two for each processor
MIN_INPUTS = 512  # of a part of a packed product

MAX_DECODE_SHARED = 16  # query heads of a key head, of which decode's rows hold one query
NARROW_HEAD = 128  # channels; wider heads leave registers for half as many keys
WIDE_MATRIX = 16384  # outputs; narrower ones need narrow tiles to fill the processors


def rows_of(shared: int, singles: bool) -> int:
    """Return the rows of attention's programs.

    Args:
        shared: query heads of a key head.
        singles: whether every sequence of the step has a single token.
    """
    return DECODE_ROWS if singles and shared <= MAX_DECODE_SHARED else PROMPT_ROWS


def keys_per_tile(D: int) -> int:
    """Return how many keys of ``D`` channels one product takes: it decides bits."""
    return 64 if D <= NARROW_HEAD else 32


def attention_warps(rows: int, D: int) -> int:
    """Return the warps of attention's programs."""
    if rows == DECODE_ROWS:
        return 2 if D <= 2 * NARROW_HEAD else 8
    return 4 if D <= NARROW_HEAD else 8


class ProductTile(NamedTuple):
    """What a program of a product computes at a time.

    Attributes:
        rows: of tokens.
        outputs: rows of the weight.
        inputs: how many are multiplied at a time; the order of sums does not depend on it.
        warps: of the program.
        stages: loads that are under way.
        streams: the copy engine loads, and programs stay for several tiles.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    streams: bool = False


LARGE_TILE = ProductTile(128, 256, 64, warps=8, stages=3, streams=True)
SMALL_TILE = ProductTile(64, 64, 128, warps=4, stages=5)
# By the most rows: for narrow matrices and wide ones (see WIDE_MATRIX).
PRODUCT_TILES = {
    16: (ProductTile(16, 32, 128, warps=4, stages=5), ProductTile(16, 64, 128, warps=4, stages=5)),
    64: (SMALL_TILE, ProductTile(64, 128, 128, warps=4, stages=4)),
    128: (SMALL_TILE, LARGE_TILE),
    256: (ProductTile(64, 128, 128, warps=4, stages=4, streams=True), LARGE_TILE),
    512: (ProductTile(128, 128, 64, warps=4, stages=4, streams=True), LARGE_TILE),
}
# Without matrix units: for tests, not for speed.
FLOAT32_TILE = ProductTile(32, 32, 32, warps=4, stages=3)


def product_tile(num_rows: int, N: int, *, can_stream: bool, is_float32: bool) -> ProductTile:
    """Return the tile for a number of rows and a matrix of ``N`` outputs."""
    if is_float32:
        return FLOAT32_TILE
    most = next((most for most in PRODUCT_TILES if num_rows <= most), None)
    tile = LARGE_TILE if most is None else PRODUCT_TILES[most][N >= WIDE_MATRIX]
    return tile if can_stream or not tile.streams else SMALL_TILE


def packed_rows(num_rows: int) -> int:
    """Return the rows of tokens of a packed or grouped product's programs."""
    return 16 if num_rows <= 16 else 64 if num_rows <= 128 else 128


def num_parts(N: int, K: int) -> int:
    """Return in how many parts a packed matrix's inputs are summed; they are added in order.

    A narrow matrix has too few programs to keep the memory busy with a single row of tokens. The
    cut is a property of the matrix, so that a row has the same bits in any batch.
    """
    parts, programs = 1, -(-N // 64)
    while programs * parts < WANTED_PROGRAMS and K // (2 * parts) >= MIN_INPUTS:
        parts *= 2
    return parts
