"""Triton kernels in Triton's interpreter against their twins.

Tiles are small, so that a hundred tokens meet every edge.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

pytest.importorskip("tests.gpu.kernels.interpreter")

import numpy as np
import torch

from ridgeline.backends.cuda import kernels, packed, tiles
from ridgeline.backends.cuda.kernels.draws import filters
from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.cases import CASES
from ridgeline.backends.cuda.measure.inputs.draws import DRAWS, asks_of, logits_of, signed
from ridgeline.backends.cuda.step.draws import Draws
from ridgeline.backends.cuda.step.edits import changes
from ridgeline.backends.sampler import rule
from ridgeline.backends.sampler.step_output import answered
from ridgeline.core.params import SamplingParams
from tests.gpu.kernels.cases import attention_case, draw_case, near, normal, small_part, stated
from tests.gpu.kernels.interpreter import MARKS

pytestmark = MARKS
F32, F16 = torch.float32, torch.float16


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT", 64)
    monkeypatch.setattr(tiles, "keys_per_tile", lambda D: 16)
    monkeypatch.setattr(tiles, "PIECE", 1024)


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return what a part of the bench found."""
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    return [one for one in lines if "what" in one]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, F32) for name in twins.__all__), ("product", F16), ("packed_product", F16)],
)
def test_kernels_give_what_their_twins_give(
    name: str, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that the bench asks of a card."""
    part = small_part(dtype)
    part.ops = kernels
    part.run(CASES[name](part))
    found = told(capsys)
    assert [one for one in found if not one.get("ok", True)] == []
    assert any("ok" in one for one in found)


@pytest.mark.parametrize("name", kernels.__all__)
def test_kernels_take_what_their_twins_take(name: str) -> None:
    of_kernel, of_twin = (inspect.signature(getattr(where, name)) for where in (kernels, twins))
    assert list(of_kernel.parameters) == list(of_twin.parameters)
    for one, other in zip(of_kernel.parameters.values(), of_twin.parameters.values(), strict=True):
        assert (one.kind, one.default) == (other.kind, other.default)


def test_attention_of_halves_sums_the_weights_that_it_multiplies() -> None:
    case = attention_case(F16, (4, 2, 16))
    near(kernels.attend(*case.given(16)), stated(case), 2e-3)


def test_attention_leaves_blocks_alone_that_nobody_sees() -> None:
    case = attention_case(F32, (2, 1, 16), [(150, 151), (40, 50)], window=20)
    wanted = kernels.attend(*case.given(16))
    for table, end in zip(case.tables, (151 - 20, 50 - 29), strict=True):
        table[: end // 16] = 1 << 29  # far outside of the cache
    assert torch.equal(kernels.attend(*case.given(16)), wanted)


def test_a_file_s_blocks_are_multiplied_as_they_are() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 256, (6, 288), dtype=torch.uint8, generator=generator)
    blocks = rows.reshape(6, 2, 144)
    blocks[..., 1] = blocks[..., 3] = 20  # factors of about 1e-3
    matrix = packed.from_gguf("Q4_K", rows, (6, 512))
    assert matrix is not None
    x = normal(3, 512)
    near(kernels.packed_product(x, matrix, None), x @ matrix.wide().T)


def test_penalties_masks_and_ranks_are_the_rule_s() -> None:
    random = np.random.default_rng(2)
    asks, logits = asks_of(random, 14, 1500), logits_of(random, 14, 1500)
    logits[7, 1400] = float("-inf")
    drawn = Draws(8, 99, kernels, torch.device("cpu"))
    found = drawn.answers(torch.from_numpy(logits), asks)
    for i, (row, ask, answer) in enumerate(zip(logits, asks, found, strict=True)):
        assert answer == answered(row, ask) if i != 7 else not answer.is_finite
    assert sum(changes(ask.draws[0]) for ask in asks if ask.draws) > 3
    assert sum(ask.num_top is not None for ask in asks) > 3


def test_draws_without_filters_need_no_search() -> None:
    plain = [params for params in DRAWS if not {"top_k", "top_p"} & params.keys()]
    given, wanted = draw_case([SamplingParams(**params) for params in plain], 3000)
    assert kernels.draw(*given, has_filters=False)[0].tolist() == wanted


@pytest.mark.parametrize(
    ("where", "value"), [(0, float("nan")), (1099, float("inf")), (1050, float("-inf"))]
)
def test_draws_say_what_is_not_finite(where: int, value: float) -> None:
    given, wanted = draw_case([SamplingParams(temperature=0.5, top_p=0.5)] * 2, 1100)
    given[0][1, where] = value
    broken = given[1].tolist().index(1)
    picked, finite = kernels.draw(*given)
    assert picked[broken] == -1
    assert picked[1 - broken] == wanted[1 - broken]
    assert finite.tolist() == [int(i != broken) for i in range(2)]


def test_filters_keep_what_the_rule_keeps() -> None:
    """All of it, not only the tokens that happen to be drawn; many logits are equal."""
    cases = [(2, 0.0), (5, 0.0), (300, 0.0), (0, 0.02), (0, 0.9), (64, 0.5), (5, 0.9999)]
    logits = torch.round(normal(len(cases), 300) * 4) / 4
    logits[0] = -1.0
    logits[0, 10:14] = torch.tensor([0.0, -0.0, 0.0, -0.0])  # equal too: ids decide
    params = [SamplingParams(temperature=1.0, top_k=k, top_p=p or 1.0) for k, p in cases]
    rules = [rule.rule(one) for one in params]
    limits = torch.tensor([[-1], [0]]).repeat(1, len(cases))
    filters.narrow(
        (
            logits,
            torch.arange(len(cases)),
            torch.tensor([one.factor for one in rules], dtype=torch.float64),
            torch.tensor([one.top_k for one in rules]),
            torch.tensor([signed(one.share) for one in rules]),
        ),
        logits.amax(1),
        torch.zeros(len(cases), dtype=torch.int32),
        limits,
        300,
        256,
    )
    bits = (logits + 0.0).numpy().view(np.uint32).astype(np.int64)
    keys = np.where(bits >> 31, 0xFFFFFFFF - bits, bits + 0x80000000)
    for row, one in enumerate(rules):
        key, last = limits[:, row].tolist()
        found = np.flatnonzero((keys[row] > key) | (keys[row] == key) & (np.arange(300) <= last))
        wanted, _ = rule.keep(logits[row].numpy(), one)
        assert found.tolist() == wanted.tolist(), cases[row]
