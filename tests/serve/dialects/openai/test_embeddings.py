"""Vectors over HTTP: those of the engine alone, for the openai client and for those that rank."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from ridgeline import LLM
from ridgeline.engine.outputs import cosine
from ridgeline.serve.dialects.openai.schemas import EmbeddingList, Reranked, Scored
from tests.serve.serving import Served, check_shape, serving
from tests.waiting import eventually

TEXTS = ["The river is deep.", "A dog barks.", "deep", "The river is deep."]


@pytest.fixture(scope="module")
def offline(model: Path) -> Iterator[LLM]:
    with LLM(model, kv_cache_memory="1MiB", threads=1) as llm:
        yield llm


def vectors(llm: LLM, texts: Any, **how: Any) -> list[list[float]]:
    return [out.outputs.embedding for out in llm.embed(texts, **how)]


def test_the_openai_client_gets_the_vectors_of_the_engine(served: Served, offline: LLM) -> None:
    """The client asks for base64 unless it is told otherwise; both are the same numbers."""
    wanted = vectors(offline, TEXTS)
    for how in ({}, {"encoding_format": "float"}):
        answer = served.client().embeddings.create(model="tiny", input=TEXTS, **how)  # type: ignore[arg-type]
        assert [one.embedding for one in answer.data] == wanted
        assert [one.index for one in answer.data] == [0, 1, 2, 3]
        num_tokens = sum(len(offline.tokenizer.encode(text)) for text in TEXTS)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens
    with pytest.raises(BadRequestError, match="at least one token"):
        served.client().embeddings.create(model="tiny", input="")


def test_base64_is_little_endian_float32(served: Served, offline: LLM) -> None:
    body = {"input": "deep", "encoding_format": "base64"}
    status, answer, _ = served.call("/v1/embeddings", body)
    assert status == 200
    data = base64.b64decode(answer["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == vectors(offline, "deep")[0]


def test_input_as_text_list_ids_and_lists_of_ids(served: Served, offline: LLM) -> None:
    ids = offline.tokenizer.encode("deep water")
    (wanted,) = vectors(offline, "deep water")
    for given in ("deep water", ["deep water"], ids, [ids]):
        status, answer, _ = served.call("/v1/embeddings", {"input": given})
        assert status == 200, answer
        check_shape(EmbeddingList, answer)
        (found,) = answer["data"]
        assert found["embedding"] == wanted
        assert answer["usage"]["prompt_tokens"] == len(ids)


def test_fewer_dimensions_are_scaled_again(served: Served, offline: LLM) -> None:
    answer = served.client().embeddings.create(model="tiny", input="deep", dimensions=5)
    (found,) = (one.embedding for one in answer.data)
    (whole,) = vectors(offline, "deep")
    assert len(found) == 5
    assert sum(value * value for value in found) == pytest.approx(1, abs=1e-6)
    assert cosine(found, whole[:5]) == pytest.approx(1, abs=1e-6)
    assert found == vectors(offline, "deep", dimensions=5)[0]
    raw, _ = (
        served.call("/v1/embeddings", {"input": "deep", "normalize": n})[1]["data"][0]["embedding"]
        for n in (False, True)
    )
    assert sum(value * value for value in raw) > 1.5
    assert cosine(raw, whole) == pytest.approx(1, abs=1e-6)


def test_a_long_text_is_cut_if_that_is_wanted(served: Served, offline: LLM) -> None:
    ids = offline.tokenizer.encode("deep water " * 400)
    for most, kept in ((-1, offline.config.max_model_len), (7, 7)):
        body = {"input": "deep water " * 400, "truncate_prompt_tokens": most}
        status, answer, _ = served.call("/v1/embeddings", body)
        assert (status, answer["usage"]["prompt_tokens"]) == (200, kept)
        assert answer["data"][0]["embedding"] == vectors(offline, ids[:kept])[0]


def test_documents_are_ranked_by_cosine(served: Served, offline: LLM) -> None:
    query, *others = vectors(offline, ["deep water", *TEXTS])
    scores = [cosine(query, other) for other in others]
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        documents: list[Any] = [*TEXTS[:3], {"text": TEXTS[3]}]
        body = {"query": "deep water", "documents": documents}
        status, answer, _ = served.call(path, body)
        assert status == 200, answer
        check_shape(Reranked, answer)
        found = answer["results"]
        ranked = [one["relevance_score"] for one in found]
        assert ranked == sorted(ranked, reverse=True)
        assert ranked == pytest.approx([scores[one["index"]] for one in found], abs=1e-6)
        assert [one["index"] for one in found if one["index"] in (0, 3)] == [0, 3]  # equal scores
        assert all(one["document"]["text"] == TEXTS[one["index"]] for one in found)
    body |= {"top_n": 1, "return_documents": False}
    best = served.call("/v1/rerank", body)[1]["results"]
    assert best == [{name: found[0][name] for name in ("index", "relevance_score")}]


def test_scores_of_pairs(served: Served, offline: LLM) -> None:
    one, *others = vectors(offline, ["deep water", *TEXTS])
    for body, wanted in (
        ({"text_1": "deep water", "text_2": TEXTS}, [cosine(one, other) for other in others]),
        ({"text_1": TEXTS, "text_2": TEXTS}, [1.0] * 4),
        ({"text_1": "deep water", "text_2": "deep"}, [cosine(one, others[2])]),
    ):
        status, answer, _ = served.call("/v1/score", body)
        assert status == 200, answer
        check_shape(Scored, answer)
        assert [pair["score"] for pair in answer["data"]] == pytest.approx(wanted, abs=1e-7)


def test_a_vector_is_counted_and_logged(model: Path) -> None:
    with serving(model) as served:
        served.call("/v1/embeddings", {"input": TEXTS})
        found = served.metrics()
        num_tokens = sum(len(served.llm.tokenizer.encode(text)) for text in TEXTS)
        assert found["ridgeline:prompt_tokens_total"] == num_tokens
        assert found["ridgeline:generation_tokens_total"] == 0
        assert found['ridgeline:request_success_total{finished_reason="stop"}'] == len(TEXTS)
        assert found["ridgeline:time_to_first_token_seconds_count"] == len(TEXTS)
        key = 'http_requests_total{handler="/v1/embeddings",method="POST",status="200"}'
        assert found[key] == 1
        eventually(lambda: any("/v1/embeddings" in line for line in served.lines))


def test_a_failing_step_fails_its_own_text(model: Path) -> None:
    with serving(model) as served:
        ids = served.llm.tokenizer.encode("dog")

        def breaks(step: Any) -> None:
            if any(work.tokens[: len(ids)] == tuple(ids) for work in step.work):
                raise RuntimeError("broken on purpose")

        served.valve.before = breaks
        assert served.call("/v1/embeddings", {"input": "dog"})[0] == 500
        assert served.call("/v1/embeddings", {"input": "cat"})[0] == 200
