"""More configs for ``tiny_configs``: experts beside a shared one, and layers of one half each."""

from __future__ import annotations

from typing import Any

_NEMOTRON_H = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
    "unused": ("num_hidden_layers", "rope_parameters"),
}
_NOT_OF_MPT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rope_parameters",
)  # fmt: skip
_SSM, _FULL = "linear_attention", "full_attention"

BY_HALVES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-moe-shared": (
        "GraniteMoeShared",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 80,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
            "attention_multiplier": 0.3,
        },
    ),
    "llama-biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "nemotron-h": (  # as 8B and Nano 2
        "NemotronH",
        {
            **_NEMOTRON_H,
            "layers_block_type": [_SSM, "mlp", _SSM, _FULL, "mlp", _FULL, _SSM],
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    "nemotron-h-moe": (  # as Nano 3
        "NemotronH",
        {
            **_NEMOTRON_H,
            "layers_block_type": [_SSM, "moe", _SSM, _FULL, "moe", _SSM, "mlp"],
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 80,
            "routed_scaling_factor": 1.5,
        },
    ),
    "phimoe": (
        "Phimoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.2,  # that experts are near each other
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 8,
        },
    ),
    "mpt": (
        "Mpt",
        {
            "d_model": 60,
            "n_heads": 6,  # no power of two
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"alibi_bias_max": 8},
            "unused": _NOT_OF_MPT,
        },
    ),
    "bloom": (
        "Bloom",
        {
            "hidden_size": 60,
            "n_head": 6,  # no power of two
            "seq_length": 128,
            "unused": (*_NOT_OF_MPT[1:2], *_NOT_OF_MPT[3:]),
        },
    ),
}
