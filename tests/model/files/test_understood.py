"""Keys of strangers, and keys that newer files have beside others that say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.model.cost import costs
from ridgeline.model.cost.shapes import weight_params
from ridgeline.model.files.counting import shape_of_config
from ridgeline.model.files.families import arch_from_config, model_from_config, model_from_gguf
from ridgeline.model.files.tensors import ModelFileError
from tests.model.files.tiny import CONFIG, as_tensors, gguf_metadata, gguf_weights, hf_weights

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"license": "mit", "training_step": 12000, "aNote": [1]}, "license, training_step, aNote"),
        (
            {"merged_from": ["a", "b"], "mergekit": {"merge_method": "slerp"}},
            "merged_from, mergekit",
        ),
        ({"router_dropout": 0.1, "attn_backend": "x"}, "router_dropout, attn_backend"),
        ({f"note_{i}": True for i in range(23)}, ", note_19 and 3 more"),
        ({"a\nb": 2}, r"a\nb"),
        ({"qk_norm": False, "a_strangers_rope": None, "a_strangers_window": 0}, ""),
        ({"logit_scale": 1.0, "embedding_multiplier": 1, "rope_ratio": 1.0}, ""),
    ],
)
def test_a_key_that_nobody_knows_is_taken_and_named(changes: dict[str, Any], named: str) -> None:
    notes: list[str] = []
    raw = as_tensors(hf_weights(CONFIG))
    arch, _ = model_from_config(CONFIG | changes, raw, "model", note=notes.append)
    assert arch == model_from_config(CONFIG, raw, "model")[0]
    assert len(notes) == bool(named)
    for note in notes:
        assert note.startswith("keys of which nothing is known are taken to change nothing: ")
        assert note.endswith(named)
        assert "\n" not in note


def test_one_is_no_factor_where_a_name_speaks_of_none() -> None:
    with pytest.raises(ModelFileError, match="a_strangers_bias is 1, which is not supported"):
        arch_from_config(CONFIG | {"a_strangers_bias": 1}, {}, "model")


def test_keys_of_strangers_in_a_gguf_file_are_taken_and_named() -> None:
    notes: list[str] = []
    metadata = gguf_metadata(CONFIG, "llama") | {"llama.custom": "x", "other.scale": 3.0}
    model_from_gguf(metadata, as_tensors(gguf_weights(CONFIG, "llama")), "x", notes.append)
    assert notes == ["keys of which nothing is known are taken to change nothing: llama.custom"]


@pytest.mark.parametrize("named", [{}, {"architectures": None}, {"architectures": []}])
@pytest.mark.parametrize("nested", [False, True])
def test_the_type_names_the_family_where_no_class_does(named: dict[str, Any], nested: bool) -> None:
    silent = {key: value for key, value in CONFIG.items() if key != "architectures"}
    values = silent | {"model_type": "llama"} | named
    if nested:
        values = {"model_type": "nobodys", "text_config": silent | {"model_type": "llama"}} | named
    arch, _ = model_from_config(values, as_tensors(hf_weights(CONFIG)), "model")
    assert arch == model_from_config(CONFIG, as_tensors(hf_weights(CONFIG)), "model")[0]
    assert weight_params(shape_of_config(values)) == costs.weight_params(arch)


def test_a_pattern_beside_the_kinds_of_layers_says_the_same_in_other_words() -> None:
    """As newer transformers saves Gemma 3 if its config had one; it goes by the kinds."""
    published = json.loads((DATA / "configs.json").read_text())["gemma-3-1b"]["config"]
    arch = arch_from_config(published, {}, "x")
    assert [layer.known_attention.window is None for layer in arch.layers[:7]].index(True) == 5
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000},
    }
    of_layers = {"layer_types": (kinds * 5)[:26], "_sliding_window_pattern": 6}
    again = published | of_layers | {"rope_parameters": ropes, "use_bidirectional_attention": False}
    assert again["sliding_window_pattern"] == 6
    assert arch_from_config(again, {}, "x") == arch
    assert arch_from_config(again | {"sliding_window_pattern": 2}, {}, "x") == arch
    with pytest.raises(ModelFileError, match="sliding_window_pattern is 6, which is not supported"):
        arch_from_config(CONFIG | {"sliding_window_pattern": 6}, {}, "x")


def test_a_rope_beside_those_of_each_kind_of_layer_says_nothing() -> None:
    """As newer transformers saves OLMo 3 if its config was given one."""
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    olmo = CONFIG | {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 8}
    arch = arch_from_config(olmo | {"rope_parameters": kinds}, {}, "x")
    beside = {"rope_theta": 7.0, "rope_type": "default"}
    notes: list[str] = []
    for more in ({}, {"factor": 2.0, "beta_fast": 32.0, "rope_type": "yarn"}):
        stored = kinds | beside | more
        assert arch_from_config(olmo | {"rope_parameters": stored}, {}, "x", notes.append) == arch
    assert notes == [
        "rope_parameters names kinds of layers, so what is beside serves none: beta_fast, factor"
    ]
    del kinds["sliding_attention"]
    with pytest.raises(ModelFileError, match="must describe full_attention and sliding_attention"):
        arch_from_config(olmo | {"rope_parameters": kinds}, {}, "x")
