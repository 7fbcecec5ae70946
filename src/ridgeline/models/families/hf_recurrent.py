"""Families with recurrent layers in Hugging Face's files. Literal tables."""

from __future__ import annotations

from ridgeline.models.families.table import Family, adjusted, const, flag, integer, number

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
        unused=(  # other keys say it, or it was for training
            "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
            "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init",
            "full_attn_idxs", "intermediate_size", "num_heads", "theta", "tie_word_embeddings",
        ),
        must={"block_use_swiglu": True, "use_pos_enc": True},
    ),
}  # fmt: skip
