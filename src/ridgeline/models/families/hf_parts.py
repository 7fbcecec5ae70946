"""Names and facts that several families in Hugging Face's files share."""

from __future__ import annotations

from ridgeline.models.families.table import (
    choice,
    const,
    flag,
    integer,
    inverse,
    number,
    power,
)

PARTIAL = ("partial_rotary_factor",)
PREFIX = "model.layers.{}."
OUTER = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "norm_bias": "model.norm.bias",
    "head": "lm_head.weight",
    "head_bias": "lm_head.bias",
}
LAYER = {
    "attn_norm": "input_layernorm.weight",
    "attn_norm_bias": "input_layernorm.bias",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_norm_bias": "post_attention_layernorm.bias",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
FUSED = LAYER | {
    "q": "self_attn.qkv_proj.weight",
    "k": "self_attn.qkv_proj.weight",
    "v": "self_attn.qkv_proj.weight",
    "gate": "mlp.gate_up_proj.weight",
    "up": "mlp.gate_up_proj.weight",
}
AROUND = LAYER | {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
EXPERTS = LAYER | {
    "router": "mlp.gate.weight",
    "gate": "mlp.experts.{e}.gate_proj.weight",
    "up": "mlp.experts.{e}.up_proj.weight",
    "down": "mlp.experts.{e}.down_proj.weight",
}
DENSE_NAMES = {name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
SILU = {"silu": "silu", "swish": "silu"}
ACTIVATIONS = SILU | {
    "gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
MODEL = {
    "hidden_size": integer("hidden_size"),
    "vocab_size": integer("vocab_size"),
    "norm_eps": number("rms_norm_eps"),
    "tied_embeddings": flag("tie_word_embeddings"),
    "mixer.num_heads": integer("num_attention_heads"),
    "ffn.size": integer("intermediate_size"),
    "ffn.activation": choice("hidden_act", among=SILU, default="silu"),
}
BIASES = {"mixer.qkv_bias": flag("attention_bias"), "mixer.o_bias": flag("attention_bias")}
MLP_BIAS = {"ffn.bias": flag("mlp_bias")}
LAYER_NORM = {"norm": const("layer"), "norm_eps": number("layer_norm_eps", default=1e-5)}
GEMMA_1 = {
    "embed_scale": power("hidden_size", 0.5),
    "tied_embeddings": flag("tie_word_embeddings", default=True),
    "mixer.head_dim": integer("head_dim", default=256),
    # The first configs say "gelu" alone, and mean the approximation, as Google's own code has it.
    "ffn.activation": choice(
        "hidden_act",
        "hidden_activation",
        among={**ACTIVATIONS, "gelu": "gelu_tanh"},
        default="gelu_pytorch_tanh",
    ),
}
GEMMA = GEMMA_1 | {
    "layer.norms": const("around"),
    "mixer.scale": power("query_pre_attn_scalar", -0.5, 256),
    "ffn.activation": choice("hidden_activation", among=ACTIVATIONS, default="gelu_pytorch_tanh"),
}
SCALES = {
    "embed_scale": number("embedding_multiplier", default=1.0),
    "residual_scale": number("residual_multiplier", default=1.0),
    "logit_scale": inverse("logits_scaling", 1.0),
    "mixer.scale": number("attention_multiplier", default=1.0),
}
SPARSE = {
    "ffn.num": integer("num_experts", "num_local_experts"),
    "ffn.per_token": integer("num_experts_per_tok"),
    "ffn.normalised": flag("norm_topk_prob"),
}
DENSE = {"dense.size": integer("intermediate_size")}  # of layers without experts
SHARED = {
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_scale": "mlp.shared_expert_gate.weight",
}
SHARED_FACTS = {
    "ffn.shared_gated": const(True),
    "shared.size": integer("shared_expert_intermediate_size"),
}
GPT_OSS = {
    "mixer.sinks": const(True),
    "ffn.bias": const(True),
    "ffn.activation": const("swiglu_clamped"),
}

QWEN3 = {"mixer.qk_norm": const("head"), "mixer.head_dim": integer("head_dim", default=128)}
OLMO = {"layer.norms": const("behind"), "mixer.qk_norm": const("width")}
OLMO_NAMES = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
SPARSE_BLOCK = {  # experts as Mixtral names them
    "router": "block_sparse_moe.gate.weight",
    "gate": "block_sparse_moe.experts.{e}.w1.weight",
    "up": "block_sparse_moe.experts.{e}.w3.weight",
    "down": "block_sparse_moe.experts.{e}.w2.weight",
}
# Of models that also see or hear: what a config says of these halves and of their tokens.
OF_OTHER_HALVES = (
    "audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "boi_token_index",
    "eoa_token_id", "eoa_token_index", "eoi_token_id", "eoi_token_index", "image_token_id",
    "image_token_index", "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act",
    "spatial_merge_size", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_feature_layer", "vision_soft_tokens_per_image", "vision_start_token_id",
    "vision_token_id",
)  # fmt: skip
