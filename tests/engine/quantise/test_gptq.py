"""Directories of GPTQ: what is written loads near its source, fused matrices and adapters too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ridgeline.engine.quantise.gptq import quantise_directory
from ridgeline.engine.quantise.job import QuantisedFile, QuantiseOptions
from ridgeline.engine.quantise.source import additions, read_directory
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.tensors import ModelFileError
from tests.lora import llama_shapes, merged, random_pairs, write_peft
from tests.model.files.tiny import CONFIG, Raw, hf_weights
from tests.model.files.vocabularies import byte_level

WINDOWS = [tuple(np.random.default_rng(i).integers(5, 40, 64)) for i in range(8)]
PHI = CONFIG | {"architectures": ["Phi3ForCausalLM"], "num_key_value_heads": 4}


def directory(path: Path, weights: Raw, config: dict[str, Any] = CONFIG) -> Path:
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(byte_level()))
    return path


def quantised(source: Path, out: Path, **options: Any) -> QuantisedFile:
    wanted = {"windows": (), "importance": {}, "added": {}, "threads": 1} | options
    wish = QuantiseOptions("int4-gptq", **wanted)
    return quantise_directory(read_directory(source), out, wish, lambda *_: None)


def shares_lost(found: Path, wanted: Path) -> dict[str, float]:
    one, other = load_checkpoint(found), load_checkpoint(wanted)
    return {
        name: float(
            np.linalg.norm(tensor.to_f32() - other.tensors[name].to_f32())
            / np.linalg.norm(other.tensors[name].to_f32())
        )
        for name, tensor in one.tensors.items()
    }


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("config", [CONFIG, PHI], ids=["llama", "phi3"])
def test_matrices_of_layers_are_near_and_all_else_is_the_same(
    config: dict[str, Any], calibrated: bool, tmp_path: Path
) -> None:
    source = directory(tmp_path / "a", hf_weights(config, fused=config is PHI), config)
    done = quantised(source, tmp_path / "b", windows=WINDOWS if calibrated else ())
    for name, share in shares_lost(tmp_path / "b", source).items():
        is_matrix = name.startswith("layers.") and not name.endswith("norm")
        assert (0.05 < share < 0.2) if is_matrix else share == 0, name
    assert load_checkpoint(tmp_path / "b").quantization == "GPTQ (4 bits, groups of 32)"
    assert done.num_bytes == (tmp_path / "b" / "model.safetensors").stat().st_size
    assert (done.calibrated > 0) == calibrated
    stored = load_file(tmp_path / "b" / "model.safetensors")  # the library checks the header
    down = "model.layers.1.mlp.down_proj"
    assert [stored[f"{down}.{end}"].shape for end in ("qweight", "qzeros", "scales", "g_idx")] == [
        (8, 32), (2, 4), (2, 32), (64,)
    ]  # fmt: skip
    assert (stored[f"{down}.scales"] > 0).all()
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()


def test_an_adapter_of_fused_matrices_is_merged(tmp_path: Path) -> None:
    weights = hf_weights(PHI, fused=True)
    source = directory(tmp_path / "a", weights, PHI)
    pairs = random_pairs(llama_shapes(PHI, fused=True))
    adapter = write_peft(tmp_path / "adapter", pairs, lora_alpha=8)
    added = additions(adapter, read_directory(source))
    quantised(source, tmp_path / "b", added=added)
    wanted = directory(tmp_path / "c", merged(weights, pairs, 2.0), PHI)
    assert max(shares_lost(tmp_path / "b", wanted).values()) < 0.2
    assert max(shares_lost(tmp_path / "b", source).values()) > 0.3


def test_what_cannot_be_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    source = directory(tmp_path / "a", hf_weights(CONFIG))
    quantised(source, tmp_path / "b")
    with pytest.raises(ModelFileError, match="quantised already"):
        quantised(tmp_path / "b", tmp_path / "out")
    with pytest.raises(ModelFileError, match="a directory of safetensors"):
        quantised(source / "model.safetensors", tmp_path / "out")
    odd = CONFIG | {"intermediate_size": 72}
    with pytest.raises(ModelFileError, match="multiple of 32"):
        quantised(directory(tmp_path / "c", hf_weights(odd), odd), tmp_path / "out")
    damaged = hf_weights(CONFIG)
    damaged["model.layers.1.mlp.up_proj.weight"][3, 3] = np.nan
    with pytest.raises(ModelFileError, match=r"up_proj.weight' has weights that are not finite"):
        quantised(directory(tmp_path / "d", damaged), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d"]
