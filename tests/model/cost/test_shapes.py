"""Shapes: counted against published models, against the engine's own families, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.model.cost import costs
from ridgeline.model.cost.layers import shape_of_arch
from ridgeline.model.cost.shapes import ModelShape, active_params, mtp_params, weight_params
from ridgeline.model.files.counting import shape_of_config
from ridgeline.model.files.families import HF_FAMILIES, arch_from_config
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.shape.model import ModelArch
from tests.model.cost.published_configs import PUBLISHED
from tests.model.files.tiny import CONFIG as LLAMA
from tests.model.files.tiny import hf
from tests.tiny import ARCHS, BY_LAYER, LATENT, RECURRENT

CONFIG = {key: value for key, value in LLAMA.items() if key != "architectures"}
MODELS = ARCHS | BY_LAYER | LATENT
# What the families accept: name -> model_type, changes to the tiny config, how weights are made.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}, {}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True}, {"biases": "qkvo"}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}, {}),
    "mistral as it was": ("MistralForCausalLM", {}, {}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 9}, {"fused": True}),
    "qwen2": ("Qwen2ForCausalLM", {}, {"biases": "qkv"}),
    "qwen2, windowed": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        {"biases": "qkv"},
    ),
    "qwen2, window switched off": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0},
        {"biases": "qkv"},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}, {"norms": True}),
    "qwen3 by layer": (
        "Qwen3ForCausalLM",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        {"norms": True},
    ),
}


def shape_of(name: str) -> ModelShape:
    return shape_of_config(PUBLISHED[name]["config"])


def kv_bytes_per_token(shape: ModelShape) -> int:
    """Of a token that no window has left behind, at two bytes a value."""
    return 2 * sum(layer.cache.values_per_token() for layer in shape.layers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_parameters(name: str) -> None:
    entry, shape = PUBLISHED[name], shape_of(name)
    tolerance = entry.get("tolerance", 1e-6)
    assert weight_params(shape) == pytest.approx(entry["num_params"], rel=tolerance)
    active = entry.get("num_active_params", entry["num_params"])
    if "num_active_params" in entry or "moe" not in shape.kinds:
        assert active_params(shape) == pytest.approx(active, rel=tolerance)
    mtp = entry.get("num_mtp_params", 0)
    assert mtp_params(shape) == pytest.approx(mtp, rel=entry.get("mtp_tolerance", 0))
    assert kv_bytes_per_token(shape) == entry["kv_bytes_per_token"]


RUN_HERE: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "family_configs.json").read_text()
)


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_published_config_of_each_family_that_runs_is_counted_by_itself(name: str) -> None:
    shape = shape_of_config(RUN_HERE[name]["config"])
    assert weight_params(shape) == RUN_HERE[name]["num_params"]
    assert not shape.assumptions


RUN = [
    name
    for name, entry in PUBLISHED.items()
    if entry["config"].get("architectures", [""])[0] in HF_FAMILIES
]


@pytest.mark.parametrize("name", RUN)
def test_a_published_config_of_a_family_that_runs_has_its_parameters(name: str) -> None:
    entry = PUBLISHED[name]
    config = entry["config"]
    if "text_config" in config:
        config = config["text_config"] | {"architectures": config["architectures"]}
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    arch = arch_from_config(config, {}, name)
    tolerance = entry.get("tolerance", 1e-6)
    assert costs.weight_params(arch) == pytest.approx(entry["num_params"], rel=tolerance)
    assert costs.kv_bytes_per_token(arch, 2) == entry["kv_bytes_per_token"]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_the_engine_runs_have_the_same_weights_and_windows(name: str) -> None:
    architecture, changes, kinds = FAMILIES[name]
    config = {**CONFIG, "architectures": [architecture], **changes}
    arch, _ = hf(config, **kinds)
    model_type = architecture.removesuffix("ForCausalLM").lower()
    shape = shape_of_config({**config, "model_type": model_type})
    assert weight_params(shape) == costs.weight_params(arch)
    assert tuple(layer.cache.window for layer in shape.layers) == tuple(
        layer.mixer.window for layer in arch.layers
    )
    assert kv_bytes_per_token(shape) == costs.kv_bytes_per_token(arch, 2)
    assert (shape.num_heads, shape.num_kv_heads) == (
        arch.layers[0].mixer.num_heads,
        arch.layers[0].mixer.num_kv_heads,
    )


@pytest.mark.parametrize("name", RECURRENT)
def test_states_are_counted_alike(name: str) -> None:
    arch, shape = RECURRENT[name], shape_of_arch(RECURRENT[name], "tiny")
    states = sum(layer.cache.state_values for layer in shape.layers)
    assert states == arch.num_state_values
    assert costs.state_bytes_per_seq(arch) == 4 * states
    assert kv_bytes_per_token(shape) == costs.kv_bytes_per_token(arch, 2)
    assert weight_params(shape) == costs.weight_params(arch)


@pytest.mark.parametrize("arch", MODELS.values(), ids=MODELS)
def test_an_arch_has_the_same_weights_as_a_shape(arch: ModelArch) -> None:
    shape = shape_of_arch(arch, "tiny")
    assert weight_params(shape) == costs.weight_params(arch)
    assert kv_bytes_per_token(shape) == costs.kv_bytes_per_token(arch, 2)
    for layer, same in zip(shape.layers, arch.layers, strict=True):
        owns_keys = same.known_attention.kv_of is None
        assert layer.cache.kind == "shared" or owns_keys
        assert layer.cache.window == (same.known_attention.window if owns_keys else None)


def test_kinds_say_what_is_special() -> None:
    assert shape_of("llama-3.1-8b").kinds == ("gqa",)
    assert shape_of("gemma-3-1b").kinds == ("mqa", "sliding window")
    assert shape_of("phi-3-mini-4k").kinds == ("mha", "sliding window")
    assert shape_of("deepseek-v3").kinds == ("mla", "latent", "moe")
    assert shape_of("qwen3-next-80b-a3b").kinds == ("linear attention", "gqa", "state", "moe")


def test_windows_stand_where_the_family_has_them() -> None:
    def windows(name: str) -> list[int | None]:
        return [layer.cache.window for layer in shape_of(name).layers]

    assert windows("gemma-2-9b") == [4096, None] * 21
    assert windows("gemma-3-1b") == ([512] * 5 + [None]) * 4 + [512] * 2
    assert windows("gpt-oss-20b") == [128, None] * 12
    assert windows("qwen3-8b") == [None] * 36


def test_llama_4_has_chunks_and_a_shared_expert_of_an_experts_width() -> None:
    """Scout: 109 B parameters by its card, of them 0.9 B that see; 17 B active."""
    scout = {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True,
        "attention_chunk_size": 8192, "tie_word_embeddings": False, "moe_layers": None,
    }  # fmt: skip
    shape = shape_of_config(scout)
    assert weight_params(shape) == pytest.approx(108.1e9, rel=0.005)
    assert active_params(shape) == pytest.approx(17e9, rel=0.02)
    assert [layer.cache.window for layer in shape.layers] == [8192, 8192, 8192, None] * 12
    assert not any("qk_norm" in matrix.name for _, matrix in shape.matrices())  # without weights
    every = {**scout, "no_rope_layers": [1, 0] * 24, "interleave_moe_layer_step": 2}
    half = shape_of_config(every)
    assert [layer.cache.window for layer in half.layers] == [8192, None] * 24
    assert [layer.mlp_values for layer in half.layers[:2]] == [3 * 16384, 6 * 8192 + 2 * 5120]


def test_every_rank_keeps_all_of_a_latent_cache_and_at_least_one_head() -> None:
    latent = shape_of("deepseek-v3").layers[0].cache
    assert latent.values_per_token(1) == latent.values_per_token(8) == 512 + 64
    heads = shape_of("qwen3-235b-a22b").layers[0].cache  # 4 of 128 channels
    assert [heads.values_per_token(ranks) for ranks in (1, 2, 4, 8)] == [1024, 512, 256, 256]


def test_layers_that_share_a_cache_keep_none_of_their_own() -> None:
    config = {**CONFIG, "model_type": "gemma3n_text", "num_kv_shared_layers": 1, "head_dim": 8}
    first, second = shape_of_config(config).layers
    assert first.cache.values_per_token() == 2 * 2 * 8
    assert (second.cache.kind, second.cache.values_per_token()) == ("shared", 0)


def test_a_state_is_the_same_for_every_length() -> None:
    cache = shape_of("mamba-2.8b").layers[0].cache
    assert cache.values_per_token() == 0
    assert cache.state_values == 5120 * (16 + 3)  # states, and the convolution's last three inputs


def test_the_text_of_a_model_with_pictures_says_what_is_not_counted() -> None:
    text = {**CONFIG, "model_type": "llama"}
    outer = {"model_type": "llava", "text_config": text, "vision_config": {"hidden_size": 1152}}
    shape = shape_of_config(outer)
    assert (shape.towers, shape.not_counted) == (("vision_config",), ())
    assert weight_params(shape) == weight_params(shape_of_config(text))


# GLM-5: "744B parameters (40B active)". What else its config says is DeepSeek-V3's.
GLM_5: dict[str, Any] = PUBLISHED["deepseek-v3"]["config"] | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "head_dim": 64,
    "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
    "indexer_rope_interleave": True, "intermediate_size": 12288, "kv_lora_rank": 512, "n_group": 1,
    "num_attention_heads": 64, "num_hidden_layers": 78, "num_key_value_heads": 64,
    "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "topk_group": 1, "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip


def test_an_indexer_of_sparse_attention_is_counted() -> None:
    shape = shape_of_config(GLM_5)
    assert weight_params(shape) == pytest.approx(744e9, rel=5e-4)
    assert active_params(shape) == pytest.approx(40e9, rel=0.05)
    assert shape.layers[0].cache.values_per_token() == 512 + 64 + 128  # and the indexer's key
    assert any("index_topk" in line for line in shape.assumptions)
    shared = ["full", "full", *["shared"] * 76]
    fewer = shape_of_config(GLM_5 | {"indexer_types": shared})
    of_one = 32 * 128 * 2048 + (128 + 32) * 6144 + 2 * 128
    assert weight_params(shape) - weight_params(fewer) == 76 * of_one
    assert fewer.layers[2].cache.values_per_token() == 512 + 64
    v3 = PUBLISHED["deepseek-v3"]["config"]
    indexer = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
    with pytest.raises(ModelFileError, match="index_head_dim"):
        shape_of_config(v3 | indexer)
    v32 = v3 | indexer | {"architectures": ["DeepseekV32ForCausalLM"]}
    assert weight_params(shape_of_config(v32)) > weight_params(shape_of_config(v3))


GEMMA_4: dict[str, Any] = {
    name: entry for name, entry in RUN_HERE.items() if name.startswith("gemma-4")
}


@pytest.mark.parametrize("name", GEMMA_4)
def test_gemma_4_has_the_shape_of_the_model_that_the_engine_runs(name: str) -> None:
    config = GEMMA_4[name]["config"]
    arch, shape = arch_from_config(config, {}, name), shape_of_config(config)
    same = shape_of_arch(arch, "gemma4_text")
    assert weight_params(shape) == GEMMA_4[name]["num_params"]
    assert active_params(shape) == active_params(same)
    assert kv_bytes_per_token(shape) == costs.kv_bytes_per_token(arch, 2)
    assert [layer.cache for layer in shape.layers] == [layer.cache for layer in same.layers]
    assert [layer.mlp_values for layer in shape.layers] == [
        layer.mlp_values for layer in same.layers
    ]
    assert shape.not_counted == ()
    assert set(shape.towers) <= {"vision_config", "audio_config"}


def test_shared_keys_and_values_halve_what_a_cache_holds() -> None:
    for name, own, every in (("gemma-4-e2b", 18_432, 43_008), ("gemma-4-e4b", 57_344, 100_352)):
        config = GEMMA_4[name]["config"]
        alone = config | {"text_config": config["text_config"] | {"num_kv_shared_layers": 0}}
        assert kv_bytes_per_token(shape_of_config(config)) == own
        assert kv_bytes_per_token(shape_of_config(alone)) == every


WIDE = {"enable_moe_block": True, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2: layer 0 finds no layer of its"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        (WIDE, "num_experts is missing"),
        (
            WIDE | {"num_experts": 2, "top_k_experts": 3},
            "a token cannot go to 3 of 2 experts",
        ),
        ({"per_layer_config": [2]}, "per_layer_config must have head_dim"),
        ({"per_layer_config": {"1": 5}}, "per_layer_config must have head_dim"),
        ({"per_layer_config": {"1": {"head_dim": -5}}}, "per_layer_config: head_dim is -5"),
    ],
)
def test_a_gemma_4_that_cannot_be_counted(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of_config({**CONFIG, "model_type": "gemma4_text", **changes})


def test_newer_configs_of_gemma_4_say_heads_by_the_number_of_a_layer() -> None:
    config = {**CONFIG, "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16}
    newer = {key: value for key, value in config.items() if key != "global_head_dim"}
    newer["per_layer_config"] = {"01": {"head_dim": 16}}
    assert shape_of_config(newer).layers == shape_of_config(config).layers
    assert shape_of_config(newer).layers[0].cache.values_per_head == 16
    none = shape_of_config({**config, "hidden_size_per_layer_input": None})
    usual = shape_of_config(config)
    assert weight_params(usual) > weight_params(none)
    unified = shape_of_config({**config, "model_type": "gemma4_unified_text"})
    assert weight_params(unified) == weight_params(none)
    assert "embed_tokens_per_layer" in str(usual.embedding)


def test_an_unknown_family_is_taken_for_a_llama_and_says_so() -> None:
    brandnew = {**CONFIG, "model_type": "brandnew", "gated_mlp": True}
    shape = shape_of_config(brandnew)
    assert weight_params(shape) == weight_params(shape_of_config({**CONFIG, "model_type": "llama"}))
    assert shape.assumptions[0].startswith("model_type 'brandnew' is not known here: taken for a")
    plain = shape_of_config({**brandnew, "gated_mlp": False})
    gates = CONFIG["num_hidden_layers"] * CONFIG["intermediate_size"] * CONFIG["hidden_size"]
    assert weight_params(shape) - weight_params(plain) == gates
    assert plain.assumptions[0].endswith(", and MLPs without gates")


@pytest.mark.parametrize(
    ("family", "gates"),
    [("cwm", True), ("bitnet", True), ("internlm2", True), ("apertus", False), ("nanochat", False),
     ("biogpt", False), ("bert-generation", False), ("apertus1p5_text", False)],
)  # fmt: skip
def test_a_table_knows_whether_mlps_of_some_unknown_families_have_gates(
    family: str, gates: bool
) -> None:
    shape = shape_of_config({**CONFIG, "model_type": family})
    said = {**CONFIG, "model_type": "brandnew", "gated_mlp": gates}
    assert weight_params(shape) == weight_params(shape_of_config(said))


def test_whether_an_mlp_has_a_gate_is_never_guessed() -> None:
    with pytest.raises(ValueError, match='add "gated_mlp": true if they multiply') as caught:
        shape_of_config({**CONFIG, "model_type": "brandnew"}, "my.json")
    assert str(caught.value).startswith("my.json: model_type 'brandnew' is not known here")
    with pytest.raises(ValueError, match="gated_mlp is 'yes', not true or false"):
        shape_of_config({**CONFIG, "model_type": "apertus", "gated_mlp": "yes"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two', not an integer"),
        ({"num_hidden_layers": 10**6}, "more than 4096"),
        ({"num_nextn_predict_layers": 4_000_000}, "num_nextn_predict_layers is 4000000, more than"),
        ({"mtp_num_hidden_layers": 5000}, "more than 4096"),
        ({"mlp_only_layers": [1] * 2000}, "mlp_only_layers is [1, 1, 1, 1, 1, 1, ...], which may"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"tie_word_embeddings": "yes"}, "not true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types must name one of full_attention, "),
        ({"layer_types": ["full_attention", "magic"]}, "layer_types must name one of full_"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 0},
            "layer_types has sliding_attention, and sliding_window is 0",
        ),
        ({"ssm_state_size": 128}, "ssm_state_size is 128, which may change the model's size"),
        ({"index_n_heads": 64}, "index_n_heads is 64, which may change"),
        ({"num_experts": 4}, "num_experts is 4, which may change the model's size"),
        ({"num_experts": 4, "model_type": "mellum"}, "num_experts_per_tok or experts_"),
        (
            {"num_experts": 4, "num_experts_per_tok": 5, "model_type": "mellum"},
            "a token cannot go to 5 of 4 experts",
        ),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
        ({"text_config": ["no"]}, "text_config is not an object"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    with pytest.raises(ValueError, match=r"my\.json: ") as caught:
        shape_of_config({"model_type": "llama", **config}, "my.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


SPARSE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "switch", "more"),
    [
        ("llama", "attention_bias", 2 * (32 + 2 * 16 + 32)),
        ("llama", "mlp_bias", 2 * (2 * 64 + 32)),
        ("qwen2", "attention_bias", 0),  # q, k and v have biases anyway, o has none
        ("cohere", "use_qk_norm", 2 * (4 + 2) * 8),
        ("glm4_moe", "use_qk_norm", 2 * 2 * 8),
        ("mistral", "attention_bias", 2 * (32 + 2 * 16 + 32)),  # as the engine reads it
        ("mixtral", "attention_bias", 0),  # none of its models goes by it
        ("qwen3", "mlp_bias", None),
        ("llama", "use_qk_norm", None),
    ],
)
def test_a_switch_counts_where_the_family_has_it_and_is_refused_elsewhere(
    family: str, switch: str, more: int | None
) -> None:
    config = {**CONFIG, **SPARSE, "model_type": family, "tie_word_embeddings": False}
    if family != "glm4_moe":
        config = {key: value for key, value in config.items() if key not in SPARSE}
    plain = weight_params(shape_of_config(config))
    if more is None:
        with pytest.raises(ValueError, match=f"{switch} is True, which may change"):
            shape_of_config({**config, switch: True})
    else:
        assert weight_params(shape_of_config({**config, switch: True})) == plain + more


def test_fields_without_a_size_are_no_reason_to_refuse() -> None:
    harmless = {"pad_token_id": 3, "attention_dropout": 0.1, "rope_scaling": {"factor": 2.0},
                "num_beams": 4, "sliding_window": None, "use_cache": True, "hidden_dropout": 0.5,
                "_name_or_path": "x", "ssm_state_size": 0}  # fmt: skip
    shape_of_config({**CONFIG, "model_type": "llama", **harmless})


def test_a_bare_class_has_no_head() -> None:
    config = PUBLISHED["mistral-7b-v0.1"]["config"]
    whole = shape_of_config(config)
    bare = shape_of_config(config | {"architectures": ["MistralModel"]})
    assert weight_params(whole) - weight_params(bare) == 32000 * 4096
    gpt2 = RUN_HERE["gpt2"]["config"]
    assert shape_of_config(gpt2 | {"tie_word_embeddings": False}).is_tied is False
