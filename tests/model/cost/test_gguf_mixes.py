"""Files of llama.cpp's quantiser: their sizes as its help and its benchmarks state them."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.model.cost.format_bytes import FORMATS, format_named, storage_of_dtype
from ridgeline.model.cost.gguf_mixes import MIXES, Mix, mixed_modules
from ridgeline.model.cost.shapes import Matrix, ModelShape
from ridgeline.model.files.counting import shape_of_config
from tests.model.cost.matrix_bytes import stored_bytes
from tests.model.cost.published_configs import PUBLISHED

_LLAMA_2: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def shape_of(model: str) -> ModelShape:
    config = _LLAMA_2 if model == "llama-2-7b" else PUBLISHED[model]["config"]
    return shape_of_config(config)


@pytest.mark.parametrize(
    ("model", "name", "gib"),
    [
        # The quantiser's own help, of Llama 3 8B.
        ("llama-3.1-8b", "q2_k", 2.96),
        ("llama-3.1-8b", "Q3_K_S", 3.41),
        ("llama-3.1-8b", "Q3_K_M", 3.74),
        ("llama-3.1-8b", "q3_k_l", 4.03),
        ("llama-3.1-8b", "q4_0", 4.34),
        ("llama-3.1-8b", "q4_1", 4.78),
        ("llama-3.1-8b", "q4_k_s", 4.37),
        ("llama-3.1-8b", "q4_k_m", 4.58),
        ("llama-3.1-8b", "q5_0", 5.21),
        ("llama-3.1-8b", "q5_1", 5.65),
        ("llama-3.1-8b", "q5_k_s", 5.21),
        ("llama-3.1-8b", "q5_k_m", 5.33),
        ("llama-3.1-8b", "q6_k", 6.14),
        ("llama-3.1-8b", "q8_0", 7.96),
        # The quantiser's page, of Llama 3.1 8B.
        ("llama-3.1-8b", "iq1_s", 1.87),
        ("llama-3.1-8b", "iq1_m", 2.01),
        ("llama-3.1-8b", "iq2_xxs", 2.23),
        ("llama-3.1-8b", "iq2_xs", 2.42),
        ("llama-3.1-8b", "iq2_s", 2.56),
        ("llama-3.1-8b", "iq2_m", 2.74),
        ("llama-3.1-8b", "IQ3_XXS", 3.04),
        ("llama-3.1-8b", "iq3_xs", 3.27),
        ("llama-3.1-8b", "iq3_s", 3.42),
        ("llama-3.1-8b", "iq3_m", 3.52),
        ("llama-3.1-8b", "iq4_xs", 4.17),
        ("llama-3.1-8b", "iq4_nl", 4.38),
        ("llama-3.1-8b", "q2_k_s", 2.78),
        # llama-bench's tables.
        ("gpt-oss-20b", "mxfp4_moe", 11.27),
        ("llama-3.1-70b", "q4_k_m", 39.59),
        ("llama-3.1-70b", "q8_0", 69.82),
        ("llama-2-7b", "q4_0", 3.56),
        ("llama-2-7b", "q8_0", 6.67),
        ("llama-2-7b", "q4_k_m", 3.80),
        ("llama-2-7b", "q6_k", 5.15),
    ],
)
def test_a_file_is_as_large_as_its_maker_says(model: str, name: str, gib: float) -> None:
    shape = shape_of(model)
    size = stored_bytes(storage_of_dtype(name, shape), shape.matrices())
    assert size / 2**30 == pytest.approx(gib, rel=0.01)


def format_in(model: str, name: str, full_name: str, matrix: Matrix) -> str:
    return mixed_modules(name, shape_of(model)).format_of(full_name, matrix)


def test_parts_of_a_model_keep_more_bits() -> None:
    down = Matrix("mlp.down_proj", "MLP", 4096, 14336)
    layers = [
        format_in("llama-3.1-8b", "q4_k_m", f"model.layers.{i}.mlp.down_proj", down)
        for i in range(32)
    ]
    assert [i for i, name in enumerate(layers) if name == "q6_k"] == [
        0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31,
    ]  # fmt: skip
    value = Matrix("self_attn.v_proj", "attention", 1024, 8192)
    where = "model.layers.20.self_attn.v_proj"
    assert format_in("llama-3.1-70b", "q4_k_m", where, value) == "q5_k"  # values of 8 queries
    assert format_in("mixtral-8x7b", "q4_k_m", where, value) == "q8_0"  # beside 8 experts
    out = Matrix("self_attn.o_proj", "attention", 4096, 4096)
    where = "model.layers.20.self_attn.o_proj"
    assert format_in("mixtral-8x7b", "q4_k_m", where, out) == "q5_k"
    assert format_in("llama-3.1-8b", "q4_k_m", where, out) == "q4_k"
    router = Matrix("mlp.router", "experts", 8, 4096, linear=False)
    assert format_in("mixtral-8x7b", "q4_k_m", "model.layers.0.mlp.router", router) == "f32"
    before = Matrix("per_layer_model_projection", "embedding", 4096, 4096)  # is never converted
    assert format_in("llama-3.1-8b", "q4_k_m", "model.per_layer_model_projection", before) == "bf16"


def test_a_tied_embedding_is_stored_as_a_head() -> None:
    embedding = Matrix("embed_tokens", "embedding", 1000, 4096, linear=False)
    where = "model.embed_tokens"
    assert format_in("gemma-2-9b", "q4_k_m", where, embedding) == "q6_k"
    assert format_in("llama-3.1-8b", "q4_k_m", where, embedding) == "q4_k"


# What llama.cpp's own test lists of Qwen3-Coder-Next, whose sizes are those of Qwen3-Next: the
# layers where a matrix is not of the mix's own type (tests/snapshots/qwen3-coder-next.schema).
_SENSITIVE = [*range(6), *range(8, 42, 3), *range(42, 48)]
LISTED: dict[str, dict[str, dict[str, list[int]]]] = {
    "q4_k_m": {
        "qkv": {"q6_k": [i for i in _SENSITIVE if i % 4 != 3]},
        "v_proj": {"q6_k": [3, 11, 23, 35, 43, 47]},
        "down_proj": {"q6_k": _SENSITIVE},
    },
    "q4_k_s": {
        "qkv": {"q5_k": [0, 1, 2]}, "v_proj": {"q5_k": [3]}, "down_proj": {"q5_k": [*range(6)]},
    },
    "q3_k_m": {
        "qkv": {"q5_k": [0, 1], "q4_k": [i for i in range(2, 48) if i % 4 != 3]},
        "v_proj": {"q4_k": [*range(3, 48, 4)]},
        "o_proj": {"q4_k": [*range(3, 48, 4)]},
        "down_proj": {"q5_k": [0, 1, 2], "q4_k": [*range(3, 48)]},
    },
    "q6_k": {},
    "iq1_s": {
        "qkv": {"q4_k": [i for i in range(48) if i % 4 != 3]},
        "v_proj": {"q4_k": [*range(3, 48, 4)]},
        "o_proj": {"iq2_xxs": [*range(3, 48, 4)]},
        "down_proj": {"q2_k": [0, 1, 2]},  # each with a shared expert: six tensors
    },
    "iq3_xs": {
        "qkv": {"q4_k": [i for i in range(48) if i % 4 != 3]},
        "q_proj": {"iq3_xxs": [*range(3, 48, 4)]},
        "k_proj": {"iq3_xxs": [*range(3, 48, 4)]},
        "v_proj": {"q4_k": [*range(3, 48, 4)]},
        "gate_proj": {"iq3_xxs": [*range(6, 42)]},
        "up_proj": {"iq3_xxs": [*range(6, 42)]},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_layers_are_those_that_llama_cpp_lists(name: str) -> None:
    shape = shape_of("qwen3-next-80b-a3b")
    storage, found = storage_of_dtype(name, shape), dict[str, dict[str, list[int]]]()
    for full_name, matrix in shape.matrices():
        kind = storage.of(full_name, matrix).name
        if ".layers." in full_name and kind not in (MIXES[name], "f32"):
            steps = full_name.split(".")
            layers = found.setdefault(steps[-1], {}).setdefault(kind, [])
            layers += [int(steps[2])] * (int(steps[2]) not in layers)  # experts, and a shared one
    assert found == LISTED[name]


def test_embeddings_of_layers_are_stored_as_the_embedding_of_tokens() -> None:
    embedding = Matrix("embed_tokens_per_layer", "embedding", 1000, 4096, linear=False)
    where = "model.embed_tokens_per_layer"
    assert format_in("gemma-2-9b", "q4_k_m", where, embedding) == "q6_k"
    assert format_in("llama-3.1-8b", "q4_k_m", where, embedding) == "q4_k"


def test_queries_keys_and_values_in_one_matrix_are_stored_as_values() -> None:
    """As llama.cpp's own lists of types have ``attn_qkv``, in a sensitive layer and in another."""
    matrix = Matrix("self_attn.q_proj", "attention", 3072, 3072)
    for name, first, middle in (
        ("q4_k_m", "q6_k", "q4_k"), ("q5_k_m", "q6_k", "q5_k"), ("q3_k_m", "q5_k", "q4_k"),
        ("q3_k_l", "q5_k", "q5_k"), ("q4_k_s", "q5_k", "q4_k"), ("q6_k", "q6_k", "q6_k"),
    ):  # fmt: skip
        for part in "qkv":
            where = [f"model.layers.{i}.self_attn.{part}_proj" for i in (0, 17)]
            assert [format_in("phi-4", name, at, matrix) for at in where] == [first, middle]
    separate = format_in("llama-3.1-8b", "q4_k_m", "model.layers.0.self_attn.q_proj", matrix)
    assert separate == "q4_k"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("q2_k", "q5_k"), ("q2_k_s", "q2_k"), ("q3_k_s", "q5_k"), ("q3_k_l", "q3_k"),
     ("q4_0", "q4_0"), ("q5_k_m", "q5_k"), ("q6_k", "q6_k"), ("iq4_xs", "q5_k")],
)  # fmt: skip
def test_beside_8_experts_some_mixes_widen_what_leads_out_of_attention(
    name: str, expected: str
) -> None:
    mix = Mix(name, 32, per_key=4, num_experts=8)
    assert mix.format_of("out", 5, 4096) == expected
    assert {mix.format_of("key", 5, 4096), mix.format_of("value", 5, 4096)} == {"q8_0"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("iq1_s", ["q4_k", "q4_k", "q5_k", "iq1_s"]), ("iq2_m", ["q4_k", "q4_k", "q5_k", "iq2_s"]),
     ("iq3_xxs", ["q8_0", "q8_0", "q5_k", "iq2_s"]), ("iq3_m", ["q8_0", "q8_0", "q5_k", "iq3_s"])],
)  # fmt: skip
def test_mixes_of_few_bits_beside_8_experts(name: str, expected: list[str]) -> None:
    mix = Mix(name, 32, per_key=4, num_experts=8)
    found = [mix.format_of(role, 16, 4096) for role in ("key", "value", "out", "query")]
    assert found == expected
    assert mix.format_of("down", 12, 4096) == ("q4_k" if name == "iq3_m" else MIXES[name])


def test_embedding_head_and_values_of_mixes_of_few_bits() -> None:
    mix = Mix("iq2_m", 80, per_key=8)
    found = [mix.format_of(role, 40, 8192) for role in ("embedding", "head", "value")]
    assert found == ["iq3_s", "q5_k", "q4_k"]  # the 70B of other mixes has values in q5_k
    assert Mix("iq2_xs", 32).format_of("value", 40, 4096) == "q2_k"
    tied = Mix("iq1_s", 32, is_tied=True)
    assert [tied.format_of("embedding", 0, columns) for columns in (4096, 576)] == ["q5_k", "q8_0"]
    assert tied.format_of("down", 20, 576) == "iq4_nl"


def test_only_experts_of_mxfp4_moe_are_in_mxfp4() -> None:
    up = Matrix("mlp.experts.up_proj", "experts", 512, 2048, copies=512)
    where = "model.layers.3.mlp.experts.up_proj"
    assert format_in("qwen3-next-80b-a3b", "mxfp4_moe", where, up) == "mxfp4"
    shared = Matrix("mlp.shared_experts.up_proj", "experts", 512, 2048)
    where = "model.layers.3.mlp.shared_experts.up_proj"
    assert format_in("qwen3-next-80b-a3b", "mxfp4_moe", where, shared) == "q8_0"
    for part in ("embed_tokens", "lm_head"):
        matrix = Matrix(part, "embedding", 1000, 2048, linear=part == "lm_head")
        assert format_in("qwen3-next-80b-a3b", "mxfp4_moe", f"model.{part}", matrix) == "q8_0"


@pytest.mark.parametrize(
    ("columns", "expected"), [(512, "q4_k"), (576, "q5_0"), (100, "f16")], ids=str
)
def test_rows_that_are_no_whole_blocks_take_smaller_ones(columns: int, expected: str) -> None:
    matrix = Matrix("mlp.up_proj", "MLP", 64, columns)
    where = "model.layers.9.mlp.up_proj"
    assert format_in("llama-3.1-8b", "q4_k_m", where, matrix) == expected


def test_a_mix_without_its_letter_is_the_middle_one() -> None:
    assert [format_named(name).name for name in ("q3_k", "Q4_K", "q5_k", "q6_k")] == [
        "q3_k_m", "q4_k_m", "q5_k_m", "q6_k",
    ]  # fmt: skip
    assert all(base in FORMATS for base in MIXES.values())
    with pytest.raises(ValueError, match=r"q4_k_m"):
        format_named("q4_k_x")
