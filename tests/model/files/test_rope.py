"""Rope scaling: each published formula, stated here a second time, gives the same divisors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.rope import rope_from_config
from ridgeline.model.files.tensors import ModelFileError
from tests.model.files.tiny import CONFIG, arch_of, from_gguf, gguf_weights, hf


def test_llama3_scaling() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = arch_of(rope_scaling=scaling, rope_theta=500.0, head_dim=16, num_attention_heads=2,
                   num_key_value_heads=1).layers[0].mixer.rope  # fmt: skip
    wanted = []
    for i in range(8):
        frequency = 500.0 ** (-2 * i / 16)
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4:
            scaled = frequency
        elif wavelength > 64 / 1:
            scaled = frequency / 32
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            scaled = (1 - smooth) * frequency / 32 + smooth * frequency
        wanted.append(frequency / scaled)
    assert rope.divisors == pytest.approx(wanted)
    assert wanted[0] == 1
    assert wanted[-1] == pytest.approx(32)
    assert any(1 < d < 31 for d in wanted)
    assert rope.attention_factor == 1.0


def test_linear_scaling_under_its_old_name() -> None:
    rope = arch_of(rope_scaling={"type": "linear", "factor": 4.0}).layers[0].mixer.rope
    assert rope.divisors == (4.0,) * 4


def test_the_newer_place_of_rope_parameters() -> None:
    parameters = {"rope_type": "linear", "factor": 2, "rope_theta": 5000}
    rope = arch_of(rope_theta=None, rope_parameters=parameters).layers[0].mixer.rope
    assert (rope.theta, rope.divisors) == (5000.0, (2.0,) * 4)
    assert (
        arch_of(rope_theta=None, rope_parameters={"rope_type": "default"})
        .layers[0]
        .mixer.rope.theta
        == 10000.0
    )


def yarn_divisors(theta: float, dim: int, factor: float, original: int) -> list[float]:
    """YaRN as its paper states it: a ramp over channels between 32 turns and one."""

    def channel(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(channel(32)), 0), min(math.ceil(channel(1)), dim - 1)
    divisors = []
    for i in range(dim // 2):
        interpolated = min(1.0, max(0.0, (i - low) / (high - low)))
        divisors.append(1 / (interpolated / factor + 1 - interpolated))
    return divisors


@pytest.mark.parametrize(("theta", "original"), [(10000.0, 1024), (10000.0, 128), (10.0, 961)])
def test_yarn_scaling(theta: float, original: int) -> None:
    one_head = {"head_dim": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    rope = arch_of(rope_scaling=scaling, rope_theta=theta, **one_head).layers[0].mixer.rope
    wanted = yarn_divisors(theta, 32, 4.0, original)
    assert rope.divisors == pytest.approx(wanted)
    assert any(1.1 < d < 3.9 for d in wanted)


def test_yarn_extends_the_context_and_cools_attention() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    arch = arch_of(rope_scaling=scaling)
    assert arch.layers[0].mixer.rope.attention_factor == pytest.approx(1 + 0.1 * math.log(4))
    assert arch.max_position == 4096
    given = arch_of(rope_scaling=scaling | {"attention_factor": 1.5})
    assert given.layers[0].mixer.rope.attention_factor == 1.5
    weighted = arch_of(rope_scaling=scaling | {"mscale": 2.0, "mscale_all_dim": 0.5})
    wanted = (1 + 0.2 * math.log(4)) / (1 + 0.05 * math.log(4))
    assert weighted.layers[0].mixer.rope.attention_factor == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_longrope_under_each_of_its_names(name: str) -> None:
    scaling = {"type": name, "short_factor": [1.0, 1.5], "long_factor": [2, 8.5]}
    config = CONFIG | {
        "architectures": ["Phi3ForCausalLM"],
        "rope_scaling": scaling,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 256,
    }
    rope = hf(config, fused=True)[0].layers[0].mixer.rope
    assert rope.divisors_for(256) == (1.0, 1.5)
    assert rope.divisors_for(257) == (2.0, 8.5)
    wanted = math.sqrt(1 + math.log(4096 / 256) / math.log(256))
    assert rope.attention_factor == pytest.approx(wanted)


def test_rope_of_a_gguf_file() -> None:
    raw = gguf_weights(CONFIG, "llama")
    linear = from_gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, raw)
    assert linear[0].layers[0].mixer.rope.divisors == (2.0,) * 4
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 1024,
    }
    rope = from_gguf(yarn, raw)[0].layers[0].mixer.rope
    assert rope.divisors == pytest.approx(yarn_divisors(10000.0, 8, 4.0, 1024))
    assert rope.attention_factor == pytest.approx(1 + 0.1 * math.log(4))
    raw["rope_freqs.weight"] = np.array([1, 2, 4, 8], np.float32)
    assert from_gguf({}, raw)[0].layers[0].mixer.rope.divisors == (1.0, 2.0, 4.0, 8.0)
    with pytest.raises(ModelFileError, match="rope scaling 'dynamic'"):
        from_gguf({"llama.rope.scaling.type": "dynamic"}, raw)
    with pytest.raises(ModelFileError, match=r"'longrope' needs its factors: rope_factors_long"):
        from_gguf({"llama.rope.scaling.type": "longrope"}, raw)

    phi = gguf_weights(CONFIG, "phi3", fused=True)
    phi["rope_factors_short.weight"] = np.array([1.0, 1.5], np.float32)
    phi["rope_factors_long.weight"] = np.array([2.0, 8.5], np.float32)
    keys = {
        "phi3.rope.dimension_count": 4,
        "phi3.rope.scaling.original_context_length": 64,
        "phi3.rope.scaling.attn_factor": 1.25,
    }
    rope = from_gguf(keys, phi, "phi3")[0].layers[0].mixer.rope
    assert (rope.divisors_for(64), rope.divisors_for(65)) == ((1.0, 1.5), (2.0, 8.5))
    assert rope.attention_factor == 1.25
    phi["rope_factors_long.weight"][1] = np.nan
    with pytest.raises(ModelFileError, match=r"'rope_factors_long.weight'\[1\] is nan"):
        from_gguf(keys, phi, "phi3")
    del phi["rope_factors_long.weight"]
    with pytest.raises(ModelFileError, match=r"'rope_factors_long.weight': found no such tensor"):
        from_gguf(keys, phi, "phi3")


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 5, "high_freq_factor": 4},
            "low_freq",
        ),
        ({"rope_type": "llama3", "factor": 8}, "low_freq_factor is missing"),
        ({"rope_type": "yarn", "factor": 4, "rope_theta": 0.5}, "rope base above 1"),
        ({"rope_type": "longrope"}, "short_factor is missing"),
        ({"short_factor": [1.0, 1.5], "long_factor": [2, 8.5]}, "without rope_type"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ],
)
def test_scaling_that_makes_no_sense(scaling: dict[str, object], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        arch_of(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("architecture", "scaling"),
    [
        ("LlamaForCausalLM", {"rope_type": "dynamic", "alpha": 20.0, "factor": 1.0}),
        ("LlamaForCausalLM", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("Qwen3ForCausalLM", {"rope_type": "yarn", "factor": 4, "llama_4_scaling_beta": 0.1}),
    ],
)
def test_a_number_that_only_other_architectures_go_by_is_refused(
    architecture: str, scaling: dict[str, object]
) -> None:
    (key,) = scaling.keys() - {"rope_type", "factor"}
    for where in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ModelFileError, match=f"{key} is .* no model of this architecture"):
            arch_of(**{"architectures": [architecture], where: scaling})
    with pytest.raises(ModelFileError, match=f"{key} is .* no model of this architecture"):
        arch_of(architectures=[architecture], **{key: scaling[key]})


def test_llama_3_scaling_may_have_no_ramp() -> None:
    """Of Llama 4 Scout: what turns less than once in the original context is divided."""
    scaling = {
        "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    values = {"rope_theta": 10_000.0, "max_position_embeddings": 128, "rope_scaling": scaling}
    rope, _ = rope_from_config(ConfigReader(values, "x"), 16)
    turns = [64 / (2 * math.pi * 10_000 ** (2 * i / 16)) for i in range(8)]
    assert rope.divisors == tuple(1.0 if turn >= 1 else 16.0 for turn in turns)
    assert set(rope.divisors) == {1.0, 16.0}
