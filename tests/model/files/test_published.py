"""Published configs of families that run: every key is understood, and the parameters are counted.

Their values were written down from the files that ``source`` names. ``tests/parity`` binds the
tensors that transformers makes of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.model.cost import costs
from ridgeline.model.files.counting import shape_of_config
from ridgeline.model.files.families import (
    HF_FAMILIES,
    arch_from_config,
    family_of,
    model_from_config,
)
from ridgeline.model.files.tensors import ModelFileError, Tensor
from tests.answers.tiny_families import learnt_positions

DATA = Path(__file__).parents[2] / "data"
CONFIGS: dict[str, Any] = json.loads((DATA / "family_configs.json").read_text())
OTHERS: dict[str, Any] = json.loads((DATA / "configs.json").read_text())
ENCODERS = {name: family for name, family in HF_FAMILIES.items() if "has_head" in family.facts}
OF_ENCODERS: dict[str, Any] = json.loads((DATA / "encoder_configs.json").read_text())


def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor without values: what binds looks at shapes alone."""
    return Tensor(name, "F32", shape, np.zeros((0, 0), np.uint8))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_counts_its_published_parameters(name: str) -> None:
    entry = CONFIGS[name]
    config, family = entry["config"], family_of(entry["config"])
    assert family is not None
    arch = arch_from_config(config, learnt_positions(config, family), name)
    assert costs.weight_params(arch) == entry["num_params"] + entry.get("num_norms_of_ones", 0)
    assert len({id(layer) for layer in arch.layers}) == len(set(arch.layers))


def test_every_family_has_a_published_config() -> None:
    named = {
        name
        for entry in (*CONFIGS.values(), *OTHERS.values())
        for name in entry["config"]["architectures"]
    }
    same_as_another = {
        "Gemma4ForCausalLM",
        "Llama4ForCausalLM",
        "Gemma4UnifiedForCausalLM",
        "MptForCausalLM",
        "PhimoeForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
    not_at_hand = {
        "ArceeForCausalLM",
        "BambaForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HeliumForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "Jais2ForCausalLM",
        "MinistralForCausalLM",
        "VaultGemmaForCausalLM",
    }
    families = {name.partition(" ")[0] for name in HF_FAMILIES}
    assert families - ENCODERS.keys() - named == same_as_another | not_at_hand


@pytest.mark.parametrize("name", OF_ENCODERS)
def test_a_published_encoder_counts_its_published_parameters(name: str) -> None:
    """Their files have more: what is added to other tensors when it is bound, and a pooler."""
    entry = OF_ENCODERS[name]
    config = entry["config"]
    family = family_of(config)
    assert family is not None
    arch = arch_from_config(config, learnt_positions(config, family), name)
    hidden = arch.hidden_size
    folded = hidden * config["type_vocab_size"] if "types" in family.outer else 0
    folded += hidden if "embed_norm" in family.outer else 0
    if "pooler.dense.weight" in family.buffers:
        folded += hidden * (hidden + 1)
    if arch.num_segments > 1:  # each has positions of its own
        folded -= (arch.num_segments - 1) * config["max_position_embeddings"] * hidden
    assert costs.weight_params(arch) + folded == entry["num_params"]


def test_every_encoder_has_a_published_config() -> None:
    published = [family_of(entry["config"]) for entry in OF_ENCODERS.values()]
    missing = {name for name, family in ENCODERS.items() if family not in published}
    assert missing == {"Gemma3TextModel"}


@pytest.mark.parametrize(
    ("config", "bases"),
    [
        (CONFIGS["gemma-3-270m"]["config"], ["rope_theta", "rope_local_base_freq"]),
        (
            OF_ENCODERS["modernbert-embed-base"]["config"],
            ["global_rope_theta", "local_rope_theta"],
        ),
    ],
)
def test_bases_of_rope_that_a_file_leaves_out(config: dict[str, Any], bases: list[str]) -> None:
    """transformers has them by kind of layer: those of the published models."""
    plain = {"rope_type": "default"}
    by_kind = {"full_attention": plain, "sliding_attention": plain}
    arch = arch_from_config(config, {}, "x")
    without = {key: value for key, value in config.items() if key not in bases}
    assert arch_from_config(without, {}, "x") == arch
    assert arch_from_config(without | {"rope_parameters": by_kind}, {}, "x") == arch


def test_gguf_files_of_gemma_4_state_as_many_parameters() -> None:
    """They have what nobody reads too: K/V of layers that read others', and frequencies."""
    names = [name for name in CONFIGS if name.startswith("gemma-4")]
    assert len(names) == 5
    for name in names:
        entry = CONFIGS[name]
        arch = arch_from_config(entry["config"], {}, name)
        unread = sum(
            2 * mixer.kv_size * arch.hidden_size + mixer.head_dim  # with the norm of keys
            for mixer in arch.attentions
            if mixer.kv_of is not None
        )
        frequencies = max(mixer.head_dim for mixer in arch.attentions) // 2
        assert costs.weight_params(arch) + unread + frequencies == entry["num_gguf_params"]


def test_what_stands_beside_a_text_half_is_understood_too() -> None:
    config = CONFIGS["gemma-3-4b-it"]["config"]
    with pytest.raises(ModelFileError, match="a_strangers_scale is "):
        arch_from_config(config | {"a_strangers_scale": 2}, {}, "x")
    with pytest.raises(ModelFileError, match="quantization_config is set"):
        arch_from_config(config | {"quantization_config": {"quant_method": "new"}}, {}, "x")
    tied = {"tie_word_embeddings": True}
    untied = {"tie_word_embeddings": False}
    assert not arch_from_config(config | untied, {}, "x").tied_embeddings
    text = config["text_config"]
    for inner, outer in ((tied, untied), (untied, tied), (tied, {}), (untied, {})):
        both = config | outer | {"text_config": text | inner}
        assert arch_from_config(both, {}, "x").tied_embeddings is inner["tie_word_embeddings"]
        assert shape_of_config(both).is_tied is inner["tie_word_embeddings"]


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_tensors_of_a_text_half_bind_under_every_prefix(prefix: str) -> None:
    config = CONFIGS["gemma-3-4b-it"]["config"]
    small = config["text_config"] | {
        "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 40,
    }  # fmt: skip
    config = config | {"text_config": small}
    arch = arch_from_config(config, {}, "x")
    names = HF_FAMILIES["Gemma3ForConditionalGeneration"]
    raw = {}
    for name, shape in arch.matrix_shapes().items():
        in_file = names.outer.get(name)
        if in_file is None:
            in_file = names.prefix.format(0) + names.layer[name.split(".")[2]]
        in_file = prefix + in_file.removeprefix("model.")
        data = np.zeros((shape[0], 4 * shape[-1] if len(shape) > 1 else 4), np.uint8)
        raw[in_file] = Tensor(in_file, "F32", shape, data)
    raw["vision_tower.patch.weight"] = tensor("vision_tower.patch.weight", (3, 3))
    notes: list[str] = []
    bound = model_from_config(config, raw, "x", note=notes.append)[1]
    assert notes == ["tensors of parts that do not run here are not read: 1, of vision_tower.patch"]
    assert bound.keys() == arch.matrix_shapes().keys()
    raw["model.other.weight"] = tensor("model.other.weight", (3, 3))
    with pytest.raises(ModelFileError, match="is not part of this architecture"):
        model_from_config(config, raw, "x")
