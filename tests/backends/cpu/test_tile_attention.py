"""Attention by matrix tiles: the bits of the twin, by AMX and by an emulated tile unit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from ridgeline.backends.cpu.kernels.tiles import Amx, Emulated
from ridgeline.backends.cpu.layout.model_sizes import model_sizes
from ridgeline.backends.cpu.layout.shapes import MIXED_ROWS, ROW_BLOCK
from ridgeline.system.machine import tiles_refusal
from tests.backends.cpu.machine import TARGETS, same_bits
from tests.backends.cpu.test_attention import LENGTH, SHAPES, WIDE, Built
from tests.tiny import PLAIN, changed

HAS_TILES = TARGETS["host"].processor.has_tiles
SUITED = ["group 3", "group 7, biases", "group 8, norms", "group 2, sinks, slopes", *WIDE]
CASES = [(unit, shape, "int8") for unit in ("amx", "host") for shape in SUITED]
CASES += [(unit, shape, "int8-int4") for unit in ("amx", "host") for shape in SUITED[1:3]]
CASES += [(name, "group 3", "int8") for name in list(TARGETS)[1:]]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: ", ".join(case))
def attention(request: pytest.FixtureRequest) -> Built:
    """By the unit of this processor, or emulated on each; values are copied 4 records at a time."""
    name, shape, kind = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.backends.cpu.kernels.tile_attention.CHUNK", 4)
        if name != "amx":
            return Built(name, shape, kind, partial(Emulated, form=TARGETS[name].processor.dot))
        if not HAS_TILES:
            pytest.skip(f"no matrix tiles here: {tiles_refusal()}")
        return Built("host", shape, kind, Amx)


@pytest.mark.parametrize("window", [None, 5, 17])
def test_several_queries_see_what_each_sees_alone(attention: Built, window: int | None) -> None:
    """However many there are, and whatever lies behind them and behind the cache."""
    here, most = attention.machine.is_local, attention.heads.tile
    for position in [0, 15, 30, 64, LENGTH - most] if here else [5] * (window == 5):
        for count in (2, 5, most) if here else (most,):
            attention.grow(position + count)
            got = attention.attend(position, count, window)
            assert same_bits(got, attention.wanted(position, count, window)), (position, count)


@pytest.mark.parametrize("kind", ["int8", "int8-int4", "f16", "f32"])
def test_what_tiles_cannot_read_stays_with_vectors(kind: str) -> None:
    """They read bytes, 64 channels of a record's keys at a time, and 32 channels of values."""
    suited = {
        shape for shape, heads in SHAPES.items() if replace(heads, kv_cache_dtype=kind).suits_tiles
    }
    wide = {shape for shape in SUITED if shape in SHAPES and SHAPES[shape].size > 32}
    wanted = {"int8": {*SUITED} - {*WIDE} | {"group 1, padded", "group 2, norms behind rope"}}
    assert suited == (wanted | {"int8-int4": wide}).get(kind, set())


def test_a_models_layers_attend_by_tiles_all_or_none() -> None:
    """A step's rows are cut into items once, for all layers."""
    odd = changed(PLAIN, head_dim=24)  # 48 channels, padded
    mixed = replace(PLAIN, layers=(*PLAIN.layers[:1], *odd.layers[1:]))
    for arch, has_tiles, wanted in (
        (PLAIN, True, True), (PLAIN, False, False), (mixed, True, False), (odd, True, False),
    ):  # fmt: skip
        sizes = model_sizes(arch, "int8-row", "int8", has_tiles=has_tiles)
        assert {heads.by_tiles for heads in sizes.all_heads} == {wanted}
        assert sizes.together[1] == max(heads.tile for heads in sizes.all_heads)
        assert sizes.row_block == ROW_BLOCK * (4 if has_tiles else 1)
        assert sizes.mixed_rows == MIXED_ROWS * (4 if has_tiles else 1)
