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
}
