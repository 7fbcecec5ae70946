"""Decoders saved without their head: every family binds, and is read as what makes vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ridgeline.model.files.families import HF_FAMILIES, family_of, model_from_config
from ridgeline.model.files.tensors import ModelFileError
from tests.model.files.encoders import write_encoder
from tests.model.files.test_gguf_modern import in_directory
from tests.model.files.tiny import CONFIG, as_tensors, hf_weights
from tests.parity.tiny_configs import CONFIGS, NEWER

Arrays = dict[str, np.ndarray[Any, Any]]
_HEADS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")


def without_head(config: dict[str, Any], weights: Arrays) -> tuple[dict[str, Any], Arrays]:
    """Return a model as transformers saves its bare class: without the first part of names."""
    name = config["architectures"][0]
    bare = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Model"
    kept = {name: array for name, array in weights.items() if name not in _HEADS}
    (before,) = {name.partition(".")[0] for name in kept}
    kept = {name.removeprefix(f"{before}."): array for name, array in kept.items()}
    return {**config, "architectures": [bare]}, kept


@pytest.mark.parametrize("name", CONFIGS | NEWER)
def test_every_family_of_decoders_binds_without_its_head(name: str, tmp_path: Path) -> None:
    config, weights = in_directory(name, tmp_path)
    whole, wanted = model_from_config(config, as_tensors(weights), "model")
    bare_config, bare = without_head(config, weights)
    arch, found = model_from_config(bare_config, as_tensors(bare), "model")
    assert (arch.has_head, arch.head_bias, whole.has_head) == (False, False, True)
    assert arch.layers == whole.layers
    assert found.keys() == wanted.keys() - {"head", "head_bias"}
    for part in found:
        np.testing.assert_array_equal(found[part].to_f32(), wanted[part].to_f32(), part)


def test_a_file_without_head_and_prefix_is_one_of_the_bare_class() -> None:
    """sentence-transformers leaves the class's name as it was, as of the larger Qwen3-Embedding."""
    _, bare = without_head(CONFIG, hf_weights(CONFIG))
    assert not model_from_config(CONFIG, as_tensors(bare), "model")[0].has_head
    tied = CONFIG | {"tie_word_embeddings": True}
    assert model_from_config(tied, as_tensors(bare), "model")[0].has_head
    whole_names = {f"model.{name}": array for name, array in bare.items()}
    with pytest.raises(ModelFileError, match=r"'lm_head.weight' of shape \(40, 32\) is missing"):
        model_from_config(CONFIG, as_tensors(whole_names), "model")


@pytest.mark.parametrize("name", ["MistralForCausalLM", "MistralModel"])
def test_a_decoder_that_sees_what_follows_makes_vectors(name: str) -> None:
    """Of its window the file says how far it reaches to each side."""
    config = CONFIG | {"architectures": [name], "is_causal": False, "sliding_window": 5}
    arch, _ = model_from_config(config, as_tensors(hf_weights(CONFIG)), "model")
    assert (arch.has_head, arch.is_encoder, arch.reads_whole) == (False, True, True)
    assert [one.window for one in arch.attentions] == [6, 6]


def test_the_head_that_an_encoder_was_trained_with_is_left_out(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    wanted_arch, wanted = model_from_config(config, as_tensors(weights), "model")
    under = {f"bert.{name}": array for name, array in weights.items()}
    under["cls.predictions.bias"] = np.ones(4, np.float32)
    for name in ("BertForMaskedLM", "BertForPreTraining", "BertModel"):
        arch, found = model_from_config(
            config | {"architectures": [name]}, as_tensors(under), "model"
        )
        assert (arch, found.keys()) == (wanted_arch, wanted.keys())
    under["bert.strange.weight"] = np.ones(4, np.float32)
    with pytest.raises(ModelFileError, match=r"'strange.weight' is not part"):
        model_from_config(config, as_tensors(under), "model")


@pytest.mark.parametrize("name", ["NobodysModel", "ForCausalLM", "Model", None, ["x"]])
def test_classes_of_no_family_stay_unknown(name: Any) -> None:
    assert family_of({"architectures": [name]}) is None


def test_classes_in_the_tables_are_themselves() -> None:
    for name in HF_FAMILIES:
        if " " not in name:
            assert family_of({"architectures": [name]}) is HF_FAMILIES[name]
