"""Bytes of formats: small matrices by hand, published files by their sizes."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.model.cost.format_bytes import (
    FORMATS,
    Storage,
    format_named,
    kv_bytes_of,
    storage_of_config,
    storage_of_dtype,
)
from ridgeline.model.cost.shapes import Matrix
from ridgeline.model.files.counting import shape_of_config
from ridgeline.model.files.gguf.file import _TENSOR_TYPES
from tests.model.cost.matrix_bytes import stored_bytes
from tests.model.cost.published_configs import PUBLISHED

MATRIX = Matrix("self_attn.q_proj", "attention", rows=256, columns=512)


def quantised(**changes: Any) -> Storage:
    return storage_of_config({"torch_dtype": "bfloat16", "quantization_config": changes})


def bytes_of(storage: Storage, matrix: Matrix = MATRIX, name: str = "") -> int:
    return stored_bytes(storage, [(name or f"model.layers.0.{matrix.name}", matrix)])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, 256 * 512 + 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 256 * 512 + 2 * 4 * 4),
        # nibbles; per group of 128 and output a scale of 2 bytes and half a byte of zero; an order
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 65536 + 4 * 256 * 2.5 + 512 * 4),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 131072 + 256 * 3 + 512 * 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 65536 + 8 * 256 * 2.5),
        (
            {
                "quant_method": "hqq",
                "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}},
            },
            65536 + 8 * 256 * 4,
        ),
        ({"quant_method": "mxfp4"}, 256 * 512 * 2),  # experts alone are converted
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 65536 + 8 * 256 * 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 131072 + 256 * 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 65536 + 32 * 256),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, 256 * 512 + 2 * 4 * 4),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            256 * 512 + 256 * 4,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
                },
                "ignore": ["lm_head"],
            },
            131072 + 256 * 2,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {
                            "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128,
                            "symmetric": True,
                        }
                    }
                },
            },
            65536 + 4 * 256 * 2,
        ),
    ],
)  # fmt: skip
def test_values_and_scales(config: dict[str, Any], expected: float) -> None:
    assert bytes_of(quantised(**config)) == expected


def test_experts_in_mxfp4_take_four_bits_and_a_quarter() -> None:
    experts = Matrix("mlp.experts.up_proj", "experts", 64, 96, copies=8, active=2)
    assert bytes_of(quantised(quant_method="mxfp4"), experts) == 8 * 64 * 96 * 4.25 / 8


@pytest.mark.parametrize(
    ("pattern", "is_kept"),
    [
        ("model.layers.*.self_attn", True),
        ("self_attn.q_proj", True),
        ("q_proj", True),
        ("re:.*self_attn.*", True),
        ("model.layers.1", False),  # and not of layer 11 either
        ("proj", False),
        ("mlp", False),
        ("re:.*self_attn", True),
        ("re:self_attn.*", False),  # from the begin
        (r"re:model\.layers\.\d+\.(self_attn|mlp)\..*_proj$", True),
        ("re:.*(?:q_proj|k_proj)$", True),
        ("re:.*v_proj$", False),
        ("*.q_proj", True),
        ("*.k_proj", False),
    ],
)
def test_modules_that_are_not_converted(pattern: str, is_kept: bool) -> None:
    storage = quantised(quant_method="fp8", modules_to_not_convert=[pattern])
    name = "model.layers.11.self_attn.q_proj"
    assert (storage.of(name, MATRIX) is storage.plain) == is_kept


def test_names_that_end_with_a_star_may_be_many() -> None:
    """ModelOpt names each layer's modules so."""
    kept = [f"model.layers.{i}.self_attn*" for i in range(200)]
    storage = quantised(quant_method="modelopt", quant_algo="NVFP4", ignore=kept)
    assert storage.of("model.layers.199.self_attn.o_proj", MATRIX) is storage.plain
    assert storage.of("model.layers.199.mlp.up_proj", MATRIX) is storage.linear
    assert storage.of("model.layers.200.self_attn.o_proj", MATRIX) is storage.linear


@pytest.mark.parametrize(
    ("listed", "counted"),
    [
        ("model.language_model.layers.3.mlp*", "model.layers.3.mlp.up_proj"),
        ("language_model.model.layers.3*", "model.layers.3.mlp.up_proj"),
        ("model.layers.3.block_sparse_moe.experts.7.w1", "model.layers.3.mlp.experts.up_proj"),
        ("*.mlp.shared_expert.*", "model.layers.3.mlp.shared_experts.up_proj"),
        ("model.layers.3.linear_attn.in_proj_z", "model.layers.3.linear_attn.in_proj_qkvz.z"),
    ],
)
def test_modules_are_found_by_the_names_of_other_files(listed: str, counted: str) -> None:
    storage = quantised(quant_method="modelopt", quant_algo="NVFP4", ignore=[listed])
    assert storage.of(counted, MATRIX) is storage.plain
    assert storage.of(counted.replace(".3.", ".4."), MATRIX) is (
        storage.plain if listed[0] == "*" else storage.linear
    )


def test_a_mixed_quantisation_says_the_format_of_each_module() -> None:
    layers = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.0.mlp.down_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }
    storage = quantised(
        quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers
    )
    names = (*layers, "model.layers.0.self_attn.k_proj")
    assert [storage.of(name, MATRIX).name for name in names] == ["fp8", "nvfp4", "nvfp4", "bf16"]
    assert storage.name == "nvfp4"  # of most modules
    unknown = layers | {"model.layers.1": {"quant_algo": "INT3"}}
    with pytest.raises(ValueError, match="'modelopt', which is not understood"):
        quantised(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=unknown)


def test_layers_that_files_number_by_halves_are_found() -> None:
    """Of Nemotron the mixer and what stands behind it are layers of their own."""
    said = {
        "quant_method": "modelopt", "quant_algo": "NVFP4",
        "exclude_modules": [
            "backbone.layers.3.mixer.q_proj", "backbone.layers.2.mixer.in_proj*",
            "backbone.layers.4.mixer.shared_experts.up_proj",
        ],
    }  # fmt: skip
    for halves in (
        {"hybrid_override_pattern": "MEM*-"},
        {"layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp"]},
    ):
        storage = storage_of_config({"quantization_config": said} | halves)
        kept = {
            name
            for name in (
                f"model.layers.{i}.{part}"
                for i in range(4)
                for part in ("self_attn.q_proj", "mamba.in_proj", "mlp.shared_experts.up_proj")
            )
            if storage.of(name, MATRIX) is storage.plain
        }
        assert kept == {
            "model.layers.2.self_attn.q_proj",
            "model.layers.1.mamba.in_proj",
            "model.layers.2.mlp.shared_experts.up_proj",
        }


def test_a_text_half_says_how_it_is_quantised() -> None:
    """As Kimi K2.5's does, whose whole config says nothing."""
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    storage = storage_of_config({"dtype": "float16", "text_config": {"quantization_config": said}})
    assert (storage.plain.name, storage.linear.name) == ("f16", "fp8 in blocks")


def test_modelopt_is_known_by_its_algorithm_where_it_does_not_name_itself() -> None:
    assert quantised(quant_algo="FP8", producer={"name": "modelopt"}).linear.name == "fp8"


@pytest.mark.parametrize(
    "patterns",
    [
        ["re:(a+)+$"],
        ["re:(.*.*)*x"],
        ["re:" + "a?" * 30 + "a" * 30],
        ["re:(a|a)*b"],
        ["re:a{1,99}{1,99}b"],
        ["re:("],
        ["re:" + "(" * 150],
        ["re:" + "x" * 500],
        [f"*{i}" for i in range(100)],
        [f"layers.{i}" for i in range(10_000)],
    ],
)
def test_patterns_of_a_stranger_that_could_take_for_ever_are_refused(patterns: list[str]) -> None:
    with pytest.raises(ValueError, match=r"quantization_config: .*(is not understood|at most)"):
        quantised(quant_method="fp8", modules_to_not_convert=patterns)


def test_the_dearest_patterns_that_are_taken_cost_little() -> None:
    """Tried in all ways, a single name would take for ever."""
    patterns = ["re:" + ".*e" * 60 + "!" + str(i) for i in range(20)] + ["*e" * 90 + "x"]
    storage = quantised(quant_method="fp8", modules_to_not_convert=patterns)
    for i in range(500):
        storage.of(f"model.layers.{i}.self_attn.e_proj_e_e_e_e_e_e_e_e_e_e_e_e_e_e_e_e", MATRIX)


def test_what_is_not_a_product_stays_as_it_is() -> None:
    norm = Matrix("norm", "norms", 512, linear=False)
    head = Matrix("lm_head", "head", 1000, 512)
    storage = quantised(quant_method="awq", bits=4, group_size=128)
    assert bytes_of(storage, norm, "model.norm") == 1024
    assert bytes_of(storage, head, "lm_head") == 1000 * 512 * 2


def test_blocks_of_gguf_are_those_that_the_reader_knows() -> None:
    for name, count, size in _TENSOR_TYPES.values():
        found = FORMATS[name.lower()]
        scales = found.scale_bits / found.group if found.group > 0 else 0  # MXFP4
        assert found.bits + scales == 8 * size / count, name


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b"])
def test_published_files_have_this_size(name: str) -> None:
    config = PUBLISHED[name]["config"]
    size = stored_bytes(storage_of_config(config), shape_of_config(config).matrices())
    # DeepSeek's files are 688.6 GB with the layer for several tokens, which has 15.3 of them.
    expected = {"deepseek-v3": 673.2e9, "gpt-oss-20b": 13_761_264_768}[name]
    assert size == pytest.approx(expected, rel={"deepseek-v3": 1e-3, "gpt-oss-20b": 1e-9}[name])


def test_types_of_the_config() -> None:
    assert storage_of_config({"torch_dtype": "float16"}).plain.name == "f16"
    assert storage_of_config({"dtype": "float32"}).plain.name == "f32"
    assert storage_of_config({"text_config": {"torch_dtype": "float16"}}).plain.name == "f16"
    assert storage_of_config({}).plain.name == "bf16"


def test_a_format_that_is_asked_for_spares_the_head_and_the_norms() -> None:
    shape = shape_of_config(PUBLISHED["llama-3.1-8b"]["config"])
    storage = storage_of_dtype("int4", shape)
    assert storage.of("model.layers.0.self_attn.q_proj", MATRIX).name == "int4"
    assert storage.of("lm_head", Matrix("lm_head", "head", 8, 8)).name == "bf16"
    assert storage_of_dtype("f32", shape).plain.name == "f32"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method 'magic'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "damaged"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "damaged"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "x"}}, "damaged"),
        ({"quantization_config": {"quant_method": "gptq", "bits": -4}}, "damaged"),
        ({"quantization_config": ["gptq"]}, "not an object"),
        ({"quantization_config": {"quant_method": "fp8", "ignore": [3]}}, "not text"),
        ({"torch_dtype": 16}, "not a string"),
        ({"torch_dtype": "float17"}, "no format 'float17'"),
    ],
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"config\.json|format") as caught:
        storage_of_config(config)
    assert message in str(caught.value)


def test_names_of_formats() -> None:
    assert format_named("torch.bfloat16").name == "bf16"
    assert format_named("FP16").name == "f16"
    assert [kv_bytes_of(name) for name in ("bf16", "fp8", "fp8_e4m3", "int8", "f32")] == [
        2, 1, 1, 1, 4,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="q4_k"):
        format_named("q4_z")
    with pytest.raises(ValueError, match="a cache cannot be kept in 'q4_k'"):
        kv_bytes_of("q4_k")
