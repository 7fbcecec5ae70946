"""Families with a mixture of experts in Hugging Face's files. Literal tables."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.families.hf_parts import (
    BIASES,
    DENSE,
    DENSE_NAMES,
    EXPERTS,
    GPT_OSS,
    LAYER,
    MODEL,
    OUTER,
    PREFIX,
    QWEN3,
    SCALES,
    SHARED,
    SHARED_FACTS,
    SPARSE,
    SPARSE_BLOCK,
)
from ridgeline.models.families.table import (
    Family,
    const,
    count,
    flag,
    integer,
)

FAMILIES = {
    "MixtralForCausalLM": Family(
        OUTER,
        LAYER | SPARSE_BLOCK,
        PREFIX,
        MODEL
        | {
            "ffn.num": integer("num_local_experts", default=8),
            "ffn.per_token": integer("num_experts_per_tok", default=2),
        },
        windows="all",
        has_experts=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        OUTER,
        EXPERTS,
        PREFIX,
        MODEL | BIASES | QWEN3 | SPARSE | DENSE | {"ffn.size": integer("moe_intermediate_size")},
        windows="switch of all",
        default_window=4096,
        has_experts=True,
        instead=DENSE_NAMES,
        dense_layers="mlp_only_layers",
        experts_every="decoder_sparse_step",
    ),
    "Qwen2MoeForCausalLM": Family(
        OUTER,
        EXPERTS | SHARED,
        PREFIX,
        MODEL
        | SPARSE
        | DENSE
        | SHARED_FACTS
        | {
            "mixer.qkv_bias": flag("qkv_bias", default=True),
            "ffn.size": integer("moe_intermediate_size"),
        },
        windows="switch",
        default_window=4096,
        has_experts=True,
        instead=DENSE_NAMES,
        dense_layers="mlp_only_layers",
        experts_every="decoder_sparse_step",
    ),
    "OlmoeForCausalLM": Family(
        OUTER,
        EXPERTS,
        PREFIX,
        MODEL | BIASES | SPARSE | {"mixer.qk_norm": const("width")},
        has_experts=True,
        refuse=("clip_qkv",),
    ),
    "GraniteMoeForCausalLM": Family(
        OUTER,
        LAYER
        | {
            "router": "block_sparse_moe.router.layer.weight",
            "gate": "block_sparse_moe.input_linear.weight",
            "up": "block_sparse_moe.input_linear.weight",
            "down": "block_sparse_moe.output_linear.weight",
        },
        PREFIX,
        MODEL
        | BIASES
        | SCALES
        | {
            "ffn.num": integer("num_local_experts"),
            "ffn.per_token": integer("num_experts_per_tok"),
        },
        has_experts=True,
    ),
    "GptOssForCausalLM": Family(
        OUTER,
        LAYER
        | {
            "sinks": "self_attn.sinks",
            "router": "mlp.router.weight",
            "router_bias": "mlp.router.bias",
            "gate": "mlp.experts.gate_up_proj",
            "up": "mlp.experts.gate_up_proj",
            "down": "mlp.experts.down_proj",
            "gate_bias": "mlp.experts.gate_up_proj_bias",
            "up_bias": "mlp.experts.gate_up_proj_bias",
            "down_bias": "mlp.experts.down_proj_bias",
        },
        PREFIX,
        MODEL
        | GPT_OSS
        | {
            "mixer.head_dim": integer("head_dim", default=64),
            "mixer.qkv_bias": flag("attention_bias", default=True),
            "mixer.o_bias": flag("attention_bias", default=True),
            "ffn.num": integer("num_local_experts"),
            "ffn.per_token": integer("num_experts_per_tok", "experts_per_token"),
        },
        windows="pattern",
        default_window=128,
        pattern=2,
        has_experts=True,
        gates_by_turns=True,
        unused=("experts_per_token", "initial_context_length"),
        must={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ),
}
_GRANITE = FAMILIES["GraniteMoeForCausalLM"]
FAMILIES["GraniteMoeSharedForCausalLM"] = replace(
    _GRANITE,
    layer={
        **_GRANITE.layer,
        "shared_gate": "shared_mlp.input_linear.weight",
        "shared_up": "shared_mlp.input_linear.weight",
        "shared_down": "shared_mlp.output_linear.weight",
    },
    facts={**_GRANITE.facts, "shared.size": count("shared_intermediate_size")},
)
