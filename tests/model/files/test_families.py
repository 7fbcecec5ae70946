"""Families: every tensor lands under its canonical name, every fact is the file's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families import (
    GGUF_FAMILIES,
    HF_FAMILIES,
    arch_from_config,
    family_of,
    model_from_config,
)
from ridgeline.model.files.families.gguf_config import config_of_gguf
from ridgeline.model.files.families.layers import arch_of
from ridgeline.model.files.families.lookup import NEAREST
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.shape.model import Attention, Experts, Layer, ModelArch
from tests.model.files.test_gguf_modern import in_directory
from tests.model.files.tiny import (
    CONFIG,
    as_tensors,
    from_gguf,
    gguf_metadata,
    gguf_weights,
    hf,
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


def mixer(arch: ModelArch) -> Attention:
    return arch.layers[0].mixer


def reaches(arch: ModelArch) -> tuple[int | None, ...]:
    return tuple(layer.mixer.window for layer in arch.layers)


def layers_of_gguf(values: dict[str, Any], arch: str) -> tuple[Layer, ...]:
    """The layers of a file, of whose tensors only the embedding is there."""
    meta, family = ConfigReader(values, "x", prefix=f"{arch}."), GGUF_FAMILIES[arch]
    embedding = as_tensors({"token_embd.weight": np.zeros((40, 32), np.float32)})
    config, metadata, overrides = config_of_gguf(meta, family, embedding)
    return arch_of(config, family, family.read(metadata), embedding, **overrides).layers


def test_llama_of_hugging_face() -> None:
    raw = hf_weights(CONFIG)
    arch, tensors = model_from_config(CONFIG, as_tensors(raw), "model")
    assert (arch.num_layers, arch.hidden_size, arch.layers[0].ffn.size) == (2, 32, 64)
    assert (mixer(arch).num_heads, mixer(arch).num_kv_heads, mixer(arch).head_dim) == (4, 2, 8)
    assert (arch.vocab_size, arch.max_position, arch.norm_eps) == (40, 128, 1e-5)
    assert (mixer(arch).rope.theta, mixer(arch).rope.dim, mixer(arch).rope.divisors) == (
        10000.0,
        8,
        (),
    )
    assert reaches(arch) == (None, None)
    assert (mixer(arch).qkv_bias, mixer(arch).o_bias, mixer(arch).qk_norm) == (False, False, "")
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
    raw["lm_head.weight"] = raw["model.embed_tokens.weight"].copy()
    assert "head" not in model_from_config(tied, as_tensors(raw), "model")[1]
    del raw["lm_head.weight"]
    assert model_from_config(tied, as_tensors(raw), "model")[0].tied_embeddings
    with pytest.raises(ModelFileError, match=r"'lm_head.weight' of shape \(40, 32\) is missing"):
        model_from_config(CONFIG, as_tensors(raw), "model")


def test_biases_and_norms() -> None:
    qwen2 = CONFIG | {"architectures": ["Qwen2ForCausalLM"]}
    arch, tensors = hf(qwen2, biases="qkv")
    assert (mixer(arch).qkv_bias, mixer(arch).o_bias) == (True, False)
    assert (
        not hf(qwen2 | {"attention_bias": True}, biases="qkv")[0].layers[0].mixer.o_bias
    )  # it never has one
    assert tensors["layers.1.k_bias"].name == "model.layers.1.self_attn.k_proj.bias"
    arch, _ = hf(CONFIG | {"attention_bias": True}, biases="qkvo")
    assert (mixer(arch).qkv_bias, mixer(arch).o_bias) == (True, True)

    qwen3 = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
    arch, tensors = hf(qwen3, norms=True)
    assert (mixer(arch).qk_norm, mixer(arch).head_dim, mixer(arch).rope.dim) == ("head", 16, 16)
    assert tensors["layers.0.q"].shape == (64, 32)
    silent = {k: v for k, v in qwen3.items() if k != "head_dim"}
    raw = as_tensors(hf_weights(qwen3 | {"head_dim": 128}, norms=True))
    assert model_from_config(silent, raw, "model")[0].layers[0].mixer.head_dim == 128
    assert tensors["layers.0.q_norm"].name == "model.layers.0.self_attn.q_norm.weight"


def test_fused_projections_are_split_by_rows() -> None:
    config = CONFIG | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5}
    raw = hf_weights(config, fused=True)
    arch, tensors = model_from_config(config, as_tensors(raw), "model")
    assert mixer(arch).rope.dim == 4
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
    arch, _ = hf(config, fused=name.startswith("Phi3"), biases=biases)
    assert reaches(arch) == windows


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"architectures": ["NobodysForCausalLM"]},
            r"'NobodysForCausalLM' is not supported; ridgeline models --families lists",
        ),
        ({"architectures": ["T5ForConditionalGeneration"]}, "encoder and a decoder.*Qwen3 run"),
        (
            {"architectures": ["NobodysForCausalLM"], "auto_map": {"AutoModel": "a.B"}},
            r"its own code \(auto_map\) is never run; ridgeline models",
        ),
        (
            {"architectures": ["Qwen33ForCausalLM"]},
            "not supported: of what runs 'Qwen3ForCausalLM' is nearest by name; ridgeline",
        ),
        ({"architectures": ["GPTJForCausalLM"]}, r"GPT-NeoX \(Pythia\).* and GPT-2 run; ridgeline"),
        (
            {"architectures": ["LlavaForConditionalGeneration"]},
            "text half is the Llama.*, which runs",
        ),
        ({"architectures": None}, "architecture None"),
        ({"architectures": [["x"]]}, "architecture"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', not true or false"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"a_strangers_scale": 0.5}, "a_strangers_scale is 0.5.*by its name.*take that key out"),
        ({"aStrangersLayerNorm": True}, "aStrangersLayerNorm is True.*by its name it changes"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0, which is not supported"),
        ({"attention_k_eq_v": True}, "attention_k_eq_v is True, which is not supported"),
        ({"quantization": {"bits": 4}}, "quantization is {'bits': 4}, which is not supported"),
        ({"use_rope": False}, "use_rope is False"),
        ({"use_rope": None}, "use_rope is None, which is not supported; supported: True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "a_strangers_key": 1}},
            "rope_scaling has a_strangers_key 1, which is not supported",
        ),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
            "'ntk'.*supported: default",
        ),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ({"mlp_bias": True}, "'model.layers.0.mlp.gate_proj.bias' of shape"),
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
        ({"num_hidden_layers": 1}, "'model.layers.1.input_layernorm.weight' is not part"),
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


def test_a_rope_that_grows_with_the_text_is_plain_within_the_context() -> None:
    """Beyond, every key would depend on the text's length: such texts are refused."""
    dynamic = CONFIG | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    assert hf(dynamic)[0] == hf(CONFIG)[0]
    assert hf(dynamic)[0].max_position == CONFIG["max_position_embeddings"]


def test_a_gemma_that_sees_both_ways_is_pooled_by_the_mean() -> None:
    gemma = CONFIG | {"architectures": ["Gemma3TextModel"], "head_dim": 8, "hidden_act": None}
    for both_ways, pooling in ((True, "mean"), (False, "")):
        arch = arch_from_config(gemma | {"use_bidirectional_attention": both_ways}, {}, "x")
        assert (arch.is_encoder, arch.pooling) == (both_ways, pooling)


def test_null_switches_off_what_is_on_by_default() -> None:
    """As transformers reads it."""
    values = CONFIG | {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4}
    values |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
    values |= {"shared_expert_intermediate_size": 8}
    biases = [{"qkv_bias": None}, {"qkv_bias": False}, {}]
    archs = [arch_from_config(values | more, {}, "x") for more in biases]
    assert [mixer(arch).qkv_bias for arch in archs] == [False, False, True]


def test_a_window_of_qwen3_moe_is_of_all_layers() -> None:
    values = CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
    values |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "max_window_layers": 1}
    windowed = {"use_sliding_window": True, "sliding_window": 6}
    assert reaches(arch_from_config(values | windowed, {}, "x")) == (6, 6)
    assert reaches(arch_from_config(values, {}, "x")) == (None, None)


def test_what_is_said_of_a_part_that_a_model_lacks_changes_nothing() -> None:
    values = CONFIG | {"architectures": ["Lfm2ForCausalLM"], "conv_L_cache": 3, "norm_eps": 1e-5}
    values |= {"layer_types": ["full_attention"] * 2, "full_attn_idxs": [0]}
    del values["rms_norm_eps"], values["hidden_act"]
    assert arch_from_config(values, {}, "x").layers[0].attention is not None


def test_a_tensor_that_would_be_ignored_is_refused() -> None:
    raw = hf_weights(CONFIG)
    raw["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)  # a known buffer
    model_from_config(CONFIG, as_tensors(raw), "model")
    raw["model.layers.0.self_attn.q_proj.bias"] = np.ones(32, np.float32)
    with pytest.raises(ModelFileError, match=r"q_proj.bias' is not part"):
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
    assert mixer(found_arch).rope.dim == mixer(wanted_arch).rope.dim
    assert (mixer(found_arch).qkv_bias, mixer(found_arch).qk_norm) == (
        mixer(wanted_arch).qkv_bias,
        mixer(wanted_arch).qk_norm,
    )
    assert list(found) == list(wanted)
    for canonical in wanted:
        np.testing.assert_array_equal(
            found[canonical].to_f32(), wanted[canonical].to_f32(), canonical
        )


def test_only_rotating_rows_of_a_llama_file_move() -> None:
    raw = gguf_weights(CONFIG, "llama")
    rows = raw["blk.0.attn_k.weight"]
    arch, tensors = from_gguf({"llama.rope.dimension_count": 4}, raw)
    assert mixer(arch).rope.dim == 4
    order = [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]
    np.testing.assert_array_equal(tensors["layers.0.k"].to_f32(), rows[order])


def test_no_weights_are_read_before_somebody_asks_for_them() -> None:
    """Rows that move do so then: packed weights know their order, and a start copies none."""
    raw = gguf_weights(CONFIG, "llama")
    _, tensors = from_gguf({}, raw)
    for tensor in tensors.values():
        assert np.shares_memory(tensor.stored, raw[tensor.name]), tensor.name


def test_rows_that_move_twice_end_where_the_second_order_says() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    first, second = np.array([1, 2, 3, 0]), np.array([2, 0, 1, 3])
    moved = as_tensors({"w": rows})["w"].reordered(first).reordered(second)
    np.testing.assert_array_equal(moved.to_f32(), rows[first][second])
    np.testing.assert_array_equal(moved.rows(slice(1, 3)).to_f32(), rows[first][second][1:3])


def test_biases_of_a_llama_file_move_with_their_rows() -> None:
    raw = gguf_weights(CONFIG, "llama")
    halves = {"q": np.arange(32, dtype=np.float32), "k": np.arange(16, dtype=np.float32)}
    for i in range(2):
        raw[f"blk.{i}.attn_q.bias"] = interleave(halves["q"], 4)
        raw[f"blk.{i}.attn_k.bias"] = interleave(halves["k"], 2)
        raw[f"blk.{i}.attn_v.bias"] = halves["k"]
        raw[f"blk.{i}.attn_output.bias"] = halves["q"]
    arch, tensors = from_gguf({}, raw)
    assert (mixer(arch).qkv_bias, mixer(arch).o_bias) == (True, True)
    for part in ("q", "k"):
        np.testing.assert_array_equal(tensors[f"layers.1.{part}_bias"].to_f32(), halves[part])


def test_facts_of_a_gguf_file() -> None:
    raw = gguf_weights(CONFIG, "llama")
    arch, _ = from_gguf({"llama.attention.sliding_window": 12}, raw)
    assert reaches(arch) == (12, 12)
    assert (arch.vocab_size, arch.max_position, arch.tied_embeddings) == (40, 128, False)
    del raw["output.weight"]
    assert from_gguf({}, raw)[0].tied_embeddings
    qwen = gguf_weights(CONFIG, "qwen2", biases="qkv")
    assert (
        from_gguf({"qwen2.attention.sliding_window": 12}, qwen, "qwen2")[0].layers[0].mixer.window
        is None
    )


def test_null_switches_a_cap_off_that_is_on_by_default() -> None:
    values = CONFIG | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 8, "hidden_act": "gelu"}

    def caps(**more: float | None) -> tuple[float, float]:
        arch = arch_from_config(values | more, {}, "x")
        return mixer(arch).softcap, arch.logit_softcap

    assert caps() == (50.0, 30.0)
    assert caps(attn_logit_softcapping=None, final_logit_softcapping=20.0) == (0.0, 20.0)


def test_a_window_of_a_gguf_file_is_honoured_or_refused() -> None:
    """OLMo 3 calls itself olmo2; every fourth layer sees everything. Granite has no window."""
    meta = gguf_metadata(CONFIG | {"num_hidden_layers": 4}, "olmo2")
    meta |= {"olmo2.rope.scaling.type": "linear", "olmo2.rope.scaling.factor": 2.0}

    def layers(**more: int) -> tuple[Layer, ...]:
        values = meta | {f"olmo2.attention.{key}": value for key, value in more.items()}
        return layers_of_gguf(values, "olmo2")

    windowed = layers(sliding_window=8)
    assert [layer.mixer.window for layer in windowed] == [8, 8, 8, None]
    scaled = [bool(layer.mixer.rope and layer.mixer.rope.divisors) for layer in windowed]
    assert scaled == [False, False, False, True]
    assert {layer.mixer.window for layer in layers()} == {None}
    assert len(set(layers())) == 1
    with pytest.raises(ModelFileError, match=r"granite\.attention\.sliding_window is 8"):
        from_gguf(
            {"granite.attention.sliding_window": 8}, gguf_weights(CONFIG, "granite"), "granite"
        )


@pytest.mark.parametrize(("arch", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_gemma_27b_are_scaled_as_published(arch: str, num_layers: int) -> None:
    """By hidden size over heads, 144 and 168; their files do not say it."""
    of_config = CONFIG | {"num_hidden_layers": num_layers, "head_dim": 4, "hidden_act": "gelu"}
    config = of_config | {
        "architectures": [f"G{arch[1:]}ForCausalLM"],
        "query_pre_attn_scalar": CONFIG["hidden_size"] // CONFIG["num_attention_heads"],
    }
    meta = gguf_metadata(of_config, arch)
    more = {"key_length": 4, "value_length": 4, "sliding_window": 8}
    meta |= {f"{arch}.attention.{key}": value for key, value in more.items()}
    found = {}
    for size in (num_layers, num_layers - 1):
        layers = layers_of_gguf(meta | {f"{arch}.block_count": size}, arch)
        found[size] = layers[0].known_attention.scale
    assert found[num_layers] == mixer(arch_from_config(config, {}, "x")).scale == 8**-0.5
    assert found[num_layers - 1] is None  # by a head's channels


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "nobodys"}, "'nobodys' is not supported; ridgeline models"),
        ({"general.architecture": 3}, "general.architecture is 3"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        ({"phi3.expert_count": 8, "general.architecture": "phi3"}, "phi3.expert_count"),
        ({"llama.a_strangers_scales": [1.0]}, "llama.a_strangers_scales is "),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False, which is not"),
        ({"general.architecture": "mamba"}, "'mamba' is not supported: Mamba-1.*Mamba-2"),
        ({"llama.attention.head_count_kv": np.array([2, 1])}, "must have one number, or 0"),
        ({"llama.attention.head_count_kv": np.array([2, 0])}, "has layers without attention"),
        ({"llama.attention.head_count_kv": np.array([3, 3])}, "4 heads cannot share 3"),
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


def test_advice_speaks_of_what_does_not_run_in_one_line() -> None:
    known = {name for name in (*HF_FAMILIES, *GGUF_FAMILIES) if " " not in name}
    assert not known & NEAREST.keys()
    for name, words in NEAREST.items():
        assert family_of({"architectures": [name]}) is None
        assert len(words) < 100
        with pytest.raises(ModelFileError) as caught:
            model_from_config({"architectures": [name]}, {}, "model")
        assert str(caught.value).count("\n") == 0


def test_a_long_name_makes_no_long_message() -> None:
    with pytest.raises(ModelFileError) as caught:
        model_from_config({"architectures": ["x" * 100_000]}, {}, "model")
    assert len(str(caught.value)) < 300


def test_the_context_ends_where_layers_would_see_chunks(tmp_path: Path) -> None:
    """Llama 4: up to there a chunk is all, and no query has grown."""
    config, weights = in_directory("llama4", tmp_path)
    config |= {"max_position_embeddings": 1 << 20}
    for changes, longest, chunk in (
        ({}, 8191, 8192),
        ({"attention_chunk_size": 40}, 40, 40),
        ({"floor_scale": 50}, 49, 8192),
        ({"max_position_embeddings": 30}, 30, 8192),
    ):
        arch, _ = model_from_config(config | changes, as_tensors(weights), "model")
        assert (arch.max_position, arch.chunk) == (longest, chunk)
    assert [layer.known_attention.qk_norm for layer in arch.layers] == ["head"] * 3 + [""]
    assert [layer.known_attention.rope is None for layer in arch.layers] == [False] * 3 + [True]
    kinds = [isinstance(layer.ffn, Experts) for layer in arch.layers]
    assert kinds == [False, True, False, True]
    with pytest.raises(ModelFileError, match="moe_layers must be a list of numbers of layers"):
        model_from_config(config | {"moe_layers": [9]}, as_tensors(weights), "model")
