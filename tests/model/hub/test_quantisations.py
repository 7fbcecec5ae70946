"""Which GGUF files are models, and which one is taken."""

from __future__ import annotations

import tracemalloc

import pytest

from ridgeline.model.hub.quantisations import gguf_models, pick

GB = 10**9
SIZES = {
    "README.md": 1,
    "Llama-3B-Instruct-F16.gguf": 6 * GB,
    "Llama-3B-Instruct-Q8_0.gguf": 3 * GB,
    "Llama-3B-Instruct-Q4_K_M.gguf": 2 * GB,
    "llama-3b-instruct-iq2_xxs.gguf": GB,
    "Llama-3B-Instruct-TQ1_0.gguf": GB // 2,
    "mmproj-F16.gguf": GB,
    "imatrix-Q4_K_M.gguf": 5,
}


def test_models_are_told_from_what_lies_beside_them() -> None:
    tags = [model.tag for model in gguf_models(SIZES)]
    assert tags == ["F16", "Q8_0", "Q4_K_M", "IQ2_XXS", "TQ1_0"]


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("m.Q4_1.gguf", "Q4_1"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m_bf16.gguf", "BF16"),
        ("Q6_K/m-Q6_K-00001-of-00001.gguf", "Q6_K"),
        ("m-1.5b-instruct-fp16.GGUF", "FP16"),
        ("model.gguf", "model.gguf"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
    ],
)
def test_the_quantisation_is_in_the_name(name: str, tag: str) -> None:
    assert [model.tag for model in gguf_models({name: 1})] == [tag]


def test_parts_are_one_model_if_all_are_there() -> None:
    parts = {f"big/m-Q4_K_M-0000{i}-of-00003.gguf": i for i in (3, 1, 2)}
    (model,) = gguf_models(parts)
    assert model.files == tuple(sorted(parts))
    assert model.size == 6
    assert gguf_models(dict.fromkeys(list(parts)[:2], 1)) == []


def test_a_name_that_says_many_parts_costs_nothing() -> None:
    tracemalloc.start()
    try:
        assert gguf_models({"m-Q4_K_M-00001-of-99999.gguf": 1}) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("room_gb", "tag", "words"),
    [
        (100, "Q8_0", "best of 5 for 100.00 GB of free memory"),
        (3.5, "Q4_K_M", "Q8_0 would need about 3.84 GB"),
        (2, "IQ2_XXS", "Q4_K_M would need about 2.74 GB"),
    ],
)
def test_the_best_that_fits_is_taken(room_gb: float, tag: str, words: str) -> None:
    model, why = pick(gguf_models(SIZES), "", int(room_gb * GB))
    assert model.tag == tag
    assert words in why


def test_where_nothing_fits_the_smallest_is_named() -> None:
    with pytest.raises(ValueError, match=r"smallest, IQ2_XXS, needs about 1\.64 GB .* 1\.00 GB is"):
        pick(gguf_models(SIZES), "", GB)
    assert pick(gguf_models(SIZES), "IQ2_XXS", GB)[0].size == GB, "a wish is a wish"


def test_full_precision_is_taken_only_where_there_is_nothing_else() -> None:
    sizes = {"m-F32.gguf": 4 * GB, "m-BF16.gguf": 2 * GB}
    assert pick(gguf_models(sizes), "", 100 * GB)[0].tag == "F32"
    assert pick(gguf_models(sizes), "", 3 * GB)[0].tag == "BF16"


def test_types_that_nothing_reads_are_not_taken() -> None:
    for tag, read in (("MXFP4", True), ("MXFP4_MOE", True), ("MXFP6", False), ("TQ2_0", False)):
        sizes = {f"m-{tag}.gguf": 2 * GB, "m-Q2_K.gguf": GB}
        assert pick(gguf_models(sizes), "", 9 * GB)[0].tag == (tag if read else "Q2_K")


def test_one_model_needs_no_reason_and_no_room() -> None:
    assert pick(gguf_models({"a.gguf": GB}), "", 0)[1] == ""


@pytest.mark.parametrize("wish", ["Q4_K_M", "q4_k_m", "Llama-3B-Instruct-Q4_K_M.gguf"])
def test_a_wish_is_a_quantisation_or_a_file(wish: str) -> None:
    assert pick(gguf_models(SIZES), wish, 0)[0].size == 2 * GB


def test_a_wish_that_is_not_there_is_answered_with_the_list() -> None:
    with pytest.raises(
        ValueError, match="there is no 'Q5_0'; there are F16, Q8_0, Q4_K_M, IQ2_XXS"
    ):
        pick(gguf_models(SIZES), "Q5_0", GB)


def test_an_ambiguous_wish_is_answered_with_the_files() -> None:
    models = gguf_models({"a-Q4_0.gguf": 1, "b-Q4_0.gguf": 1})
    with pytest.raises(ValueError, match=r"Q4_0 is ambiguous.*a-Q4_0\.gguf, b-Q4_0\.gguf"):
        pick(models, "Q4_0", GB)
    assert pick(models, "b-Q4_0.gguf", GB)[0].files == ("b-Q4_0.gguf",)
