"""Files of llama.cpp's quantiser: their sizes as its help and its benchmarks state them."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.models.counting import shape_of_config
from ridgeline.physics.format_bytes import FORMATS, format_named, storage_of_dtype
from ridgeline.physics.formats.gguf_mixes import MIXES, mix_of
from ridgeline.physics.shapes import Matrix, ModelShape
from tests.physics.published import PUBLISHED
from tests.physics.stored import stored_bytes

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
        # llama-bench's tables.
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
    return mix_of(name, shape_of(model)).format_of(full_name, matrix)


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
    before = Matrix("per_layer_model_projection", "embedding", 4096, 4096)
    assert format_in("llama-3.1-8b", "q4_k_m", "model.per_layer_model_projection", before) == "q4_k"


def test_a_tied_embedding_is_stored_as_a_head() -> None:
    embedding = Matrix("embed_tokens", "embedding", 1000, 4096, linear=False)
    where = "model.embed_tokens"
    assert format_in("gemma-2-9b", "q4_k_m", where, embedding) == "q6_k"
    assert format_in("llama-3.1-8b", "q4_k_m", where, embedding) == "q4_k"


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
