"""Topics as rules: an encoder says how near a text is to examples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError

from ridgeline import LLM
from ridgeline.serve.http.options import ServeOptions
from tests.model.files.encoders import write_encoder
from tests.serve.serving import composed, serving
from tests.trust.rules.test_file import DEFAULT

EXAMPLES = ["Which pills help?", "My head hurts"]
LONG = "The dog jumps over " * 5  # the encoder reads it in parts
OPTIONS = {"kv_cache_memory": "1MiB", "threads": 1}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(
        write_encoder(tmp_path_factory.mktemp("models") / "encoder"), max_model_len=24, **OPTIONS
    ) as llm:
        yield llm


def rules_file(folder: Path, at: float, where: str = "input") -> Path:
    file = folder / "rules.toml"
    file.write_text(
        f'{DEFAULT}{where} = ["topics"]\n[rules.topics]\nmodel = "encoder"\naction = "block"\n'
        f"at = {at}\n[rules.topics.examples]\nmedical = {EXAMPLES!r}\n"
    )
    return file


def nearest(llm: LLM, text: str) -> float:
    """The greatest cosine of a text and an example, by numpy."""
    found = [np.array(out.outputs.embedding) for out in llm.embed([text, *EXAMPLES])]
    cosines = [one @ found[0] / np.linalg.norm(one) / np.linalg.norm(found[0]) for one in found[1:]]
    return float(max(cosines))


def test_the_threshold_is_a_cosine(model: Path, encoder: LLM, tmp_path: Path) -> None:
    text = min(("fox", "ja", "0 0 0", "Größe"), key=lambda one: nearest(encoder, one))
    said: Any = [{"role": "user", "content": text}]
    score = nearest(encoder, text)
    assert 0.01 < score < 0.9999
    for at, is_blocked in ((score - 1e-5, True), (score + 1e-5, False)):
        file = rules_file(tmp_path, at)
        with serving(model, guards={"encoder": encoder}, rules=file) as served:
            client = served.client()
            if is_blocked:
                with pytest.raises(BadRequestError, match="topics"):
                    client.chat.completions.create(model="tiny", messages=said, max_tokens=2)
                with pytest.raises(BadRequestError, match="encoder, not a guard model"):
                    client.moderations.create(input="a", model="encoder")
            else:
                assert client.chat.completions.create(model="tiny", messages=said, max_tokens=2)


def test_long_texts_are_read_in_parts_and_answers_are_judged(
    model: Path, encoder: LLM, tmp_path: Path
) -> None:
    with serving(
        model, guards={"encoder": encoder}, rules=rules_file(tmp_path, 0.001, "output")
    ) as served:
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 60, "seed": 1}
        body["structured_outputs"] = {"regex": EXAMPLES[0].replace("?", "[?]")}
        status, answer, _ = served.call("/v1/completions", body)
        assert status == 200
        assert answer["choices"][0] | {"logprobs": None} == answer["choices"][0]
        assert answer["choices"][0]["finish_reason"] == "content_filter"
        assert answer["choices"][0]["text"] == ""
    assert len(encoder.text.encode(LONG)) > encoder.config.max_model_len
    with serving(model, guards={"encoder": encoder}, rules=rules_file(tmp_path, 1.0)) as served:
        status, answer, _ = served.call("/v1/embeddings", {"input": LONG})
        assert status == 200, answer


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write examples"),
        ('categories = ["S1"]\nexamples = { a = ["b"] }', "no categories"),
        ("examples = { a = [] }", "table of texts"),
        ("examples = { a = 3 }", "list of texts"),
        ('examples = ["a"]', "table of texts"),
    ],
)
def test_bad_topics_are_refused(
    model: Path, encoder: LLM, tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "rules.toml"
    rule = '[rules.topics]\nmodel = "encoder"\naction = "note"\n'
    file.write_text(f'{DEFAULT}input = ["topics"]\n{rule}{text}')
    with LLM(model, **OPTIONS) as llm, pytest.raises(ValueError, match=says):
        composed(llm, ServeOptions(rules=file), guards={"encoder": encoder})
