"""Hugging Face directories: every family, every kind of rope, windows, biases, tied heads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ridgeline.model.files.checkpoint import load_checkpoint
from tests.model.files.quantizers import mxfp4_values
from tests.parity import tiny, tiny_configs
from tests.parity.compare import TOLERANCE, check

PLAIN = [name for name in tiny_configs.CONFIGS if name != "phi3-longrope"]
LONG_PROMPTS, SHORT_PROMPTS = (40, 33), (8, 5)  # 40 + 24 is the context of 64


@pytest.mark.parametrize("name", PLAIN)
def test_family(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(name)
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(40, 7, 1)]
    check(tiny.save(model, tmp_path), answers)


@pytest.mark.parametrize("name", tiny_configs.NEWER)
def test_newer_family(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(name)
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(40, 7, 1)]
    check(tiny.save(model, tmp_path), answers)


@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-h-moe"])
def test_small_steps_of_nemotron_h_are_left_as_they_are(name: str, tmp_path: Path) -> None:
    """The publisher's code limits steps by time_step_limit; transformers by time_step_min."""
    model = tiny.make_model(name)
    floored = [module for module in model.modules() if hasattr(module, "time_step_limit")]
    assert all(module.time_step_limit[0] == model.config.time_step_min for module in floored)
    for module in floored:
        module.dt_bias.data -= 9  # steps of about a ten-thousandth
    prompts = tiny.prompts(40, 7)
    otherwise = [tiny.answer(model, ids) for ids in prompts]
    for module in floored:
        module.time_step_limit = (0.0, float("inf"))
    answers = [tiny.answer(model, ids) for ids in prompts]
    assert np.abs(otherwise[0].logprobs[:40] - answers[0].logprobs[:40]).max() > 100 * TOLERANCE
    check(tiny.save(model, tmp_path), answers)


def test_gpt_oss_in_real_mxfp4_is_its_dequantised_self(tmp_path: Path) -> None:
    model = tiny.make_model("gpt-oss")
    rng, blocks = np.random.default_rng(1), {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            num, width, rows = parameter.shape
            packed, exponents, weights = mxfp4_values(rng, (num, rows, width))
            packed = packed.reshape(num, rows, -1, 16)
            blocks |= {f"{name}_blocks": packed, f"{name}_scales": exponents}
            parameter.data = tiny.torch.from_numpy(weights.swapaxes(1, 2).copy())
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(40, 7)]
    path = tiny.save(model, tmp_path)
    plain = load_file(path / "model.safetensors")
    kept = {name: array for name, array in plain.items() if f"{name}_blocks" not in blocks}
    assert len(kept) == len(plain) - len(blocks) / 2
    save_file(kept | blocks, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (path / "config.json").write_text(json.dumps(config))
    check(path, answers)


def test_llama_4_chooses_experts_by_products(tmp_path: Path) -> None:
    """Sigmoids of large products are all 1: the larger product counts, not the first of equals."""
    model = tiny.make_model("llama4-plain")
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            parameter.data *= 40
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(40, 7)]
    check(tiny.save(model, tmp_path), answers)


@pytest.mark.parametrize(("lengths", "context"), [(SHORT_PROMPTS, 32), (LONG_PROMPTS, 64)])
def test_longrope_on_both_sides_of_the_original_context(
    lengths: tuple[int, ...], context: int, tmp_path: Path
) -> None:
    """transformers goes by the length of each text, the engine by the longest it may get."""
    model = tiny.make_model("phi3-longrope")
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(*lengths)]
    check(tiny.save(model, tmp_path), answers, max_model_len=context)


@pytest.mark.parametrize("name", ["llama3", "qwen2-tied", "phi3"])
def test_sharded(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(name)
    path = tiny.save(model, tmp_path, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    check(path, [tiny.answer(model, ids) for ids in tiny.prompts(12)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights(dtype: str, tmp_path: Path) -> None:
    model, kind = tiny.make_model("qwen3"), getattr(tiny.torch, dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(kind).float()
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(12)]
    path = tiny.save(model.to(kind), tmp_path)  # last: it rounds the frequencies of rope too
    check(path, answers)


@pytest.mark.parametrize("name", list(tiny_configs.CONFIGS))
def test_older_config_means_the_same(name: str, tmp_path: Path) -> None:
    """Most models were published before rope_parameters, with rope_theta and rope_scaling."""
    path = tiny.save(tiny.make_model(name), tmp_path)
    now = load_checkpoint(path).arch
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if config["model_type"] == "phi3":
        rope.pop("original_max_position_embeddings", None)  # it stands beside, as ever
    if rope["rope_type"] == "default":
        config["rope_scaling"] = None
    else:
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope
    (path / "config.json").write_text(json.dumps(config))
    assert load_checkpoint(path).arch == now
