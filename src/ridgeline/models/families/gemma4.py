"""Gemma 4, in both kinds of files. Literal tables.

A model has an input per layer and layers that read others' keys and values (E2B, E4B), or keys that
are values where a layer sees everything (12B, 31B), and experts beside a dense network (26B-A4B).
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.families.hf_parts import (
    ACTIVATIONS,
    AROUND,
    BIASES,
    MODEL,
    OUTER,
    PARTIAL,
    PREFIX,
)
from ridgeline.models.families.table import (
    Family,
    choice,
    const,
    count,
    flag,
    has,
    integer,
    number,
    optional,
    power,
)

_GELU = choice("hidden_activation", among=ACTIVATIONS, default="gelu_pytorch_tanh")
_COMMON = {
    "layer.norms": const("around"),
    "mixer.qk_norm": const("head"),
    "mixer.v_norm": const(True),
    "mixer.scale": const(1.0),
}
_OF_EXPERTS = {"ffn.own_scales": const(True)}
_OUTER = OUTER | {
    "inputs": "model.embed_tokens_per_layer.weight",
    "inputs_proj": "model.per_layer_model_projection.weight",
    "inputs_norm": "model.per_layer_projection_norm.weight",
}
_LAYER = AROUND | {
    "input_gate": "per_layer_input_gate.weight",
    "input_proj": "per_layer_projection.weight",
    "input_post_norm": "post_per_layer_input_norm.weight",
    "out_scale": "layer_scalar",
}
_FACTS = (
    MODEL
    | BIASES
    | _COMMON
    | {
        "tied_embeddings": flag("tie_word_embeddings", default=True),
        "norm_eps": number("rms_norm_eps", default=1e-6),
        "embed_scale": power("hidden_size", 0.5),
        "logit_softcap": optional("final_logit_softcapping"),
        "mixer.head_dim": integer("head_dim", default=256),
        "ffn.activation": _GELU,
        "layer.input_size": count("hidden_size_per_layer_input"),
        "layer.out_scale": const(True),
    }
)
_DEFAULTS = {
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
    },
}
# Pictures alone see what follows them: a text is causal.
_MUST = {"use_bidirectional_attention": "vision"}

FAMILIES = {
    "Gemma4ForCausalLM": Family(
        _OUTER,
        _LAYER,
        PREFIX,
        _FACTS,
        windows="pattern",
        default_window=512,
        pattern=6,
        rope_keys=PARTIAL,
        heads_by_layer=True,
        defaults=_DEFAULTS,
        unused=("num_experts", "top_k_experts", "moe_intermediate_size"),
        must=_MUST | {"enable_moe_block": False},
    ),
    "Gemma4ForCausalLM of experts": Family(
        _OUTER,
        _LAYER
        | {
            "router": "router.proj.weight",
            "router_norm": "router.scale",
            "expert_scales": "router.per_expert_scale",
            "experts_norm": "pre_feedforward_layernorm_2.weight",
            "experts_post_norm": "post_feedforward_layernorm_2.weight",
            "beside_post_norm": "post_feedforward_layernorm_1.weight",
            "beside_gate": "mlp.gate_proj.weight",
            "beside_up": "mlp.up_proj.weight",
            "beside_down": "mlp.down_proj.weight",
            "gate": "experts.gate_up_proj",
            "up": "experts.gate_up_proj",
            "down": "experts.down_proj",
        },
        PREFIX,
        _FACTS
        | _OF_EXPERTS
        | {
            "ffn.num": integer("num_experts"),
            "ffn.per_token": integer("top_k_experts"),
            "ffn.size": integer("moe_intermediate_size"),
            "beside.size": integer("intermediate_size"),
            "beside.activation": _GELU,
        },
        windows="pattern",
        default_window=512,
        pattern=6,
        rope_keys=PARTIAL,
        heads_by_layer=True,
        has_experts=True,
        lacks_root=("router_norm",),
        defaults=_DEFAULTS,
        must=_MUST | {"enable_moe_block": True},
    ),
}
FAMILIES["Gemma4UnifiedForCausalLM"] = replace(  # 12B
    FAMILIES["Gemma4ForCausalLM"],
    default_window=1024,
    defaults=_DEFAULTS
    | {
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262_144,
    },
)
FAMILIES["Gemma4UnifiedForConditionalGeneration"] = FAMILIES["Gemma4UnifiedForCausalLM"]
FAMILIES["Gemma4ForConditionalGeneration"] = FAMILIES["Gemma4ForCausalLM"]
FAMILIES["Gemma4ForConditionalGeneration of experts"] = FAMILIES["Gemma4ForCausalLM of experts"]

_GGUF_OUTER = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "inputs": "per_layer_token_embd.weight",
    "inputs_proj": "per_layer_model_proj.weight",
    "inputs_norm": "per_layer_proj_norm.weight",
}
_GGUF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "input_gate": "inp_gate.weight",
    "input_proj": "proj.weight",
    "input_post_norm": "post_norm.weight",
    "out_scale": "layer_output_scale.weight",
}
_GGUF_FACTS = _COMMON | {
    "hidden_size": integer("embedding_length"),
    "norm_eps": number("attention.layer_norm_rms_epsilon"),
    "embed_scale": power("embedding_length", 0.5),
    "logit_softcap": optional("final_logit_softcapping"),
    "mixer.num_heads": integer("attention.head_count"),
    "ffn.size": integer("feed_forward_length"),
    "ffn.activation": const("gelu_tanh"),
    "layer.input_size": count("embedding_length_per_layer_input"),
    "layer.out_scale": has("blk.0.layer_output_scale.weight"),
}
_REFUSED = ("attn_logit_softcapping", "attention.scale", "embedding_scale", "logit_scale")

GGUF_FAMILIES = {
    "gemma4": Family(
        _GGUF_OUTER,
        _GGUF_LAYER,
        "blk.{}.",
        _GGUF_FACTS,
        windows="pattern",
        ropes={"sliding": "10000"},
        heads_by_layer=True,
        refuse=_REFUSED,
    ),
    "gemma4 of experts": Family(
        _GGUF_OUTER,
        _GGUF_LAYER
        | {
            "router": "ffn_gate_inp.weight",
            "router_norm": "ffn_gate_inp.scale",
            "expert_scales": "ffn_down_exps.scale",
            "experts_norm": "pre_ffw_norm_2.weight",
            "experts_post_norm": "post_ffw_norm_2.weight",
            "beside_post_norm": "post_ffw_norm_1.weight",
            "beside_gate": "ffn_gate.weight",
            "beside_up": "ffn_up.weight",
            "beside_down": "ffn_down.weight",
            "gate": "ffn_gate_up_exps.weight",
            "up": "ffn_gate_up_exps.weight",
            "down": "ffn_down_exps.weight",
        },
        "blk.{}.",
        _GGUF_FACTS
        | _OF_EXPERTS
        | {
            "ffn.num": integer("expert_count"),
            "ffn.per_token": integer("expert_used_count"),
            "ffn.size": integer("expert_feed_forward_length"),
            "beside.size": integer("feed_forward_length"),
            "beside.activation": const("gelu_tanh"),
        },
        windows="pattern",
        ropes={"sliding": "10000"},
        heads_by_layer=True,
        has_experts=True,
        lacks_root=("router_norm",),
        instead={"gate": "ffn_gate_exps.weight", "up": "ffn_up_exps.weight"},
        refuse=_REFUSED,
    ),
}
