"""Encoders in Hugging Face's files: they make vectors, or scores of pairs. Literal tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.models.families.gguf import FAMILIES as _GGUF_DECODERS
from ridgeline.models.families.hf import FAMILIES as _DECODERS
from ridgeline.models.families.table import Family, choice, const, either, integer, number, unless

_ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    "silu": "silu", "swish": "silu",
}  # fmt: skip
_ENCODER = {
    "hidden_size": integer("hidden_size"),
    "vocab_size": integer("vocab_size"),
    "mixer.num_heads": integer("num_attention_heads"),
    "ffn.size": integer("intermediate_size"),
    "norm": const("layer"),
    "norm_bias": const(True),
    "norm_eps": number("layer_norm_eps", default=1e-12),
    "tied_embeddings": const(True),
    "has_head": const(False),
    "pooling": const("mean"),  # unless files beside the config say otherwise
    "layer.norms": const("within"),
    "mixer.causal": const(False),
    "mixer.qkv_bias": const(True),
    "mixer.o_bias": const(True),
    "ffn.gated": const(False),
    "ffn.bias": const(True),
    "ffn.activation": choice("hidden_act", among=_ACTIVATIONS, default="gelu"),
}
_BERT_OUTER = {
    "embed": "embeddings.word_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "types": "embeddings.token_type_embeddings.weight",
    "layers.0.attn_norm": "embeddings.LayerNorm.weight",
    "layers.0.attn_norm_bias": "embeddings.LayerNorm.bias",
    "norm": "encoder.layer.{}.output.LayerNorm.weight",
    "norm_bias": "encoder.layer.{}.output.LayerNorm.bias",
}
_BERT_LAYER = {
    "attn_norm": "../output.LayerNorm.weight",
    "attn_norm_bias": "../output.LayerNorm.bias",
    "q": "attention.self.query.weight",
    "k": "attention.self.key.weight",
    "v": "attention.self.value.weight",
    "o": "attention.output.dense.weight",
    "q_bias": "attention.self.query.bias",
    "k_bias": "attention.self.key.bias",
    "v_bias": "attention.self.value.bias",
    "o_bias": "attention.output.dense.bias",
    "mlp_norm": "attention.output.LayerNorm.weight",
    "mlp_norm_bias": "attention.output.LayerNorm.bias",
    "up": "intermediate.dense.weight",
    "up_bias": "intermediate.dense.bias",
    "down": "output.dense.weight",
    "down_bias": "output.dense.bias",
}
_GGUF_OUTER = {
    "embed": "token_embd.weight",
    "positions": "position_embd.weight",
    "types": "token_types.weight",
    "layers.0.attn_norm": "token_embd_norm.weight",
    "layers.0.attn_norm_bias": "token_embd_norm.bias",
    "norm": "blk.{}.layer_output_norm.weight",
    "norm_bias": "blk.{}.layer_output_norm.bias",
}
_GGUF_LAYER = {
    "attn_norm": "../layer_output_norm.weight",
    "attn_norm_bias": "../layer_output_norm.bias",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "mlp_norm": "attn_output_norm.weight",
    "mlp_norm_bias": "attn_output_norm.bias",
    "up": "ffn_up.weight",
    "up_bias": "ffn_up.bias",
    "down": "ffn_down.weight",
    "down_bias": "ffn_down.bias",
}
_KINDS = (("", "weight"), ("_bias", "bias"))
_POOLER = ("pooler.dense.weight", "pooler.dense.bias")  # for a task that is no vector
FAMILIES: dict[str, Family] = {}
FAMILIES["BertModel"] = Family(
    _BERT_OUTER,
    _BERT_LAYER,
    "encoder.layer.{}.",
    _ENCODER,
    ropes={"full": "none"},
    buffers=_POOLER,
    unused=("gradient_checkpointing", "type_vocab_size", "hidden_dropout_prob",
            "attention_probs_dropout_prob", "tie_word_embeddings", "output_past", "pooler_fc_size",
            "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
            "pooler_type"),
    must={"position_embedding_type": "absolute", "is_decoder": False, "directionality": "bidi"},
)  # fmt: skip
FAMILIES["XLMRobertaModel"] = replace(
    FAMILIES["BertModel"],
    facts=_ENCODER | {"position_offset": const(2)},  # behind that of the padding
    must={**FAMILIES["BertModel"].must, "pad_token_id": 1},
)
_OWN_POSITIONS = {name: value for name, value in _BERT_OUTER.items() if name != "types"}
# Scores gain learnt numbers by distance beside learnt positions (Song et al., 2020).
FAMILIES["MPNetModel"] = replace(
    FAMILIES["XLMRobertaModel"],
    outer=_OWN_POSITIONS | {"relative_bias": "encoder.relative_attention_bias.weight"},
    layer=_BERT_LAYER
    | {f"{name}{bias}": f"attention.attn.{name}.{kind}" for name in "qkvo" for bias, kind in _KINDS}
    | {f"mlp_norm{bias}": f"attention.LayerNorm.{kind}" for bias, kind in _KINDS},
    facts={
        **FAMILIES["XLMRobertaModel"].facts,
        "mixer.bias_buckets": integer("relative_attention_num_buckets", default=32),
    },
    must={"relative_attention_num_buckets": 32, "pad_token_id": 1},
)
# Half of BERT's layers, and one type of tokens (Sanh et al., 2019).
FAMILIES["DistilBertModel"] = Family(
    _OWN_POSITIONS
    | {f"norm{bias}": f"transformer.layer.{{}}.output_layer_norm.{kind}" for bias, kind in _KINDS},
    {
        f"{name}{bias}": f"{in_file}.{kind}"
        for name, in_file in (
            *((name, f"attention.{name}_lin") for name in "qkv"),
            ("o", "attention.out_lin"),
            ("attn_norm", "../output_layer_norm"),
            ("mlp_norm", "sa_layer_norm"),
            ("up", "ffn.lin1"),
            ("down", "ffn.lin2"),
        )
        for bias, kind in _KINDS
    },
    "transformer.layer.{}.",
    _ENCODER
    | {
        "norm_eps": const(1e-12),
        "ffn.activation": choice("activation", among=_ACTIVATIONS, default="gelu"),
    },
    ropes={"full": "none"},
    aliases={
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    },
    # Of training; and that positions began as sines, which the file has as numbers.
    unused=("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_",
            "tie_word_embeddings", "output_past"),
)  # fmt: skip
_IDENTITY = "torch.nn.modules.linear.Identity"
_SIGMOID = "torch.nn.modules.activation.Sigmoid"
_CLASSIFIER = {
    "pooling": const("cls"),
    "scores": choice(
        "sbert_ce_default_activation_function",
        among={_SIGMOID: "sigmoid", _IDENTITY: "identity"},
        default=_SIGMOID,
    ),
}


def _below(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {name: prefix + in_file for name, in_file in names.items()}


FAMILIES["BertForSequenceClassification"] = replace(
    FAMILIES["BertModel"],
    outer=_below("bert.", _BERT_OUTER)
    | {
        "pooler": "bert.pooler.dense.weight",
        "pooler_bias": "bert.pooler.dense.bias",
        "scores": "classifier.weight",
        "scores_bias": "classifier.bias",
    },
    prefix="bert.encoder.layer.{}.",
    facts=_ENCODER | _CLASSIFIER,
    buffers=(),
    num_segments=2,
)
FAMILIES["XLMRobertaForSequenceClassification"] = replace(
    FAMILIES["XLMRobertaModel"],
    outer=_below("roberta.", _BERT_OUTER)
    | {
        "pooler": "classifier.dense.weight",
        "pooler_bias": "classifier.dense.bias",
        "scores": "classifier.out_proj.weight",
        "scores_bias": "classifier.out_proj.bias",
    },
    prefix="roberta.encoder.layer.{}.",
    facts=_ENCODER | _CLASSIFIER | {"position_offset": const(2)},
    buffers=(),
)
FAMILIES["RobertaForSequenceClassification"] = FAMILIES["XLMRobertaForSequenceClassification"]
FAMILIES["RobertaModel"] = FAMILIES["XLMRobertaModel"]

GGUF_FAMILIES = {
    "bert": Family(
        _GGUF_OUTER,
        _GGUF_LAYER,
        "blk.{}.",
        {name: reader for name, reader in _ENCODER.items() if name != "vocab_size"}
        | {
            "hidden_size": integer("embedding_length"),
            "norm_eps": number("attention.layer_norm_epsilon"),
            "mixer.num_heads": integer("attention.head_count"),
            "ffn.size": integer("feed_forward_length"),
            "ffn.activation": const("gelu"),
        },
        ropes={"full": "none"},
    )
}

# Rope in place of learnt positions, gates, and no bias but the norms' (Nussbaum et al., 2024).
_NOMIC = {
    "mixer.qkv_bias": const(False),
    "mixer.o_bias": const(False),
    "ffn.gated": const(True),
    "ffn.bias": const(False),
}
FAMILIES["NomicBertModel"] = Family(
    {
        "embed": "embeddings.word_embeddings.weight",
        "types": "embeddings.token_type_embeddings.weight",
        "layers.0.attn_norm": "emb_ln.weight",
        "layers.0.attn_norm_bias": "emb_ln.bias",
        "norm": "encoder.layers.{}.norm2.weight",
        "norm_bias": "encoder.layers.{}.norm2.bias",
    },
    dict.fromkeys("qkv", "attn.Wqkv.weight")
    | {
        "attn_norm": "../norm2.weight",
        "attn_norm_bias": "../norm2.bias",
        "o": "attn.out_proj.weight",
        "mlp_norm": "norm1.weight",
        "mlp_norm_bias": "norm1.bias",
        "gate": "mlp.fc12.weight",
        "up": "mlp.fc11.weight",
        "down": "mlp.fc2.weight",
    },
    "encoder.layers.{}.",
    _ENCODER
    | _NOMIC
    | {"ffn.activation": choice("hidden_act", among={"silu": "silu", "swiglu": "silu"})},
    aliases={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "max_trained_positions": "max_position_embeddings",
        "rotary_emb_base": "rope_theta",
        "rotary_emb_fraction": "partial_rotary_factor",
        "layer_norm_epsilon": "layer_norm_eps",
        "activation_function": "hidden_act",
    },
    refuse=("rotary_scaling_factor", "rotary_emb_scale_base"),
    unused=(
        *FAMILIES["BertModel"].unused,
        *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "n_positions"),
        *("pad_vocab_size_multiple", "reorder_and_upcast_attn", "use_flash_attn", "use_xentropy"),
    ),
    must={
        "is_decoder": False,
        "causal": False,
        "prenorm": False,
        "parallel_block": False,
        "parallel_block_tied_norm": False,
        "use_rms_norm": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "rotary_emb_interleaved": False,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
)
_GGUF_NORMS = {name: value for name, value in _GGUF_LAYER.items() if "norm" in name}
GGUF_FAMILIES["nomic-bert"] = Family(
    {name: value for name, value in _GGUF_OUTER.items() if name != "positions"},
    _GGUF_NORMS
    | dict.fromkeys("qkv", "attn_qkv.weight")
    | {
        "o": "attn_output.weight",
        "gate": "ffn_gate.weight",
        "up": "ffn_up.weight",
        "down": "ffn_down.weight",
    },
    "blk.{}.",
    {**GGUF_FAMILIES["bert"].facts, **_NOMIC, "ffn.activation": const("silu")},
)

# Gemma 3 whose tokens see what follows them, as EmbeddingGemma (Schechter Vera et al., 2025). The
# same class without the flag is a decoder that was saved without its head.
_GEMMA3, _GGUF_GEMMA3 = _DECODERS["Gemma3ForCausalLM"], _GGUF_DECODERS["gemma3"]
FAMILIES["Gemma3TextModel"] = replace(
    _GEMMA3,
    facts={
        **_GEMMA3.facts,
        "tied_embeddings": const(True),
        "has_head": const(False),
        "mixer.causal": unless("use_bidirectional_attention"),
        "pooling": either("use_bidirectional_attention", yes="mean", no=""),
    },
    refuse=("attn_logit_softcapping", "final_logit_softcapping"),
    unused=(*_GEMMA3.unused, "_sliding_window_pattern", "tie_word_embeddings"),
)
GGUF_FAMILIES["gemma-embedding"] = replace(
    _GGUF_GEMMA3,
    facts={
        **_GGUF_GEMMA3.facts,
        "has_head": const(False),
        "pooling": const("mean"),
        "mixer.causal": const(False),
    },
    unused=("dense_2_feat_in", "dense_2_feat_out", "dense_3_feat_in", "dense_3_feat_out"),
)

# Norms before, gates, alternating windows, no bias at all (Warner et al., 2024).
_MODERN = {
    "hidden_size": integer("hidden_size"),
    "vocab_size": integer("vocab_size"),
    "mixer.num_heads": integer("num_attention_heads"),
    "mixer.causal": const(False),
    "ffn.size": integer("intermediate_size"),
    "ffn.activation": choice("hidden_activation", among=_ACTIVATIONS, default="gelu"),
    "norm": const("layer"),
    "norm_eps": number("norm_eps", default=1e-5),
    "tied_embeddings": const(True),
    "has_head": const(False),
    "pooling": const("mean"),
}
FAMILIES["ModernBertModel"] = Family(
    {
        "embed": "embeddings.tok_embeddings.weight",
        "embed_norm": "embeddings.norm.weight",
        "norm": "final_norm.weight",
    },
    {
        **dict.fromkeys("qkv", "attn.Wqkv.weight"),
        **dict.fromkeys(("gate", "up"), "mlp.Wi.weight"),
        "attn_norm": "attn_norm.weight",
        "o": "attn.Wo.weight",
        "mlp_norm": "mlp_norm.weight",
        "down": "mlp.Wo.weight",
    },
    "layers.{}.",
    _MODERN,
    windows="pattern",
    default_window=128,
    pattern=3,
    full_first=True,
    first_norms="before mlp",
    ropes={"sliding": "local_rope_theta"},
    aliases={
        "global_attn_every_n_layers": "sliding_window_pattern",
        "global_rope_theta": "rope_theta",
        "local_attention": "sliding_window",
    },
    defaults={"rope_theta": 160_000.0},
    unused=(
        *("classifier_activation", "classifier_bias", "classifier_pooling", "cls_token_id"),
        *("decoder_bias", "deterministic_flash_attn", "embedding_dropout"),
        *("gradient_checkpointing", "initializer_cutoff_factor", "layer_norm_eps"),
        *("mlp_dropout", "position_embedding_type", "reference_compile"),
        *("repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction"),
        *("sliding_window_pattern", "local_rope_theta", "rope_theta", "tie_word_embeddings"),
    ),
    must={"norm_bias": False, "attention_bias": False, "mlp_bias": False},
)
GGUF_FAMILIES["modern-bert"] = Family(
    {
        "embed": "token_embd.weight",
        "embed_norm": "token_embd_norm.weight",
        "norm": "output_norm.weight",
    },
    {
        **dict.fromkeys("qkv", "attn_qkv.weight"),
        **dict.fromkeys(("gate", "up"), "ffn_up.weight"),
        "attn_norm": "attn_norm.weight",
        "o": "attn_output.weight",
        "mlp_norm": "ffn_norm.weight",
        "down": "ffn_down.weight",
    },
    "blk.{}.",
    {name: reader for name, reader in _MODERN.items() if name != "vocab_size"}
    | {
        "hidden_size": integer("embedding_length"),
        "norm_eps": number("attention.layer_norm_epsilon"),
        "mixer.num_heads": integer("attention.head_count"),
        "ffn.size": integer("feed_forward_length"),
        "ffn.activation": choice("hidden_activation", among=_ACTIVATIONS, default="gelu"),
    },
    windows="pattern",
    pattern=3,
    full_first=True,
    first_norms="before mlp",
    ropes={"sliding": "10000"},
)
