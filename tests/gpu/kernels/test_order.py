"""A row has the same bits in any batch, and a text however it is cut, by kernels as they are.

numpy's products change a row's bits with its place, so here the interpreter's add inputs one after
the other, as the matrix unit was seen to do (docs/results.md#gpu). Whether a card does is for the
bench to ask; that nothing else has an order that a batch decides is asked here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("tests.gpu.kernels.interpreter")

import numpy as np
import torch
from triton.runtime import interpreter

from ridgeline.backends.cuda import kernels, packed, tiles
from ridgeline.backends.cuda.measure.parts.bits import CLAIMS
from tests.gpu.kernels.cases import attention_case, near, normal, small_part, stated
from tests.gpu.kernels.interpreter import MARKS

pytestmark = MARKS
F32, F16 = torch.float32, torch.float16


@pytest.fixture(autouse=True)
def _ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dot(self: Any, a: Any, b: Any, acc: Any, *precision: Any) -> Any:
        rows, columns = a.data.astype(np.float32), b.data.astype(np.float32)
        out = acc.data.copy()
        for k in range(rows.shape[1]):
            out += rows[:, k, None] * columns[None, k]
        return interpreter.TensorHandle(out, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a hundred tokens meet every edge."""
    monkeypatch.setattr(tiles, "SPLIT", 32)
    monkeypatch.setattr(tiles, "keys_per_tile", lambda D: 16)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(
    "how", [{}, {"window": 40}, {"has_sinks": True, "softcap": 9.0}, {"has_slopes": True}], ids=str
)
def test_attention_has_the_same_bits_however_a_text_is_cut(how: dict[str, Any]) -> None:
    whole = attention_case(F16, (4, 2, 16), [(0, 100)], **how)
    wanted = kernels.attend(*whole.given(64))
    near(wanted, stated(whole), 2e-3)
    for rows in (16, 64):  # the instance for single tokens, and that for prompts
        for start, end in ((99, 100), (90, 100), (20, 60), (31, 34)):
            cut = whole.piece(start, end)
            for shares in (True, False):
                found = kernels.attend(*cut.given(rows, shares=shares))
                assert torch.equal(found, wanted[start:end]), (rows, start, end, shares)


@pytest.mark.full
@pytest.mark.parametrize("D", [128, 256])
def test_attention_s_own_tiles_give_the_same_bits_in_both_instances(D: int) -> None:
    whole = attention_case(F16, (8, 2, D), [(590, 620)], window=0)
    wanted = kernels.attend(*whole.given(tiles.PROMPT_ROWS))
    near(wanted, stated(whole), 2e-3)
    for at in (590, 619):
        alone = whole.piece(at, at + 1)
        for shares in (True, False):
            found = kernels.attend(*alone.given(tiles.DECODE_ROWS, shares=shares))
            assert torch.equal(found[0], wanted[at - 590])


@pytest.mark.usefixtures("_small_tiles")
def test_attention_has_the_same_bits_beside_any_others() -> None:
    case = attention_case(F32, (4, 2, 16))
    together = kernels.attend(*case.given(16))
    for row, (token, count, _) in enumerate(case.spans):
        alone = kernels.attend(*case.alone(row).given(64))
        assert torch.equal(alone, together[token : token + count])


# They take minutes here, and are asked in this file of small tiles and matrices.
_ASKED_ABOVE = {"attend", "product", "packed_product"}


@pytest.mark.parametrize("name", [name for name in CLAIMS if name not in _ASKED_ABOVE])
def test_what_the_bench_asks_of_a_card_is_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    part = small_part()
    part.ops = kernels
    part.run(CLAIMS[name](part))
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ours = [one for one in found if "same_bits" in one and "ok" in one]
    assert ours
    assert [one for one in ours if not one["same_bits"]] == []


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_a_product_has_a_row_s_bits_in_any_batch(
    dtype: torch.dtype, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "WIDE_MATRIX", 32 if is_wide else 1 << 20)
    x, weight = normal(600, 136).to(dtype), normal(70, 136, seed=2).to(dtype)
    alone = kernels.product(x[:1], weight, None, F32)[0]
    seen = set()
    for rows in (2, 17, 70, 150, 300, 600) if dtype == F16 else (2, 40, 70):
        seen.add(tiles.product_tile(rows, 70, can_stream=True, is_float32=dtype == F32))
        for place in (0, rows // 2, rows - 1):
            batch = x[:rows].clone()
            batch[[0, place]] = batch[[place, 0]]
            found = kernels.product(batch, weight, None, F32)[place]
            assert torch.equal(found, alone), (rows, place)
    assert (
        len(seen)
        == {(F16, False): 5, (F16, True): 3, (F32, False): 1, (F32, True): 1}[dtype, is_wide]
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_a_packed_product_has_a_row_s_bits_in_any_batch(bits: int) -> None:
    """Parts of its inputs are summed by programs of their own, or by one: the bits are the same."""
    matrix = packed.pack(normal(70, 1216, seed=2), bits)
    x = normal(150, 1216)
    alone = kernels.packed_product(x[:1], matrix, None)[0]
    for rows in (2, 40, 150):
        for place in (0, rows - 1):
            batch = x[:rows].clone()
            batch[[0, place]] = batch[[place, 0]]
            assert torch.equal(kernels.packed_product(batch, matrix, None)[place], alone)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_part_of_a_packed_matrix_gives_the_bits_of_the_whole(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How inputs are cut follows the whole matrix, of which a rank has some outputs."""
    monkeypatch.setattr(tiles, "WANTED_PROGRAMS", 2)
    monkeypatch.setattr(tiles, "MIN_INPUTS", 64)
    weight, x = normal(128, 1024, seed=2), normal(3, 1024)
    wanted = kernels.packed_product(x, packed.pack(weight, bits), None)[:, 64:]
    part = packed.pack(weight[64:], bits)
    of_whole = replace(part, num_outputs=128)
    assert torch.equal(kernels.packed_product(x, of_whole, None), wanted)
    assert not torch.equal(kernels.packed_product(x, part, None), wanted)
