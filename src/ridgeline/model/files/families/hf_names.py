"""Names and facts in Hugging Face's files that several rows share, and keys that mean nothing."""

from __future__ import annotations

from typing import Any

from ridgeline.model.files.families.fields import choice, const, flag, integer, number

PARTIAL = "partial_rotary_factor"
OUTER = {"embed": "model.embed_tokens.", "norm": "model.norm.", "head": "lm_head."}
LAYER = {
    "attn_norm": "input_layernorm.",
    "q": "self_attn.q_proj.",
    "k": "self_attn.k_proj.",
    "v": "self_attn.v_proj.",
    "o": "self_attn.o_proj.",
    "q_norm": "self_attn.q_norm.",
    "k_norm": "self_attn.k_norm.",
    "mlp_norm": "post_attention_layernorm.",
    "gate": "mlp.gate_proj.",
    "up": "mlp.up_proj.",
    "down": "mlp.down_proj.",
}
QKV_PROJ = {"q k v": "self_attn.qkv_proj."}
GATE_UP_PROJ = {"gate up": "mlp.gate_up_proj."}
AROUND = {  # norms
    "attn_post_norm": "post_attention_layernorm.",
    "mlp_norm": "pre_feedforward_layernorm.",
    "mlp_post_norm": "post_feedforward_layernorm.",
}
BEHIND = {
    "attn_post_norm": "post_attention_layernorm.",
    "mlp_post_norm": "post_feedforward_layernorm.",
}


def gated(module: str, part: str = "") -> dict[str, str]:
    """Return names of the matrices of an MLP with gates; ``part`` begins the canonical ones."""
    return {f"{part}{name}": f"{module}.{name}_proj." for name in ("gate", "up", "down")}


def numbered_matrices(module: str) -> dict[str, str]:
    """Return the same where matrices have numbers, as in Mixtral and LFM2."""
    return {"gate": f"{module}.w1.", "up": f"{module}.w3.", "down": f"{module}.w2."}


DENSE = gated("mlp")
EXPERTS = gated("mlp.experts.{e}") | {"router": "mlp.gate."}
BLOCK_OF_EXPERTS = numbered_matrices("block_sparse_moe.experts.{e}") | {
    "router": "block_sparse_moe.gate."
}
SHARED = gated("mlp.shared_expert", "shared_") | {"shared_scale": "mlp.shared_expert_gate."}
SSM = {
    "in": "in_proj.",
    "conv": "conv1d.",
    "dt_bias": "dt_bias",
    "a_log": "A_log",
    "skip": "D",
    "gated_scale": "norm.",
    "out": "out_proj.",
}
SILU = {"silu": "silu", "swish": "silu"}
ACTIVATIONS = SILU | {
    "gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
NO_LIMITS = [0.0, float("inf")]

TIED = {"tied_embeddings": flag("tie_word_embeddings", default=True)}
BIASES = {"mixer.qkv_bias": flag("attention_bias"), "mixer.o_bias": flag("attention_bias")}
MLP_BIAS = {"ffn.bias": flag("mlp_bias")}
ALL_BIASES = dict.fromkeys(("norm_bias", "mixer.qkv_bias", "mixer.o_bias", "ffn.bias"), const(True))
LAYER_NORM = {"norm": const("layer"), "norm_eps": number("layer_norm_eps", default=1e-5)}
HEAD_NORM = {"mixer.qk_norm": const("head")}
HEADS_OF_128 = {"mixer.head_dim": integer("head_dim", default=128)}
SPARSE = {
    "ffn.num": integer("num_experts", "num_local_experts"),
    "ffn.per_token": integer("num_experts_per_tok"),
    "ffn.normalised": flag("norm_topk_prob"),
}


def activation(*keys: str, default: str) -> dict[str, Any]:
    """Return the fact that a key names the activation, which is ``default`` where none is named."""
    return {"ffn.activation": choice(*keys, among=ACTIVATIONS, default=default)}


# Of models that also see or hear: what a config says of these halves and of their tokens.
OF_OTHER_HALVES = (
    "audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "boi_token_index",
    "eoa_token_id", "eoa_token_index", "eoi_token_id", "eoi_token_index", "image_token_id",
    "image_token_index", "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act",
    "spatial_merge_size", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_feature_layer", "vision_soft_tokens_per_image", "vision_start_token_id",
    "vision_token_id",
)  # fmt: skip
# Set or not, these change no answer: how a model was trained, saved or is usually sampled.
HARMLESS = frozenset((
    "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled", "_name_or_path",
    "_sliding_window_pattern", "activation_dropout", "architectures",
    "attention_bias", "attention_dropout", "attn_implementation", "attn_pdrop", "auto_map",
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "classifier_dropout", "classifier_dropout_prob",
    "cross_attention_hidden_size", "decoder_sparse_step", "decoder_start_token_id",
    "diversity_penalty", "do_layer_norm_before", "do_sample", "dropout", "dtype", "early_stopping",
    "embd_pdrop", "enable_bias", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "generation_config", "gradient_checkpointing", "head_dim",
    "hidden_dropout", "id2label", "init_std", "initializer_factor", "initializer_range",
    "is_composition", "is_decoder", "is_encoder_decoder", "is_llama_config", "label2id",
    "layer_norm_elementwise_affine", "layer_types", "layerdrop", "length_penalty", "max_length",
    "max_window_layers", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_key_value_heads", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "remove_invalid_values", "repetition_penalty", "resid_pdrop",
    "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise",
    "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache", "use_flash_attention", "use_flash_attn",
    "use_mrope",
))  # fmt: skip
# Of keys that a family does not read, the value with which they change nothing.
ONLY = {
    "add_cross_attention": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_causal": True,
    "lm_head_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "use_bias": False,
    "use_qk_norm": False,
    "use_rope": True,
    "use_sliding_window": False,
}
