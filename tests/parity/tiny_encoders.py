"""Configs of tiny models that make vectors or scores, and the files that stand beside such a model.

Names, sizes and changes are as in ``tiny_configs``, but the class is written out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_NO_ROPE = ("num_key_value_heads", "rope_parameters")
_OF_BERT: dict[str, Any] = {"num_hidden_layers": 3, "unused": _NO_ROPE}
_OF_ROBERTA: dict[str, Any] = {**_OF_BERT, "pad_token_id": 1, "bos_token_id": 0}
_OF_PAIRS: dict[str, Any] = {
    "num_labels": 1,
    # The number before the sigmoid: a change of it never drowns.
    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
}
_TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", _OF_BERT),
    "bert-pairs": ("BertForSequenceClassification", {**_OF_BERT, **_OF_PAIRS}),
    "roberta": ("RobertaModel", _OF_ROBERTA),
    "roberta-pairs": ("RobertaForSequenceClassification", {**_OF_ROBERTA, **_OF_PAIRS}),
    "xlm-roberta": ("XLMRobertaModel", {**_OF_ROBERTA, "type_vocab_size": 1}),
    "xlm-roberta-pairs": (
        "XLMRobertaForSequenceClassification",
        {**_OF_ROBERTA, **_OF_PAIRS, "type_vocab_size": 1},
    ),
    "mpnet": ("MPNetModel", _OF_ROBERTA),
    "distilbert": (
        "DistilBertModel",
        {"hidden_dim": 96, "unused": ("intermediate_size", *_NO_ROPE)},
    ),
    "nomic-bert": ("NomicBertModel", {"unused": ("num_key_value_heads",)}),
    "modern-bert": (
        "ModernBertModel",
        {
            "num_hidden_layers": 5,
            "local_attention": 24,
            "rope_parameters": _TWO_ROPES,
            "unused": ("num_key_value_heads",),
        },
    ),
    "embedding-gemma": (
        "Gemma3TextModel",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": _TWO_ROPES,
            "use_bidirectional_attention": True,
        },
    ),
    "mistral-both-ways": (
        "MistralModel",
        {"sliding_window": 20, "head_dim": 24, "is_causal": False},
    ),
    "qwen2-both-ways": ("Qwen2Model", {"is_causal": False}),
}


def word_tokenizer(vocab_size: int, between: int = 0) -> dict[str, Any]:
    """Return a tokenizer.json of which ``w7`` is the word of id 7, from 4 on.

    ``between`` says how many separators stand between the texts of a pair, as BERT (1) or RoBERTa
    (2) has them; 0 leaves texts as they are.
    """
    special = {"[CLS]": 0, "[PAD]": 1, "[SEP]": 2, "[UNK]": 3}
    ends: dict[str, Any] = {"sep": ["[SEP]", 2], "cls": ["[CLS]", 0]}
    of_roberta = {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False}
    kinds = (None, {"type": "BertProcessing", **ends}, {**of_roberta, **ends})
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": kinds[between],
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": special | {f"w{i}": i for i in range(4, vocab_size)},
        },
    }


def write_steps(folder: Path, pool: str, *, normalises: bool) -> None:
    """Write how states become a vector, as sentence-transformers does."""
    steps = ["Transformer", "Pooling", *(["Normalize"] if normalises else [])]
    modules = [
        {"idx": i, "path": "1_Pooling" if kind == "Pooling" else "", "type": f"models.{kind}"}
        for i, kind in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    config = {f"pooling_mode_{mode}": name == pool for name, mode in modes.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
