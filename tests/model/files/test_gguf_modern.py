"""Families from 2025 on: a GGUF file gives what the same weights give in a directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ridgeline.model.files.families import model_from_config, model_from_gguf
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.shape.model import Layer
from tests.answers.tiny_families import write_family
from tests.model.files.gguf_conversion import ARCHITECTURES, Arrays, converted
from tests.model.files.tiny import as_tensors
from tests.parity.modern_configs import MODERN

# Converters leave a window out, and which layers of Llama 4 turn or have experts.
OTHERWISE = ("dots1-window", "llama4-plain")
NAMES = [
    name
    for name, (family, _) in MODERN.items()
    if f"{family}ForCausalLM" in ARCHITECTURES and name not in OTHERWISE
] + ["gpt-oss"]


def _facts(layer: Layer) -> tuple[Layer, object]:
    """A layer but for the context that its rope was trained with, which only scaled ones need."""
    mixer = layer.known_attention
    rope = mixer.rope
    turns = rope and (float(np.float32(rope.theta)), rope.dim, rope.divisors)
    return replace(layer, mixer=replace(mixer, rope=None)), turns


def in_directory(name: str, path: Path) -> tuple[dict[str, Any], Arrays]:
    """Return config.json and weights of the tiny model of this name."""
    directory = write_family(path / name, name)
    config = json.loads((directory / "config.json").read_text())
    return config, load_file(directory / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_gives_what_a_directory_gives(name: str, tmp_path: Path) -> None:
    config, weights = in_directory(name, tmp_path)
    wanted_arch, wanted = model_from_config(config, as_tensors(weights), "model")
    metadata, raw = converted(config, weights)
    arch, found = model_from_gguf(metadata, as_tensors(raw), "x.gguf")
    assert list(map(_facts, arch.layers)) == list(map(_facts, wanted_arch.layers))
    context = {"max_position": arch.max_position}
    assert replace(arch, layers=()) == replace(wanted_arch, layers=(), **context)
    assert found.keys() == wanted.keys()
    for part in wanted:
        np.testing.assert_array_equal(found[part].to_f32(), wanted[part].to_f32(), part)


@pytest.mark.parametrize(
    ("name", "arch"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3-moe", "qwen3vlmoe")]
)
def test_of_qwen_vl_the_text_half_is_that_of_qwen(name: str, arch: str, tmp_path: Path) -> None:
    config, weights = in_directory(name, tmp_path)
    wanted_arch, wanted = model_from_config(config, as_tensors(weights), "model")
    metadata, raw = converted(config, weights, arch)
    found_arch, found = model_from_gguf(metadata, as_tensors(raw), "x.gguf")
    assert list(map(_facts, found_arch.layers)) == list(map(_facts, wanted_arch.layers))
    for part in wanted:
        np.testing.assert_array_equal(found[part].to_f32(), wanted[part].to_f32(), part)


def test_the_layer_that_guesses_a_token_ahead_is_left_out(tmp_path: Path) -> None:
    config, weights = in_directory("glm4-moe", tmp_path)
    wanted_arch, wanted = model_from_config(config, as_tensors(weights), "model")
    number, ones = config["num_hidden_layers"], np.ones(4, np.float32)
    config["num_nextn_predict_layers"] = 1
    more = {f"model.layers.{number}.enorm.weight": ones}
    arch, found = model_from_config(config, as_tensors(weights | more), "model")
    assert (arch, found.keys()) == (wanted_arch, wanted.keys())
    metadata, raw = converted(config, weights)
    metadata["glm4moe.nextn_predict_layers"] = 1
    metadata["glm4moe.block_count"] = number + 1
    raw[f"blk.{number}.nextn.enorm.weight"] = ones
    arch, found = model_from_gguf(metadata, as_tensors(raw), "x.gguf")
    assert arch.num_layers == number
    assert found.keys() == wanted.keys()


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("glm4", {"rope.dimension_sections": [4, 2, 2, 0]}, "rope.dimension_sections is "),
        ("glm4", {"attention.scale": 0.5}, "glm4.attention.scale is set"),
        ("olmo", {"attention.clamp_kqv": 8.0}, "olmo.attention.clamp_kqv is set"),
        ("ernie4.5-moe", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step is 2"),
        ("minimax-m2", {"expert_gating_func": 1}, "expert_gating_func is 1"),
        ("ministral3", {"rope.scaling.type": "none"}, "temperature_scale without yarn"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Of GLM-4V the rows of queries and keys are in another order."""
    metadata, raw = converted(*in_directory(name, tmp_path))
    arch = metadata["general.architecture"]
    metadata |= {f"{arch}.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelFileError, match=named):
        model_from_gguf(metadata, as_tensors(raw), "x.gguf")


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("ernie4.5-moe", {"moe_layer_end_index": 1}, "moe_layer_end_index is 1: dense networks"),
        ("ernie4.5-moe", {"moe_layer_interval": 2}, "moe_layer_interval is 2"),
        ("ernie4.5", {"use_bias": True}, "use_bias is True"),
        ("minimax-m2", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
        ("minimax-m2", {"rotary_dim": 20}, "rope over 20 of a head's 16 channels"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("seed-oss", {"mlp_bias": True}, "mlp_bias is set"),
        (
            "ministral3",
            {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta beside rope_type 'default'",
        ),
        ("hunyuan", {"use_cla": True}, "use_cla is True"),
        ("hunyuan", {"rope_parameters": {"rope_type": "ntk"}}, "'ntk' is not supported"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv is set"),
        ("arcee", {"mlp_bias": True}, "mlp_bias is set"),
    ],
)
def test_a_config_of_another_kind_is_refused(
    name: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config, weights = in_directory(name, tmp_path)
    with pytest.raises(ModelFileError, match=named):
        model_from_config(config | changes, as_tensors(weights), "model")


def test_layers_of_exaone_4_turn_where_they_slide(tmp_path: Path) -> None:
    kinds = {}
    for name in ("exaone4", "exaone4-plain"):
        config, weights = in_directory(name, tmp_path)
        arch, _ = model_from_config(config, as_tensors(weights), "model")
        kinds[name] = [(one.window, one.rope is not None) for one in arch.attentions]
    assert kinds["exaone4"] == [(8, True)] * 3 + [(None, False)]
    assert kinds["exaone4-plain"] == [(None, True)] * 2
