"""A tiny random encoder in a directory, as sentence-transformers would have saved it."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.model.files.vocabularies import wordpiece

VOCAB, HIDDEN, INNER, LAYERS, POSITIONS = 400, 32, 48, 2, 96
CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of BERT's tensors."""
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm.weight": (HIDDEN,),
        "embeddings.LayerNorm.bias": (HIDDEN,),
        "pooler.dense.weight": (HIDDEN, HIDDEN),
        "pooler.dense.bias": (HIDDEN,),
    }
    for i in range(LAYERS):
        parts = {
            **dict.fromkeys(("attention.self.query", "attention.self.key"), (HIDDEN, HIDDEN)),
            **dict.fromkeys(("attention.self.value", "attention.output.dense"), (HIDDEN, HIDDEN)),
            "intermediate.dense": (INNER, HIDDEN),
            "output.dense": (HIDDEN, INNER),
            "attention.output.LayerNorm": (HIDDEN,),
            "output.LayerNorm": (HIDDEN,),
        }
        for part, shape in parts.items():
            found[f"encoder.layer.{i}.{part}.weight"] = shape
            found[f"encoder.layer.{i}.{part}.bias"] = shape[:1]
    return found


def write_encoder(
    path: Path, pool: str = "mean_tokens", *, scores_pairs: bool = False, **more: Any
) -> Path:
    """Write it; ``more`` are keys of its config. Or one that scores pairs of texts."""
    rng = np.random.default_rng(3)
    wanted = shapes()
    if scores_pairs:
        wanted = {f"bert.{name}": shape for name, shape in wanted.items()}
        wanted |= {"classifier.weight": (1, HIDDEN), "classifier.bias": (1,)}
        more["architectures"] = ["BertForSequenceClassification"]
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in wanted.items()}
    folder = path / "1_Pooling"
    folder.mkdir(parents=True)
    save_file(weights, path / "model.safetensors")
    spec = deepcopy(wordpiece())  # which is made once for all tests
    ids = spec["model"]["vocab"]
    spec["post_processor"] = {
        "type": "BertProcessing",
        "cls": ["<s>", ids["<s>"]],
        "sep": ["</s>", ids["</s>"]],
    }
    modules = [
        {"path": name, "type": f"sentence_transformers.models.{kind}"}
        for name, kind in (("", "Transformer"), ("1_Pooling", "Pooling"), ("2", "Normalize"))
    ]
    files: dict[str, Any] = {
        "config.json": CONFIG | more,
        "tokenizer.json": spec,
    }
    if not scores_pairs:
        files["modules.json"] = modules
        files["1_Pooling/config.json"] = {f"pooling_mode_{pool}": True}
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path
