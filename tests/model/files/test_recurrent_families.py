"""Families with recurrent layers: what their files mean, and a model from its directory."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline import LLM, RequestOutput, SamplingParams
from ridgeline.model.files.families import arch_from_config, model_from_config
from ridgeline.model.files.tensors import ModelFileError, Tensor
from ridgeline.model.shape.model import Attention, Experts, Mlp, ModelArch
from ridgeline.model.shape.recurrent import Conv, Delta, Ssm
from ridgeline.planner.plan import plan
from tests.model.files.recurrent import (
    LFM2,
    MAMBA,
    QWEN,
    Shapes,
    lfm2,
    mamba,
    qwen,
    save,
    weights,
)
from tests.model.files.tiny import CONFIG, Config, Raw, hf_weights

NEXT: Config = {k: v for k, v in QWEN.items() if k != "intermediate_size"} | {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}


def tensors(raw: Raw) -> dict[str, Tensor]:
    return {
        name: Tensor(name, "F32", a.shape, np.ascontiguousarray(a).reshape(-1, 1).view(np.uint8))
        if a.ndim == 1
        else Tensor(name, "F32", a.shape, a.reshape(-1, a.shape[-1]).view(np.uint8))
        for name, a in raw.items()
    }


def bound(config: Config, raw: Raw) -> tuple[ModelArch, dict[str, Tensor]]:
    return model_from_config(config, tensors(raw), "model")


def test_lfm2() -> None:
    arch, found = bound(LFM2, weights(lfm2()))
    assert [type(layer.mixer) for layer in arch.layers] == [Conv, Attention, Conv]
    assert arch.layers[0].mixer == Conv(3)
    assert arch.tied_embeddings
    assert found["layers.0.conv"].shape == (32, 3)
    by_type = ["conv", "full_attention", "conv"]
    named = {k: v for k, v in LFM2.items() if k != "full_attn_idxs"} | {"layer_types": by_type}
    assert bound(named, weights(lfm2()))[0] == arch


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"block_auto_adjust_ff_dim": True}, 256),
        ({"block_auto_adjust_ff_dim": True, "block_multiple_of": 20}, 40),
        ({"block_auto_adjust_ff_dim": True, "block_multiple_of": 1}, 32),
        ({"block_ff_dim": 72}, 72),
        (
            {
                "block_auto_adjust_ff_dim": True,
                "block_multiple_of": 1,
                "block_ffn_dim_multiplier": 1.6,
            },
            51,
        ),
    ],
)
def test_the_width_of_lfm2s_mlp(changes: dict[str, Any], width: int) -> None:
    assert arch_from_config(LFM2 | changes, {}, "model").layers[0].ffn.size == width


def test_lfm2_with_experts() -> None:
    """The first layers have a dense network; experts are chosen by a sigmoid and a bias."""
    config = LFM2 | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
    }
    dense, *others = arch_from_config(config, {}, "model").layers
    assert dense.ffn == Mlp(48)
    experts = Experts(3, 2, 16, router="sigmoid", choice_bias=True)
    assert [layer.ffn for layer in others] == [experts] * 2
    plain = arch_from_config(config | {"use_expert_bias": False}, {}, "model")
    assert plain.layers[2].ffn == replace(experts, choice_bias=False)
    with pytest.raises(ModelFileError, match="num_dense_layers is 4, of 3 layers"):
        arch_from_config(config | {"num_dense_layers": 4}, {}, "model")


@pytest.mark.parametrize(
    ("changes", "has_experts"),
    [
        ({}, [True, True, True]),
        ({"mlp_only_layers": [1]}, [True, False, True]),
        ({"decoder_sparse_step": 2}, [False, True, False]),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, [False, False, False]),
    ],
)
def test_layers_of_qwen_without_experts(changes: dict[str, Any], has_experts: list[bool]) -> None:
    layers = arch_from_config(NEXT | {"intermediate_size": 80} | changes, {}, "model").layers
    assert [isinstance(layer.ffn, Experts) for layer in layers] == has_experts
    assert all(layer.ffn == Mlp(80) for layer in layers if not isinstance(layer.ffn, Experts))


def test_qwen35() -> None:
    raw = weights(qwen())
    arch, found = bound(QWEN, raw)
    assert [type(layer.mixer) for layer in arch.layers] == [Delta, Delta, Attention]
    assert arch.layers[0].mixer == Delta(2, 6, 4, 5, 4)
    attention = arch.attentions[0]
    assert attention.gated
    assert attention.rope is not None
    assert attention.rope.dim == 4  # a quarter of 16
    both = raw["model.layers.2.self_attn.q_proj.weight"].reshape(4, 2, 16, 32)
    for place, name in enumerate(("q", "q_gate")):
        np.testing.assert_array_equal(
            found[f"layers.2.{name}"].to_f32(), both[:, place].reshape(64, 32)
        )
    raised = raw["model.layers.0.input_layernorm.weight"] + np.float32(1)
    np.testing.assert_array_equal(found["layers.0.attn_norm"].to_f32(), raised)
    scale = raw["model.layers.0.linear_attn.norm.weight"]
    np.testing.assert_array_equal(found["layers.0.gated_scale"].to_f32(), scale)


def test_the_text_half_of_qwen35() -> None:
    text = {k: v for k, v in QWEN.items() if k != "architectures"}
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"depth": 2},
        "image_token_id": 37,
        "video_token_id": 38,
        "vision_start_token_id": 35,
        "vision_end_token_id": 36,
    }
    raw = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in weights(qwen()).items()
    }
    raw |= {
        "model.visual.patch_embed.proj.weight": np.zeros((4, 4), np.float32),
        "mtp.fc.weight": np.zeros((4, 4), np.float32),
    }
    assert bound(whole, raw)[0] == bound(QWEN, weights(qwen()))[0]


def test_rows_that_qwen3_next_sorts_by_head() -> None:
    raw = weights(qwen(fused=True))
    arch, found = bound(NEXT, raw)
    ffn = arch.layers[0].ffn
    assert isinstance(ffn, Experts)
    assert ffn.shared is not None
    assert (ffn.shared.size, ffn.shared_gated) == (48, True)
    rows = raw["model.layers.0.linear_attn.in_proj_qkvz.weight"].reshape(2, -1, 32)
    ends = (0, 4, 8, 23, 38)  # of a key head: 4 rows of q, 4 of k, three times 5 of v and of z
    parts = [rows[:, a:b].reshape(-1, 32) for a, b in pairwise(ends)]
    qkv = np.concatenate(parts[:3])
    np.testing.assert_array_equal(found["layers.0.qkv"].to_f32(), qkv)
    np.testing.assert_array_equal(found["layers.0.z"].to_f32(), parts[3])
    rows = raw["model.layers.0.linear_attn.in_proj_ba.weight"].reshape(2, 2, 3, 32)
    for place, name in enumerate(("beta", "decay")):
        np.testing.assert_array_equal(
            found[f"layers.0.{name}"].to_f32(), rows[:, place].reshape(6, 32)
        )


def test_experts_of_qwen35_one_by_one_and_in_a_stack() -> None:
    config = NEXT | {"architectures": ["Qwen3_5MoeForCausalLM"]}
    raw = weights(qwen(fused=True))
    delta = weights(qwen())
    raw = {name: array for name, array in raw.items() if "linear_attn" not in name}
    raw |= {name: array for name, array in delta.items() if "linear_attn" in name}
    arch, one_by_one = bound(config, raw)
    stacked = {name: array for name, array in raw.items() if ".experts." not in name}
    for i in range(3):
        prefix = f"model.layers.{i}.mlp.experts."
        parts = {
            part: np.stack([raw[f"{prefix}{e}.{part}_proj.weight"] for e in range(3)])
            for part in ("gate", "up", "down")
        }
        both = np.concatenate([parts["gate"], parts["up"]], axis=1)
        stacked |= {f"{prefix}gate_up_proj": both, f"{prefix}down_proj": parts["down"]}
    other, in_a_stack = bound(config, stacked)
    assert arch == other
    for name, tensor in one_by_one.items():
        np.testing.assert_array_equal(tensor.to_f32(), in_a_stack[name].to_f32(), name)


def test_mamba2() -> None:
    arch, _ = bound(MAMBA, weights(mamba()))
    assert arch.layers[0].mixer == Ssm(4, 16, 6, 2, 4)
    assert arch.layers[0].ffn.size == 0
    assert arch.attentions == ()
    assert arch.max_position == 1 << 15


@pytest.mark.parametrize(
    ("config", "shapes", "changes", "message"),
    [
        (LFM2, lfm2(), {"full_attn_idxs": "all"}, "full_attn_idxs must be a list of numbers"),
        (NEXT, {}, {"mlp_only_layers": [3]}, "each less than num_hidden_layers, which is 3"),
        (NEXT, {}, {"mlp_only_layers": 1}, "mlp_only_layers must be a list of numbers of"),
        (NEXT, {}, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (LFM2, lfm2(), {"block_use_swiglu": False}, "block_use_swiglu is False"),
        (LFM2, lfm2(), {"layer_types": ["conv", "ring", "conv"]}, "layer_types must name one of"),
        (QWEN, qwen(), {"linear_num_key_heads": 4}, "6 heads with a state cannot share 4"),
        (QWEN, qwen(), {"attn_output_gate": False}, "attn_output_gate is False"),
        (QWEN, qwen(), {"attention_bias": True}, "attention_bias is set"),
        (MAMBA, mamba(), {"time_step_limit": [0.0, 0.1]}, "time_step_limit is "),
        (MAMBA, mamba(), {"n_groups": 3}, "4 heads with a state cannot share 3"),
        (MAMBA, mamba(), {"num_heads": 6}, "has shape"),
    ],
)
def test_what_is_refused(
    config: Config, shapes: Shapes, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        bound(config | changes, weights(shapes))


@pytest.mark.parametrize(("config", "shapes"), [(LFM2, lfm2()), (QWEN, qwen()), (MAMBA, mamba())])
def test_from_a_directory(config: Config, shapes: Shapes, tmp_path: Path) -> None:
    path = save(tmp_path / "model", config, weights(shapes))
    options = {"backend": "reference", "max_model_len": 64, "max_num_seqs": 4}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[3 + i % 7 for i in range(33)], [5, 9, 4]]
    alone = [LLM(str(path), **options).generate(prompt, params)[0] for prompt in prompts]
    llm = LLM(str(path), max_num_batched_tokens=9, **options)
    first = llm.generate(prompts, params)
    again = llm.generate(prompts, params)
    wanted = [one.outputs[0].token_ids for one in alone]
    assert [one.outputs[0].token_ids for one in first] == wanted
    assert [one.outputs[0].token_ids for one in again] == wanted
    assert [one.num_cached_tokens for one in again] == [32, 0]
    assert llm.memory().part_bytes("recurrent_states") > 0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("config", "shapes"), [(LFM2, lfm2()), (QWEN, qwen()), (MAMBA, mamba())])
def test_drafts_by_every_method(
    config: Config, shapes: Shapes, backend: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "model", config, weights(shapes))
    small = save(tmp_path / "small", CONFIG, hf_weights(CONFIG))
    prompts = [[3 + i % 7 for i in range(33)], [5, 9, 4], [3 + i % 7 for i in range(21)]]
    wishes = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.3, seed=3, n=2, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=1.1),
    ]

    def ask(speculative_config: Any, **options: Any) -> list[RequestOutput]:
        base = {"max_model_len": 64, "max_num_seqs": 4, "threads": 1, "backend": backend}
        with LLM(str(path), speculative_config=speculative_config, **base | options) as llm:
            llm.generate(prompts, wishes)
            return llm.generate(prompts, wishes)  # from checkpoints, and with earlier answers

    plain = ask("off")
    num_right = num_tried = 0
    ways: list[dict[str, Any]] = [
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "lookahead"},
        {"method": "draft_model", "model": str(small)},
    ]
    for way in ways:
        for options in ({}, {"enable_prefix_caching": False}):
            drafted = ask(way | {"always": True}, **options)
            for one, other in zip(drafted, plain, strict=True):
                for out, same in zip(one.outputs, other.outputs, strict=True):
                    assert out.token_ids == same.token_ids
                    assert backend == "reference" or out.logprobs == same.logprobs
            assert sum(out.num_draft_tokens for out in drafted) > 20
            num_tried += sum(out.num_draft_tokens for out in drafted)
            num_right += sum(out.num_accepted_tokens for out in drafted)
    assert num_tried > num_right > 50


def test_a_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "model", LFM2, weights(lfm2()))
    config: Any = {"method": "draft_model", "model": str(path)}
    message = "model has recurrent layers, whose states cannot be taken back"
    with pytest.raises(ValueError, match=message):
        LLM(str(path), speculative_config=config, backend="reference")


def test_the_planner_counts_states(tmp_path: Path) -> None:
    path = save(tmp_path / "model", LFM2, weights(lfm2()))
    states = [
        line.num_bytes for line in plan(path).best.ledger.lines if line.name == "state of sequences"
    ]
    arch = bound(LFM2, weights(lfm2()))[0]
    assert states == [4 * arch.num_state_values]
    assert asdict(arch.layers[0].mixer) == {"kernel": 3, "bias": False}
