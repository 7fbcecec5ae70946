"""Nemotron-H: layers of a file are halves of ours, and some of them cannot be joined."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.model.cost import costs
from ridgeline.model.cost.shapes import weight_params
from ridgeline.model.files.counting import shape_of_config
from ridgeline.model.files.families import HF_FAMILIES, arch_from_config, family_of
from ridgeline.model.files.families.weight_names import number_in_file
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.shape.model import Experts, Mlp
from tests.model.files.test_published import CONFIGS

PLAIN: dict[str, Any] = CONFIGS["nemotron-h-8b"]["config"]
EXPERTS: dict[str, Any] = CONFIGS["nemotron-3-nano-30b-a3b"]["config"]


def small(letters: str, **more: Any) -> dict[str, Any]:
    changes = {"hybrid_override_pattern": letters} | more
    return {k: v for k, v in EXPERTS.items() if k != "num_hidden_layers"} | changes


def test_a_network_belongs_to_the_mixer_before_it() -> None:
    arch = arch_from_config(small("M-MM*E*ME"), {}, "x")
    found = [
        (layer.attention is not None, type(layer.ffn), layer.ffn.size) for layer in arch.layers
    ]
    assert found == [
        (False, Mlp, 1856), (False, Mlp, 0), (False, Mlp, 0), (True, Experts, 1856),
        (True, Mlp, 0), (False, Experts, 1856),
    ]  # fmt: skip
    assert all(mixer.rope is None for mixer in arch.attentions)
    family = HF_FAMILIES["NemotronHForCausalLM of experts"]
    numbers = [[number_in_file(arch, family, i, part) for part in ("attn_norm", "mlp_norm", "down")]
               for i in (0, 3, 5)]  # fmt: skip
    assert numbers == [[0, 1, 1], [4, 5, 5], [7, 8, 8]]


def test_names_and_letters_say_the_same() -> None:
    names = ["mamba", "mlp", "full_attention", "moe", "linear_attention"]
    of_names = small("", layers_block_type=names) | {"hybrid_override_pattern": None}
    assert arch_from_config(of_names, {}, "x") == arch_from_config(small("M-*EM"), {}, "x")
    assert family_of(of_names) is HF_FAMILIES["NemotronHForCausalLM of experts"]
    assert family_of(small("M-*")) is HF_FAMILIES["NemotronHForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hybrid_override_pattern": "M-+*"}, "must name each layer, as one of M, "),
        ({"hybrid_override_pattern": "-M*"}, "layer 0 has no mixer before it"),
        ({"hybrid_override_pattern": "M--*"}, "layer 2 has no mixer before it"),
        ({"hybrid_override_pattern": "M-M-"}, "no layer with attention"),
        ({"hybrid_override_pattern": None}, "layers_block_type, or hybrid_override_"),
        ({"num_hidden_layers": 7}, "names 4 layers, not num_hidden_layers"),
        ({"moe_latent_size": 64}, "moe_latent_size is set"),
        ({"num_key_value_heads": 5}, "cannot share 5 key and value heads"),
        ({"mlp_hidden_act": "mish"}, "mlp_hidden_act 'mish' is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"time_step_limit": [0.001, float("inf")]}, "time_step_limit is "),
    ],
)
def test_what_cannot_be_joined_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        arch_from_config(small("M-*E") | changes, {}, "x")


def test_the_least_step_of_the_first_weights_is_no_floor_of_steps() -> None:
    """As in the publisher's own code, where only time_step_limit limits them."""
    assert EXPERTS["time_step_min"] == 0.001
    arch = arch_from_config(EXPERTS, {}, "x")
    for value in (1e-30, 0.5):
        assert arch_from_config(EXPERTS | {"time_step_min": value}, {}, "x") == arch


def test_a_rope_that_nothing_turns_by_is_left_out() -> None:
    said = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert arch_from_config(PLAIN | said, {}, "x") == arch_from_config(PLAIN, {}, "x")


def test_a_config_without_experts_may_speak_of_them() -> None:
    """As those that transformers writes."""
    said = {"n_routed_experts": 8, "moe_intermediate_size": 7688, "n_group": 1}
    assert arch_from_config(PLAIN | said, {}, "x") == arch_from_config(PLAIN, {}, "x")


@pytest.mark.parametrize("config", [PLAIN, EXPERTS, small("M-*M", model_type="nemotron_h")])
def test_a_plan_counts_the_same(config: dict[str, Any]) -> None:
    assert weight_params(shape_of_config(config)) == costs.weight_params(
        arch_from_config(config, {}, "x")
    )
