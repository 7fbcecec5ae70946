"""The kernels' twins in torch against numpy and the reference backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

import torch
from gguf.quants import dequantize, quantize

from ridgeline.backends.cuda import packed
from ridgeline.backends.cuda.layer_spec import HeadSpec
from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.inputs.attention import heads_inputs
from ridgeline.backends.cuda.measure.inputs.draws import DRAWS
from ridgeline.backends.reference import parts
from ridgeline.core.params import SamplingParams
from tests.gpu.kernels.cases import attention_case, draw_case, near, normal, small_part, stated

F32 = torch.float32


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_are_the_reference_backend_s(kind: str) -> None:
    x, weight, bias = normal(3, 40), normal(40, seed=2), normal(40, seed=3)
    arch: Any = SimpleNamespace(norm=kind, norm_eps=1e-5)
    wanted = parts.normalised(x.numpy(), parts.Norm(weight.numpy(), bias.numpy()), arch)
    near(twins.norm(x, weight, bias, 1e-5, kind, F32), torch.from_numpy(wanted))
    assert twins.norm(x, None, None, 1e-5, kind, torch.float16).dtype == torch.float16


def test_a_sub_layer_s_output_is_normed_scaled_added_and_the_sum_normed() -> None:
    x, delta, weight, post = normal(3, 40), normal(3, 40, seed=2), normal(40, seed=3), normal(40)
    stream = x.clone()
    row = twins.add_norm(stream, delta, 0.5, (post, None), weight, None, 1e-5, "rms", F32)
    wanted = x.numpy() + 0.5 * parts.rms_norm(delta.numpy(), post.numpy(), 1e-5)
    near(stream, torch.from_numpy(wanted))
    near(row, torch.from_numpy(parts.rms_norm(wanted, weight.numpy(), 1e-5)))
    plain = twins.add_norm(stream.clone(), delta, 1.0, None, None, None, 1e-5, "rms", F32)
    near(plain, stream + delta)


@pytest.mark.parametrize("activation", [*parts.ACTIVATIONS, "swiglu_clamped"])
def test_activations_are_the_reference_backend_s(activation: Any) -> None:
    inner = normal(3, 60) * 4
    gates, up = np.split(inner.numpy(), 2, axis=1)
    wanted = parts.gated(activation, gates * np.float32(0.7), up)
    near(twins.gate(inner, activation, True, 0.7), torch.from_numpy(wanted))
    if activation in parts.ACTIVATIONS:
        wanted = parts.ACTIVATIONS[activation](inner.numpy())
        near(twins.gate(inner, activation, False, 1.0), torch.from_numpy(wanted))


@pytest.mark.parametrize("qk_norm", [0, 1, 2])
@pytest.mark.parametrize("own", [True, False])
def test_heads_are_normed_and_rotated_as_in_the_reference_backend(qk_norm: int, own: bool) -> None:
    given = heads_inputs(small_part(), HeadSpec(4, 2, 12, 4, 1.0, qk_norm=qk_norm, own=own))
    heads = given["qkv"].numpy().reshape(7, -1, 12)
    at = given["positions"].numpy()
    cos, sin = (given[name].numpy()[at, None] for name in ("cos", "sin"))

    def made(part: np.ndarray, weight: torch.Tensor | None) -> np.ndarray:
        for turn in (1, 2):
            if weight is not None and turn == qk_norm:
                with np.errstate(invalid="ignore"):  # of the token that is poisoned
                    part = parts.rms_norm(part, weight.numpy(), 1e-5)
            if turn == 1:
                part = parts.rotate(part, cos, sin)
        return part

    near(
        twins.rope_and_cache(**given)[:6], torch.from_numpy(made(heads[:, :4], given["q_norm"])[:6])
    )
    if own:
        k = made(heads[:, 4:6], given["k_norm"])
        stored = given["cache"][:, 0].numpy()
        for token, (block, slot) in {0: (3, 0), 1: (3, 1), 3: (1, 15), 4: (8, 5)}.items():
            np.testing.assert_allclose(stored[block, :, slot], k[token], rtol=1e-5)
    assert given["poison"].tolist() == [0, 0, int(own), 0, 0, 0, 0]
    assert torch.isfinite(given["cache"]).all()


def test_values_may_be_keys_before_they_turn_and_have_a_norm() -> None:
    given = heads_inputs(
        small_part(), HeadSpec(4, 2, 12, 6, 1.0, qk_norm=1, v_norm=True, v_is_k=True)
    )
    twins.rope_and_cache(**given)
    raw = given["qkv"].numpy().reshape(7, -1, 12)[3, 4:6]
    wanted = parts.rms_norm(raw, None, 1e-5)
    np.testing.assert_allclose(given["cache"][1, 1, :, 15].numpy(), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"window": 33},
        {"softcap": 2.0, "has_sinks": True},
        {"has_slopes": True, "window": 70},
        {"value_at": 3},
    ],
    ids=str,
)
def test_attention_is_what_its_definition_says(how: dict[str, Any]) -> None:
    case = attention_case(F32, (4, 2, 8), **how)
    near(twins.attend(*case.given()), stated(case))


def test_a_product_adds_its_bias_and_leaves_as_the_type_that_is_asked_for() -> None:
    x, weight, bias = normal(3, 64), normal(5, 64, seed=2), normal(5, seed=3)
    near(
        twins.product(x, weight, bias),
        torch.from_numpy(parts.linear(x.numpy(), weight.numpy(), bias.numpy())),
    )
    half = twins.product(x.half(), weight.half(), bias, F32)
    assert half.dtype == F32
    near(half, twins.product(x, weight, bias), 2e-3)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_of_files_keep_their_own_numbers(kind: str) -> None:
    weight = normal(6, 192).numpy()
    rows = quantize(weight, gguf.GGMLQuantizationType[kind])
    made = packed.from_gguf(kind, torch.from_numpy(rows), (6, 192))
    assert made is not None
    wanted = dequantize(rows, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(made.wide().numpy(), wanted)
    assert made.nbytes == {"Q8_0": 6 * 6 * 34, "Q4_0": 6 * 6 * 20, "Q4_1": 6 * 6 * 20}[kind]


def test_scales_of_q4_k_are_rounded_once() -> None:
    random = np.random.default_rng(2)
    rows = random.integers(0, 256, (4, 2, 144), dtype=np.uint8)
    rows[..., :4] = random.uniform(1e-3, 2e-3, (4, 2, 2)).astype(np.float16).view(np.uint8)
    made = packed.from_gguf("Q4_K", torch.from_numpy(rows.reshape(4, 288)), (4, 512))
    assert made is not None
    wanted = dequantize(rows.reshape(4, 288), gguf.GGMLQuantizationType.Q4_K)
    np.testing.assert_allclose(made.wide().numpy(), wanted, atol=2**-11 * np.abs(wanted).max() * 2)


def test_other_types_and_odd_widths_are_not_kept() -> None:
    assert packed.from_gguf("Q6_K", torch.zeros((1, 210), dtype=torch.uint8), (1, 256)) is None
    assert packed.from_gguf("Q8_0", torch.zeros((1, 34), dtype=torch.uint8), (1, 32)) is None


@pytest.mark.parametrize(("bits", "most"), [(8, 1 / 254), (4, 1 / 30)])
def test_packing_errs_by_half_a_step_of_a_group(bits: int, most: float) -> None:
    weight = normal(6, 128)
    weight[0, :32] = 0.0
    made = packed.pack(weight, bits)
    groups = weight.reshape(6, 4, 32)
    width = 2 * groups.abs().amax(2) if bits == 8 else groups.amax(2) - groups.amin(2)
    error = (made.wide() - weight).reshape(6, 4, 32).abs().amax(2)
    assert (error <= width * most * (0.5 if bits == 8 else 1.0) * 1.2 + 1e-7).all()
    x = normal(2, 128, seed=3)
    near(twins.packed_product(x, made, None), x @ made.wide().T)


def test_matrices_of_one_kind_are_stacked() -> None:
    a, b = normal(3, 128), normal(5, 128, seed=2)
    for bits in (8, 4):
        made = packed.stack([packed.pack(a, bits), packed.pack(b, bits)])
        wanted = torch.cat([packed.pack(a, bits).wide(), packed.pack(b, bits).wide()])
        assert torch.equal(made.wide(), wanted)


def test_pairs_meet_their_experts() -> None:
    x, weight, bias = normal(4, 64), normal(3, 10, 64, seed=2), normal(3, 10, seed=3)
    chosen = torch.tensor([[0, 2], [0, 1], [1, 2], [0, 2]])
    order = torch.sort(chosen.reshape(-1), stable=True).indices
    met = SimpleNamespace(order=order, offsets=torch.tensor([0, 3, 5, 8]), per_token=2)
    inner = twins.grouped_product(x, weight, bias, met, True)
    down = normal(3, 64, 10, seed=4)
    made = twins.grouped_product(inner, down, None, met, False).reshape(4, 2, 64)
    for token, experts in enumerate(chosen.tolist()):
        for nth, e in enumerate(experts):
            near(made[token, nth], (x[token] @ weight[e].T + bias[e]) @ down[e].T)


@pytest.mark.parametrize("params", DRAWS, ids=str)
def test_draws_are_the_rule_s(params: dict[str, Any]) -> None:
    given, wanted = draw_case([SamplingParams(**params)] * 4, 1500)
    given[0][0, 1499] = float("nan")  # of one draw
    broken = given[1].tolist().index(0)
    wanted[broken] = -1
    picked, finite = twins.draw(*given)
    assert picked.tolist() == wanted
    assert finite.tolist() == [int(i != broken) for i in range(4)]


def test_blocks_are_read_before_any_is_written() -> None:
    cache = torch.arange(6.0)[:, None] * torch.ones(6, 5)
    twins.copy_blocks(cache, torch.tensor([0, 4]), torch.tensor([4, 5]))
    assert cache[:, 0].tolist() == [0, 1, 2, 3, 0, 4]
