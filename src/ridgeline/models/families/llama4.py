"""Llama 4 (Meta, 2025), its text half: in Hugging Face's files and GGUF files. Literal tables.

Three layers in four turn queries and keys and norm them without weights; they see chunks of 8,192
tokens, and the others let queries grow from there on. Neither is computed: the context ends before.
"""

from __future__ import annotations

from typing import Any

from ridgeline.models.families.gguf_names import LAYER as GGUF_LAYER
from ridgeline.models.families.gguf_names import OUTER as GGUF_OUTER
from ridgeline.models.families.gguf_names import PREFIX as GGUF_PREFIX
from ridgeline.models.families.gguf_names import SHARED, refused_but
from ridgeline.models.families.hf_parts import BIASES, LAYER, MODEL, OUTER, PREFIX
from ridgeline.models.families.table import Family, const, either, integer, number, numbered

_CHUNK = 8192
_PARTS = ("gate", "up", "down")
_EXPERTS = {
    "mixer.norm_turned": const(True),
    "ffn.router": const("sigmoid"),
    "ffn.normalised": const(False),
    "ffn.scales_input": const(True),
}
_OF_BOTH: dict[str, Any] = {  # kinds of files
    "interleaved": True,
    "ropes": {"no_rope_layers": "none"},
    "plain_head_norms": True,
    "has_experts": True,
    "dense_layers": "mlp_only_layers",  # which no file has
    "experts_every": "interleave_moe_layer_step",
}
FAMILIES = {
    "Llama4ForCausalLM": Family(
        OUTER,
        LAYER
        | {
            "router": "feed_forward.router.weight",
            "gate": "feed_forward.experts.gate_up_proj",
            "up": "feed_forward.experts.gate_up_proj",
            "down": "feed_forward.experts.down_proj",
            **{
                f"shared_{name}": f"feed_forward.shared_expert.{name}_proj.weight"
                for name in _PARTS
            },
        },
        PREFIX,
        MODEL
        | BIASES
        | _EXPERTS
        | {
            "mixer.head_dim": integer("head_dim", default=128),
            "mixer.qk_norm": either("use_qk_norm", yes="head", no="", default=True),
            "ffn.num": integer("num_local_experts", default=16),
            "ffn.per_token": integer("num_experts_per_tok", default=1),
            "shared.size": integer("intermediate_size"),
            "dense.size": integer("intermediate_size_mlp"),
            "chunk.size": integer("attention_chunk_size", default=_CHUNK),
            "chunk.grows_at": integer("floor_scale", default=_CHUNK),
        },
        instead={name: f"feed_forward.{name}_proj.weight" for name in _PARTS},
        experts_turned=True,
        defaults={"rope_theta": 500_000.0},
        unused=("attn_scale", "attn_temperature_tuning", "for_llm_compressor",
                "intermediate_size_mlp"),
        **_OF_BOTH,
    )
}  # fmt: skip
FAMILIES["Llama4ForConditionalGeneration"] = FAMILIES["Llama4ForCausalLM"]
GGUF_FAMILIES = {
    "llama4": Family(
        GGUF_OUTER,
        GGUF_LAYER | SHARED | {name: f"ffn_{name}_exps.weight" for name in _PARTS},
        GGUF_PREFIX,
        _EXPERTS
        | {
            "hidden_size": integer("embedding_length"),
            "norm_eps": number("attention.layer_norm_rms_epsilon"),
            "mixer.num_heads": integer("attention.head_count"),
            # As in llama.cpp: Scout's queries and keys are normed, Maverick's are not.
            "mixer.qk_norm": numbered("expert_count", among={16: "head", 128: ""}, default=16),
            "ffn.num": integer("expert_count"),
            "ffn.per_token": integer("expert_used_count"),
            "ffn.size": integer("expert_feed_forward_length"),
            "shared.size": integer("expert_feed_forward_length"),
            "dense.size": integer("feed_forward_length"),
            "chunk.size": integer("attention.chunk_size", default=_CHUNK),
            "chunk.grows_at": const(_CHUNK),
        },
        instead={name: f"ffn_{name}.weight" for name in _PARTS},
        refuse=refused_but("expert_count"),
        must={"expert_gating_func": 2},
        **_OF_BOTH,
    )
}
