"""The tables of tiles: what decides bits follows from shapes alone."""

from __future__ import annotations

import pytest

from ridgeline.backends.cuda import tiles


def test_single_tokens_have_an_instance_of_their_own_where_their_heads_fit() -> None:
    assert tiles.rows_of(4, singles=True) == 16
    assert tiles.rows_of(16, singles=True) == 16
    assert tiles.rows_of(17, singles=True) == 64  # a program would hold no query
    assert tiles.rows_of(4, singles=False) == 64
    assert set(tiles.PROGRAMS_PER_PROCESSOR) == {16, 64}


@pytest.mark.parametrize("D", [64, 128, 256, 512])
def test_partial_results_have_whole_tiles_of_keys(D: int) -> None:
    assert tiles.SPLIT % tiles.keys_per_tile(D) == 0


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 100, 200, 400, 5000])
@pytest.mark.parametrize("N", [1024, 128256])
def test_products_take_tiles_by_rows_and_width(rows: int, N: int) -> None:
    tile = tiles.product_tile(rows, N, can_stream=True, is_float32=False)
    assert tile.rows >= min(rows, 64)
    assert tile.streams == (rows > (64 if N >= tiles.WIDE_MATRIX else 128))
    slow = tiles.product_tile(rows, N, can_stream=False, is_float32=False)
    assert not slow.streams
    assert tiles.product_tile(rows, N, can_stream=True, is_float32=True) == tiles.FLOAT32_TILE


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((28672, 4096), 1), ((4096, 4096), 4), ((4096, 14336), 4), ((6144, 4096), 4), ((64, 512), 1)],
    ids=str,
)
def test_inputs_of_packed_matrices_are_cut_by_shape_until_processors_are_busy(
    shape: tuple[int, int], parts: int
) -> None:
    assert tiles.num_parts(*shape) == parts
