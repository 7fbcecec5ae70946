"""What requests may ask for comes from shared code: the answers are those of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

from ridgeline import LLM, RequestOutput, SamplingParams
from ridgeline.core.records import Record, RequestRecord
from ridgeline.foresight.simulator.replay import replay
from ridgeline.foresight.trace import read_whole
from tests.answers.tiny_families import write_family
from tests.gpu.engines import IDS

FAMILIES = ["qwen3", "gemma3", "falcon-h1", pytest.param("qwen3-next", marks=pytest.mark.full)]
DRAFTS = {"always": True, "num_speculative_tokens": 5}


def params(max_tokens: int = 8, **wishes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **wishes)


ASKED = {
    "greedy": params(temperature=0, logprobs=3),
    "several": params(temperature=0.9, seed=3, n=3, top_p=0.9),
    "best of": params(temperature=0.9, seed=3, n=2, best_of=4),
    "beams": params(use_beam_search=True, n=3),
    "contrastive": params(penalty_alpha=0.6, top_k=4),
    "penalties": params(temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.4),
    "repeats": params(temperature=0.9, seed=6, dry_multiplier=0.8, xtc_probability=0.5),
    "spread": params(temperature=0.9, seed=7, typical_p=0.9, top_n_sigma=2.0, min_p=0.05),
    "ids": params(temperature=0.9, seed=8, allowed_token_ids=[*range(5, 60)], logit_bias={9: 3.0}),
    "prompt": params(temperature=0, prompt_logprobs=2),
}


class Loaded:
    """One tiny model on both backends, and the records of the cuda backend's engine."""

    def __init__(self, path: Path) -> None:
        base = {"dtype": "f32", "max_model_len": 64, "threads": 1, "kv_cache_memory": "4MiB"}
        self._path, self._base = path, base
        self.plain = self.load("reference")
        self.records: list[Record] = []

    def load(self, backend: str, **options: Any) -> LLM:
        """Load the model."""
        off = {"speculative_config": "off"}
        llm = LLM(self._path, backend=backend, **self._base | off | options)
        if backend == "cuda":
            llm.engine.listeners.append(self.records.append)
        return llm


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    path = write_family(tmp_path_factory.mktemp("family") / request.param, request.param)
    model = Loaded(path)
    yield model
    model.plain.close()


def assert_same(outs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for out, want in zip(outs, wanted, strict=True):
        for got, expected in zip(out.outputs, want.outputs, strict=True):
            assert got.token_ids == expected.token_ids
            rows = zip(got.token_ids, got.logprobs or (), expected.logprobs or (), strict=False)
            for token, mine, theirs in rows:
                assert abs(mine[token].logprob - theirs[token].logprob) < 1e-4
                assert mine.keys() == theirs.keys()


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 16}, {"speculative_config": DRAFTS}],
    ids=["together", "in chunks", "with drafts"],
)
def test_every_kind_of_request(loaded: Loaded, options: dict[str, Any]) -> None:
    prompts = [IDS[5 * i : 5 * i + 9] * 2 for i in range(len(ASKED))]
    wanted = loaded.plain.generate(prompts, list(ASKED.values()))
    loaded.records.clear()
    with loaded.load("cuda", **options) as llm:
        assert_same(llm.generate(prompts, list(ASKED.values())), wanted)
        again = llm.generate(prompts, list(ASKED.values()))  # from the prefix cache
        assert_same(again, wanted)
    assert any(out.num_cached_tokens for out in again)
    drafted = [r.num_draft_tokens for r in loaded.records if isinstance(r, RequestRecord)]
    assert any(drafted) == ("speculative_config" in options)


def test_vectors_of_texts(tmp_path: Path) -> None:
    found = {}
    path = write_family(tmp_path / "model", "qwen3")
    for backend in ("reference", "cuda"):
        options = {"dtype": "f32", "max_model_len": 64, "kv_cache_memory": "4MiB"}
        with LLM(path, backend=backend, threads=1, **options) as llm:
            found[backend] = [one.outputs.embedding for one in llm.embed([IDS[:9], IDS[9:40]])]
    for mine, theirs in zip(found["cuda"], found["reference"], strict=True):
        assert max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) < 1e-5


def test_what_only_a_processor_can_do_is_refused_by_name(tmp_path: Path) -> None:
    path = write_family(tmp_path / "model", "qwen3")
    options: dict[str, Any] = {"backend": "cuda", "dtype": "f32", "max_model_len": 64}
    options["kv_cache_memory"] = "4MiB"
    with LLM(path, **options) as llm:
        with pytest.raises(ValueError, match="the cuda backend keeps its memory until it ends"):
            llm.sleep(1)
        with pytest.raises(ValueError, match="the cuda backend counts no cycles"):
            llm.runner.profile(lambda: None)
    with pytest.raises(ValueError, match="--kv-disk: the cuda backend keeps its cache on the dev"):
        LLM(path, **options, kv_disk=f"{tmp_path / 'kv'}:1MiB")


def test_a_trace_is_decided_again(tmp_path: Path) -> None:
    """Steps that ran ahead leave no mark in it."""
    trace = tmp_path / "trace"
    options: dict[str, Any] = {"dtype": "f32", "max_model_len": 64, "kv_cache_memory": "4MiB"}
    path = write_family(tmp_path / "model", "qwen3")
    with LLM(path, backend="cuda", trace=str(trace), **options) as llm:
        llm.generate([IDS[:9], IDS[3:30], IDS[5:8]], params(12, temperature=0))
        assert llm.runner.num_ahead > 20
    outcome = replay(read_whole(trace))
    assert (outcome.num_requests, outcome.difference) == (3, None)
