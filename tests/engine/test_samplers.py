"""DRY, XTC, allowed and bad words over a whole model: drafts and neighbours change no answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.backends.sampler.penalties import has
from ridgeline.backends.sampler.rule import narrowed
from ridgeline.core.step import TokenLogprobs
from ridgeline.text.token_rules import Lexicon
from tests.engine.test_llm import model

__all__ = ["model"]  # a fixture

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, max_tokens=40)
DRY = {"dry_multiplier": 5.0, "dry_sequence_breakers": []}
WISHES: list[dict[str, Any]] = [
    DRY,
    {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_penalty_last_n": 20},
    {"bad_words": ["the", "a", "cat", "e", "ing"]},
    {"allowed_token_ids": list(range(40, 60))},
    {"typical_p": 0.7},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.005},
    DRY | {"bad_words": ["o"], "xtc_probability": 0.3, "typical_p": 0.9, "top_n_sigma": 2.0},
]


@pytest.fixture(scope="module", params=["cpu", "reference"])
def pair(model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """The same model without drafts, and with as many as there can be."""
    options: dict[str, Any] = {"kv_cache_memory": "4MiB", "backend": request.param}
    if request.param == "cpu":
        options["threads"] = 1
    plain = LLM(model, speculative_config="off", **options)
    drafting = LLM(model, speculative_config={"always": True}, **options)
    with plain, drafting:
        yield plain, drafting


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, kv_cache_memory="1MiB", threads=1) as llm:
        yield llm


@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_and_neighbours_change_no_answer(
    pair: tuple[LLM, LLM], base: SamplingParams, wish: dict[str, Any]
) -> None:
    prompts = ["one two three one two three one two", "the cat the cat the cat", "x"]
    # A prediction that is right at first, so that drafts are taken, and wrong later.
    (begun,) = pair[0].generate(prompts[0], base)
    params = [
        replace(base, seed=seed, prediction=begun.outputs[0].text, n=1 + seed % 2, **wish)
        for seed in range(3)
    ]
    alone = [pair[0].generate(*one)[0].outputs for one in zip(prompts, params, strict=True)]
    for llm in pair:
        together = llm.generate(prompts, params)
        assert [out.outputs for out in together] == alone
        for out in together:
            assert all(answer.finish_reason == "length" for answer in out.outputs)


def test_drafts_are_taken_where_repeats_are_penalised(pair: tuple[LLM, LLM]) -> None:
    """The test above must not be about drafts that were all wrong. Few tokens repeat themselves."""
    few = replace(SAMPLED, temperature=3.0, max_tokens=100, allowed_token_ids=[70, 71], seed=1)
    wish = replace(few, dry_multiplier=1.0, dry_base=1.1)
    plain, drafting = (llm.generate("x", wish)[0] for llm in pair)
    assert plain.outputs == drafting.outputs
    assert drafting.num_accepted_tokens > 5
    assert pair[1].generate("x", few)[0].outputs != plain.outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen(llm: LLM, temperature: float) -> None:
    allowed = [50, 3, 407, 50]
    params = replace(SAMPLED, temperature=temperature, allowed_token_ids=allowed, seed=2)
    (out,) = llm.generate("hello", params)
    assert set(out.outputs[0].token_ids) <= set(allowed)
    form = {"regex": "[a-f]{5}"}
    both = replace(params, ignore_eos=False, structured_outputs=form)  # type: ignore[arg-type]
    few = [token for text in "abc" for token in llm.tokenizer.encode(text)]
    few += [token for token in range(400) if llm.text.spell(token) in ("", "a", "bc")]
    (out,) = llm.generate("hello", replace(both, allowed_token_ids=[*few, 0]))
    assert out.outputs[0].finish_reason == "stop"
    assert set(out.outputs[0].text) <= set("abc")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_do_not_come(llm: LLM, temperature: float) -> None:
    """Single tokens and runs of them, as the plain answers have them."""
    letters = [t for t in range(400) if llm.text.spell(t).isalpha() and llm.text.spell(t).isascii()]
    base = replace(SAMPLED, temperature=temperature, allowed_token_ids=letters, seed=3)
    ids = list(llm.generate("hello", base)[0].outputs[0].token_ids)
    encode, decode = llm.tokenizer.encode, llm.tokenizer.decode
    runs = [ids[i : i + size] for size in (1, 2, 3) for i in range(len(ids) - size)]
    words = {len(run): run for run in runs if encode(decode(run)) == run}
    assert set(words) >= {1, 2}
    for size, run in words.items():
        (out,) = llm.generate("hello", replace(base, bad_words=[decode(run)]))
        answer = list(out.outputs[0].token_ids)
        assert len(answer) == len(ids)
        assert all(answer[i : i + size] != run for i in range(len(answer)))


def test_breakers_are_all_tokens_with_their_text(llm: LLM) -> None:
    lexicon = Lexicon(llm.tokenizer, (), llm.text.vocab_size)
    texts = ["e", "o l"]
    wish = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=texts)
    rules = lexicon.rules(wish)
    vocab = range(llm.tokenizer.vocab_size)
    spelled = {token: llm.tokenizer.token_bytes(token) for token in vocab}
    wanted = [token for token in vocab if any(t.encode() in spelled[token] for t in texts)]
    assert wanted
    assert [token for token in vocab if has(rules.breakers, token)] == wanted
    run = tuple(llm.tokenizer.encode("o l"))
    assert len(run) > 1
    assert run in rules.break_runs[run[-1]]
    assert lexicon.rules(replace(wish, dry_sequence_breakers=[])).breakers == b""
    assert not lexicon.rules(SamplingParams()).breakers  # nobody asked


def test_bad_words_have_a_spelling_with_a_space_and_one_without(llm: LLM) -> None:
    lexicon = Lexicon(llm.tokenizer, (), llm.text.vocab_size)
    for word in ("the", " the", "hello cat"):
        rules = lexicon.rules(SamplingParams(bad_words=[word]))
        for spelling in (word.strip(), f" {word.strip()}"):
            ids = tuple(llm.tokenizer.encode(spelling, add_bos=False))
            assert ids[0] in rules.banned if len(ids) == 1 else ids in rules.bad[ids[-2]]
    assert lexicon.rules(SamplingParams(bad_words=["\n", " "])).banned


def test_ids_beyond_the_vocabulary_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="allowed_token_ids names token 410"):
        llm.generate("x", replace(GREEDY, allowed_token_ids=[410]))


# --- the middle of a text ----------------------------------------------------------------------


def middles(llm: LLM, prompts: list[str]) -> list[list[TokenLogprobs]]:
    """Return answers drawn as llama.cpp does in the middle of a text, with 20 candidates each."""
    params = replace(SAMPLED, top_k=20, logprobs=20, seed=1)
    rules = llm.text.lexicon.rules(params, narrows=True)
    found: dict[int, list[TokenLogprobs]] = {}
    for text in prompts:
        found[llm.engine.add(tuple(llm.text.encode(text)), params, token_rules=rules)] = []
    while llm.engine.has_work():
        for event in llm.engine.step():
            assert event.logprobs is not None
            found[event.seq_id[0]].append(event.logprobs)
    return list(found.values())


def tokens_of(answers: list[list[TokenLogprobs]]) -> list[list[int]]:
    return [[entry.token for entry in answer] for answer in answers]


def test_each_draw_in_the_middle_is_from_what_is_left(pair: tuple[LLM, LLM]) -> None:
    plain, drafting = pair
    prompts = ["def main", "the cat sat on", "x", "a b c d a b c d a b c d"]
    answers = middles(plain, prompts)
    tokens = tokens_of(answers)
    assert tokens_of(middles(drafting, prompts)) == tokens, "drafts change nothing"
    alone = [middles(plain, [text])[0] for text in prompts]
    assert tokens_of(alone) == tokens, "nor do neighbours"
    params = replace(SAMPLED, top_k=20)
    rules = plain.text.lexicon.rules(params, narrows=True)
    num_narrow = 0
    for entry in (entry for answer in answers for entry in answer):
        weights = [int(math.exp(logprob) * 2**40) for _, logprob in entry.top]
        left, _ = narrowed([token for token, _ in entry.top], weights, rules)
        assert entry.token in left
        num_narrow += len(left) < 20
    assert num_narrow > 20
