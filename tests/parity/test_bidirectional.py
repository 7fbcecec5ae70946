"""Encoders made like decoders, with rope and windows, against transformers: tiny random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import save_file

from ridgeline import LLM
from tests.parity.gguf_files import LAYER_NAMES, NAMES_OF
from tests.parity.test_encoders import POOLS, embedded, random_model, sizes, states_of
from tests.parity.tiny import torch, transformers

KINDS = {
    "embedding-gemma": lambda: transformers.Gemma3TextModel(
        transformers.Gemma3TextConfig(
            **sizes(num_hidden_layers=4, num_key_value_heads=1, head_dim=32),
            query_pre_attn_scalar=32,  # of head_dim, for GGUF has no key for it
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
            use_bidirectional_attention=True,
        )
    ),
}
LENGTHS = (1, 7, 12, 14, 90)  # below and above half of the window
F32 = {"dtype": "f32", "kv_cache_dtype": "f32"}


def texts() -> list[list[int]]:
    return [[int(i) for i in np.random.default_rng(n).integers(3, 300, n)] for n in LENGTHS]


def add_dense(folder: Path) -> list[Any]:
    """Two dense layers behind the pooling, as sentence-transformers saves them; return them."""
    layers = [torch.nn.Linear(64, 160, bias=True), torch.nn.Linear(160, 48, bias=False)]
    modules = json.loads((folder / "modules.json").read_text())
    for i, layer in enumerate(layers, 2):
        name = f"{i}_Dense"
        (folder / name).mkdir()
        save_file(
            {f"linear.{k}": v.contiguous() for k, v in layer.state_dict().items()},
            folder / name / "model.safetensors",
        )
        kind = "activation.Tanh" if i == 2 else "linear.Identity"
        config = {"activation_function": f"torch.nn.modules.{kind}", "bias": i == 2}
        (folder / name / "config.json").write_text(json.dumps(config))
        modules.insert(i, {"idx": i, "path": name, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    return layers


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", KINDS)
def test_random_ones(tmp_path: Path, name: str, backend: str) -> None:
    for pool in POOLS:
        model = random_model(name, tmp_path / pool, pool, normalises=True, kinds=KINDS)
        f32 = F32 if backend == "cpu" else {}
        with LLM(tmp_path / pool, backend=backend, kv_cache_memory="8MiB", **f32) as llm:
            for row, found in zip(texts(), embedded(llm, texts()), strict=True):
                wanted = POOLS[pool](states_of(model, row)).double()
                assert np.abs(found - (wanted / wanted.norm()).numpy()).max() < 1e-4


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_dense_layers(tmp_path: Path, backend: str) -> None:
    folder = tmp_path / "m"
    model = random_model("embedding-gemma", folder, "mean", normalises=True, kinds=KINDS)
    first, second = add_dense(folder)
    f32 = F32 if backend == "cpu" else {}
    with LLM(folder, backend=backend, kv_cache_memory="8MiB", **f32) as llm:
        for row, found in zip(texts(), embedded(llm, texts()), strict=True):
            with torch.inference_mode():
                wanted = second(first(states_of(model, row).mean(0)).tanh()).double()
            assert found.shape == (48,)
            assert np.abs(found - (wanted / wanted.norm()).numpy()).max() < 1e-4
        assert len(llm.embed([[5, 6]], dimensions=40)[0].outputs.embedding) == 40
        with pytest.raises(ValueError, match="48"):
            llm.embed([[5, 6]], dimensions=64)
    wide = {"linear.weight": torch.zeros(8, 65)}
    save_file(wide, folder / "3_Dense" / "model.safetensors")
    with pytest.raises(ValueError, match=r"of shape \(8, 65\) cannot take vectors of 160"):
        LLM(folder, backend=backend)
    (folder / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"3_Dense.model.safetensors: .* it is missing"):
        LLM(folder, backend=backend)


def write_gguf(model: Any, path: Path, dense: list[Any]) -> Path:
    """Write an EmbeddingGemma in float32 as llama.cpp's converter does."""
    config, kind = model.config, "gemma-embedding"
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_float32(f"{kind}.rope.freq_base_swa", 100.0)
    writer.add_sliding_window(24)  # as config.json has it, not half of it
    writer.add_sliding_window_pattern([one[0] == "s" for one in config.layer_types])
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *(f"\u2581w{i}" for i in range(4, 300))]
    writer.add_token_list(words)
    writer.add_token_types([3] * 4 + [1] * 296)
    for name, parameter in model.named_parameters():
        stem, _ = name.rsplit(".", 1)
        out = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(stem, "")
        if not out:
            _, number, inner = stem.split(".", 2)
            out = f"blk.{number}.{(LAYER_NAMES | NAMES_OF['gemma3_text'])[inner]}"
        array = parameter.detach().numpy()
        writer.add_tensor(f"{out}.weight", array + 1 if "norm" in name else array)
    for i, layer in enumerate(dense, 2):
        writer.add_dense_features_dims(f"dense_{i}", *layer.weight.shape[::-1])
        writer.add_tensor(f"dense_{i}.weight", layer.weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("has_dense", [False, True])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_embedding_gemma_from_gguf(tmp_path: Path, backend: str, has_dense: bool) -> None:
    model = random_model("embedding-gemma", tmp_path / "m", "mean", normalises=True, kinds=KINDS)
    dense = [torch.nn.Linear(64, 160, bias=False), torch.nn.Linear(160, 64, bias=False)]
    dense = dense if has_dense else []
    path = write_gguf(model, tmp_path / "m.gguf", dense)
    with LLM(
        path, backend=backend, kv_cache_memory="8MiB", **(F32 if backend == "cpu" else {})
    ) as llm:
        for row, found in zip(texts(), embedded(llm, texts()), strict=True):
            with torch.inference_mode():
                wanted = torch.nn.Sequential(*dense)(states_of(model, row).mean(0)).double()
            assert np.abs(found - (wanted / wanted.norm()).numpy()).max() < 1e-4
