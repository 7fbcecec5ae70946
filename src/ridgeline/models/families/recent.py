"""Families from 2024 on that are of no older kin, in both sorts of files. Literal tables."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.families.deepseek import (
    GGUF_DENSE_NAMES,
    GGUF_SPARSE,
    GGUF_SPARSE_NAMES,
    ROUTERS,
    SPARSE_NAMES,
    V3_SPARSE,
)
from ridgeline.models.families.gguf_names import LAYER as GGUF_LAYER
from ridgeline.models.families.gguf_names import OUTER as GGUF_OUTER
from ridgeline.models.families.gguf_names import PREFIX as GGUF_PREFIX
from ridgeline.models.families.gguf_names import REFUSED, refused_but
from ridgeline.models.families.hf import FAMILIES as _HF
from ridgeline.models.families.hf_parts import (
    ACTIVATIONS,
    BIASES,
    DENSE,
    DENSE_NAMES,
    LAYER,
    LAYER_NORM,
    MODEL,
    OLMO_NAMES,
    OUTER,
    PARTIAL,
    PREFIX,
    QWEN3,
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
    numbered,
    product,
)

_BEHIND = {"layer.norms": const("behind"), "mixer.qk_norm": const("head")}
_OF_HEADS = {"mixer.qk_norm": const("head")}
_MINIMAX = {
    "mixer.qk_norm": const("width"),
    "ffn.router": const("sigmoid"),
    "ffn.choice_bias": const(True),
}
_SIGMOID = {"noaux_tc": "sigmoid", "sigmoid": "sigmoid"}
_ERNIE = {
    "norm_eps": number("rms_norm_eps", default=1e-5),
    "tied_embeddings": flag("tie_word_embeddings", default=True),
}
# An MLP without gates, whose activation is the square of ReLU.
_SQUARED = {
    "ffn.gated": const(False),
    "ffn.activation": choice("hidden_act", among=ACTIVATIONS, default="relu2"),
    "ffn.bias": flag("mlp_bias"),
}
_HUNYUAN = {"mixer.qk_norm": const("head"), "mixer.norm_turned": const(True)}
_ERNIE_THETA = {"rope_theta": 500_000.0}
_GEMMA_2 = _HF["Gemma2ForCausalLM"]
FAMILIES = {
    "Exaone4ForCausalLM": Family(
        OUTER,
        LAYER | OLMO_NAMES,
        PREFIX,
        MODEL | _BEHIND,
        windows="pattern",
        default_window=4096,
        pattern=4,
        ropes={"full": "none beside windows"},
        unused=("sliding_window_pattern",),  # beside layer_types, which say it
    ),
    "Ernie4_5ForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        MODEL | _ERNIE | {"mixer.head_dim": integer("head_dim", default=128)},
        interleaved=True,
        defaults=_ERNIE_THETA,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        OUTER,
        LAYER | SPARSE_NAMES | {"choice_bias": "mlp.moe_statics.e_score_correction_bias"},
        PREFIX,
        MODEL
        | _ERNIE
        | DENSE
        | {
            "ffn.num": integer("moe_num_experts", default=64),
            "ffn.per_token": integer("moe_k", default=6),
            "ffn.size": integer("moe_intermediate_size"),
            "ffn.choice_bias": const(True),
            "shared.size": product("moe_num_shared_experts", "moe_intermediate_size"),
        },
        interleaved=True,
        has_experts=True,
        instead=DENSE_NAMES,
        dense_layers="moe_layer_start_index",
        defaults={**_ERNIE_THETA, "moe_layer_start_index": 1, "moe_num_shared_experts": 2},
        others=("model.mtp_",),
        # How experts were filled in training, layers that guess ahead, and what sums stay above.
        unused=("moe_capacity", "moe_norm_min", "num_nextn_predict_layers"),
        must={"moe_gate": "topk", "moe_layer_interval": 1, "moe_use_aux_free": True},
    ),
    "SeedOssForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        MODEL
        | {
            "mixer.head_dim": integer("head_dim", default=128),
            "mixer.qkv_bias": flag("attention_bias", default=True),
            "mixer.o_bias": flag("attention_out_bias"),
            "ffn.bias": flag("mlp_bias"),
        },
        refuse=("mlp_bias",),
        unused=("residual_dropout",),
    ),
    "MiniMaxM2ForCausalLM": Family(
        OUTER,
        LAYER
        | {
            "router": "block_sparse_moe.gate.weight",
            "choice_bias": "block_sparse_moe.e_score_correction_bias",
            "gate": "block_sparse_moe.experts.{e}.w1.weight",
            "up": "block_sparse_moe.experts.{e}.w3.weight",
            "down": "block_sparse_moe.experts.{e}.w2.weight",
        },
        PREFIX,
        MODEL
        | _MINIMAX
        | {
            "mixer.head_dim": integer("head_dim", default=128),
            "ffn.num": integer("num_local_experts"),
            "ffn.per_token": integer("num_experts_per_tok"),
            "shared.size": count("shared_intermediate_size"),
        },
        has_experts=True,
        rope_keys=PARTIAL,
        defaults={"rope_theta": 5_000_000.0},
        refuse=("shared_intermediate_size",),
        # Layers that guess ahead, which layers see everything (all do), and parts of older models.
        unused=(
            "attn_type_list",
            "mlp_intermediate_size",
            "mtp_transformer_layers",
            "num_mtp_modules",
            "shared_moe_mode",
            "use_mtp",
        ),
        must={
            "layernorm_full_attention_beta": 1.0,
            "layernorm_linear_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
    ),
    "Dots1ForCausalLM": Family(
        OUTER,
        LAYER | SPARSE_NAMES,
        PREFIX,
        MODEL
        | BIASES
        | _OF_HEADS
        | V3_SPARSE
        | {
            "ffn.normalised": flag("norm_topk_prob"),
            "ffn.router": choice("scoring_func", among=_SIGMOID, default="sigmoid"),
        },
        windows="switch",
        has_experts=True,
        instead=DENSE_NAMES,
        dense_layers="first_k_dense_replace",
        defaults={"max_window_layers": 62, "sliding_window": 4096, "use_sliding_window": True},
        unused=("aux_loss_alpha", "ep_size", "seq_aux"),
        must={"moe_layer_freq": 1, "topk_method": "noaux_tc"},
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        OUTER,
        LAYER
        | {
            "q_norm": "self_attn.query_layernorm.weight",
            "k_norm": "self_attn.key_layernorm.weight",
        },
        PREFIX,
        MODEL | BIASES | _HUNYUAN,
        rope_keys=("alpha",),
        # Tokens of pictures and of other tasks, and what is said of parts that are switched off.
        unused=(
            "attention_head_dim",
            "cla_share_factor",
            "dense_list",
            "eod_token_id",
            "im_end_id",
            "im_newline_id",
            "im_start_id",
            "mask_init_id",
            "norm_type",
            "num_media_embeds",
            "org_vocab_size",
            "pad_id",
            "pool_type",
            "text_end_id",
            "text_start_id",
            "video_end_id",
            "video_start_id",
        ),
        must={
            "add_classification_head": False,
            "num_experts": 1,
            "position_embedding_xdrope": False,
            "skip_cls_token": False,
            "use_cla": False,
            "use_qk_norm": True,
            "use_rotary_pos_emb": True,
        },
    ),
    "ArceeForCausalLM": Family(
        OUTER, LAYER, PREFIX, MODEL | BIASES | _SQUARED, refuse=("mlp_bias",)
    ),
    "NemotronForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        MODEL
        | BIASES
        | LAYER_NORM
        | _SQUARED
        | {"norm_eps": number("norm_eps", default=1e-5), "norm_bias": const(True)},
        norm_offset=1.0,
        rope_keys=PARTIAL,
        defaults={"partial_rotary_factor": 0.5},
        refuse=("mlp_bias",),
    ),
    "MinistralForCausalLM": Family(OUTER, LAYER, PREFIX, MODEL, windows="all", default_window=4096),
    "Ministral3ForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        MODEL | {"mixer.head_dim": integer("head_dim", default=128)},
        windows="all",
        rope_keys=("llama_4_scaling_beta",),
    ),
    "OlmoForCausalLM": Family(
        OUTER,
        LAYER,
        PREFIX,
        MODEL | BIASES | LAYER_NORM | {"norm_eps": const(1e-5)},
        plain_norms=True,
        refuse=("clip_qkv",),
    ),
    "VaultGemmaForCausalLM": replace(  # Gemma 2 without norms behind
        _GEMMA_2,
        layer=LAYER | {"mlp_norm": "pre_feedforward_layernorm.weight"},
        facts={**_GEMMA_2.facts, "layer.norms": const("before")},
    ),
    "Qwen3VLForConditionalGeneration": Family(OUTER, LAYER, PREFIX, MODEL | BIASES | QWEN3),
}

_GGUF_MODEL = {
    "hidden_size": integer("embedding_length"),
    "norm_eps": number("attention.layer_norm_rms_epsilon"),
    "mixer.num_heads": integer("attention.head_count"),
    "ffn.size": integer("feed_forward_length"),
}
_GGUF_BIASES = {
    "mixer.qkv_bias": has("blk.0.attn_q.bias"),
    "mixer.o_bias": has("blk.0.attn_output.bias"),
}
GGUF_FAMILIES = {
    "exaone4": Family(
        GGUF_OUTER,
        GGUF_LAYER,
        GGUF_PREFIX,
        _GGUF_MODEL | _BEHIND,
        windows="pattern",
        default_window=0,
        pattern=4,
        ropes={"full": "none beside windows"},
        refuse=refused_but("attention.sliding_window_pattern"),
    ),
    "ernie4_5": Family(
        GGUF_OUTER, GGUF_LAYER, GGUF_PREFIX, _GGUF_MODEL, interleaved=True, refuse=REFUSED
    ),
    "ernie4_5-moe": Family(
        GGUF_OUTER,
        GGUF_LAYER | GGUF_SPARSE_NAMES,
        GGUF_PREFIX,
        _GGUF_MODEL | GGUF_SPARSE | {"ffn.normalised": const(True)},
        interleaved=True,
        has_experts=True,
        instead=GGUF_DENSE_NAMES,
        dense_layers="leading_dense_block_count",
        refuse=refused_but("expert_count"),
        unused=("expert_shared_feed_forward_length",),  # made of other numbers than the width is
        must={"interleave_moe_layer_step": 1},
    ),
    "seed_oss": Family(
        GGUF_OUTER,
        GGUF_LAYER | {"mlp_norm": "post_attention_norm.weight"},
        GGUF_PREFIX,
        _GGUF_MODEL | _GGUF_BIASES,
        refuse=REFUSED,
    ),
    "minimax-m2": Family(
        GGUF_OUTER,
        GGUF_LAYER | GGUF_SPARSE_NAMES,
        GGUF_PREFIX,
        _GGUF_MODEL
        | _MINIMAX
        | {
            "ffn.num": integer("expert_count"),
            "ffn.per_token": integer("expert_used_count"),
            "ffn.size": integer("expert_feed_forward_length"),
        },
        has_experts=True,
        refuse=refused_but("expert_count"),
        must={"expert_gating_func": 2},
    ),
    "hunyuan-dense": Family(
        GGUF_OUTER,
        GGUF_LAYER,
        GGUF_PREFIX,
        _GGUF_MODEL | _GGUF_BIASES | _HUNYUAN,
        refuse=REFUSED,
    ),
    "mistral3": Family(
        GGUF_OUTER,
        GGUF_LAYER,
        GGUF_PREFIX,
        _GGUF_MODEL | _GGUF_BIASES,
        interleaved=True,
        refuse=refused_but("rope.scaling.yarn_log_multiplier"),
    ),
    "arcee": Family(
        GGUF_OUTER,
        GGUF_LAYER,
        GGUF_PREFIX,
        _GGUF_MODEL | _GGUF_BIASES | {"ffn.gated": const(False), "ffn.activation": const("relu2")},
        interleaved=True,
        refuse=REFUSED,
    ),
    "dots1": Family(
        GGUF_OUTER,
        GGUF_LAYER | GGUF_SPARSE_NAMES,
        GGUF_PREFIX,
        _GGUF_MODEL
        | _GGUF_BIASES
        | GGUF_SPARSE
        | _OF_HEADS
        | {"ffn.router": numbered("expert_gating_func", among=ROUTERS, default=2)},
        has_experts=True,
        instead=GGUF_DENSE_NAMES,
        dense_layers="leading_dense_block_count",
        refuse=refused_but("expert_count"),
    ),
}
