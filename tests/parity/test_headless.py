"""Decoders without their head, and encoders with another: vectors against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline import LLM
from tests.parity.test_encoders import (
    POOLS,
    embedded,
    random_model,
    sizes,
    states_of,
    write_gguf,
)
from tests.parity.tiny import transformers

_OF_KEYS = {"num_key_value_heads": 2, "head_dim": 16, "attn_implementation": "eager"}
MODELS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: transformers.MistralModel(
        transformers.MistralConfig(**sizes(**_OF_KEYS, sliding_window=20))
    ),
    "mistral, both ways": lambda: transformers.MistralModel(
        transformers.MistralConfig(**sizes(**_OF_KEYS, sliding_window=20, is_causal=False))
    ),
    "qwen2": lambda: transformers.Qwen2Model(transformers.Qwen2Config(**sizes(**_OF_KEYS))),
    "qwen2, both ways": lambda: transformers.Qwen2Model(
        transformers.Qwen2Config(**sizes(**_OF_KEYS, is_causal=False))
    ),
    "qwen3": lambda: transformers.Qwen3Model(transformers.Qwen3Config(**sizes(**_OF_KEYS))),
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**sizes(**_OF_KEYS))),
    "gemma2": lambda: transformers.Gemma2Model(transformers.Gemma2Config(**sizes(**_OF_KEYS))),
    "gpt2": lambda: transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=4, n_positions=130)
    ),
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_vectors(tmp_path: Path, name: str, backend: str) -> None:
    for pool in ("last", "mean"):
        folder = tmp_path / pool
        model = random_model(name, folder, pool, normalises=True, kinds=MODELS)
        ids = [[int(i) for i in np.random.default_rng(n).integers(3, 300, n)] for n in (1, 7, 90)]
        f32 = {"dtype": "f32", "kv_cache_dtype": "f32"} if backend == "cpu" else {}
        with LLM(folder, backend=backend, kv_cache_memory="8MiB", **f32) as llm:
            for row, found in zip(ids, embedded(llm, ids), strict=True):
                wanted = POOLS[pool](states_of(model, row)).double()
                assert np.abs(found - (wanted / wanted.norm()).numpy()).max() < 1e-4
            with pytest.raises(ValueError, match="cannot generate text"):
                llm.generate("w5")


ENCODERS: dict[str, Callable[[], Any]] = {
    "BertForMaskedLM": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**sizes())),
    "BertForPreTraining": lambda: transformers.BertForPreTraining(
        transformers.BertConfig(**sizes())
    ),
    "RobertaForMaskedLM": lambda: transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(**sizes(pad_token_id=1))
    ),
    "XLMRobertaForTokenClassification": lambda: transformers.XLMRobertaForTokenClassification(
        transformers.XLMRobertaConfig(**sizes(pad_token_id=1, type_vocab_size=1))
    ),
    "MPNetForMaskedLM": lambda: transformers.MPNetForMaskedLM(
        transformers.MPNetConfig(**sizes(max_position_embeddings=302))
    ),
    "DistilBertForMaskedLM": lambda: transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(
            vocab_size=300,
            dim=64,
            n_layers=3,
            n_heads=4,
            hidden_dim=96,
            max_position_embeddings=302,
        )
    ),
    "MPNetModel": lambda: transformers.MPNetModel(
        transformers.MPNetConfig(**sizes(max_position_embeddings=302))
    ),
    "DistilBertModel": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(
            vocab_size=300,
            dim=64,
            n_layers=3,
            n_heads=4,
            hidden_dim=96,
            max_position_embeddings=302,
            activation="relu",
        )
    ),
    "ModernBertForMaskedLM": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **sizes(pad_token_id=0, cls_token_id=1, sep_token_id=2, attn_implementation="eager")
        )
    ),
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_of_encoders(tmp_path: Path, name: str, backend: str) -> None:
    """With another head than is used, or none; some with texts longer than near distances."""
    model = random_model(name, tmp_path / "m", "mean", normalises=True, kinds=ENCODERS)
    longest = 300 if "MPNet" in name or "Distil" in name else 60
    ids = [[int(i) for i in np.random.default_rng(n).integers(3, 300, n)] for n in (1, 60, longest)]
    f32 = {"dtype": "f32", "kv_cache_dtype": "f32"} if backend == "cpu" else {}
    with LLM(tmp_path / "m", backend=backend, kv_cache_memory="8MiB", **f32) as llm:
        for row, found in zip(ids, embedded(llm, ids), strict=True):
            wanted = POOLS["mean"](states_of(model.base_model, row)).double()
            assert np.abs(found - (wanted / wanted.norm()).numpy()).max() < 1e-4


def test_distilbert_from_gguf(tmp_path: Path) -> None:
    whole = random_model(
        "DistilBertForMaskedLM", tmp_path / "m", "mean", normalises=True, kinds=ENCODERS
    )
    model = whole.distilbert
    path = write_gguf(model, tmp_path / "m.gguf", 1)
    with LLM(path, backend="reference", kv_cache_memory="8MiB") as llm:
        ids = [[0, *range(4, 4 + n), 2] for n in (1, 60)]
        for row, found in zip(ids, embedded(llm, ids), strict=True):
            wanted = POOLS["mean"](states_of(model, row)).double()
            assert np.abs(found - (wanted / wanted.norm()).numpy()).max() < 1e-4
