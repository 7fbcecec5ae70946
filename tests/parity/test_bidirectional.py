"""Encoders made like decoders, with rope and windows, against transformers: tiny random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("torch", reason="parity tests need their own environment")

from safetensors.torch import save_file

from ridgeline import LLM
from ridgeline.model.cost import costs
from ridgeline.model.files.families import model_from_config
from ridgeline.model.files.tensors import Tensor
from tests.parity import tiny
from tests.parity.gguf_files import LAYER_NAMES, NAMES_OF
from tests.parity.test_encoders import POOLS, embedded, random_model, sizes, states_of
from tests.parity.tiny import torch, transformers
from tests.parity.tiny_encoders import ENCODERS

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
    "modern-bert": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(
            **sizes(num_hidden_layers=5, pad_token_id=1),
            local_attention=24,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        )
    ),
    "modern-bert by default": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(**sizes(hidden_activation="silu", pad_token_id=1))
    ),
}
OUTER_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
}
MODERN_NAMES = {
    "attn_norm": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
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
    """Write an EmbeddingGemma or a ModernBERT in float32 as llama.cpp's converter does."""
    config = model.config
    is_gemma = config.model_type == "gemma3_text"
    kind = "gemma-embedding" if is_gemma else "modern-bert"
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_float32(f"{kind}.rope.freq_base_swa", 100.0)
    writer.add_sliding_window(24)  # as config.json has it, not half of it
    if is_gemma:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_sliding_window_pattern([one[0] == "s" for one in config.layer_types])
    else:
        writer.add_layer_norm_eps(config.norm_eps)
        writer.add_causal_attention(False)
        writer.add_string(f"{kind}.hidden_activation", config.hidden_activation)
        writer.add_uint32(f"{kind}.attention.sliding_window_pattern", 3)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *(f"\u2581w{i}" for i in range(4, 300))]
    writer.add_token_list(words)
    writer.add_token_types([3] * 4 + [1] * 296)
    names = LAYER_NAMES | NAMES_OF["gemma3_text"] | MODERN_NAMES
    for name, parameter in model.named_parameters():
        stem, _ = name.rsplit(".", 1)
        out = OUTER_NAMES.get(stem, "")
        if not out:
            _, number, inner = stem.split(".", 2)
            out = f"blk.{number}.{names[inner]}"
        array = parameter.detach().numpy()
        writer.add_tensor(f"{out}.weight", array + 1 if is_gemma and "norm" in name else array)
    for i, layer in enumerate(dense, 2):
        writer.add_dense_features_dims(f"dense_{i}", *layer.weight.shape[::-1])
        writer.add_tensor(f"dense_{i}.weight", layer.weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("name", "has_dense"),
    [("embedding-gemma", False), ("embedding-gemma", True), ("modern-bert", False)],
)
def test_from_gguf(tmp_path: Path, backend: str, name: str, has_dense: bool) -> None:
    model = random_model(name, tmp_path / "m", "mean", normalises=True, kinds=KINDS)
    dense = [torch.nn.Linear(64, 160, bias=False), torch.nn.Linear(160, 64, bias=False)]
    dense = dense if has_dense else []
    path = write_gguf(model, tmp_path / "m.gguf", dense)
    f32 = F32 if backend == "cpu" else {}
    with LLM(path, backend=backend, kv_cache_memory="8MiB", **f32) as llm:
        for row, found in zip(texts(), embedded(llm, texts()), strict=True):
            with torch.inference_mode():
                wanted = torch.nn.Sequential(*dense)(states_of(model, row).mean(0)).double()
            assert np.abs(found - (wanted / wanted.norm()).numpy()).max() < 1e-4


@pytest.mark.parametrize("name", ["embedding-gemma", "modern-bert"])
def test_ropes_that_the_config_leaves_out(tmp_path: Path, name: str) -> None:
    family, _ = ENCODERS[name]
    config = tiny.make_config(name, rope_parameters=None)
    kinds = {name: lambda: getattr(transformers, family)(config)}
    model = random_model(name, tmp_path / "m", "mean", normalises=False, kinds=kinds)
    path = tmp_path / "m" / "config.json"
    values = json.loads(path.read_text())
    plain = {"rope_type": "default"}
    for said in (None, {"full_attention": plain, "sliding_attention": plain}):
        path.write_text(json.dumps(values | {"rope_parameters": said}))
        with LLM(tmp_path / "m", backend="reference", kv_cache_memory="8MiB") as llm:
            ids = [[i % 90 + 4 for i in range(n)] for n in LENGTHS]
            for row, found in zip(ids, embedded(llm, ids), strict=True):
                wanted = states_of(model, row).mean(0).double().numpy()
                assert np.abs(found - wanted).max() < 1e-4


# As published; transformers writes newer keys.
OLDER = {
    "architectures": ["ModernBertModel"],
    "attention_bias": False,
    "classifier_pooling": "mean",
    "cls_token_id": 0,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 64,
    "initializer_cutoff_factor": 2.0,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-05,
    "local_attention": 24,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 130,
    "mlp_bias": False,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "position_embedding_type": "absolute",
    "reference_compile": False,
    "repad_logits_with_grad": False,
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "vocab_size": 300,
}


REAL: dict[str, tuple[Any, int]] = {  # configurations as published, and millions of parameters
    "embeddinggemma-300m": (
        transformers.Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=768,
            intermediate_size=1152,
            num_hidden_layers=24,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=256,
            sliding_window=512,
            max_position_embeddings=2048,
            use_bidirectional_attention=True,
        ),
        303,  # with the dense layers, 4.7 more, they are the 308 of its card
    ),
    "modernbert-base": (transformers.ModernBertConfig(), 149),
}


@pytest.mark.parametrize("name", REAL)
def test_real_sizes_bind(name: str) -> None:
    config, num_millions = REAL[name]
    kind = {"gemma3_text": "Gemma3TextModel", "modernbert": "ModernBertModel"}[config.model_type]
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
    raw = {}
    for key, value in model.named_parameters():
        shape = tuple(value.shape)
        raw[key] = Tensor(key, "F32", shape, np.zeros((shape[0], 4 * (*shape, 1)[1]), np.uint8))
    values = config.to_dict() | {"architectures": [kind]}
    arch, bound = model_from_config(values, raw, name)
    assert arch.is_encoder
    assert round(costs.weight_params(arch) / 1e6) == num_millions
    assert bound.keys() == arch.matrix_shapes().keys()
    assert {layer.known_attention.window for layer in arch.layers} == {
        None,
        values.get("sliding_window", values.get("local_attention")) // 2 + 1,
    }


def test_modern_bert_with_its_older_keys(tmp_path: Path) -> None:
    config = transformers.ModernBertConfig(
        **sizes(num_hidden_layers=5, pad_token_id=1), local_attention=24
    )
    kinds = {"modern": lambda: transformers.ModernBertModel(config)}
    model = random_model("modern", tmp_path / "m", "mean", normalises=False, kinds=kinds)
    (tmp_path / "m" / "config.json").write_text(json.dumps(OLDER))
    with LLM(tmp_path / "m", backend="reference", kv_cache_memory="8MiB") as llm:
        for row, found in zip(texts(), embedded(llm, texts()), strict=True):
            assert np.abs(found - states_of(model, row).mean(0).double().numpy()).max() < 1e-4
    (tmp_path / "m" / "config.json").write_text(json.dumps(OLDER | {"mlp_bias": True}))
    with pytest.raises(ValueError, match="mlp_bias is True"):
        LLM(tmp_path / "m")
