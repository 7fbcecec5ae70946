"""Directories as GGUF files: every family's reader finds the model, under llama.cpp's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ridgeline.model.files.families import model_from_config, model_from_gguf
from ridgeline.model.files.lossy import as_gguf
from ridgeline.model.files.safetensors_dir import load_directory
from ridgeline.model.files.tensors import Checkpoint, ModelFileError
from tests.answers.tiny_families import write_family
from tests.model.files.tiny import CONFIG, Raw, as_tensors, converted, gguf_metadata, hf_weights

NAMES = {
    "llama3": "llama", "llama-linear": "llama", "mistral-window": "llama", "qwen2-tied": "qwen2",
    "qwen3": "qwen3", "gemma": "gemma", "phi2": "phi2", "phi3-window": "phi3",
    "phi3-longrope": "phi3", "glm4": "glm4", "mixtral": "llama", "qwen3-moe": "qwen3moe",
}  # fmt: skip
_NUMBERS = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
_OF_ROPE = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_finds_the_model_of_the_directory(name: str, tmp_path: Path) -> None:
    source = load_directory(write_family(tmp_path / "model", name))
    values, tensors = as_gguf(source)
    arch, bound = model_from_gguf(values, tensors, "x.gguf")
    assert values["general.architecture"] == NAMES[name]
    assert [layer.ffn for layer in arch.layers] == [layer.ffn for layer in source.arch.layers]
    assert bound.keys() == source.tensors.keys()
    for part, tensor in source.tensors.items():
        np.testing.assert_array_equal(bound[part].to_f32(), tensor.to_f32(), part)
    known = gguf.MODEL_TENSORS[_NUMBERS[NAMES[name]]]
    spelt = {gguf.TENSOR_NAMES[kind] for kind in known} | {"output"}  # of Gemma's tiny one too
    for in_file, tensor in tensors.items():
        plain = in_file.rpartition(".")[0].replace(".0.", ".{bid}.").replace(".1.", ".{bid}.")
        assert in_file in _OF_ROPE or plain in spelt, in_file
        assert len(tensor.shape) > 1 or tensor.dtype == "F32"
        if len(tensor.shape) > 1:  # as they are written, across the experts of a stack
            by_row = tensor.to_f32().reshape(-1, tensor.shape[-1])
            np.testing.assert_array_equal(tensor.rows(slice(90, 130)).to_f32(), by_row[90:130])


def in_memory(config: dict[str, Any], weights: Raw) -> Checkpoint:
    arch, tensors = model_from_config(config, as_tensors(weights), "model")
    family = config["architectures"][0]
    return Checkpoint(Path("model"), arch, tensors, (2,), 1, (1,), None, {}, family=family)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3"])
def test_rows_lie_as_converters_write_them(name: str) -> None:
    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}
    config = CONFIG | {"architectures": [f"{classes[name]}ForCausalLM"], "head_dim": 8}
    kinds: dict[str, Any] = {
        "qwen2": {"biases": "qkv"}, "qwen3": {"norms": True}, "phi3": {"fused": True},
    }.get(name, {})  # fmt: skip
    weights = hf_weights(config, **kinds)
    values, tensors = as_gguf(in_memory(config, weights))
    wanted = converted(weights, config, name)
    assert tensors.keys() == wanted.keys()
    for in_file, array in wanted.items():
        np.testing.assert_array_equal(tensors[in_file].to_f32(), array, in_file)
        if array.ndim > 1:  # also in pieces, as they are written
            np.testing.assert_array_equal(tensors[in_file].rows(slice(5, 21)).to_f32(), array[5:21])
    for key, value in gguf_metadata(config, name).items():
        assert values[key] == (pytest.approx(value) if isinstance(value, float) else value), key


def test_norms_are_stored_as_they_multiply() -> None:
    config = CONFIG | {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "head_dim": 8}
    weights = hf_weights(config)
    _, tensors = as_gguf(in_memory(config, weights))
    stored = tensors["blk.1.ffn_norm.weight"].to_f32()
    hf = weights["model.layers.1.post_attention_layernorm.weight"]
    np.testing.assert_array_equal(stored, hf + np.float32(1))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-yarn", r"rope.divisors\[1\] is .* in a GGUF file of 'llama' it would be read as"),
        ("qwen2-window", r"layers\[1\].mixer.window is 6; .* read as None"),
        ("helium", "how a HeliumForCausalLM is written as a GGUF file is not known"),
        ("lfm2", "how a Lfm2ForCausalLM is written as a GGUF file is not known"),
    ],
)
def test_what_a_file_cannot_say_is_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=words):
        as_gguf(load_directory(write_family(tmp_path / "model", name)))
