"""What is said where there is no GPU to compute on: one line each, with the way out."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from ridgeline import LLM
from ridgeline.backends import BACKENDS, cuda
from ridgeline.backends.cuda import device
from ridgeline.backends.cuda.device import DeviceFacts, facts, rates_ratio, what_is_missing
from ridgeline.core.scheduling.policies import SplitFuse
from tests.tiny import PLAIN, changed, checkpoint, new_setup

WHOLE = DeviceFacts("2.11.0+cu130", True, (13, 0), (13, 0), "NVIDIA H200", (9, 0))
NEW_ENOUGH = ["NVIDIA A100", (8, 0)], ["NVIDIA H100", (9, 0)], ["NVIDIA B200", (10, 0)]

CASES = {
    "no torch": (DeviceFacts(), "torch is not installed", "pip install 'ridgeline[gpu]'"),
    "old torch": (WHOLE._replace(torch="2.8.1"), "torch 2.8.1 is too old", "--upgrade"),
    "a build for processors": (
        WHOLE._replace(torch="2.13.0+cpu", cuda=None),
        "torch 2.13.0+cpu is a build without CUDA",
        "pip uninstall torch",
    ),
    "no triton": (WHOLE._replace(has_triton=False), "Triton is not installed", "--backend cpu"),
    "no driver": (WHOLE._replace(driver=None, gpu=None), "no NVIDIA driver", "nvidia-smi"),
    "old driver": (
        WHOLE._replace(driver=(12, 4), gpu=None),
        "knows CUDA 12.4, and torch 2.11.0+cu130 needs 13.0",
        "update the driver",
    ),
    "no device": (WHOLE._replace(gpu=None), "no GPU is visible", "CUDA_VISIBLE_DEVICES"),
    "old device": (
        WHOLE._replace(gpu="Tesla T4", capability=(7, 5)),
        "Tesla T4 has compute capability 7.5, but 8.0 (Ampere) is the minimum",
        "--backend cpu",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_missing_device_is_one_line_with_a_way_out(case: str) -> None:
    known, problem, way_out = CASES[case]
    line = what_is_missing(known)
    assert line is not None
    assert problem in line
    assert way_out in line
    assert "\n" not in line


@pytest.mark.parametrize(("gpu", "capability"), NEW_ENOUGH)
def test_a_gpu_that_is_new_enough_is_taken(gpu: str, capability: tuple[int, int]) -> None:
    assert what_is_missing(WHOLE._replace(gpu=gpu, capability=capability)) is None


def test_a_driver_may_be_newer_than_torch_or_a_little_older() -> None:
    assert what_is_missing(WHOLE._replace(driver=(14, 1))) is None
    assert what_is_missing(WHOLE._replace(cuda=(13, 2))) is None


@pytest.mark.skipif(not what_is_missing(facts()), reason="a GPU is here, and is taken")
def test_a_machine_without_a_gpu_is_told_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="--backend cuda: ") as error:
        cuda.check(new_setup(), PLAIN)
    assert "\n" not in str(error.value)
    if importlib.util.find_spec("torch") is None:
        assert "pip install 'ridgeline[gpu]'" in str(error.value)
    assert cuda.describe() in str(error.value)


def test_the_name_of_the_backend_is_known_to_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cuda" in BACKENDS
    with pytest.raises(ValueError, match="not one of auto, cpu, reference, cuda"):
        LLM("smollm2", backend="gpu")


def test_weights_that_are_too_large_name_the_largest_format_that_fits() -> None:
    arch = changed(PLAIN, hidden_size=64, vocab_size=1 << 16)
    model = checkpoint(arch)
    sizes = {
        form: sum(cuda.packed_bytes(model, new_setup(dtype=form)).values())
        for form in ("f32", "bf16", "int8", "int4")
    }
    assert sizes["f32"] > sizes["bf16"] > sizes["int8"] > sizes["int4"]
    line = cuda.too_large(model, "f32", sizes["bf16"] + 1)
    assert "in f32, and the GPU has" in line
    assert line.endswith(f"--dtype bf16 takes {sizes['bf16'] / 2**20:.1f} MiB")
    assert "--dtype int4" in cuda.too_large(model, "bf16", sizes["int4"])
    assert "take a smaller model" in cuda.too_large(model, "bf16", sizes["int4"] - 1)


# As the driver describes GPUs, and what their sheets say: operations and bytes a second.
RATES = {
    "H100 SXM": ((9, 0, 132, 1_980_000, 2_619_000, 5120), 989e12 / 3350e9),
    "A100 80 GB": ((8, 0, 108, 1_410_000, 1_593_000, 5120), 312e12 / 2039e9),
    "L4": ((8, 9, 58, 2_040_000, 6_251_000, 192), 121e12 / 300e9),
}


@pytest.mark.parametrize("name", RATES)
def test_operations_for_each_byte_are_those_of_the_sheet(name: str) -> None:
    described, ratio = RATES[name]
    assert rates_ratio(*described) == pytest.approx(ratio, rel=0.1)


def test_a_gpu_that_says_nothing_or_is_not_known_has_no_ratio() -> None:
    assert rates_ratio(0, 0, 0, 0, 0, 0) is None
    assert rates_ratio(11, 7, 100, 1, 1, 1) is None


def test_prompts_come_in_pieces_that_suit_the_weights_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "ops_per_byte", lambda: 300.0)
    setup = new_setup(max_model_len=64)

    def least(dtype: str) -> int:
        return cuda.least_prompt_tokens(PLAIN, replace(setup, dtype=dtype))

    assert 600 <= least("bf16") < 800  # 2 bytes, 2 operations a weight; an embedding as well
    assert least("int8") == pytest.approx(least("bf16") * 0.53, rel=0.02)
    assert least("int4") < least("int8") < least("bf16")
    assert least("f32") == SplitFuse.min_chunk
