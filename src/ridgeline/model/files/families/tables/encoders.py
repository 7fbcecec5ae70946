"""Encoders, which make vectors, or scores of pairs. Literal tables."""

from __future__ import annotations

from ridgeline.model.files.families.fields import choice, const, either, integer, number, unless
from ridgeline.model.files.families.hf_names import ACTIVATIONS, ALL_BIASES, activation
from ridgeline.model.files.families.inherit import row

_SIGMOID = "torch.nn.modules.activation.Sigmoid"
_IDENTITY = "torch.nn.modules.linear.Identity"
_CLASSIFIER = {
    "pooling": const("cls"),
    "scores": choice(
        "sbert_ce_default_activation_function",
        among={_SIGMOID: "sigmoid", _IDENTITY: "identity"},
        default=_SIGMOID,
    ),
}
_UNUSED = (
    "gradient_checkpointing type_vocab_size hidden_dropout_prob attention_probs_dropout_prob "
    "tie_word_embeddings output_past pooler_fc_size pooler_num_attention_heads "
    "pooler_num_fc_layers pooler_size_per_head pooler_type"
)
_NO_POOLER = "-pooler.dense.weight -pooler.dense.bias"  # beside scores it is no buffer
_NORMS_IN_GGUF = {"attn_norm": "../layer_output_norm.", "mlp_norm": "attn_output_norm."}


def _of_bert(prefix: str) -> dict[str, str]:
    """Return names of BERT's tensors before and behind the layers, below a prefix."""
    return {
        "embed": f"{prefix}embeddings.word_embeddings.",
        "positions": f"{prefix}embeddings.position_embeddings.",
        "types": f"{prefix}embeddings.token_type_embeddings.",
        "layers.0.attn_norm": f"{prefix}embeddings.LayerNorm.",
        "norm": f"{prefix}encoder.layer.{{}}.output.LayerNorm.",
    }


ROWS = (
    row(
        "encoder",
        types="",
        outer={"head": None, "head_bias": None},
        facts=ALL_BIASES
        | activation("hidden_act", default="gelu")
        | {
            "norm": "layer",
            "norm_eps": number("layer_norm_eps", default=1e-12),
            "tied_embeddings": True,
            "has_head": False,
            "pooling": "mean",  # unless files beside the config say otherwise
            "layer.norms": "within",
            "mixer.causal": False,
            "ffn.gated": False,
        },
    ),
    row(
        "bert",
        like="encoder",
        hf="BertModel",
        gguf="bert",
        outer=_of_bert(""),
        layer={
            "attn_norm": "../output.LayerNorm.",
            "q": "attention.self.query.",
            "k": "attention.self.key.",
            "v": "attention.self.value.",
            "o": "attention.output.dense.",
            "mlp_norm": "attention.output.LayerNorm.",
            "up": "intermediate.dense.",
            "down": "output.dense.",
        },
        prefix="encoder.layer.{}.",
        ropes={"full": "none"},
        buffers="pooler.dense.weight pooler.dense.bias",  # for a task that is no vector
        ignored_keys=_UNUSED,
        required={
            "position_embedding_type": "absolute",
            "is_decoder": False,
            "directionality": "bidi",
        },
        in_gguf={"outer": {"norm": "blk.{}.layer_output_norm."}, "layer": _NORMS_IN_GGUF},
    ),
    row(
        "BertForSequenceClassification",
        like="bert",
        types="",
        hf="BertForSequenceClassification",
        outer=_of_bert("bert.") | {"pooler": "bert.pooler.dense.", "scores": "classifier."},
        prefix="bert.encoder.layer.{}.",
        facts=_CLASSIFIER,
        buffers=_NO_POOLER,
        num_segments=2,
    ),
    row(
        "xlm-roberta",
        like="bert",
        hf="XLMRobertaModel",
        facts={"position_offset": 2},  # behind that of the padding
        required={"pad_token_id": 1},
    ),
    row("roberta", like="xlm-roberta", hf="RobertaModel"),
    row(
        "XLMRobertaForSequenceClassification",
        like="xlm-roberta",
        types="",
        hf="XLMRobertaForSequenceClassification, RobertaForSequenceClassification",
        outer=_of_bert("roberta.")
        | {"pooler": "classifier.dense.", "scores": "classifier.out_proj."},
        prefix="roberta.encoder.layer.{}.",
        facts=_CLASSIFIER,
        buffers=_NO_POOLER,
    ),
    row(  # scores gain learnt numbers by distance beside learnt positions (Song et al., 2020)
        "mpnet",
        like="xlm-roberta",
        hf="MPNetModel",
        outer={"relative_bias": "encoder.relative_attention_bias.weight", "types": None},
        layer={
            "q": "attention.attn.q.",
            "k": "attention.attn.k.",
            "v": "attention.attn.v.",
            "o": "attention.attn.o.",
            "mlp_norm": "attention.LayerNorm.",
        },
        facts={"mixer.bias_buckets": integer("relative_attention_num_buckets", default=32)},
        required={"relative_attention_num_buckets": 32},
    ),
    row(  # half of BERT's layers, and one type of tokens (Sanh et al., 2019)
        "distilbert",
        like="encoder",
        hf="DistilBertModel",
        outer=_of_bert("") | {"norm": "transformer.layer.{}.output_layer_norm.", "types": None},
        layer={
            "attn_norm": "../output_layer_norm.",
            "q": "attention.q_lin.",
            "k": "attention.k_lin.",
            "v": "attention.v_lin.",
            "o": "attention.out_lin.",
            "mlp_norm": "sa_layer_norm.",
            "up": "ffn.lin1.",
            "down": "ffn.lin2.",
        },
        prefix="transformer.layer.{}.",
        facts=activation("activation", default="gelu") | {"norm_eps": 1e-12},
        ropes={"full": "none"},
        aliases={
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
        },
        # Of training; and that positions began as sines, which the file has as numbers.
        ignored_keys="qa_dropout seq_classif_dropout sinusoidal_pos_embds tie_weights_ "
        "tie_word_embeddings output_past",
    ),
    row(  # rope, gates, and no bias but the norms' (Nussbaum et al., 2024)
        "nomic_bert",
        like="encoder",
        hf="NomicBertModel",
        gguf="nomic-bert",
        outer=_of_bert("")
        | {
            "positions": None,
            "layers.0.attn_norm": "emb_ln.",
            "norm": "encoder.layers.{}.norm2.",
        },
        layer={
            "attn_norm": "../norm2.",
            "q k v": "attn.Wqkv.",
            "o": "attn.out_proj.",
            "mlp_norm": "norm1.",
            "gate": "mlp.fc12.",
            "up": "mlp.fc11.",
            "down": "mlp.fc2.",
        },
        prefix="encoder.layers.{}.",
        facts={
            "mixer.qkv_bias": False,
            "mixer.o_bias": False,
            "ffn.gated": True,
            "ffn.bias": False,
            "ffn.activation": choice("hidden_act", among={"silu": "silu", "swiglu": "silu"}),
        },
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
        defaults={"rope_theta": 1000.0},
        refused_keys="rotary_scaling_factor rotary_emb_scale_base",
        ignored_keys=f"{_UNUSED} dense_seq_output fused_bias_fc fused_dropout_add_ln n_positions "
        "pad_vocab_size_multiple reorder_and_upcast_attn use_flash_attn use_xentropy",
        required={
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
        in_gguf={
            "outer": {"norm": "blk.{}.layer_output_norm."},
            "layer": _NORMS_IN_GGUF,
            "facts": {"ffn.activation": "silu"},
        },
    ),
    row(  # norms before, gates, alternating windows, no bias at all (Warner et al., 2024)
        "modernbert",
        like="encoder",
        hf="ModernBertModel",
        gguf="modern-bert",
        outer={
            "embed": "embeddings.tok_embeddings.",
            "embed_norm": "embeddings.norm.",
            "norm": "final_norm.",
        },
        layer={
            "attn_norm": "attn_norm.",
            "q k v": "attn.Wqkv.",
            "o": "attn.Wo.",
            "mlp_norm": "mlp_norm.",
            "gate up": "mlp.Wi.",
            "down": "mlp.Wo.",
        },
        prefix="layers.{}.",
        facts={
            "norm_bias": None,
            "norm_eps": number("norm_eps", default=1e-5),
            "layer.norms": None,
            "mixer.qkv_bias": None,
            "mixer.o_bias": None,
            "ffn.gated": None,
            "ffn.bias": None,
            "ffn.activation": choice("hidden_activation", among=ACTIVATIONS, default="gelu"),
        },
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
        ignored_keys="classifier_activation classifier_bias classifier_pooling cls_token_id "
        "decoder_bias deterministic_flash_attn embedding_dropout gradient_checkpointing "
        "initializer_cutoff_factor layer_norm_eps mlp_dropout position_embedding_type "
        "reference_compile repad_logits_with_grad sparse_pred_ignore_index sparse_prediction "
        "sliding_window_pattern local_rope_theta rope_theta tie_word_embeddings",
        required={"norm_bias": False, "attention_bias": False, "mlp_bias": False},
        in_gguf={
            "layer": {"gate": "ffn_up."},
            "facts": {
                "ffn.activation": choice("hidden_activation", among=ACTIVATIONS, default="gelu")
            },
            "ropes": {"sliding": "10000"},
        },
    ),
    # Gemma 3 whose tokens see what follows them, as EmbeddingGemma (Schechter Vera et al., 2025).
    # The same class without the flag is a decoder that was saved without its head.
    row(
        "Gemma3TextModel",
        like="gemma3",
        types="",
        hf="Gemma3TextModel",
        gguf="gemma-embedding",
        facts={
            "tied_embeddings": True,
            "has_head": False,
            "pooling": either("use_bidirectional_attention", yes="mean", no=""),
            "mixer.causal": unless("use_bidirectional_attention"),
        },
        refused_keys="-use_bidirectional_attention",
        ignored_keys="_sliding_window_pattern tie_word_embeddings",
        in_gguf={
            "facts": {"pooling": "mean", "mixer.causal": False},
            "ignored_keys": "dense_2_feat_in dense_2_feat_out dense_3_feat_in dense_3_feat_out",
        },
    ),
)
