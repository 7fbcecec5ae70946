"""Shapes against transformers: parameters of published configs and of small models of each family,
built without memory (on the meta device)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.model.cost.shapes import weight_params
from ridgeline.model.files.counting import shape_of_config

NOT_HERE = "transformers and torch are not installed: make test-parity has them"
torch = pytest.importorskip("torch", reason=NOT_HERE)
transformers = pytest.importorskip("transformers", reason=NOT_HERE)

PUBLISHED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "configs.json").read_text()
)
OUTER = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 6, "pad_token_id": 0}
SIZES = OUTER | {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
}
LATENT = SIZES | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 2,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
SPARSE = SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONVOLVED = {"layer_types": ["conv", "full_attention", "conv"] * 2}
BIASED = {"attention_bias": True}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    *((name, SIZES) for name in ("llama", "granite", "smollm3", "mistral", "ministral", "phi3")),
    *((name, SIZES) for name in ("qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2")),
    *((name, SIZES) for name in ("olmo3", "cohere", "cohere2", "starcoder2", "seed_oss")),
    *((name, SIZES | BIASED) for name in ("llama", "qwen3", "gemma2", "seed_oss", "phimoe")),
    ("llama", SIZES | {"mlp_bias": True}),
    ("llama", SIZES | {"tie_word_embeddings": True}),
    ("cohere", SIZES | {"use_qk_norm": True}),
    ("mixtral", SIZES | {"num_local_experts": 4}),
    ("olmoe", SIZES | {"num_experts": 4, "num_experts_per_tok": 2}),
    ("gpt_oss", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    (
        "llama4_text",
        SIZES
        | {"intermediate_size_mlp": 80, "num_local_experts": 4, "interleave_moe_layer_step": 2},
    ),
    (
        "qwen2_moe",
        SPARSE
        | {
            "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
    ),
    ("qwen3_moe", SPARSE),
    (
        "qwen3_next",
        SPARSE
        | {
            "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
    ),
    ("lfm2_moe", SPARSE | CONVOLVED | {"num_dense_layers": 1}),
    ("lfm2_moe", SPARSE | CONVOLVED | {"num_dense_layers": 2, "use_expert_bias": False}),
    ("deepseek_v2", LATENT),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", LATENT | {"q_lora_rank": None}),
    (
        "glm4_moe",
        SIZES
        | {
            "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1, "use_qk_norm": True,
        },
    ),
    (
        "jamba",
        SIZES
        | {
            "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 3,
            "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        },
    ),
    (
        "bamba",
        SIZES
        | {
            "attn_layer_indices": [1, 4], "mamba_n_heads": 4, "mamba_d_head": 32,
            "mamba_n_groups": 1, "mamba_d_state": 8,
        },
    ),
    ("mamba", OUTER | {"state_size": 8}),
    ("falcon_mamba", OUTER | {"state_size": 8}),
    ("mamba2", OUTER | {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 8}),
]  # fmt: skip


def params_of(config: Any) -> int:
    """Parameters, and what transformers keeps as a buffer although files have it."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    ends = ("e_score_correction_bias", "expert_bias")
    balances = (b for name, b in model.named_buffers() if name.endswith(ends))
    return sum(p.numel() for p in (*model.parameters(), *balances))


# transformers 5 has a check of its own that the published file does not pass.
NOT_TAKEN = ("falcon-h1-0.5b",)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in NOT_TAKEN])
def test_a_published_config(name: str) -> None:
    values = PUBLISHED[name]["config"]
    plain = {key: value for key, value in values.items() if key != "quantization_config"}
    expected = params_of(transformers.AutoConfig.for_model(**plain))
    assert weight_params(shape_of_config(values)) == expected


@pytest.mark.parametrize(("family", "sizes"), FAMILIES)
def test_a_small_model_of_a_family(family: str, sizes: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(family, **sizes)
    shape = shape_of_config({**config.to_dict(), "model_type": family})
    assert weight_params(shape) == params_of(config)
