"""Families with recurrent layers in Hugging Face's files. Literal tables."""

from __future__ import annotations

from ridgeline.models.families.table import Family, adjusted, choice, const, flag, integer, number

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
        | {
            "router": "mlp.gate.weight",
            "gate": "mlp.experts.{e}.gate_proj.weight",
            "up": "mlp.experts.{e}.up_proj.weight",
            "down": "mlp.experts.{e}.down_proj.weight",
            "shared_gate": "mlp.shared_expert.gate_proj.weight",
            "shared_up": "mlp.shared_expert.up_proj.weight",
            "shared_down": "mlp.shared_expert.down_proj.weight",
            "shared_scale": "mlp.shared_expert_gate.weight",
        },
        _PREFIX,
        _QWEN
        | {
            "ffn.num": integer("num_experts"),
            "ffn.per_token": integer("num_experts_per_tok"),
            "ffn.normalised": flag("norm_topk_prob", default=True),
            "ffn.size": integer("moe_intermediate_size"),
            "ffn.shared_gated": const(True),
            "shared.size": integer("shared_expert_intermediate_size"),
        },
        recurrent="delta",
        has_experts=True,
        attention_layers="full_attention_interval",
        pattern=4,
        norm_offset=1.0,
        defaults={"partial_rotary_factor": 0.25},
        others=("mtp.",),
        refuse=("attention_bias", "mlp_only_layers"),
        unused=("full_attention_interval", "intermediate_size"),  # of layers without experts
        must={"decoder_sparse_step": 1},
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
        defaults={"partial_rotary_factor": 0.25},
        others=("mtp.",),
        refuse=("attention_bias", "mlp_only_layers"),
        unused=(
            "full_attention_interval", "mamba_ssm_dtype", "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
        ),
        must={"attn_output_gate": True},
    ),
}  # fmt: skip
FAMILIES["Qwen3_5ForConditionalGeneration"] = FAMILIES["Qwen3_5ForCausalLM"]
