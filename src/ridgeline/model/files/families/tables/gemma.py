"""Gemma, from the first to the fourth. Literal tables."""

from __future__ import annotations

from ridgeline.model.files.families.fields import (
    cap,
    choice,
    const,
    count,
    has,
    integer,
    number,
    optional,
    power,
)
from ridgeline.model.files.families.hf_names import (
    ACTIVATIONS,
    AROUND,
    BIASES,
    HEAD_NORM,
    TIED,
    activation,
    gated,
)
from ridgeline.model.files.families.inherit import row

_ACTIVATION = activation("hidden_activation", default="gelu_pytorch_tanh")
ROWS = (
    row(
        "gemma",
        hf="GemmaForCausalLM",
        gguf="gemma",
        facts=BIASES
        | TIED
        | {
            "embed_scale": power("hidden_size", exponent=0.5),
            "mixer.head_dim": integer("head_dim", default=256),
            # The first configs say "gelu" alone, and mean the approximation, as Google's code does.
            "ffn.activation": choice(
                "hidden_act",
                "hidden_activation",
                among=ACTIVATIONS | {"gelu": "gelu_tanh"},
                default="gelu_pytorch_tanh",
            ),
        },
        norm_offset=1.0,
        ignored_keys="hidden_activation",  # beside hidden_act
        refused_keys="use_bidirectional_attention",
        in_gguf={"facts": {"embed_scale": power("embedding_length", exponent=0.5)}},
    ),
    row(
        "gemma2",
        like="gemma",
        hf="Gemma2ForCausalLM",
        gguf="gemma2",
        layer=AROUND,
        facts=_ACTIVATION
        | {
            "logit_softcap": cap("final_logit_softcapping", default=30.0),
            "layer.norms": "around",
            "mixer.scale": power("query_pre_attn_scalar", exponent=-0.5, default=256),
            "mixer.softcap": cap("attn_logit_softcapping", default=50.0),
        },
        windows="pattern",
        default_window=4096,
        pattern=2,
        ignored_keys="hidden_act sliding_window_size",  # other keys say it
        in_gguf={
            "facts": {
                "logit_softcap": number("final_logit_softcapping", default=30.0),
                "mixer.softcap": number("attn_logit_softcapping", default=50.0),
            },
            "wide_scale_layers": (46,),
        },
    ),
    row(  # Gemma 2 without norms behind
        "vaultgemma",
        like="gemma2",
        hf="VaultGemmaForCausalLM",
        facts={"layer.norms": "before"},
    ),
    row(
        "gemma3",
        like="gemma2",
        types="gemma3_text",
        hf="Gemma3ForCausalLM, Gemma3ForConditionalGeneration",
        gguf="gemma3",
        facts=HEAD_NORM | {"logit_softcap": None, "mixer.softcap": None},
        pattern=6,
        ropes={"sliding": "rope_local_base_freq"},
        defaults={"rope_theta": 1e6},
        refused_keys="attn_logit_softcapping final_logit_softcapping",
        text_defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 1e4,
        },
        in_gguf={
            "facts": {"logit_softcap": None, "mixer.softcap": None},
            "ropes": {"sliding": "10000"},
            "wide_scale_layers": (62,),
        },
    ),
    row(  # an input per layer, keys and values of other layers (E2B, E4B), keys that are values
        "gemma4",
        types="gemma4_text",
        hf="Gemma4ForCausalLM, Gemma4ForConditionalGeneration",
        gguf="gemma4",
        outer={
            "inputs": "model.embed_tokens_per_layer.",
            "inputs_proj": "model.per_layer_model_projection.",
            "inputs_norm": "model.per_layer_projection_norm.",
        },
        layer=AROUND
        | {
            "input_gate": "per_layer_input_gate.",
            "input_proj": "per_layer_projection.",
            "input_post_norm": "post_per_layer_input_norm.",
            "out_scale": "layer_scalar",
        },
        facts=BIASES
        | TIED
        | HEAD_NORM
        | _ACTIVATION
        | {
            "norm_eps": number("rms_norm_eps", default=1e-6),
            "embed_scale": power("hidden_size", exponent=0.5),
            "logit_softcap": optional("final_logit_softcapping"),
            "layer.norms": const("around"),
            "layer.input_size": count("hidden_size_per_layer_input"),
            "layer.out_scale": const(True),
            "mixer.head_dim": integer("head_dim", default=256),
            "mixer.v_norm": const(True),
            "mixer.scale": const(1.0),
        },
        windows="pattern",
        default_window=512,
        pattern=6,
        heads_by_layer=True,
        defaults={
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
        },
        ignored_keys="num_experts top_k_experts moe_intermediate_size",
        # Pictures alone see what follows them: a text is causal.
        required={"use_bidirectional_attention": "vision", "enable_moe_block": False},
        in_gguf={
            "facts": {
                "embed_scale": power("embedding_length", exponent=0.5),
                "logit_softcap": optional("final_logit_softcapping"),
                "layer.out_scale": has("layer_output_scale.weight"),
            },
            "pattern": 0,
            "ropes": {"sliding": "10000"},
        },
    ),
    row(  # 12B
        "gemma4_unified",
        like="gemma4",
        types="gemma4_unified_text",
        hf="Gemma4UnifiedForCausalLM, Gemma4UnifiedForConditionalGeneration",
        default_window=1024,
        defaults={"hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144},
    ),
    row(  # 26B-A4B: experts beside a dense network
        "gemma4 of experts",
        like="gemma4",
        hf="Gemma4ForCausalLM of experts, Gemma4ForConditionalGeneration of experts",
        gguf="gemma4 of experts",
        layer={
            "router": "router.proj.",
            "router_norm": "router.scale",
            "expert_scales": "router.per_expert_scale",
            "experts_norm": "pre_feedforward_layernorm_2.",
            "experts_post_norm": "post_feedforward_layernorm_2.",
            "beside_post_norm": "post_feedforward_layernorm_1.",
            **gated("mlp", "beside_"),
            "gate up": "experts.gate_up_proj",
            "down": "experts.down_proj",
        },
        facts={
            "ffn.num": integer("num_experts"),
            "ffn.per_token": integer("top_k_experts"),
            "ffn.size": integer("moe_intermediate_size"),
            "ffn.own_scales": const(True),
            "beside.size": integer("intermediate_size"),
            "beside.activation": _ACTIVATION["ffn.activation"],
        },
        has_experts=True,
        scaled_by_sqrt_hidden="router_norm",
        required={"enable_moe_block": True},
        in_gguf={
            "layer": {
                "router_norm": "ffn_gate_inp.scale",
                "expert_scales": "ffn_down_exps.scale",
                "experts_norm": "pre_ffw_norm_2.",
                "experts_post_norm": "post_ffw_norm_2.",
                "beside_post_norm": "post_ffw_norm_1.",
                "beside_gate": "ffn_gate.",
                "beside_up": "ffn_up.",
                "beside_down": "ffn_down.",
                "gate up": "ffn_gate_up_exps.",
            },
            "alternatives": {"gate": "ffn_gate_exps.", "up": "ffn_up_exps."},
        },
    ),
)
