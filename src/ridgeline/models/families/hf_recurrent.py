"""Families with recurrent layers in Hugging Face's files. Literal tables."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.families.hf_parts import (
    BIASES,
    DENSE,
    DENSE_NAMES,
    LAYER,
    MODEL,
    OUTER,
    PARTIAL,
    SCALES,
    SHARED,
    SHARED_FACTS,
)
from ridgeline.models.families.table import (
    Family,
    adjusted,
    choice,
    const,
    flag,
    integer,
    number,
    numbers,
)

NO_LIMITS = [0.0, float("inf")]
_PREFIX = "model.layers.{}."
_LFM2_OUTER = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.embedding_norm.weight",
    "head": "lm_head.weight",
}
_LFM2_LAYER = {
    "attn_norm": "operator_norm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.out_proj.weight",
    "q_norm": "self_attn.q_layernorm.weight",
    "k_norm": "self_attn.k_layernorm.weight",
    "in": "conv.in_proj.weight",
    "in_bias": "conv.in_proj.bias",
    "conv": "conv.conv.weight",
    "conv_bias": "conv.conv.bias",
    "out": "conv.out_proj.weight",
    "out_bias": "conv.out_proj.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate": "feed_forward.w1.weight",
    "up": "feed_forward.w3.weight",
    "down": "feed_forward.w2.weight",
}

_QWEN_OUTER = _LFM2_OUTER | {"norm": "model.norm.weight"}
_QWEN_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "q_gate": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "qkv": "linear_attn.in_proj_qkv.weight",
    "z": "linear_attn.in_proj_z.weight",
    "beta": "linear_attn.in_proj_b.weight",
    "decay": "linear_attn.in_proj_a.weight",
    "conv": "linear_attn.conv1d.weight",
    "dt_bias": "linear_attn.dt_bias",
    "a_log": "linear_attn.A_log",
    "gated_scale": "linear_attn.norm.weight",
    "out": "linear_attn.out_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_QWEN = {
    "hidden_size": integer("hidden_size"),
    "vocab_size": integer("vocab_size"),
    "norm_eps": number("rms_norm_eps"),
    "tied_embeddings": flag("tie_word_embeddings"),
    "mixer.num_heads": integer("num_attention_heads"),
    "mixer.head_dim": integer("head_dim", default=256),
    "mixer.qk_norm": const("head"),
    "mixer.gated": const(True),
    "recurrent.num_key_heads": integer("linear_num_key_heads", default=16),
    "recurrent.num_value_heads": integer("linear_num_value_heads", default=32),
    "recurrent.key_dim": integer("linear_key_head_dim", default=128),
    "recurrent.value_dim": integer("linear_value_head_dim", default=128),
    "recurrent.kernel": integer("linear_conv_kernel_dim", default=4),
    "ffn.activation": choice("hidden_act", among={"silu": "silu"}, default="silu"),
}

_QWEN_UNUSED = (
    "full_attention_interval",
    "mamba_ssm_dtype",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
)
_QWEN_MUST = {"attn_output_gate": True, "output_gate_type": "swish"}
_QWEN_EXPERTS = {
    "router": "mlp.gate.weight",
    "gate": "mlp.experts.{e}.gate_proj.weight",
    "up": "mlp.experts.{e}.up_proj.weight",
    "down": "mlp.experts.{e}.down_proj.weight",
    **SHARED,
}
_QWEN_SPARSE = {
    "ffn.num": integer("num_experts"),
    "ffn.per_token": integer("num_experts_per_tok"),
    "ffn.normalised": flag("norm_topk_prob", default=True),
    "ffn.size": integer("moe_intermediate_size"),
    **SHARED_FACTS,
}
_MAMBA = {
    "recurrent.num_heads": integer("num_heads"),
    "recurrent.head_dim": integer("head_dim"),
    "recurrent.state_dim": integer("state_size"),
    "recurrent.num_groups": integer("n_groups"),
    "recurrent.kernel": integer("conv_kernel"),
    "recurrent.conv_bias": flag("use_conv_bias", default=True),
    "recurrent.bias": flag("use_bias"),
}
_MAMBA_OF_HYBRID = {
    "recurrent.num_heads": integer("mamba_n_heads"),
    "recurrent.head_dim": integer("mamba_d_head"),
    "recurrent.state_dim": integer("mamba_d_state"),
    "recurrent.num_groups": integer("mamba_n_groups"),
    "recurrent.kernel": integer("mamba_d_conv"),
    "recurrent.conv_bias": flag("mamba_conv_bias", default=True),
}
SSM_LAYER = {
    "in": "in_proj.weight",
    "in_bias": "in_proj.bias",
    "conv": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "dt_bias": "dt_bias",
    "a_log": "A_log",
    "skip": "D",
    "gated_scale": "norm.weight",
    "out": "out_proj.weight",
    "out_bias": "out_proj.bias",
}
_SSM_OF_HYBRID = {n: f"mamba.{name}" for n, name in SSM_LAYER.items()}
_HYBRID = MODEL | BIASES | _MAMBA_OF_HYBRID | {"recurrent.bias": flag("mamba_proj_bias")}
_GRANITE = {
    "rope.turns": choice(
        "position_embedding_type", among={"rope": True, "nope": False}, default="nope"
    ),
    "ffn.size": integer("shared_intermediate_size"),
}

FAMILIES = {
    "Lfm2ForCausalLM": Family(
        _LFM2_OUTER,
        _LFM2_LAYER,
        _PREFIX,
        {
            "hidden_size": integer("hidden_size"),
            "vocab_size": integer("vocab_size"),
            "norm_eps": number("norm_eps", default=1e-5),
            "tied_embeddings": flag("tie_embedding", "tie_word_embeddings", default=True),
            "mixer.num_heads": integer("num_attention_heads"),
            "mixer.qk_norm": const("head"),
            "recurrent.kernel": integer("conv_L_cache", default=3),
            "recurrent.bias": flag("conv_bias"),
            "ffn.size": adjusted("block_ff_dim", "intermediate_size"),
        },
        recurrent="conv",
        attention_layers="full_attn_idxs",
        pattern=1,
        unused=(  # other keys say it, or it was for training
            "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
            "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init",
            "intermediate_size", "num_heads", "theta", "tie_word_embeddings",
        ),
        must={"block_use_swiglu": True, "use_pos_enc": True},
    ),
    "Qwen3NextForCausalLM": Family(
        _QWEN_OUTER,
        _QWEN_LAYER
        | dict.fromkeys(("qkv", "z"), "linear_attn.in_proj_qkvz.weight")
        | dict.fromkeys(("beta", "decay"), "linear_attn.in_proj_ba.weight")
        | _QWEN_EXPERTS,
        _PREFIX,
        _QWEN | _QWEN_SPARSE | DENSE,
        recurrent="delta",
        has_experts=True,
        attention_layers="full_attention_interval",
        pattern=4,
        norm_offset=1.0,
        rope_keys=PARTIAL,
        defaults={"partial_rotary_factor": 0.25},
        others=("mtp.",),
        refuse=("attention_bias",),
        instead=DENSE_NAMES,
        dense_layers="mlp_only_layers",
        experts_every="decoder_sparse_step",
        unused=("full_attention_interval", "intermediate_size"),  # where all layers have experts
    ),
    "Qwen3_5MoeForCausalLM": Family(
        _QWEN_OUTER,
        _QWEN_LAYER | _QWEN_EXPERTS,
        _PREFIX,
        _QWEN | _QWEN_SPARSE,
        recurrent="delta",
        has_experts=True,
        instead={
            "gate": "mlp.experts.gate_up_proj",
            "up": "mlp.experts.gate_up_proj",
            "down": "mlp.experts.down_proj",
        },
        attention_layers="full_attention_interval",
        pattern=4,
        norm_offset=1.0,
        rope_keys=PARTIAL,
        defaults={"partial_rotary_factor": 0.25},
        others=("mtp.",),
        refuse=("attention_bias", "mlp_only_layers"),
        unused=_QWEN_UNUSED,
        must=_QWEN_MUST | {"norm_topk_prob": True},
    ),
    "Qwen3_5ForCausalLM": Family(
        _QWEN_OUTER,
        _QWEN_LAYER,
        _PREFIX,
        _QWEN | {"ffn.size": integer("intermediate_size")},
        recurrent="delta",
        attention_layers="full_attention_interval",
        pattern=4,
        norm_offset=1.0,
        rope_keys=PARTIAL,
        defaults={"partial_rotary_factor": 0.25},
        others=("mtp.",),
        refuse=("attention_bias", "mlp_only_layers"),
        unused=_QWEN_UNUSED,
        must=_QWEN_MUST,
    ),
    "FalconH1ForCausalLM": Family(
        _LFM2_OUTER | {"norm": "model.final_layernorm.weight"},
        {
            "attn_norm": "input_layernorm.weight",
            "q": "self_attn.q_proj.weight",
            "k": "self_attn.k_proj.weight",
            "v": "self_attn.v_proj.weight",
            "o": "self_attn.o_proj.weight",
            "mlp_norm": "pre_ff_layernorm.weight",
            "gate": "feed_forward.gate_proj.weight",
            "up": "feed_forward.up_proj.weight",
            "down": "feed_forward.down_proj.weight",
        }
        | _SSM_OF_HYBRID,
        _PREFIX,
        {
            "hidden_size": integer("hidden_size"),
            "vocab_size": integer("vocab_size"),
            "norm_eps": number("rms_norm_eps", default=1e-5),
            "tied_embeddings": flag("tie_word_embeddings"),
            "embed_scale": number("embedding_multiplier", default=1.0),
            "logit_scale": number("lm_head_multiplier", default=1.0),
            "mixer.num_heads": integer("num_attention_heads"),
            "mixer.key_scale": number("key_multiplier", default=1.0),
            "mixer.in_scale": number("attention_in_multiplier", default=1.0),
            "mixer.out_scale": number("attention_out_multiplier", default=1.0),
            "recurrent.gated_norm": flag("mamba_rms_norm"),
            "recurrent.norm_first": flag("mamba_norm_before_gate", default=True),
            "recurrent.in_scale": number("ssm_in_multiplier", default=1.0),
            "recurrent.out_scale": number("ssm_out_multiplier", default=1.0),
            "recurrent.part_scales": numbers("ssm_multipliers", default=(1.0,) * 5),
            "ffn.size": integer("intermediate_size"),
            "ffn.bias": flag("mlp_bias"),
            "ffn.activation": choice("hidden_act", among={"silu": "silu"}, default="silu"),
            "scales.ffn": numbers("mlp_multipliers", default=(1.0, 1.0)),
        }
        | _MAMBA_OF_HYBRID,
        recurrent="ssm",
        beside=True,
        refuse=("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"),
        unused=(  # other keys say it, or how a prompt is computed
            "mamba_chunk_size", "mamba_d_ssm", "mamba_expand", "num_logits_to_keep",
            "attn_layer_indices",
        ),
        must={"time_step_limit": NO_LIMITS, "mamba_use_mlp": True},
    ),
    "GraniteMoeHybridForCausalLM": Family(
        OUTER,
        LAYER
        | _SSM_OF_HYBRID
        | {
            "gate": "shared_mlp.input_linear.weight",
            "up": "shared_mlp.input_linear.weight",
            "down": "shared_mlp.output_linear.weight",
        },
        _PREFIX,
        _HYBRID | SCALES | _GRANITE,
        recurrent="ssm",
        aliases={"layers_block_type": "layer_types"},
        attention_layers="attn_layer_indices",
        unused=(  # how a prompt is computed, other keys say it, or there is no such part
            "init_method", "intermediate_size", "mamba_chunk_size", "mamba_conv_bias",
            "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand", "mamba_n_groups",
            "mamba_n_heads", "num_experts_per_tok",
        ),
        must={"normalization_function": "rmsnorm", "time_step_limit": NO_LIMITS},
    ),
    "BambaForCausalLM": Family(
        OUTER | {"norm": "model.final_layernorm.weight"},
        LAYER
        | _SSM_OF_HYBRID
        | {
            "mlp_norm": "pre_ff_layernorm.weight",
            "gate": "feed_forward.gate_proj.weight",
            "up": "feed_forward.up_proj.weight",
            "down": "feed_forward.down_proj.weight",
        },
        _PREFIX,
        _HYBRID | {"ffn.bias": flag("mlp_bias")},
        recurrent="ssm",
        attention_layers="attn_layer_indices",
        rope_keys=PARTIAL,
        defaults={"partial_rotary_factor": 0.5},
        refuse=("mlp_bias",),
        unused=(  # how a prompt is computed, for training, or other keys say it
            "attn_rotary_emb", "mamba_chunk_size", "mamba_expand", "num_logits_to_keep",
            "z_loss_coefficient",
        ),
        must={"time_step_limit": NO_LIMITS},
    ),
    "Mamba2ForCausalLM": Family(
        {
            "embed": "backbone.embeddings.weight",
            "norm": "backbone.norm_f.weight",
            "head": "lm_head.weight",
        },
        {"attn_norm": "norm.weight"} | {n: f"mixer.{name}" for n, name in SSM_LAYER.items()},
        "backbone.layers.{}.",
        {
            "hidden_size": integer("hidden_size"),
            "vocab_size": integer("vocab_size"),
            "norm_eps": number("layer_norm_epsilon", default=1e-5),
            "tied_embeddings": flag("tie_word_embeddings"),
            "ffn.size": const(0),
            "ffn.activation": choice("hidden_act", among={"silu": "silu"}, default="silu"),
        }
        | _MAMBA,
        recurrent="ssm",
        unused=(  # for training, or other keys say it
            "chunk_size", "expand", "intermediate_size", "norm_before_gate", "residual_in_fp32",
            "rescale_prenorm_residual", "rms_norm", "time_step_floor", "time_step_init_scheme",
            "time_step_max", "time_step_min", "time_step_rank", "time_step_scale",
        ),
        must={"time_step_limit": NO_LIMITS},
    ),
}  # fmt: skip
_LFM2 = FAMILIES["Lfm2ForCausalLM"]
FAMILIES["Lfm2MoeForCausalLM"] = replace(
    _LFM2,
    layer=_LFM2_LAYER
    | {
        "router": "feed_forward.gate.weight",
        "choice_bias": "feed_forward.expert_bias",
        "gate": "feed_forward.experts.{e}.w1.weight",
        "up": "feed_forward.experts.{e}.w3.weight",
        "down": "feed_forward.experts.{e}.w2.weight",
    },
    facts={
        **_LFM2.facts,
        **DENSE,
        "ffn.num": integer("num_experts"),
        "ffn.per_token": integer("num_experts_per_tok"),
        "ffn.size": integer("moe_intermediate_size"),
        "ffn.router": const("sigmoid"),
        "ffn.choice_bias": flag("use_expert_bias", default=True),
        "ffn.normalised": flag("norm_topk_prob", default=True),
        "ffn.scale": number("routed_scaling_factor", default=1.0),
    },
    has_experts=True,
    instead={name: _LFM2_LAYER[name] for name in ("gate", "up", "down")},
    dense_layers="num_dense_layers",
    unused=(
        *_LFM2.unused,
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
    ),
)
_GRANITE_HYBRID = FAMILIES["GraniteMoeHybridForCausalLM"]
FAMILIES["GraniteMoeHybridForCausalLM of experts"] = replace(
    _GRANITE_HYBRID,
    layer={
        **_GRANITE_HYBRID.layer,
        "router": "block_sparse_moe.router.layer.weight",
        "gate": "block_sparse_moe.input_linear.weight",
        "up": "block_sparse_moe.input_linear.weight",
        "down": "block_sparse_moe.output_linear.weight",
        **{f"shared_{name}": _GRANITE_HYBRID.layer[name] for name in ("gate", "up", "down")},
    },
    facts={
        **_GRANITE_HYBRID.facts,
        "ffn.num": integer("num_local_experts"),
        "ffn.per_token": integer("num_experts_per_tok"),
        "ffn.size": integer("intermediate_size"),
        "shared.size": integer("shared_intermediate_size"),
    },
    has_experts=True,
)
FAMILIES["Qwen3_5ForConditionalGeneration"] = FAMILIES["Qwen3_5ForCausalLM"]
FAMILIES["Qwen3_5MoeForConditionalGeneration"] = FAMILIES["Qwen3_5MoeForCausalLM"]
