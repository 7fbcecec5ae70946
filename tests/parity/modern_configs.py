"""Configs of tiny models of families from 2025 on, as those of ``tiny_configs``."""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HALF_ROPE = {**_ROPE, "partial_rotary_factor": 0.5}
_GLM = {"head_dim": 16, "rms_norm_eps": 1e-5, "rope_parameters": _HALF_ROPE}
_SPARSE = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}

MODERN: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("Glm", {**_GLM, "attention_bias": True}),
    "glm4": ("Glm4", {**_GLM, "attention_bias": True}),  # as 9B
    "glm4-plain": ("Glm4", {**_GLM, "attention_bias": False, "head_dim": 24}),  # as 32B
    "glm4-moe": (  # as GLM-4.5 and 4.6
        "Glm4Moe",
        {
            **_SPARSE,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": _HALF_ROPE,
        },
    ),
    "glm4-moe-plain": (  # as GLM-4.5-Air
        "Glm4Moe",
        {**_SPARSE, "n_group": 3, "topk_group": 2, "rope_parameters": _HALF_ROPE},
    ),
    "exaone4": (  # as 32B
        "Exaone4",
        {
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
    ),
    "exaone4-plain": (  # as 1.2B
        "Exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4.5": ("Ernie4_5", {"head_dim": 24, "tie_word_embeddings": True}),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 48,
            "moe_k": 2,
            "moe_num_experts": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 24, "attention_bias": True}),
    "minimax-m2": (
        "MiniMaxM2",
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "dots1": (
        "Dots1",
        {**_SPARSE, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "sliding_window": None},
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "alpha": 20.0,
                "factor": 1.0,
            },
            "tie_word_embeddings": True,
        },
    ),
    "arcee": ("Arcee", {}),
    "nemotron": ("Nemotron", {"rope_parameters": _HALF_ROPE}),
    "nemotron-bias": (
        "Nemotron",
        {"rope_parameters": _HALF_ROPE, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "ministral": (
        "Ministral",
        {
            "head_dim": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "ministral3": (  # scores grow after 16 tokens, and again
        "Ministral3",
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "beta_slow": 0.25,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "olmo": ("Olmo", {}),
    "llama4": (  # as Scout and Maverick: experts in every other layer
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 48,
            "intermediate_size_mlp": 96,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
    ),
    "llama4-plain": (  # no norms of queries and keys, and more of all else than published ones
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "intermediate_size": 48,
            "intermediate_size_mlp": 96,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 1, 3],
            "no_rope_layers": [1, 0, 1, 0],
            "use_qk_norm": False,
            "tie_word_embeddings": True,
        },
    ),
    "dots1-window": (
        "Dots1",
        {**_SPARSE, "norm_topk_prob": False, "sliding_window": 8, "max_window_layers": 1},
    ),
    "vaultgemma": (
        "VaultGemma",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "helium": ("Helium", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "jais2": ("Jais2", {}),
    "jais2-plain": (
        "Jais2",
        {"head_dim": 24, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    ),
}
