"""Families: every tensor lands under its canonical name, every fact is the file's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ridgeline.arch import ModelArch
from ridgeline.models.families import model_from_config, model_from_gguf
from ridgeline.models.weights import ModelFileError, Tensor
from tests.models.tiny import (
    CONFIG,
    as_tensors,
    gguf_metadata,
    gguf_weights,
    hf_weights,
    interleave,
)

SPLIT = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}


def hf(config: dict[str, Any], **kinds: Any) -> tuple[ModelArch, dict[str, Tensor]]:
    return model_from_config(config, as_tensors(hf_weights(config, **kinds)), "model")


def arch_of(**changes: Any) -> ModelArch:
    """The architecture of the tiny Llama with ``changes`` to its config; None takes a key out."""
    config = {k: v for k, v in (CONFIG | changes).items() if v is not None}
    return hf(config)[0]


def from_gguf(
    changes: dict[str, Any], raw: dict[str, np.ndarray], arch: str = "llama"
) -> tuple[ModelArch, dict[str, Tensor]]:
    return model_from_gguf(gguf_metadata(CONFIG, arch) | changes, as_tensors(raw), "x.gguf")


def test_llama_of_hugging_face() -> None:
    raw = hf_weights(CONFIG)
    arch, tensors = model_from_config(CONFIG, as_tensors(raw), "model")
    assert (arch.num_layers, arch.hidden_size, arch.intermediate_size) == (2, 32, 64)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim) == (4, 2, 8)
    assert (arch.vocab_size, arch.max_position, arch.norm_eps) == (40, 128, 1e-5)
    assert (arch.rope.theta, arch.rope.dim, arch.rope.divisors) == (10000.0, 8, ())
    assert arch.windows == (None, None)
    assert (arch.qkv_bias, arch.o_bias, arch.qk_norm) == (False, False, False)
    assert not arch.tied_embeddings
    assert {name: t.shape for name, t in tensors.items()} == arch.matrix_shapes()
    wanted = {
        f"layers.{i}.{c}": f"model.layers.{i}.{n}" for i in range(2) for c, n in SPLIT.items()
    }
    wanted |= {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
    }
    for canonical, in_file in wanted.items():
        np.testing.assert_array_equal(tensors[canonical].to_f32(), raw[in_file], canonical)


def test_a_tied_model_needs_and_uses_no_head() -> None:
    raw = hf_weights(CONFIG)
    tied = CONFIG | {"tie_word_embeddings": True}
    assert "head" not in model_from_config(tied, as_tensors(raw), "model")[1]
    del raw["lm_head.weight"]
    assert model_from_config(tied, as_tensors(raw), "model")[0].tied_embeddings
    with pytest.raises(ModelFileError, match=r"'lm_head.weight' of shape \(40, 32\) is missing"):
        model_from_config(CONFIG, as_tensors(raw), "model")


def test_biases_and_norms() -> None:
    qwen2 = CONFIG | {"architectures": ["Qwen2ForCausalLM"]}
    arch, tensors = hf(qwen2, biases="qkv")
    assert (arch.qkv_bias, arch.o_bias) == (True, False)
    assert not hf(qwen2 | {"attention_bias": True}, biases="qkv")[0].o_bias  # it never has one
    assert tensors["layers.1.k_bias"].name == "model.layers.1.self_attn.k_proj.bias"
    arch, _ = hf(CONFIG | {"attention_bias": True}, biases="qkvo")
    assert (arch.qkv_bias, arch.o_bias) == (True, True)

    qwen3 = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
    arch, tensors = hf(qwen3, norms=True)
    assert (arch.qk_norm, arch.head_dim, arch.rope.dim) == (True, 16, 16)
    assert tensors["layers.0.q"].shape == (64, 32)
    silent = {k: v for k, v in qwen3.items() if k != "head_dim"}
    raw = as_tensors(hf_weights(qwen3 | {"head_dim": 128}, norms=True))
    assert model_from_config(silent, raw, "model")[0].head_dim == 128
    assert tensors["layers.0.q_norm"].name == "model.layers.0.self_attn.q_norm.weight"


def test_fused_projections_are_split_by_rows() -> None:
    config = CONFIG | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5}
    raw = hf_weights(config, fused=True)
    arch, tensors = model_from_config(config, as_tensors(raw), "model")
    assert arch.rope.dim == 4
    qkv = raw["model.layers.1.self_attn.qkv_proj.weight"]
    gate_up = raw["model.layers.1.mlp.gate_up_proj.weight"]
    parts = {
        "q": qkv[:32],
        "k": qkv[32:48],
        "v": qkv[48:],
        "gate": gate_up[:64],
        "up": gate_up[64:],
    }
    for part, rows in parts.items():
        np.testing.assert_array_equal(tensors[f"layers.1.{part}"].to_f32(), rows)
        assert not tensors[f"layers.1.{part}"].data.flags.owndata  # views, no copies


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 16}, (None, None)),
        ("MistralForCausalLM", {"sliding_window": 16}, (16, 16)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None)),
        ("MistralForCausalLM", {}, (4096, 4096)),
        ("Phi3ForCausalLM", {"sliding_window": 20}, (20, 20)),
        ("Phi3ForCausalLM", {}, (None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "max_window_layers": 1}, (None, None)),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            (None, 16),
        ),
        (
            "Qwen2ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (16, None),
        ),
    ],
)
def test_windows(name: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = CONFIG | {"architectures": [name]} | changes
    biases = "qkv" if name.startswith("Qwen2") else ""
    assert hf(config, fused=name.startswith("Phi3"), biases=biases)[0].windows == windows


def test_llama3_scaling() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = arch_of(rope_scaling=scaling, rope_theta=500.0, head_dim=16, num_attention_heads=2,
                   num_key_value_heads=1).rope  # fmt: skip
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
    rope = arch_of(rope_scaling={"type": "linear", "factor": 4.0}).rope
    assert rope.divisors == (4.0,) * 4


def test_the_newer_place_of_rope_parameters() -> None:
    parameters = {"rope_type": "linear", "factor": 2, "rope_theta": 5000}
    rope = arch_of(rope_theta=None, rope_parameters=parameters).rope
    assert (rope.theta, rope.divisors) == (5000.0, (2.0,) * 4)
    assert arch_of(rope_theta=None, rope_parameters={"rope_type": "default"}).rope.theta == 10000.0


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


@pytest.mark.parametrize(("theta", "original"), [(10000.0, 1024), (10000.0, 128), (10.0, 4096)])
def test_yarn_scaling(theta: float, original: int) -> None:
    one_head = {"head_dim": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    rope = arch_of(rope_scaling=scaling, rope_theta=theta, **one_head).rope
    wanted = yarn_divisors(theta, 32, 4.0, original)
    assert rope.divisors == pytest.approx(wanted)
    assert any(1.1 < d < 3.9 for d in wanted)


def test_yarn_extends_the_context_and_cools_attention() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    arch = arch_of(rope_scaling=scaling)
    assert arch.rope.attention_factor == pytest.approx(1 + 0.1 * math.log(4))
    assert arch.max_position == 4096
    given = arch_of(rope_scaling=scaling | {"attention_factor": 1.5})
    assert given.rope.attention_factor == 1.5
    weighted = arch_of(rope_scaling=scaling | {"mscale": 2.0, "mscale_all_dim": 0.5})
    wanted = (1 + 0.2 * math.log(4)) / (1 + 0.05 * math.log(4))
    assert weighted.rope.attention_factor == pytest.approx(wanted)


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
    rope = hf(config, fused=True)[0].rope
    assert rope.divisors_for(256) == (1.0, 1.5)
    assert rope.divisors_for(257) == (2.0, 8.5)
    wanted = math.sqrt(1 + math.log(4096 / 256) / math.log(256))
    assert rope.attention_factor == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, r"'Gemma3ForCausalLM'.*supported: Llama.*Qwen3"),
        ({"architectures": None}, "architecture None"),
        ({"architectures": [["x"]]}, "architecture"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "'dynamic'.*supported: default",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_scaling"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor is",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 3}, "'model.layers.2.input_layernorm.weight'"),
        ({"num_hidden_layers": 1}, "'model.layers.1.input_layernorm.weight' is no part"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": 2**62}, "num_attention_heads is"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"head_dim": 7}, "rope over 7"),
        (
            {"vocab_size": 41},
            r"'model.embed_tokens.weight' has shape \(40, 32\), wanted \(41, 32\)",
        ),
        ({"intermediate_size": 96}, r"gate_proj.weight' has shape \(64, 32\), wanted \(96, 32\)"),
    ],
)
def test_what_a_config_must_not_say(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError, match=named) as caught:
        model_from_config(CONFIG | changes, as_tensors(hf_weights(CONFIG)), "model")
    assert str(caught.value).startswith("model: ")


def test_a_tensor_that_would_be_ignored_is_refused() -> None:
    raw = hf_weights(CONFIG)
    raw["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)  # a known buffer
    model_from_config(CONFIG, as_tensors(raw), "model")
    raw["model.layers.0.self_attn.q_proj.bias"] = np.ones(32, np.float32)
    with pytest.raises(ModelFileError, match=r"q_proj.bias' is no part"):
        model_from_config(CONFIG, as_tensors(raw), "model")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "phi3"])
def test_gguf_gives_what_the_same_weights_give_in_a_directory(arch: str) -> None:
    kinds: dict[str, Any] = {
        "llama": {},
        "qwen2": {"biases": "qkv"},
        "qwen3": {"norms": True},
        "phi3": {"fused": True},
    }[arch]
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}[arch]
    config = CONFIG | {"architectures": [f"{name}ForCausalLM"], "head_dim": 8}
    wanted_arch, wanted = hf(config, **kinds)
    raw = gguf_weights(config, arch, **kinds)
    found_arch, found = from_gguf({f"{arch}.attention.key_length": 8}, raw, arch)
    assert found_arch.rope.dim == wanted_arch.rope.dim
    assert (found_arch.qkv_bias, found_arch.qk_norm) == (wanted_arch.qkv_bias, wanted_arch.qk_norm)
    assert list(found) == list(wanted)
    for canonical in wanted:
        np.testing.assert_array_equal(
            found[canonical].to_f32(), wanted[canonical].to_f32(), canonical
        )


def test_only_rotating_rows_of_a_llama_file_move() -> None:
    raw = gguf_weights(CONFIG, "llama")
    rows = raw["blk.0.attn_k.weight"]
    arch, tensors = from_gguf({"llama.rope.dimension_count": 4}, raw)
    assert arch.rope.dim == 4
    order = [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]
    np.testing.assert_array_equal(tensors["layers.0.k"].to_f32(), rows[order])


def test_biases_of_a_llama_file_move_with_their_rows() -> None:
    raw = gguf_weights(CONFIG, "llama")
    halves = {"q": np.arange(32, dtype=np.float32), "k": np.arange(16, dtype=np.float32)}
    for i in range(2):
        raw[f"blk.{i}.attn_q.bias"] = interleave(halves["q"], 4)
        raw[f"blk.{i}.attn_k.bias"] = interleave(halves["k"], 2)
        raw[f"blk.{i}.attn_v.bias"] = halves["k"]
        raw[f"blk.{i}.attn_output.bias"] = halves["q"]
    arch, tensors = from_gguf({}, raw)
    assert (arch.qkv_bias, arch.o_bias) == (True, True)
    for part in ("q", "k"):
        np.testing.assert_array_equal(tensors[f"layers.1.{part}_bias"].to_f32(), halves[part])


def test_facts_of_a_gguf_file() -> None:
    raw = gguf_weights(CONFIG, "llama")
    arch, _ = from_gguf({"llama.attention.sliding_window": 12}, raw)
    assert arch.windows == (12, 12)
    assert (arch.vocab_size, arch.max_position, arch.tied_embeddings) == (40, 128, False)
    del raw["output.weight"]
    assert from_gguf({}, raw)[0].tied_embeddings
    qwen = gguf_weights(CONFIG, "qwen2", biases="qkv")
    assert from_gguf({"qwen2.attention.sliding_window": 12}, qwen, "qwen2")[0].windows[0] is None


def test_rope_of_a_gguf_file() -> None:
    raw = gguf_weights(CONFIG, "llama")
    linear = from_gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, raw)
    assert linear[0].rope.divisors == (2.0,) * 4
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 1024,
    }
    rope = from_gguf(yarn, raw)[0].rope
    assert rope.divisors == pytest.approx(yarn_divisors(10000.0, 8, 4.0, 1024))
    assert rope.attention_factor == pytest.approx(1 + 0.1 * math.log(4))
    raw["rope_freqs.weight"] = np.array([1, 2, 4, 8], np.float32)
    assert from_gguf({}, raw)[0].rope.divisors == (1.0, 2.0, 4.0, 8.0)
    with pytest.raises(ModelFileError, match="rope scaling 'dynamic'"):
        from_gguf({"llama.rope.scaling.type": "dynamic"}, raw)

    phi = gguf_weights(CONFIG, "phi3", fused=True)
    phi["rope_factors_short.weight"] = np.array([1.0, 1.5], np.float32)
    phi["rope_factors_long.weight"] = np.array([2.0, 8.5], np.float32)
    keys = {
        "phi3.rope.dimension_count": 4,
        "phi3.rope.scaling.original_context_length": 64,
        "phi3.rope.scaling.attn_factor": 1.25,
    }
    rope = from_gguf(keys, phi, "phi3")[0].rope
    assert (rope.divisors_for(64), rope.divisors_for(65)) == ((1.0, 1.5), (2.0, 8.5))
    assert rope.attention_factor == 1.25
    phi["rope_factors_long.weight"][1] = np.nan
    with pytest.raises(ModelFileError, match=r"'rope_factors_long.weight'\[1\] is nan"):
        from_gguf(keys, phi, "phi3")
    del phi["rope_factors_long.weight"]
    with pytest.raises(ModelFileError, match=r"'rope_factors_long.weight': found no such tensor"):
        from_gguf(keys, phi, "phi3")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3' is not supported; supported: llama, phi3"),
        ({"general.architecture": 3}, "general.architecture is 3"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale"),
        ({"llama.attention.head_count_kv": np.array([2, 1])}, "head_count_kv is array"),
        ({"llama.attention.value_length": 16}, "value_length"),
        ({"llama.rope.dimension_count": 5}, "rope over 5"),
        ({"llama.block_count": 2**31}, "block_count"),
        ({"llama.feed_forward_length": 65}, r"wanted \(65, 32\)"),
    ],
)
def test_what_a_gguf_file_must_not_say(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        from_gguf(changes, gguf_weights(CONFIG, "llama"))


def test_a_gguf_file_without_weights() -> None:
    with pytest.raises(ModelFileError, match=r"'token_embd.weight' is missing"):
        from_gguf({}, {})
