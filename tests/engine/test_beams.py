"""Beams and best_of through the Python API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams, StructuredOutputsParams
from tests.engine.test_llm import HELLO, model

__all__ = ["model"]  # a fixture


@pytest.fixture(params=["reference", "cpu"])
def llm(model: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(model, backend=request.param, kv_cache_memory="1MiB", threads=1)


def test_beams_come_best_first_with_their_sums(llm: LLM) -> None:
    params = SamplingParams(use_beam_search=True, best_of=5, n=3, max_tokens=10, ignore_eos=True)
    (out,) = llm.generate("Once upon a time", params)
    totals = [answer.cumulative_logprob for answer in out.outputs]
    assert totals == sorted(totals, reverse=True)
    assert [answer.index for answer in out.outputs] == [0, 1, 2]
    assert len({answer.token_ids for answer in out.outputs}) == 3
    assert all(answer.logprobs is None for answer in out.outputs)
    assert all(answer.finish_reason == "length" for answer in out.outputs)
    for answer in out.outputs:
        assert answer.text == llm.tokenizer.decode(list(answer.token_ids))
    (chat,) = llm.chat(HELLO, params)
    assert len(chat.outputs) == 3


def test_best_of_returns_the_likeliest_of_what_n_would_draw(llm: LLM) -> None:
    wishes: dict[str, Any] = {"seed": 5, "max_tokens": 10, "temperature": 1.0}
    (every,) = llm.generate("x", SamplingParams(n=6, logprobs=0, **wishes))
    (best,) = llm.generate("x", SamplingParams(n=2, best_of=6, **wishes))
    means = {
        answer.token_ids: answer.cumulative_logprob / len(answer.token_ids)
        for answer in every.outputs
    }
    wanted = sorted(means, key=means.__getitem__, reverse=True)[:2]
    assert [answer.token_ids for answer in best.outputs] == wanted
    assert [answer.index for answer in best.outputs] == [0, 1]
    assert all(answer.logprobs is None for answer in best.outputs)


def test_what_is_recommended_for_drawing_does_not_hinder_beams(llm: LLM) -> None:
    llm.text.generation_defaults = {"temperature": 0.3, "top_p": 0.5}
    params = llm.default_params(use_beam_search=True, max_tokens=4)
    assert (params.temperature, params.top_p) == (1.0, 1.0)
    assert llm.default_params(max_tokens=4).temperature == 0.3


def test_what_cannot_be_is_named_and_nothing_runs(llm: LLM) -> None:
    beams = SamplingParams(use_beam_search=True, top_k=3)
    with pytest.raises(ValueError, match="top_k is 3: use_beam_search excludes it"):
        llm.generate("x", beams)
    for params in (SamplingParams(use_beam_search=True), SamplingParams(best_of=2)):
        with pytest.raises(ValueError, match="stream is not possible: "):
            llm.stream("x", params)
    with pytest.raises(ValueError, match="best_of asks for 1024 at once, but at most"):
        llm.generate("x", SamplingParams(use_beam_search=True, best_of=1024))
    assert not llm.engine.requests


@pytest.mark.parametrize("pattern", ["[ab]{2,3}c", "(x|yz)[0-9]", "[a-z ]{12}"])
def test_beams_of_a_form_fit_it_and_keep_their_probabilities(llm: LLM, pattern: str) -> None:
    """A mask drops candidates and changes no log-probability: the prompt's own are the same."""
    form = StructuredOutputsParams(regex=pattern)
    wishes: dict[str, Any] = {"best_of": 5, "n": 3, "max_tokens": 20, "logprobs": 1}
    params = SamplingParams(use_beam_search=True, structured_outputs=form, **wishes)
    (out,) = llm.generate("Once upon a time", params)
    assert len({answer.token_ids for answer in out.outputs}) == 3
    for answer in out.outputs:
        assert re.fullmatch(pattern, answer.text)
        assert answer.finish_reason == "stop"
        tokens = [*out.prompt_token_ids, *answer.token_ids]
        (read,) = llm.generate(tokens, SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert read.prompt_logprobs is not None
        found = read.prompt_logprobs[len(out.prompt_token_ids) :]
        total = sum(
            entry[token].logprob
            for entry, token in zip(found, answer.token_ids, strict=True)
            if entry is not None
        )
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_one_beam_of_a_form_is_greedy_within_it(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="[a-z]{2,5} [0-9]{3}")
    wishes: dict[str, Any] = {"structured_outputs": form, "max_tokens": 20}
    (beam,) = llm.generate("Once", SamplingParams(use_beam_search=True, **wishes))
    (greedy,) = llm.generate("Once", SamplingParams(temperature=0, **wishes))
    assert beam.outputs[0].token_ids == greedy.outputs[0].token_ids
    assert beam.outputs[0].finish_reason == greedy.outputs[0].finish_reason == "stop"
