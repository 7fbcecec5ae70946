"""A config.json that says nothing of a quantisation, and ModelOpt's file beside it that does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.planner import plan
from tests.model.cost.published_configs import PUBLISHED

LLAMA: dict[str, Any] = PUBLISHED["llama-3.1-8b"]["config"]
NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}


def written(folder: Path, config: dict[str, Any], beside: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    return folder


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_plan_counts_what_the_file_beside_says(name: str, tmp_path: Path) -> None:
    written(tmp_path, LLAMA, {"producer": {"name": "modelopt"}, "quantization": NVFP4})
    found = plan(tmp_path / name, on="b200-sxm")
    assert found.spec.storage.name == "nvfp4"
    num_linear = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    rest = 2 * (2 * 128256 * 4096 + (2 * 32 + 1) * 4096)
    assert found.best.ledger.weights_bytes == pytest.approx(num_linear * 4.5 / 8 + rest, rel=1e-6)


def test_a_config_by_another_name_is_read_alone(tmp_path: Path) -> None:
    written(tmp_path, LLAMA, {"quantization": NVFP4})
    (tmp_path / "mine.json").write_text(json.dumps(LLAMA))
    assert plan(tmp_path / "mine.json", on="b200-sxm").spec.storage.name == "bf16"


@pytest.mark.parametrize("half", ["", "text_config"])
def test_the_configs_own_word_comes_first(half: str, tmp_path: Path) -> None:
    own = LLAMA | {"quantization_config": {"quant_method": "fp8"}}
    written(tmp_path, {half: own} if half else own, {"quantization": NVFP4})
    assert plan(tmp_path, on="b200-sxm").spec.storage.name == "fp8"


def test_a_cache_alone_is_no_quantisation_of_weights(tmp_path: Path) -> None:
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    assert plan(written(tmp_path, LLAMA, said), on="b200-sxm").spec.storage.name == "bf16"


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ([], "hf_quant_config.json: the JSON is not an object"),
        ({}, "hf_quant_config.json: quantization is None, not an object"),
        ({"quantization": {"quant_algo": "W1"}}, "which is not understood"),
    ],
)
def test_damage_is_named(beside: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plan(written(tmp_path, LLAMA, beside), on="b200-sxm")
