"""Families in Hugging Face's files, by the name in ``architectures``. Literal tables."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.families.hf_moe import FAMILIES as OF_EXPERTS
from ridgeline.models.families.hf_parts import (
    ACTIVATIONS,
    AROUND,
    BIASES,
    FUSED,
    GEMMA,
    GEMMA_1,
    LAYER,
    LAYER_NORM,
    MLP_BIAS,
    MODEL,
    OF_OTHER_HALVES,
    OLMO,
    OLMO_NAMES,
    OUTER,
    PARTIAL,
    PREFIX,
    QWEN3,
    SCALES,
)
from ridgeline.models.families.hf_recurrent import FAMILIES as RECURRENT
from ridgeline.models.families.table import (
    Family,
    cap,
    choice,
    const,
    either,
    flag,
    integer,
    number,
    numbered,
    same,
)

_FALCON = Family(
    {
        "embed": "transformer.word_embeddings.weight",
        "norm": "transformer.ln_f.weight",
        "norm_bias": "transformer.ln_f.bias",
        "head": "lm_head.weight",
    },
    LAYER
    | dict.fromkeys("qkv", "self_attention.query_key_value.weight")
    | dict.fromkeys(("q_bias", "k_bias", "v_bias"), "self_attention.query_key_value.bias")
    | {
        "o": "self_attention.dense.weight",
        "o_bias": "self_attention.dense.bias",
        "mlp_norm": "ln_mlp.weight",
        "mlp_norm_bias": "ln_mlp.bias",
        "up": "mlp.dense_h_to_4h.weight",
        "up_bias": "mlp.dense_h_to_4h.bias",
        "down": "mlp.dense_4h_to_h.weight",
        "down_bias": "mlp.dense_4h_to_h.bias",
    },
    "transformer.h.{}.",
    MODEL
    | LAYER_NORM
    | {
        "norm_eps": number("layer_norm_epsilon", default=1e-5),
        "norm_bias": const(True),
        "tied_embeddings": flag("tie_word_embeddings", default=True),
        "layer.norms": const("beside"),
        "mixer.qkv_bias": flag("bias"),
        "mixer.o_bias": flag("bias"),
        "ffn.size": integer("ffn_hidden_size", times_hidden=4),
        "ffn.gated": const(False),
        "ffn.bias": flag("bias"),
        "ffn.activation": choice("activation", among=ACTIVATIONS, default="gelu"),
    },
    heads_inside=True,
    defaults={"max_position_embeddings": 2048, "num_key_value_heads": 1},
    aliases={"n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
    refuse=("alibi",),
    unused=("num_kv_heads",),  # as many as heads, though one serves all
    must={
        "apply_residual_connection_post_layernorm": False,
        "multi_query": True,
        "new_decoder_architecture": False,
        "parallel_attn": True,
    },
)

_COHERE = MODEL | BIASES | LAYER_NORM
_COHERE |= {
    "tied_embeddings": flag("tie_word_embeddings", default=True),
    "logit_scale": number("logit_scale", default=0.0625),
    "layer.norms": const("beside"),
}
FAMILIES = {
    "LlamaForCausalLM": Family(
        OUTER,
        LAYER | {f"{name}_bias": f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
        PREFIX,
        MODEL
        | BIASES
        | MLP_BIAS
        | {"ffn.activation": choice("hidden_act", among=ACTIVATIONS, default="silu")},
    ),
    "MistralForCausalLM": Family(
        OUTER, LAYER, PREFIX, MODEL | BIASES, windows="all", default_window=4096
    ),
    "Phi3ForCausalLM": Family(
        OUTER, FUSED, PREFIX, MODEL | BIASES, windows="all", rope_keys=PARTIAL
    ),
    "Qwen2ForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        MODEL | {"mixer.qkv_bias": const(True)},
        windows="switch",
        default_window=4096,
    ),
    "Qwen3ForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        MODEL | BIASES | QWEN3,
        windows="switch",
        default_window=4096,
    ),
    "GemmaForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        MODEL | BIASES | GEMMA_1,
        norm_offset=1.0,
        unused=("hidden_activation",),  # beside hidden_act
        refuse=("use_bidirectional_attention",),
    ),
    "Gemma2ForCausalLM": Family(
        OUTER,
        AROUND,
        PREFIX,
        MODEL
        | BIASES
        | GEMMA
        | {
            "mixer.softcap": cap("attn_logit_softcapping", default=50.0),
            "logit_softcap": cap("final_logit_softcapping", default=30.0),
        },
        windows="pattern",
        default_window=4096,
        pattern=2,
        norm_offset=1.0,
        unused=("hidden_act", "sliding_window_size"),  # other keys say it
        refuse=("use_bidirectional_attention",),
    ),
    "Gemma3ForCausalLM": Family(
        OUTER,
        AROUND,
        PREFIX,
        MODEL | BIASES | GEMMA | {"mixer.qk_norm": const("head")},
        windows="pattern",
        default_window=4096,
        pattern=6,
        ropes={"sliding": "rope_local_base_freq"},
        norm_offset=1.0,
        unused=("hidden_act",),
        refuse=(
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "use_bidirectional_attention",
        ),
    ),
    "SmolLM3ForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        MODEL | BIASES | MLP_BIAS | {"tied_embeddings": flag("tie_word_embeddings", default=True)},
        ropes={"no_rope_layers": "none"},
        # Which layers a window is of, transformers says in two ways that differ.
        refuse=("mlp_bias", "sliding_window", "use_sliding_window"),
    ),
    "GraniteForCausalLM": Family(
        OUTER, LAYER, PREFIX, MODEL | BIASES | MLP_BIAS | SCALES, refuse=("mlp_bias",)
    ),
    "Olmo2ForCausalLM": Family(OUTER, LAYER | OLMO_NAMES, PREFIX, MODEL | BIASES | OLMO),
    "Olmo3ForCausalLM": Family(
        OUTER,
        LAYER | OLMO_NAMES,
        PREFIX,
        MODEL | BIASES | OLMO,
        windows="pattern",
        default_window=4096,
        pattern=4,
        ropes={"sliding": "rope_theta"},
    ),
    "StableLmForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        MODEL
        | LAYER_NORM
        | {
            "norm_bias": const(True),
            "layer.norms": either("use_parallel_residual", yes="beside", no="before"),
            "mixer.qkv_bias": flag("use_qkv_bias"),
        },
        rope_keys=PARTIAL,
        refuse=("use_parallel_residual", "qk_layernorm"),
    ),
    "CohereForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        _COHERE | {"mixer.qk_norm": either("use_qk_norm", yes="width", no="")},
        interleaved=True,
        refuse=("use_qk_norm",),
        unused=("model_max_length",),
    ),
    "Cohere2ForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        _COHERE,
        windows="pattern",
        default_window=4096,
        pattern=4,
        ropes={"full": "none"},
        interleaved=True,
        refuse=("use_qk_norm",),
        unused=("layer_switch", "use_embedding_sharing", "use_parallel_embedding"),
        must={
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_gated_activation": True,
            "use_parallel_block": True,
        },
    ),
    "PhiForCausalLM": Family(
        OUTER | {"norm": "model.final_layernorm.weight", "norm_bias": "model.final_layernorm.bias"},
        LAYER
        | {
            "o": "self_attn.dense.weight",
            "o_bias": "self_attn.dense.bias",
            "up": "mlp.fc1.weight",
            "up_bias": "mlp.fc1.bias",
            "down": "mlp.fc2.weight",
            "down_bias": "mlp.fc2.bias",
        },
        PREFIX,
        MODEL
        | LAYER_NORM
        | {
            "norm_bias": const(True),
            "head_bias": const(True),
            "layer.norms": const("beside"),
            "mixer.qkv_bias": const(True),
            "mixer.o_bias": const(True),
            "ffn.gated": const(False),
            "ffn.bias": const(True),
            "ffn.activation": choice("hidden_act", among=ACTIVATIONS, default="gelu_new"),
        },
        rope_keys=PARTIAL,
        refuse=("qk_layernorm",),
    ),
    "Starcoder2ForCausalLM": Family(
        OUTER,
        LAYER
        | {
            "up": "mlp.c_fc.weight",
            "up_bias": "mlp.c_fc.bias",
            "down": "mlp.c_proj.weight",
            "down_bias": "mlp.c_proj.bias",
        },
        PREFIX,
        MODEL
        | LAYER_NORM
        | {
            "norm_eps": number("norm_epsilon", default=1e-5),
            "norm_bias": const(True),
            "tied_embeddings": flag("tie_word_embeddings", default=True),
            "mixer.qkv_bias": flag("use_bias", default=True),
            "mixer.o_bias": flag("use_bias", default=True),
            "ffn.gated": const(False),
            "ffn.bias": flag("use_bias", default=True),
            "ffn.activation": choice("hidden_act", among=ACTIVATIONS, default="gelu_pytorch_tanh"),
        },
        windows="all",
        unused=(  # other keys say it, or it was for training
            "attention_softmax_in_fp32",
            "embedding_dropout",
            "layer_norm_epsilon",
            "residual_dropout",
            "scale_attention_softmax_in_fp32",
        ),
        must={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
    ),
    "OPTForCausalLM": Family(
        {
            "embed": "model.decoder.embed_tokens.weight",
            "positions": "model.decoder.embed_positions.weight",
            "norm": "model.decoder.final_layer_norm.weight",
            "norm_bias": "model.decoder.final_layer_norm.bias",
            "head": "lm_head.weight",
        },
        LAYER
        | {
            "attn_norm": "self_attn_layer_norm.weight",
            "attn_norm_bias": "self_attn_layer_norm.bias",
            "o": "self_attn.out_proj.weight",
            "o_bias": "self_attn.out_proj.bias",
            "mlp_norm": "final_layer_norm.weight",
            "mlp_norm_bias": "final_layer_norm.bias",
            "up": "fc1.weight",
            "up_bias": "fc1.bias",
            "down": "fc2.weight",
            "down_bias": "fc2.bias",
        },
        "model.decoder.layers.{}.",
        MODEL
        | LAYER_NORM
        | {
            "hidden_size": same("hidden_size", "word_embed_proj_dim"),
            "norm_bias": const(True),
            "tied_embeddings": flag("tie_word_embeddings", default=True),
            "position_offset": const(2),
            "mixer.qkv_bias": flag("enable_bias", default=True),
            "mixer.o_bias": flag("enable_bias", default=True),
            "ffn.size": integer("ffn_dim"),
            "ffn.gated": const(False),
            "ffn.bias": flag("enable_bias", default=True),
            "ffn.activation": choice("activation_function", among=ACTIVATIONS, default="relu"),
        },
        ropes={"full": "none"},
        spare_positions=2,
        refuse=("_remove_final_layer_norm",),
        must={"do_layer_norm_before": True},
    ),
    "GPTNeoXForCausalLM": Family(
        {
            "embed": "gpt_neox.embed_in.weight",
            "norm": "gpt_neox.final_layer_norm.weight",
            "norm_bias": "gpt_neox.final_layer_norm.bias",
            "head": "embed_out.weight",
        },
        LAYER
        | dict.fromkeys("qkv", "attention.query_key_value.weight")
        | dict.fromkeys(("q_bias", "k_bias", "v_bias"), "attention.query_key_value.bias")
        | {
            "o": "attention.dense.weight",
            "o_bias": "attention.dense.bias",
            "up": "mlp.dense_h_to_4h.weight",
            "up_bias": "mlp.dense_h_to_4h.bias",
            "down": "mlp.dense_4h_to_h.weight",
            "down_bias": "mlp.dense_4h_to_h.bias",
        },
        "gpt_neox.layers.{}.",
        MODEL
        | LAYER_NORM
        | {
            "norm_bias": const(True),
            "layer.norms": const("beside, own"),
            "mixer.qkv_bias": flag("attention_bias", default=True),
            "mixer.o_bias": flag("attention_bias", default=True),
            "ffn.gated": const(False),
            "ffn.bias": const(True),
            "ffn.activation": choice("hidden_act", among=ACTIVATIONS, default="gelu"),
        },
        heads_inside=True,
        rope_keys=PARTIAL,
        aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        buffers=(".attention.bias", ".attention.masked_bias"),
        must={"use_parallel_residual": True, "attention_bias": True},
    ),
    "FalconForCausalLM": _FALCON,
    "FalconForCausalLM of groups": replace(  # 40B, 180B, and 11B, which has one norm
        _FALCON,
        layer={**_FALCON.layer, "attn_norm": "ln_attn.weight", "attn_norm_bias": "ln_attn.bias"},
        instead={"attn_norm": "input_layernorm.weight", "attn_norm_bias": "input_layernorm.bias"},
        facts={
            **_FALCON.facts,
            "layer.norms": numbered(
                "num_ln_in_parallel_attn", among={1: "beside", 2: "beside, own"}, default=2
            ),
        },
        defaults={"max_position_embeddings": 2048},
        aliases={**_FALCON.aliases, "num_kv_heads": "num_key_value_heads"},
        unused=("multi_query", "new_decoder_architecture", "parallel_attn"),
        must={"apply_residual_connection_post_layernorm": False},
    ),
    "GPT2LMHeadModel": Family(
        {
            "embed": "transformer.wte.weight",
            "positions": "transformer.wpe.weight",
            "norm": "transformer.ln_f.weight",
            "norm_bias": "transformer.ln_f.bias",
            "head": "lm_head.weight",
        },
        dict.fromkeys("qkv", "attn.c_attn.weight")
        | dict.fromkeys(("q_bias", "k_bias", "v_bias"), "attn.c_attn.bias")
        | {
            "attn_norm": "ln_1.weight",
            "attn_norm_bias": "ln_1.bias",
            "o": "attn.c_proj.weight",
            "o_bias": "attn.c_proj.bias",
            "mlp_norm": "ln_2.weight",
            "mlp_norm_bias": "ln_2.bias",
            "up": "mlp.c_fc.weight",
            "up_bias": "mlp.c_fc.bias",
            "down": "mlp.c_proj.weight",
            "down_bias": "mlp.c_proj.bias",
        },
        "transformer.h.{}.",
        MODEL
        | LAYER_NORM
        | {
            "norm_bias": const(True),
            "tied_embeddings": flag("tie_word_embeddings", default=True),
            "mixer.qkv_bias": const(True),
            "mixer.o_bias": const(True),
            "ffn.size": integer("intermediate_size", times_hidden=4),
            "ffn.gated": const(False),
            "ffn.bias": const(True),
            "ffn.activation": choice("activation_function", among=ACTIVATIONS, default="gelu_new"),
        },
        ropes={"full": "none"},
        transposed=True,
        aliases={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "n_inner": "intermediate_size",
            "layer_norm_epsilon": "layer_norm_eps",
        },
        buffers=(".attn.bias", ".attn.masked_bias"),
        unused=(
            "_num_labels",
            "n_ctx",
            "n_special",
            "output_past",
            "predict_special_tokens",
            "reorder_and_upcast_attn",
        ),
        must={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    ),
    **OF_EXPERTS,
}
FAMILIES["Gemma3ForConditionalGeneration"] = FAMILIES["Gemma3ForCausalLM"]
FAMILIES["Mistral3ForConditionalGeneration"] = replace(  # its text half may be Ministral 3
    FAMILIES["MistralForCausalLM"], rope_keys=("llama_4_scaling_beta",)
)
# Their first configs describe both halves side by side.
FAMILIES["Qwen2VLForConditionalGeneration"] = replace(
    FAMILIES["Qwen2ForCausalLM"], unused=OF_OTHER_HALVES, others=("visual.",)
)
FAMILIES["Qwen2_5_VLForConditionalGeneration"] = FAMILIES["Qwen2VLForConditionalGeneration"]
FAMILIES |= RECURRENT

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
