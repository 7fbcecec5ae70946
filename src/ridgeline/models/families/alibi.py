"""Families whose scores lose by distance (ALiBi), of both kinds of files. Literal tables."""

from __future__ import annotations

from ridgeline.models.families.gguf_names import LAYER, OUTER, PREFIX
from ridgeline.models.families.table import (
    Family,
    const,
    flag,
    has,
    integer,
    number,
    product,
    slopes,
)

_SIZES = {
    "hidden_size": integer("hidden_size"),
    "vocab_size": integer("vocab_size"),
    "norm_eps": number("layer_norm_epsilon", default=1e-5),
    "tied_embeddings": flag("tie_word_embeddings", default=True),
    "mixer.num_heads": integer("num_attention_heads"),
    "ffn.size": integer("intermediate_size", times_hidden=4),
}
_MPT = {
    "norm": const("layer"),
    "ffn.gated": const(False),
    "ffn.activation": const("gelu"),
}

_BLOOM = {
    "norm": const("layer"),
    "norm_bias": const(True),
    "embed_norm": const(True),
    "mixer.qkv_bias": const(True),
    "mixer.o_bias": const(True),
    "ffn.gated": const(False),
    "ffn.bias": const(True),
    "ffn.activation": const("gelu_tanh"),
}

FAMILIES = {
    "BloomForCausalLM": Family(
        {
            "embed": "transformer.word_embeddings.weight",
            "embedding_norm": "transformer.word_embeddings_layernorm.weight",
            "embedding_norm_bias": "transformer.word_embeddings_layernorm.bias",
            "norm": "transformer.ln_f.weight",
            "norm_bias": "transformer.ln_f.bias",
            "head": "lm_head.weight",
        },
        dict.fromkeys("qkv", "self_attention.query_key_value.weight")
        | dict.fromkeys(("q_bias", "k_bias", "v_bias"), "self_attention.query_key_value.bias")
        | {
            "attn_norm": "input_layernorm.weight",
            "attn_norm_bias": "input_layernorm.bias",
            "o": "self_attention.dense.weight",
            "o_bias": "self_attention.dense.bias",
            "mlp_norm": "post_attention_layernorm.weight",
            "mlp_norm_bias": "post_attention_layernorm.bias",
            "up": "mlp.dense_h_to_4h.weight",
            "up_bias": "mlp.dense_h_to_4h.bias",
            "down": "mlp.dense_4h_to_h.weight",
            "down_bias": "mlp.dense_4h_to_h.bias",
        },
        "transformer.h.{}.",
        _SIZES | _BLOOM | {"mixer.slopes": slopes("num_attention_heads", "alibi_bias_max")},
        ropes={"full": "none"},
        heads_inside=True,
        defaults={"max_position_embeddings": 2048},
        aliases={
            "n_embed": "hidden_size",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers",
            "seq_length": "max_position_embeddings",
        },
        unused=(  # of kernels, for training, or how several machines added up
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "skip_bias_add",
            "skip_bias_add_qkv",
            "slow_but_exact",
            "unk_token_id",
        ),
        must={"apply_residual_connection_post_layernorm": False},
    ),
    "MptForCausalLM": Family(
        {
            "embed": "transformer.wte.weight",
            "norm": "transformer.norm_f.weight",
            "head": "lm_head.weight",
        },
        dict.fromkeys("qkv", "attn.Wqkv.weight")
        | {
            "attn_norm": "norm_1.weight",
            "o": "attn.out_proj.weight",
            "mlp_norm": "norm_2.weight",
            "up": "ffn.up_proj.weight",
            "down": "ffn.down_proj.weight",
        },
        "transformer.blocks.{}.",
        _SIZES
        | _MPT
        | {
            "mixer.slopes": slopes("num_attention_heads", "attn_config.alibi_bias_max"),
            "ffn.size": product("expansion_ratio", "hidden_size"),
        },
        ropes={"full": "none"},
        aliases={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
        },
        defaults={"expansion_ratio": 4},
        refuse=(
            "attn_config.attn_uses_sequence_id",
            "attn_config.clip_qkv",
            "attn_config.prefix_lm",
            "attn_config.qk_ln",
            "attn_config.softmax_scale",
            "logit_scale",
        ),
        unused=(  # for training, or of kernels
            "attn_config.attn_impl",
            "attn_config.attn_pdrop",
            "attn_config.model_type",
            "emb_pdrop",
            "embedding_fraction",
            "init_config",
            "init_device",
            "learned_pos_emb",
            "name",
            "norm_type",
            "tokenizer_name",
            "verbose",
        ),
        must={
            "attn_config.alibi": True,
            "attn_config.attn_type": "multihead_attention",
            "expansion_ratio": 4,
            "no_bias": True,
        },
    ),
}
FAMILIES["MPTForCausalLM"] = FAMILIES["MptForCausalLM"]  # as its first files say
GGUF_FAMILIES = {
    "bloom": Family(
        OUTER
        | {
            "embedding_norm": "token_embd_norm.weight",
            "embedding_norm_bias": "token_embd_norm.bias",
            "norm_bias": "output_norm.bias",
        },
        LAYER
        | dict.fromkeys("qkv", "attn_qkv.weight")
        | dict.fromkeys(("q_bias", "k_bias", "v_bias"), "attn_qkv.bias")
        | {
            "attn_norm_bias": "attn_norm.bias",
            "mlp_norm_bias": "ffn_norm.bias",
            "up_bias": "ffn_up.bias",
            "down_bias": "ffn_down.bias",
        },
        PREFIX,
        _BLOOM
        | {
            "hidden_size": integer("embedding_length"),
            "norm_eps": number("attention.layer_norm_epsilon"),
            "mixer.num_heads": integer("attention.head_count"),
            "mixer.slopes": slopes("attention.head_count", "attention.max_alibi_bias"),
            "ffn.size": integer("feed_forward_length"),
        },
        ropes={"full": "none"},
    ),
    "mpt": Family(
        OUTER,
        LAYER | dict.fromkeys("qkv", "attn_qkv.weight"),
        PREFIX,
        _MPT
        | {
            "hidden_size": integer("embedding_length"),
            "norm_eps": number("attention.layer_norm_epsilon"),
            "mixer.num_heads": integer("attention.head_count"),
            "mixer.slopes": slopes("attention.head_count", "attention.max_alibi_bias"),
            "mixer.qkv_bias": has("blk.0.attn_qkv.bias"),
            "ffn.size": integer("feed_forward_length"),
        },
        ropes={"full": "none"},
        refuse=("attention.clamp_kqv",),
    ),
}
