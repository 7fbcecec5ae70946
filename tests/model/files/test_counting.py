"""A model is described once: what a plan counts from a config is what the engine makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.model.cost.layers import shape_of_arch
from ridgeline.model.cost.shapes import Matrix, ModelShape, weight_params
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.counting import shape_of_config
from ridgeline.model.files.families import (
    GGUF_FAMILIES,
    HF_FAMILIES,
    TABLES,
    arch_from_config,
    family_of,
)
from ridgeline.model.files.families.tables.plan_only import NO_LLAMAS
from ridgeline.model.files.tensors import ModelFileError
from tests.answers.tiny_families import learnt_positions, tiny_config, write_family
from tests.model.cost.published_configs import PUBLISHED
from tests.model.files.tiny import CONFIG
from tests.parity.tiny_configs import CONFIGS, NEWER

DATA = Path(__file__).parents[2] / "data"
RUN_HERE = json.loads((DATA / "family_configs.json").read_text())
ENCODERS = json.loads((DATA / "encoder_configs.json").read_text())
PLANNED = json.loads((DATA / "planned_configs.json").read_text())  # of models that do not run
RUN: dict[str, dict[str, Any]] = {
    name: entry["config"]
    for name, entry in {**PUBLISHED, **RUN_HERE, **ENCODERS}.items()
    if family_of(entry["config"]) is not None
}


def described(shape: ModelShape, plain_head_norms: bool) -> list[Any]:
    """All of a shape but its name and its context."""

    def in_files(matrices: tuple[Matrix, ...]) -> list[Matrix]:
        """Norms without weights stand in no file: the engine makes them."""
        return [one for one in matrices if not plain_head_norms or "qk_norm" not in one.name]

    return [
        *((layer.kind, in_files(layer.matrices), layer.cache) for layer in shape.layers),
        *((layer.attention_values, layer.mlp_values) for layer in shape.layers),
        (shape.hidden_size, shape.vocab_size, shape.num_heads, shape.num_kv_heads),
        (shape.embedding, shape.end, shape.is_tied, in_files(shape.mtp)),
    ]


@pytest.mark.parametrize("name", CONFIGS | NEWER)
def test_a_config_alone_says_every_tensor_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / name, name)
    values = json.loads((path / "config.json").read_text())
    family = family_of(values)
    assert family is not None
    loaded = shape_of_arch(load_checkpoint(path).arch, name)
    counted = shape_of_config(values)
    assert described(counted, family.plain_head_norms) == described(loaded, family.plain_head_norms)
    assert not counted.assumptions


@pytest.mark.parametrize("name", RUN)
def test_a_published_config_is_counted_as_the_engine_reads_it(name: str) -> None:
    values, family = RUN[name], family_of(RUN[name])
    assert family is not None
    plain = {key: value for key, value in values.items() if key != "quantization_config"}
    arch = arch_from_config(plain, learnt_positions(plain, family), name)
    run, counted = shape_of_arch(arch, name), shape_of_config(values)
    assert described(counted, family.plain_head_norms) == described(run, family.plain_head_norms)


def test_every_family_has_a_config_that_is_read_both_ways() -> None:
    configs = [*(tiny_config(name) for name in CONFIGS | NEWER), *RUN.values()]
    read = [family_of(values) for values in configs]
    assert [name for name, family in HF_FAMILIES.items() if family not in read] == [
        "Gemma3TextModel",  # whose layers are those of Gemma3ForCausalLM
    ]


def test_layers_that_guess_tokens_ahead_are_counted_from_both() -> None:
    values = RUN["deepseek-v3"]
    plain = {key: value for key, value in values.items() if key != "quantization_config"}
    arch = arch_from_config(plain, {}, "deepseek-v3")
    assert arch.num_guessing == 1
    assert shape_of_arch(arch, "").mtp == shape_of_config(values).mtp != ()


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("nemotron-3-super-120b-a12b", 120.6, 12.7),
        ("nemotron-3-ultra-550b-a55b", 550, 55),
        ("qwen3-coder-480b-a35b", 480.2, 35.5),
        ("llama-3.3-nemotron-super-49b", 49.87, 49.87),
        ("mimo-v2-flash", 309, 15),
        ("mimo-7b", 7.6, 7.6),  # without what guesses tokens ahead
    ],
)
def test_models_that_are_planned_alone_have_the_parameters_of_their_names(
    name: str, billions: float, active: float
) -> None:
    shape = shape_of_config(PLANNED[name]["config"])
    assert weight_params(shape) / 1e9 == pytest.approx(billions, rel=0.003)
    used = sum(matrix.num_active_params for _, matrix in shape.matrices()) / 1e9
    assert used == pytest.approx(active, rel=0.05)


def test_experts_of_latents_compute_in_their_own_width() -> None:
    values = PLANNED["nemotron-3-super-120b-a12b"]["config"]
    shape = shape_of_config(values)
    of_mlp = [m for m in shape.layers[1].matrices if m.linear and m.name.startswith("mlp.")]
    sizes = {m.name: (m.rows, m.columns) for m in of_mlp}
    assert sizes == {
        "mlp.experts.up_proj": (2688, 1024),
        "mlp.experts.down_proj": (1024, 2688),
        "mlp.shared_experts.up_proj": (5376, 4096),
        "mlp.shared_experts.down_proj": (4096, 5376),
        "mlp.fc1_latent_proj": (1024, 4096),
        "mlp.fc2_latent_proj": (4096, 1024),
    }
    assert set(of_mlp) <= set(shape.mtp)  # a layer that guesses ahead has the same
    with pytest.raises(ModelFileError, match="moe_latent_size"):
        arch_from_config(values, {}, "x")


def test_layers_of_unlike_sizes_are_counted_each_by_itself() -> None:
    values = PLANNED["llama-3.3-nemotron-super-49b"]["config"]
    shape = shape_of_config(values)
    blocks = values["block_configs"]
    for layer, block in zip(shape.layers, blocks, strict=True):
        has_attention = not block["attention"].get("no_op")
        assert any(one.name == "self_attn.o_proj" for one in layer.matrices) == has_attention
        assert layer.cache.values_per_token() == has_attention * 2 * 8 * 128
    sizes = {one.name: (one.rows, one.columns) for one in shape.layers[0].matrices}
    assert sizes["mlp.down_proj"] == (8192, 14336)  # 2/3 of 2.625 of 8,192
    other = [blocks[0] | {"attention": {"replace_with_linear": True}}, *blocks[1:]]
    for damaged, said in (
        (blocks[1:], "must say the sizes of each"),
        ([{}, *blocks[1:]], "a block without attention"),
        (other, "replace_with_linear is True, which is not counted"),
    ):
        with pytest.raises(ModelFileError, match=said):
            shape_of_config(values | {"block_configs": damaged})


def test_layers_with_windows_may_have_other_heads() -> None:
    values = PLANNED["mimo-v2-flash"]["config"]
    shape = shape_of_config(values)
    full, windowed = shape.layers[5], shape.layers[6]
    assert full.cache.values_per_token() == 4 * (192 + 128)
    assert windowed.cache.values_per_token() == 8 * (192 + 128)
    assert (full.cache.window, windowed.cache.window) == (None, 128)
    sizes = {one.name: (one.rows, one.columns) for one in windowed.matrices}
    assert sizes["self_attn.q_proj"] == (64 * 192, 4096)
    assert sizes["self_attn.v_proj"] == (8 * 128, 4096)
    assert sizes["self_attn.o_proj"] == (4096, 64 * 128)
    assert "self_attn.sinks" in sizes
    assert "self_attn.sinks" not in str(full.matrices)
    for change, said in (
        ({"hybrid_layer_pattern": [0]}, "hybrid_layer_pattern must say"),
        ({"swa_num_attention_heads": 32}, "is not num_attention_heads"),
    ):
        with pytest.raises(ModelFileError, match=said):
            shape_of_config(values | change)


@pytest.mark.parametrize("name", NO_LLAMAS)
def test_what_is_no_llama_is_refused_for_its_reason(name: str) -> None:
    values = {key: value for key, value in CONFIG.items() if key != "architectures"}
    with pytest.raises(ModelFileError, match="nothing is guessed") as caught:
        shape_of_config(values | {"model_type": name, "gated_mlp": True})
    assert f"'{name}' are not counted: {NO_LLAMAS[name]}" in str(caught.value)


def test_what_chooses_blocks_of_tokens_is_counted_where_it_stands() -> None:
    values = PLANNED["minimax-m3"]["config"]
    shape = shape_of_config(values)
    indexed = ["index_q_proj" in str(layer.matrices) for layer in shape.layers]
    assert indexed == [bool(one) for one in values["moe_layer_freq"]]  # dense ones read all
    per_token = [layer.cache.values_per_token() for layer in shape.layers[2:4]]
    assert per_token == [2 * 4 * 128, 2 * 4 * 128 + 128]
    assert any("sparse_attention_config" in said for said in shape.assumptions)
    wrong = values["sparse_attention_config"] | {"sparse_attention_freq": [1]}
    with pytest.raises(ModelFileError, match="sparse_attention_freq must say"):
        shape_of_config(values | {"sparse_attention_config": wrong})


@pytest.mark.parametrize(
    "name",
    [name for name in TABLES.counted if "unknown" not in name and "latent experts" not in name],
)
def test_a_family_that_is_only_counted_does_not_run_and_the_message_names_it(name: str) -> None:
    """Some models of a family that runs have other sizes: these are refused for what differs."""
    config = CONFIG | {"architectures": [name.partition(" ")[0]]}
    if " " in name and config["architectures"][0] in HF_FAMILIES:
        config |= {"multi_query": False, "new_decoder_architecture": False}
    with pytest.raises(ModelFileError) as caught:
        arch_from_config(config, {}, "x")
    assert config["architectures"][0] in str(caught.value) or "multi_query" in str(caught.value)


def test_every_name_of_a_family_is_of_a_row() -> None:
    assert {*TABLES.class_of_type.values()} <= HF_FAMILIES.keys() | TABLES.counted.keys()
    assert TABLES.class_of_gguf.keys() == {name for name in GGUF_FAMILIES if " " not in name}
    assert {*TABLES.class_of_gguf.values()} <= HF_FAMILIES.keys()


def test_experts_that_share_keys_by_group_or_by_head() -> None:
    """RefinedWeb's first 40B names its key heads; StarCoder's may have one for each head."""
    falcon = {"hidden_size": 64, "n_head": 8, "n_layer": 2, "vocab_size": 40, "bias": False}
    one, four = (
        shape_of_config({"model_type": "RefinedWeb", **falcon, **changes})
        for changes in ({"multi_query": True}, {"n_head_kv": 4})
    )
    assert (one.num_kv_heads, four.num_kv_heads) == (1, 4)
    coder = {"model_type": "gpt_bigcode", "n_embd": 64, "n_head": 8, "n_layer": 2,
             "n_positions": 16, "vocab_size": 40}  # fmt: skip
    assert shape_of_config(coder).num_kv_heads == 1
    assert shape_of_config(coder | {"multi_query": False}).num_kv_heads == 8


def test_an_opt_without_biases_and_a_llama_4_that_names_no_still_layer() -> None:
    opt = RUN_HERE["opt-125m"]["config"]
    biases = 12 * (5 * 768 + 3072)
    bare = shape_of_config(opt | {"enable_bias": False})
    assert weight_params(shape_of_config(opt)) - weight_params(bare) == biases
    scout = RUN_HERE["llama-4-scout"]["config"]
    text = scout["text_config"] | {"no_rope_layers": []}
    windows = [
        layer.cache.window for layer in shape_of_config(scout | {"text_config": text}).layers
    ]
    assert windows == [8192, 8192, 8192, None] * 12


@pytest.mark.parametrize(
    ("name", "num_biases"),
    [
        *(("llama2", 3), ("granite", 3), ("smollm3", 3), ("seed-oss", 3)),
        *(("bamba", 3), ("falcon-h1", 3), ("arcee", 2), ("nemotron", 2)),
    ],
)
def test_biases_of_mlps_are_counted_also_where_they_do_not_run(
    name: str, num_biases: int, tmp_path: Path
) -> None:
    path = write_family(tmp_path / name, name)
    values = json.loads((path / "config.json").read_text())
    plain, biased = (shape_of_config(values | {"mlp_bias": switch}) for switch in (False, True))
    inner = (num_biases - 1) * values["intermediate_size"]
    more = len(plain.layers) * (inner + values["hidden_size"])
    assert weight_params(biased) - weight_params(plain) == more
    if name != "llama2":
        with pytest.raises(ModelFileError, match="mlp_bias is set, which is not supported"):
            arch_from_config(values | {"mlp_bias": True}, {}, "x")


def test_an_mpt_of_another_width_is_counted_and_does_not_run(tmp_path: Path) -> None:
    values = json.loads((write_family(tmp_path / "mpt", "mpt") / "config.json").read_text())
    wide, narrow = (shape_of_config(values | {"expansion_ratio": ratio}) for ratio in (4, 2))
    less = 2 * 2 * values["d_model"] ** 2  # a matrix up and one down, each half as large
    assert weight_params(wide) - weight_params(narrow) == len(wide.layers) * less
    with pytest.raises(ModelFileError, match="expansion_ratio is 2, which is not supported"):
        arch_from_config(values | {"expansion_ratio": 2}, {}, "x")


@pytest.mark.parametrize("name", ["llama2", "mixtral", "mpt", "nemotron-h", "lfm2"])
def test_a_size_may_be_written_with_a_point_and_a_zero(name: str, tmp_path: Path) -> None:
    values = json.loads((write_family(tmp_path / name, name) / "config.json").read_text())
    pointed = {key: float(one) if type(one) is int else one for key, one in values.items()}
    assert weight_params(shape_of_config(pointed)) == weight_params(shape_of_config(values))
    arch = arch_from_config(values, {}, "x")
    assert arch_from_config(pointed, {}, "x") == arch
    with pytest.raises(ModelFileError, match=r"num_hidden_layers is 2\.5"):
        shape_of_config({**values, "num_hidden_layers": 2.5})


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}, None),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}, 0),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}, 2 * 4 * 6272),
    ],
)
def test_an_unknown_family_is_counted_by_the_parts_that_its_config_names(
    changes: dict[str, Any], more: int | None
) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "architectures"}
    config |= {"model_type": "brandnew", "gated_mlp": True}
    plain, shape = (shape_of_config(config | one) for one in ({}, changes))
    assert "brandnew" in shape.assumptions[0]
    if more is None:
        assert shape.kinds == ("mla", "latent")
    elif not more:
        assert [layer.cache.window for layer in shape.layers] == [9, None]
        assert weight_params(shape) == weight_params(plain)
    else:
        experts = 4 * 3 * 64 * 32 + 4 * 32 - 3 * 64 * 32
        assert weight_params(shape) - weight_params(plain) == 2 * experts
