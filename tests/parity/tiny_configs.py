"""Configs of tiny models of every family, by a name for the test: what transformers is told."""

from __future__ import annotations

from typing import Any

from tests.parity.modern_configs import MODERN
from tests.parity.tiny_halves import BY_HALVES

VOCAB = 96
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
    "rope_parameters": ROPE,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,  # the defaults leave nothing between fast and slow in so short a context
    "beta_slow": 0.25,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.2, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": 32,
}
PARTIAL_ROPE = {**ROPE, "partial_rotary_factor": 0.5}
ORIGINAL = {"original_max_position_embeddings": 32}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN_ROPE, "head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 8, "head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "phi3": ("Phi3", {"rope_parameters": PARTIAL_ROPE}),
    "phi3-window": ("Phi3", {"sliding_window": 8}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONG_ROPE, **ORIGINAL}),
}
_TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": LINEAR_ROPE,
}
_SLIDING = {"sliding_window": 8, "num_hidden_layers": 4}
_EVERY_OTHER = ["sliding_attention", "full_attention"] * 2
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
_QUERY_SCALE = {"head_dim": 32, "query_pre_attn_scalar": 20}
_NOT_OF_FALCON = ("intermediate_size", "num_key_value_heads")
_FALCON_H1 = {
    "head_dim": 12,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.8, 0.9, 1.1, 1.2, 0.7],
    "mlp_multipliers": [0.9, 1.3],
}
_GRANITE_SCALES = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
}
_GRANITE_HYBRID = {
    **_GRANITE_SCALES,
    **_MAMBA,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "shared_intermediate_size": 80,
}
TEXT_CONFIGS = ("Gemma3", "Gemma4", "Gemma4Unified", "Llama4", "Qwen3_5", "Qwen3_5Moe")
_GEMMA_4 = {
    "sliding_window": 8,
    "head_dim": 8,  # scores are not scaled: more channels make torch's own error too large
    "global_head_dim": 16,
    "final_logit_softcapping": 4.0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    },
}
# Families whose config says more than the older keys of rope, or that have no rope.
NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {**_SLIDING, **_QUERY_SCALE, "layer_types": _EVERY_OTHER, "rope_parameters": _TWO_ROPES},
    ),
    "gemma4": (  # as E2B
        "Gemma4",
        {
            **_GEMMA_4,
            "num_hidden_layers": 8,
            "layer_types": _EVERY_OTHER * 2,
            "hidden_size_per_layer_input": 12,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-keys": (  # as 31B
        "Gemma4",
        {
            **_GEMMA_4,
            "num_hidden_layers": 4,
            "layer_types": _EVERY_OTHER,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
        },
    ),
    "gemma4-unified": (  # as 12B
        "Gemma4Unified",
        {
            **_GEMMA_4,
            "num_hidden_layers": 4,
            "layer_types": _EVERY_OTHER,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "unused": ("vocab_size_per_layer_input", "hidden_size_per_layer_input"),
        },
    ),
    "gemma4-moe": (  # as 26B-A4B
        "Gemma4",
        {
            **_GEMMA_4,
            "num_hidden_layers": 4,
            "layer_types": _EVERY_OTHER,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {
            **_SLIDING,
            **_QUERY_SCALE,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "granite": ("Granite", {**_GRANITE_SCALES, "attention_bias": True}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {**_SLIDING, "layer_types": _EVERY_OTHER, "rope_parameters": _TWO_ROPES},
    ),
    "stablelm": ("StableLm", {"rope_parameters": PARTIAL_ROPE, "use_qkv_bias": True}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**_SLIDING, "layer_types": _EVERY_OTHER, "head_dim": 16}),
    "phi2": ("Phi", {"rope_parameters": PARTIAL_ROPE, "num_key_value_heads": 4}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8, "tie_word_embeddings": False}),
    "opt": (
        "OPT",
        {
            "ffn_dim": 96,
            "word_embed_proj_dim": 64,
            "unused": ("intermediate_size", "num_key_value_heads"),
        },
    ),
    "neox": ("GPTNeoX", {"rope_parameters": PARTIAL_ROPE, "unused": ("num_key_value_heads",)}),
    "falcon": ("Falcon", {"unused": _NOT_OF_FALCON}),  # as 7B
    "falcon-groups": (  # as 40B
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "ffn_hidden_size": 96,
            "tie_word_embeddings": False,
            "unused": _NOT_OF_FALCON,
        },
    ),
    "falcon-one-norm": (  # as 11B
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
            "unused": _NOT_OF_FALCON,
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "n_positions": 128,
            "unused": (
                "intermediate_size",
                "num_key_value_heads",
                "max_position_embeddings",
                "rope_parameters",
            ),
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**_EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {**_EXPERTS, "head_dim": 32, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "intermediate_size": 144,
            "block_multiple_of": 32,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-bias": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "conv_L_cache": 4,
        },
    ),
    "qwen2-moe-between": (
        "Qwen2Moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "qwen3-moe-between": (
        "Qwen3Moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [0, 2],
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "moe_intermediate_size": 48,
            "num_dense_layers": 2,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
            "unused": ("intermediate_size",),
        },
    ),
    "qwen3.5": (
        "Qwen3_5",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
        },
    ),
    "falcon-h1": (
        "FalconH1",
        {
            **_FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "num_hidden_layers": 3,
        },
    ),
    "falcon-h1-plain": ("FalconH1", {**_FALCON_H1, "tie_word_embeddings": True}),
    "falcon-h1-norm-first": ("FalconH1", {**_FALCON_H1, "mamba_rms_norm": True}),
    "granite-hybrid": (  # as Granite 4.0 H Micro
        "GraniteMoeHybrid",
        {**_GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "nope"},
    ),
    "granite-hybrid-rope": (
        "GraniteMoeHybrid",
        {
            **_GRANITE_HYBRID,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite-hybrid-moe": (  # as Granite 4.0 H Tiny and Small
        "GraniteMoeHybrid",
        {**_GRANITE_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "bamba": (
        "Bamba",
        {
            **_MAMBA,
            "num_hidden_layers": 4,
            "attn_layer_indices": [1, 3],
            "rope_parameters": PARTIAL_ROPE,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 12,
            "n_groups": 2,
            "chunk_size": 8,
            "num_hidden_layers": 3,
            "unused": (
                "intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
                "max_position_embeddings",
                "rope_parameters",
                "attn_implementation",
            ),
        },
    ),
    "deepseek-v2": (  # as V2-Lite
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "q_lora_rank": 24,
            "first_k_dense_replace": 2,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "kimi": (
        "DeepseekV3",
        {**_DEEPSEEK, "q_lora_rank": 40, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **_DEEPSEEK,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 18,
            "unused": ("first_k_dense_replace",),
        },
    ),
    "olmoe": ("Olmoe", {**_EXPERTS, "norm_topk_prob": False}),
    "granite-moe": (
        "GraniteMoe",
        {**_GRANITE_SCALES, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "gpt-oss": (
        "GptOss",
        {
            **_SLIDING,
            "head_dim": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
    ),
    **BY_HALVES,
}
NEWER |= MODERN
