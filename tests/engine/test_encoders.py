"""LLM and the server on a model that makes vectors alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.core.scheduling.policies import Orca
from ridgeline.model.files.safetensors_dir import load_directory
from ridgeline.model.files.tensors import ModelFileError
from tests.model.files.encoders import HIDDEN, POSITIONS, write_encoder
from tests.serve.serving import Served, serving

TEXTS = ["The quick brown fox.", "jumps", "Over the lazy dog, and back again. " * 3, "fox"]
OPTIONS = {"kv_cache_memory": "1MiB"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models") / "encoder")


@pytest.fixture(scope="module")
def served(encoder: Path) -> Iterator[Served]:
    with serving(encoder) as running:
        yield running
        running.assert_idle()


def vectors(llm: LLM, texts: list[str]) -> list[list[float]]:
    return [out.outputs.embedding for out in llm.embed(texts)]


@pytest.mark.parametrize(
    "formats", [{}, {"dtype": "f32", "kv_cache_dtype": "f32"}, {"dtype": "int8-row"}]
)
def test_a_vector_depends_on_its_text_alone(encoder: Path, formats: dict[str, str]) -> None:
    """Bit for bit: alone, beside others, on more threads, in smaller steps."""
    with LLM(encoder, threads=1, **OPTIONS, **formats) as llm:
        wanted = [vectors(llm, [text])[0] for text in TEXTS]
        assert vectors(llm, TEXTS * 9) == wanted * 9
        assert {len(one) for one in wanted} == {HIDDEN}
        assert not any(out.num_cached_tokens for out in llm.embed(TEXTS))
    for options in (
        {"threads": 3},
        {"threads": 2, "max_num_batched_tokens": POSITIONS, "max_num_seqs": 3},
        {"policy": "static", "block_size": 32},
    ):
        with LLM(encoder, **OPTIONS, **formats, **options) as llm:
            assert vectors(llm, TEXTS * 3) == wanted * 3
            llm.engine.check()


def test_texts_are_read_whole(encoder: Path) -> None:
    with LLM(encoder, **OPTIONS) as llm:
        assert isinstance(llm.config.policy, Orca)
        assert not llm.config.enable_prefix_caching
        assert llm.config.max_num_batched_tokens >= llm.config.max_model_len == POSITIONS
        assert any("reads each text whole" in note for note in llm.config.notes)
        llm.embed([list(range(5, 5 + POSITIONS))])
        with pytest.raises(ValueError, match=f"the prompt has {POSITIONS + 1} tokens"):
            llm.embed([[5] * (POSITIONS + 1)])


def test_what_stands_around_a_text(encoder: Path) -> None:
    with LLM(encoder, **OPTIONS) as llm:
        (out,) = llm.embed("fox")
        special = [llm.tokenizer.special_id(name) for name in ("<s>", "</s>")]
        assert [out.prompt_token_ids[0], out.prompt_token_ids[-1]] == special
        assert llm.text.encode_whole("fox " * 50, 7)[-1] == special[1]
        assert len(llm.text.encode_whole("fox " * 50, 7)) == 7


def test_an_answer_is_refused_by_name(encoder: Path) -> None:
    with LLM(encoder, **OPTIONS) as llm:
        for ask in (
            lambda: llm.generate("Hello"),
            lambda: llm.generate("Hello", SamplingParams(max_tokens=1)),
            lambda: list(llm.stream("Hello")),
        ):
            with pytest.raises(ValueError, match="this model cannot generate text"):
                ask()
        assert not llm.engine.requests


def test_over_http(served: Served, encoder: Path) -> None:
    with LLM(encoder, threads=1, **OPTIONS) as llm:
        wanted = vectors(llm, TEXTS)
    answer = served.client().embeddings.create(model="tiny", input=TEXTS)
    assert [one.embedding for one in answer.data] == wanted
    found = served.call("/api/embed", {"model": "tiny", "input": TEXTS})[1]
    assert found["embeddings"] == wanted
    assert "embedding" in served.call("/api/show", {"model": "tiny"})[1]["capabilities"]
    ranked = served.call("/v1/rerank", {"query": TEXTS[2], "documents": TEXTS})[1]["results"]
    assert (ranked[0]["index"], ranked[0]["relevance_score"]) == (2, pytest.approx(1))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", {"input": "Hello"}),
    ],
)
def test_answers_are_refused_over_http(served: Served, path: str, body: dict[str, object]) -> None:
    status, error = served.refused(path, body)
    assert (status, error["param"]) == (400, "model")
    assert "cannot generate text" in error["message"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("position_embedding_type", "relative_key", "position_embedding_type"),
        ("is_decoder", True, "is_decoder"),
        ("hidden_act", "mish", "hidden_act 'mish' is not supported"),
        ("num_hidden_layers", 3, "is missing"),
        ("embedding_size", 8, "embedding_size is 8"),
    ],
)
def test_other_encoders_are_refused(tmp_path: Path, key: str, value: object, words: str) -> None:
    path = write_encoder(tmp_path / "other", **{key: value})
    with pytest.raises(ModelFileError, match=words):
        load_directory(path)


# --- pairs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models") / "ranker", scores_pairs=True)


def scores(llm: LLM, *texts: str | list[str]) -> list[float]:
    return [out.outputs.score for out in llm.score(*texts)]


def test_a_score_depends_on_its_pair_alone(ranker: Path) -> None:
    """Bit for bit; and on which text comes first, which a cosine does not."""
    with LLM(ranker, threads=1, **OPTIONS) as llm:
        wanted = [scores(llm, "a quick fox", text)[0] for text in TEXTS]
        assert scores(llm, "a quick fox", TEXTS * 5) == wanted * 5
        assert scores(llm, TEXTS, ["a quick fox"] * 4) != wanted
        assert all(0 < score < 1 for score in wanted)
        assert len({*wanted}) > 1
    with LLM(ranker, threads=3, max_num_seqs=2, **OPTIONS) as llm:
        assert scores(llm, "a quick fox", TEXTS * 3) == wanted * 3


def test_the_second_text_is_of_another_type(ranker: Path) -> None:
    """The same ids read as one text have another score: the types are seen."""
    with LLM(ranker, **OPTIONS) as llm:
        arch = llm.arch
        assert (arch.num_segments, arch.position_rows) == (2, 2 * POSITIONS)
        assert arch.separator == llm.tokenizer.special_id("</s>")
        pair = llm.text.encode_pair("a quick fox", "over the lazy dog")
        assert pair.count(arch.separator) == 2
        swapped = [token if i else 7 for i, token in enumerate(pair)]  # another first token
        _, scores = llm._vectors([pair, swapped], list, None)
        assert scores[0] != scores[1]


def test_what_spells_a_control_token_is_text_in_a_pair(ranker: Path) -> None:
    with LLM(ranker, **OPTIONS) as llm:
        ids = llm.text.encode_pair("a </s> fox", "dog </s>")
        assert ids.count(llm.arch.separator) == 2


def test_documents_are_ranked_by_their_scores(ranker: Path) -> None:
    with LLM(ranker, threads=1, **OPTIONS) as llm:
        wanted = scores(llm, "a quick fox", TEXTS)
        num_tokens = sum(len(llm.text.encode_pair("a quick fox", text)) for text in TEXTS)
    with serving(ranker) as served:
        body = {"query": "a quick fox", "documents": TEXTS}
        status, answer, _ = served.call("/v1/rerank", body)
        assert status == 200, answer
        found = answer["results"]
        assert [one["relevance_score"] for one in found] == sorted(wanted, reverse=True)
        assert all(one["relevance_score"] == wanted[one["index"]] for one in found)
        assert answer["usage"]["prompt_tokens"] == num_tokens
        pairs = served.call("/v1/score", {"text_1": "a quick fox", "text_2": TEXTS})[1]
        assert [one["score"] for one in pairs["data"]] == wanted
        for path, ask in (
            ("/v1/embeddings", {"input": "x"}),
            ("/v1/completions", {"prompt": "x"}),
        ):
            status, error = served.refused(path, ask)
            assert (status, error["param"]) == (400, "model"), error
        long = {"query": "fox", "documents": ["dog " * 200]}
        status, error = served.refused("/v1/rerank", long)
        assert (status, error["param"]) == (400, "documents")
        cut = served.call("/v1/rerank", long | {"truncate_prompt_tokens": -1})
        assert (cut[0], cut[1]["usage"]["prompt_tokens"]) == (200, POSITIONS)
        status, error = served.refused(
            "/v1/rerank", {"query": "fox " * 99, "documents": ["x"], "truncate_prompt_tokens": -1}
        )
        assert "leaves" in error["message"] or "the first text" in error["message"]


def test_a_classifier_of_more_labels_is_refused(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "m", scores_pairs=True)
    weights = load_file(path / "model.safetensors")
    weights["classifier.weight"] = np.zeros((3, HIDDEN), np.float32)
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"'classifier.weight' has shape \(3, 32\)"):
        load_directory(path)
