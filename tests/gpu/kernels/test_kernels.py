"""Triton kernels in Triton's interpreter against their twins.

Tiles are small, so that a hundred tokens meet every edge. The interpreter of Triton 3.6 multiplies
bfloat16 as integers, so float16 and float32 stand for it.
"""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")
pytest.importorskip("triton", reason="the kernels need Triton: make test-gpu")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted with TRITON_INTERPRET=1", allow_module_level=True)

import numpy as np
import torch

from ridgeline.backends.cuda import kernels, packed, tiles, twins
from ridgeline.backends.cuda.kernels.draws import filters
from ridgeline.backends.cuda.layer_spec import HeadSpec
from ridgeline.backends.cuda.step.draws import Draws
from ridgeline.backends.cuda.step.edits import changes
from ridgeline.backends.cuda.step.states import States
from ridgeline.backends.sampler import rule
from ridgeline.backends.sampler.step_output import answered
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Work
from tests.gpu.kernels.asks import asks_of, logits_of
from tests.gpu.kernels.cases import DRAWS, attention_case, draw_case, heads_case, near, signed
from tests.tiny import RECURRENT

F32, F16 = torch.float32, torch.float16
_ANY = Sampling(SamplingParams(), 0, ())
# The interpreter computes rows that nobody has too, and turns arrays of one number into numbers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT", 64)
    monkeypatch.setattr(tiles, "keys_per_tile", lambda D: 16)
    monkeypatch.setattr(tiles, "PIECE", 1024)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", kernels.__all__)
def test_kernels_take_what_their_twins_take(name: str) -> None:
    of_kernel, of_twin = (inspect.signature(getattr(where, name)) for where in (kernels, twins))
    assert list(of_kernel.parameters) == list(of_twin.parameters)
    for one, other in zip(of_kernel.parameters.values(), of_twin.parameters.values(), strict=True):
        assert (one.kind, one.default) == (other.kind, other.default)


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((4, 2, 16), {}),
        ((4, 2, 16), {"window": 33}),
        ((4, 2, 16), {"softcap": 2.0}),
        ((4, 2, 16), {"has_sinks": True, "window": 70}),
        ((4, 2, 16), {"has_slopes": True}),
        ((4, 2, 16), {"has_slopes": True, "softcap": 5.0}),
        ((9, 3, 8), {}),  # three query heads of a key head: a row of a program is nobody's
        ((2, 2, 24), {}),  # channels that are no power of two
        ((2, 1, 16), {"block_size": 5}),  # a block that divides no tile
        ((2, 1, 16), {"block_size": 32}),
        ((32, 1, 24), {"value_at": 8}),  # a latent, and two programs for its heads
        ((6, 1, 40), {"value_at": 20, "window": 33}),
    ],
    ids=str,
)
def test_attention(shape: tuple[int, int, int], how: dict[str, Any]) -> None:
    case = attention_case(F32, shape, **how)
    near(kernels.attend(*case.given(16)), twins.attend(*case.given(16)))


def test_attention_of_halves_sums_the_weights_that_it_multiplies() -> None:
    case = attention_case(F16, (4, 2, 16))
    near(kernels.attend(*case.given(16)), case.stated(), 2e-3)


def test_attention_leaves_blocks_alone_that_nobody_sees() -> None:
    case = attention_case(F32, (2, 1, 16), [(150, 151), (40, 50)], window=20)
    wanted = kernels.attend(*case.given(16))
    for table, end in zip(case.tables, (151 - 20, 50 - 29), strict=True):
        table[: end // case.block_size] = 1 << 29  # far outside of the cache
    assert torch.equal(kernels.attend(*case.given(16)), wanted)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"v_norm": True},
        {"v_is_k": True},
        {"half": 4},
        {"half": 0},
        {"own": False},
        {"K": 1, "half": 2, "value_at": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("qk_norm", [0, 1, 2])
def test_rope_and_cache(qk_norm: int, more: dict[str, Any]) -> None:
    facts: dict[str, Any] = {"H": 4, "K": 2, "D": 12, "half": 6, "scale": 1.0, "qk_norm": qk_norm}
    spec = HeadSpec(**facts | more)
    ours, theirs = heads_case(F32, spec), heads_case(F32, spec)
    q, wanted = kernels.rope_and_cache(**ours), twins.rope_and_cache(**theirs)
    near(q[:6], wanted[:6])
    assert torch.equal(ours["poison"], theirs["poison"])
    assert torch.isfinite(ours["cache"]).all()
    if spec.own:
        near(ours["cache"], theirs["cache"])
    else:
        assert not ours["cache"].any()


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("has_post", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_add_norm(kind: str, has_post: bool, has_bias: bool) -> None:
    x, delta, weight, bias = normal(3, 40), normal(3, 40, seed=2), normal(40), normal(40, seed=3)
    some_bias = bias if has_bias else None
    post = (weight + 1, some_bias) if has_post else None
    ours, theirs = x.clone(), x.clone()
    given = (0.5, post, weight, some_bias, 1e-5, kind, F16)
    near(kernels.add_norm(ours, delta, *given), twins.add_norm(theirs, delta, *given), 1e-3)
    near(ours, theirs)


def test_sums_without_a_norm_and_norms_of_parts_of_rows() -> None:
    x, delta, weight = normal(3, 40), normal(3, 40, seed=2), normal(16)
    ours, theirs = x.clone(), x.clone()
    given = (2.0, None, None, None, 1e-5, "rms", F32)
    near(kernels.add_norm(ours, delta, *given), twins.add_norm(theirs, delta, *given))
    part = x[:, 8:24]
    for one in (weight, None):
        found = kernels.norm(part, one, None, 1e-5, "rms", F32)
        near(found, twins.norm(part, one, None, 1e-5, "rms", F32))
    heads = x.reshape(3, 5, 8)
    found = kernels.norm(heads, None, None, 1e-5, "layer", F32)
    near(found, twins.norm(heads, None, None, 1e-5, "layer", F32))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("gated", [False, True])
def test_gate(activation: str, gated: bool) -> None:
    inner = normal(3, 2060) * 4
    given = (inner, activation, gated, 0.7)
    near(kernels.gate(*given), twins.gate(*given))


def test_gate_of_clamped_values() -> None:
    given = (normal(3, 60) * 6, "swiglu_clamped", True, 1.0)
    near(kernels.gate(*given), twins.gate(*given))


@pytest.mark.parametrize("rows", [1, 40, 70, 130, 300, 600])
def test_products(rows: int) -> None:
    x, weight, bias = normal(rows, 136), normal(70, 136, seed=2), normal(70, seed=3)
    near(kernels.product(x, weight, bias), twins.product(x, weight, bias))
    wanted = twins.product(x, weight, None)
    near(kernels.product(x.half(), weight.half(), None, F32), wanted, 2e-3)
    odd, narrow = x.half()[:, 1:100], weight.half()[:, 1:100]  # the copy engine takes neither
    near(kernels.product(odd, narrow, bias), twins.product(odd, narrow, bias), 2e-3)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 70])
def test_packed_products(rows: int, bits: int) -> None:
    weight, bias = normal(70, 1216, seed=2), normal(70, seed=3)
    matrix = packed.pack(weight, bits)
    assert tiles.num_parts(*matrix.shape) == 2
    x = normal(rows, 1216)
    near(kernels.packed_product(x, matrix, bias), twins.packed_product(x, matrix, bias))
    found = kernels.packed_product(x.half(), matrix, None, F32)
    near(found, twins.packed_product(x, matrix, None), 2e-3)


def test_a_file_s_blocks_are_multiplied_as_they_are() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 256, (6, 288), dtype=torch.uint8, generator=generator)
    blocks = rows.reshape(6, 2, 144)
    blocks[..., 1] = blocks[..., 3] = 20  # factors of about 1e-3
    matrix = packed.from_gguf("Q4_K", rows, (6, 512))
    assert matrix is not None
    x = normal(3, 512)
    near(kernels.packed_product(x, matrix, None), x @ matrix.wide().T)


def met_of(chosen: torch.Tensor, num: int, rows: int) -> SimpleNamespace:
    """Return who meets whom, cut into tiles of ``rows`` pairs, and two tiles of nobody."""
    flat = chosen.reshape(-1)
    counts = torch.bincount(flat, minlength=num).tolist()
    offsets = [sum(counts[:e]) for e in range(num + 1)]
    spans = [(e, low) for e in range(num) for low in range(offsets[e], offsets[e + 1], rows)]
    return SimpleNamespace(
        order=torch.sort(flat, stable=True).indices,
        offsets=torch.tensor(offsets),
        tile_expert=torch.tensor([e for e, _ in spans] + [-1, -1]),
        tile_begin=torch.tensor([low for _, low in spans] + [0, 0]),
        per_token=chosen.shape[1],
        rows=rows,
    )


@pytest.mark.parametrize("rows", [16, 64])
def test_grouped_products(rows: int) -> None:
    chosen = torch.stack([(torch.arange(2) + t) % 5 for t in range(70)]).sort(1).values
    met = met_of(chosen, 5, rows)
    x, weight, bias = normal(70, 72), normal(5, 80, 72, seed=2), normal(5, 80, seed=3)
    inner = kernels.grouped_product(x, weight, bias, met, True)
    near(inner, twins.grouped_product(x, weight, bias, met, True))
    down = normal(5, 72, 80, seed=4)
    found = kernels.grouped_product(inner, down, None, met, False)
    near(found, twins.grouped_product(inner, down, None, met, False))


@pytest.mark.parametrize("vocabulary", [900, 2500])  # one piece, and three
def test_draws_are_the_rule_s_token_by_token(vocabulary: int) -> None:
    given, wanted = draw_case([SamplingParams(**params) for params in DRAWS], vocabulary)
    picked, finite = kernels.draw(*given)
    assert picked.tolist() == wanted
    assert finite.tolist() == [1] * len(DRAWS)


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


def states_plan() -> SimpleNamespace:
    """Return the plan of three texts: one goes on and is saved twice, one begins, one has a token.

    Two tokens more are padding.
    """
    work = [
        Work((0, 0), 9, (0,) * 7, (), (), _ANY, (), (), state=2, save=((2, 4), (5, 5))),
        Work((1, 0), 0, (0,) * 3, (), (), _ANY, (), (), state=0),
        Work((2, 0), 4, (0,), (), (), _ANY, (), (), state=1),
    ]
    states = States(next(iter(RECURRENT.values())), 6, torch.device("cpu"))
    items, cuts = (torch.from_numpy(array) for array in states.cut(work))
    return SimpleNamespace(
        items=items, num_items=torch.tensor([3]), cuts=cuts, num_cuts=torch.tensor([len(cuts)]),
        item_of=torch.tensor([0] * 7 + [1] * 3 + [2] + [-1] * 2), programs=4,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["convolve", "scan", "remember", "remember by turns"])
def test_states_go_through_each_text(name: str) -> None:
    plan, T = states_plan(), 13
    if name == "convolve":
        given: tuple[Any, ...] = (normal(T, 300), normal(300, 4, seed=2), normal(300, seed=3))
        states = normal(12, 3, 300, seed=4)
    elif name == "scan":
        b, c = normal(T, 2, 6, seed=2), normal(T, 2, 6, seed=3)
        pace, kept = (torch.rand(T, 4) for _ in range(2))
        given = (normal(T, 4, 40), b, c, pace, kept, normal(4, seed=5))
        states = normal(12, 4, 40, 6, seed=6)
    else:
        q, k = normal(T, 2, 8) / 3, normal(T, 2, 8, seed=2) / 3
        given = (q, k, normal(T, 4, 40, seed=3), torch.rand(T, 4), torch.rand(T, 4))
        states = normal(12, 4, 8, 40, seed=4)
    ours, theirs, behind = states.clone(), states.clone(), ()
    if name.startswith("remember"):
        behind = (name.endswith("turns"),)
    op = name.split()[0]
    found = getattr(kernels, op)(*given, ours, *behind, plan)
    near(found, getattr(twins, op)(*given, theirs, *behind, plan))
    near(ours, theirs)
    written = sorted(plan.cuts[:, 3].tolist())
    assert written == [1, 3, 5, 9, 11]
    rest = [slot for slot in range(12) if slot not in written]
    assert torch.equal(ours[rest], states[rest])
    assert not found[11:].any()


@pytest.mark.parametrize("old_new", [([0, 1], [4, 5]), ([0, 4], [4, 5])], ids=str)
def test_blocks_are_read_before_any_is_written(old_new: tuple[list[int], list[int]]) -> None:
    cache = normal(6, 5000)
    ours, theirs = cache.clone(), cache.clone()
    old, new = map(torch.tensor, old_new)
    kernels.copy_blocks(ours, old, new)
    twins.copy_blocks(theirs, old, new)
    assert torch.equal(ours, theirs)
