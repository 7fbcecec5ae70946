"""A draft model through the Python API: answers stay the same, and what does not fit is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ridgeline import LLM, RequestOutput, SamplingParams
from ridgeline.core.structured import StructuredOutputsParams
from ridgeline.engine.setup import drafting
from ridgeline.engine.setup import resolve as resolving
from tests.engine.test_llm import model

__all__ = ["model"]  # a fixture

PROMPTS = ["Once upon a time", "Hello", "def f(x):", "1 2 3 4 5 6 7 8 9 10"]
WISHES = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=4, repetition_penalty=1.3, top_p=0.9, max_tokens=20, ignore_eos=True),
    SamplingParams(
        seed=5, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-f ]{12,16}")
    ),
]


@pytest.fixture(scope="module")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other weights here and there: its draws are often the same."""
    path = tmp_path_factory.mktemp("models") / "small"
    shutil.copytree(model, path)
    dice = np.random.default_rng(5)
    weights = load_file(path / "model.safetensors")
    for name, values in weights.items():
        if "mlp" in name:
            values *= 1 + dice.normal(0, 0.05, values.shape).astype(values.dtype)
    save_file(weights, path / "model.safetensors")
    return path


def ask(model: Path, backend: str, small: Path | None, **options: Any) -> list[RequestOutput]:
    config: Any = "off"
    if small:
        config = {"method": "draft_model", "model": str(small), "always": True}
        config["num_speculative_tokens"] = 3
    base = {"kv_cache_memory": "1MiB", "threads": 1, "backend": backend}
    with LLM(model, speculative_config=config, **base | options) as llm:
        return llm.generate(PROMPTS, WISHES)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"threads": 2}],
    ids=str,
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_answers_are_those_without_it(
    model: Path,
    small: Path,
    backend: str,
    options: dict[str, Any],
) -> None:
    plain, drafted = (ask(model, backend, draft, **options) for draft in (None, small))
    for one, other in zip(plain, drafted, strict=True):
        for out, same in zip(one.outputs, other.outputs, strict=True):
            assert (out.token_ids, out.text) == (same.token_ids, same.text)
            assert backend == "reference" or out.logprobs == same.logprobs
    tried = sum(out.num_draft_tokens for out in drafted)
    assert tried > sum(out.num_accepted_tokens for out in drafted) > 0.2 * tried


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_model_drafts_for_itself_without_an_error(model: Path, backend: str) -> None:
    outs = ask(model, backend, model)[:3]
    assert all(out.num_draft_tokens == out.num_accepted_tokens > 10 for out in outs)


def test_another_vocabulary_is_refused_with_the_first_difference(
    model: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(model, other := tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    spec = json.loads(text)
    vocab = spec["model"]["vocab"]
    names = sorted(vocab, key=vocab.get)
    first, second = names[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(
        ValueError, match=r"other has another vocabulary: its token 40 is b'.*, that"
    ):
        ask(model, "cpu", other)


def test_a_model_that_is_not_there_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.gguf"):
        ask(model, "cpu", tmp_path / "nowhere.gguf")


def test_its_memory_is_in_the_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (drafting, resolving):
        monkeypatch.setattr(module, "available_bytes", lambda: 20 << 20)
    options: dict[str, Any] = {"threads": 1, "backend": "reference", "max_num_batched_tokens": 256}
    config = {"method": "draft_model", "model": str(model)}
    with LLM(model, speculative_config="off", **options) as llm:
        alone_bytes = llm.config.kv_bytes
    with LLM(model, speculative_config=config, **options) as llm:
        assert 0 < llm.config.kv_bytes < alone_bytes - (1 << 19)
