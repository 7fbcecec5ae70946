"""Samplers on a real model: a text that loops without DRY does not with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ridgeline import LLM, SamplingParams
from tests.real_models import real_model

pytestmark = pytest.mark.engine

PROMPT = "I like apples. I like pears. I like"
GREEDY = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
DRY = replace(GREEDY, dry_multiplier=0.8, dry_sequence_breakers=['"'])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    path = str(real_model("smollm2"))
    with LLM(path, kv_cache_memory="16MiB", max_model_len=256, threads=1) as llm:
        yield llm


def longest_repeat(ids: tuple[int, ...]) -> int:
    """Return the most tokens that stand at two places."""
    for size in range(len(ids) - 1, 0, -1):
        runs = [ids[i : i + size] for i in range(len(ids) - size + 1)]
        if len(set(runs)) < len(runs):
            return size
    return 0


def answer(llm: LLM, params: SamplingParams) -> tuple[int, ...]:
    return tuple(llm.generate(PROMPT, params)[0].outputs[0].token_ids)


def test_a_text_that_loops_does_not_with_dry(llm: LLM) -> None:
    plain, dry = answer(llm, GREEDY), answer(llm, DRY)
    assert len(plain) == len(dry) == 96
    assert longest_repeat(plain) > 40
    assert longest_repeat(dry) < 12
    mild = replace(DRY, dry_multiplier=50.0, dry_allowed_length=30)
    assert longest_repeat(dry) < longest_repeat(answer(llm, mild)) < longest_repeat(plain)


def test_breakers_are_not_repeats(llm: LLM) -> None:
    """Each token of the loop has one of these letters, so all of it may come again."""
    letters = [chr(code) for code in range(33, 127)]
    breakers = letters[:64], letters[64:]
    both = [replace(DRY, dry_sequence_breakers=some) for some in (*breakers, letters)]
    assert answer(llm, both[2]) == answer(llm, GREEDY)
    assert answer(llm, both[0]) != answer(llm, GREEDY)


def test_bad_words_are_not_said(llm: LLM) -> None:
    words = ["like", "apples", "pears", "oranges", "bananas", "grapes"]
    for params in (GREEDY, replace(GREEDY, temperature=0.7, seed=1)):
        said = llm.generate(PROMPT, replace(params, bad_words=words))[0].outputs[0].text
        plain = llm.generate(PROMPT, params)[0].outputs[0].text
        assert any(word in plain for word in words)
        assert not any(word in said.split() for word in words)
