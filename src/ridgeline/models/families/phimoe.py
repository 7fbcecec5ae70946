"""Phi-3.5-MoE, of Hugging Face's files and of GGUF: experts taken one by one. Literal tables."""

from __future__ import annotations

from ridgeline.models.families.gguf_names import LAYER as GGUF_LAYER
from ridgeline.models.families.gguf_names import OUTER as GGUF_OUTER
from ridgeline.models.families.gguf_names import PREFIX as GGUF_PREFIX
from ridgeline.models.families.gguf_names import refused_but
from ridgeline.models.families.hf_parts import BIASES, LAYER, MODEL, OUTER, PREFIX, SPARSE_BLOCK
from ridgeline.models.families.table import Family, const, flag, has, integer, number

_ROUTER = {
    "norm": const("layer"),
    "norm_bias": const(True),
    "ffn.router": const("sparsemixer"),
    "ffn.normalised": const(False),
}

FAMILIES = {
    "PhimoeForCausalLM": Family(
        OUTER,
        LAYER | SPARSE_BLOCK,
        PREFIX,
        MODEL
        | BIASES
        | _ROUTER
        | {
            "head_bias": flag("lm_head_bias"),
            "ffn.num": integer("num_local_experts", default=16),
            "ffn.per_token": integer("num_experts_per_tok", default=2),
            "ffn.jitter": number("router_jitter_noise", default=0.01),
        },
        windows="all",
        has_experts=True,
        unused=("input_jitter_noise",),  # for training
        must={"num_experts_per_tok": 2},
    ),
}
FAMILIES["PhiMoEForCausalLM"] = FAMILIES["PhimoeForCausalLM"]  # as its first files say
GGUF_FAMILIES = {
    "phimoe": Family(
        GGUF_OUTER | {"norm_bias": "output_norm.bias", "head_bias": "output.bias"},
        GGUF_LAYER
        | {
            "attn_norm_bias": "attn_norm.bias",
            "mlp_norm_bias": "ffn_norm.bias",
            **{name: f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")},
        },
        GGUF_PREFIX,
        _ROUTER
        | {
            "hidden_size": integer("embedding_length"),
            "norm_eps": number("attention.layer_norm_rms_epsilon"),
            "head_bias": has("output.bias"),
            "mixer.num_heads": integer("attention.head_count"),
            "mixer.qkv_bias": has("blk.0.attn_q.bias"),
            "mixer.o_bias": has("blk.0.attn_output.bias"),
            "ffn.num": integer("expert_count"),
            "ffn.per_token": integer("expert_used_count"),
            "ffn.size": integer("feed_forward_length"),
            "ffn.jitter": const(0.01),  # which files do not say
        },
        windows="all",
        default_window=0,
        has_experts=True,
        refuse=refused_but("expert_count"),
        must={"expert_used_count": 2},
    ),
}
