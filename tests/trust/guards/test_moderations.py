"""Moderations by tiny models of the guards' families; scores are computed again from all logits."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from openai import BadRequestError, NotFoundError

from ridgeline import LLM, SamplingParams
from ridgeline.serve.engine.async_engine import AsyncEngine
from ridgeline.serve.engine.request_stream import StreamCaller
from ridgeline.serve.http.fair_pool import WorkPools
from ridgeline.serve.http.options import ServeOptions
from ridgeline.trust.guards.families import FAMILIES, OPENAI_CATEGORIES
from ridgeline.trust.guards.guard import Guard, Verdict
from ridgeline.trust.guards.guard_loading import known_judge
from tests.serve.serving import Served, composed, serving
from tests.trust.guards.models import MODELS, RISKS, VIOLATIONS, write_guard

TEXTS = ["The cat sat on the mat", "Größe {{ x }}"]


class Oracle:
    """A guard's probabilities, from all logits of the reference backend: no code of the server."""

    def __init__(self, path: Path) -> None:
        self._llm = LLM(path, backend="reference", dtype="f32", kv_cache_memory="1MiB")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        config = json.loads((path / "tokenizer_config.json").read_text())
        environment = jinja2.Environment()
        self._template = environment.from_string(config["chat_template"])

    def close(self) -> None:
        self._llm.close()

    def prompt(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        return self._template.render(
            messages=messages,
            add_generation_prompt=True,
            bos_token="",
            raise_exception=_raised,
            **variables,
        )

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def shares(self, prompt: str, written: str, words: list[str]) -> list[float]:
        """The probabilities of words behind a prompt and what is written behind it.

        Each word has a first token of its own. The probabilities add up to 1.
        """
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=self._llm.text.vocab_size)
        texts = [self.ids(written + word) for word in words]
        common = texts[0][: next(i for i in range(99) if len({*(t[i] for t in texts)}) > 1)]
        (answer,) = self._llm.generate([self.ids(prompt) + common], params)
        assert answer.outputs[0].logprobs is not None
        row = answer.outputs[0].logprobs[0]
        firsts = [ids[len(common)] for ids in texts]
        assert len(set(firsts)) == len(words)
        weights = [math.exp(row[token].logprob) for token in firsts]
        return [weight / sum(weights) for weight in weights]


def own_words(result: Any) -> dict[str, Any]:
    """What the guard says in its own words."""
    found: dict[str, Any] = result.model_extra["ridgeline"]
    return found


def _raised(message: str) -> None:
    raise jinja2.TemplateError(message)


def plain(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def of_llama_guard(oracle: Oracle, text: str) -> tuple[float, dict[str, float]]:
    return _of_hazards(oracle, oracle.prompt(plain(text)), 14)


def of_small_llama_guard(oracle: Oracle, text: str) -> tuple[float, dict[str, float]]:
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    return _of_hazards(oracle, oracle.prompt(parts), 13)


def of_llama_guard_4(oracle: Oracle, text: str) -> tuple[float, dict[str, float]]:
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    return _of_hazards(oracle, oracle.prompt(parts), 14)


def _of_hazards(oracle: Oracle, prompt: str, count: int) -> tuple[float, dict[str, float]]:
    _, unsafe = oracle.shares(prompt, "\n\n", ["safe", "unsafe"])
    numbers = [str(i) for i in range(1, count + 1)]
    shares = oracle.shares(prompt, "\n\nunsafe\nS", numbers)
    return unsafe, {
        f"S{number}": unsafe * share for number, share in zip(numbers, shares, strict=True)
    }


def of_shield_gemma(oracle: Oracle, text: str) -> tuple[float, dict[str, float]]:
    guidelines = {
        name: one.variables["guideline"]
        for family in FAMILIES
        if family.name == "ShieldGemma"
        for name, one in family.categories.items()
    }
    scores = {
        name: oracle.shares(oracle.prompt(plain(text), guideline=guideline), "", ["Yes", "No"])[0]
        for name, guideline in guidelines.items()
    }
    return max(scores.values()), scores


def of_granite(oracle: Oracle, text: str) -> tuple[float, dict[str, float]]:
    scores = {}
    for name in RISKS:
        prompt = oracle.prompt(plain(text), guardian_config={"risk_name": name})
        scores[name] = oracle.shares(prompt, "", ["Yes", "No"])[0]
    return max(scores.values()), scores


def of_qwen(oracle: Oracle, text: str) -> tuple[float, dict[str, float]]:
    prompt = oracle.prompt(plain(text))
    safe, *_ = oracle.shares(prompt, "Safety:", [" Safe", " Unsafe", " Controversial"])
    words = [f" {name}" for name in VIOLATIONS]
    shares = oracle.shares(prompt, "Safety: Unsafe\nCategories:", words)
    return 1 - safe, {
        name: (1 - safe) * share for name, share in zip(VIOLATIONS, shares, strict=True)
    }


def of_wildguard(oracle: Oracle, text: str) -> tuple[float, dict[str, float]]:
    _, harmful = oracle.shares(oracle.prompt(plain(text)), "Harmful request:", [" no", " yes"])
    return harmful, {"harmful request": harmful, "response refusal": 0, "harmful response": 0}


EXPECTED: dict[str, Callable[[Oracle, str], tuple[float, dict[str, float]]]] = {
    "Llama Guard 3 8B": of_llama_guard,
    "Llama Guard 3 1B": of_small_llama_guard,
    "Llama Guard 4": of_llama_guard_4,
    "ShieldGemma": of_shield_gemma,
    "Granite Guardian": of_granite,
    "Qwen3Guard": of_qwen,
    "WildGuard": of_wildguard,
}
ENGINE = {"backend": "reference", "dtype": "f32", "kv_cache_memory": "4MiB"}


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_the_logits_of_the_verdict(tmp_path: Path, name: str) -> None:
    path = write_guard(tmp_path / "guard", name)
    oracle = Oracle(path)
    with serving(path, ENGINE) as served:
        found = served.client().moderations.create(input=TEXTS)
        for text, result in zip(TEXTS, found.results, strict=True):
            score, categories = EXPECTED[name](oracle, text)
            own = own_words(result)
            assert own["score"] == pytest.approx(score, rel=1e-4)
            assert [one.split()[0] for one in own["categories"]] == [
                one.split()[0] for one in categories
            ]
            assert list(own["categories"].values()) == pytest.approx(
                list(categories.values()), rel=1e-4
            )
            assert result.flagged == (score >= 0.5)
            assert 0 < own["mass"] < 1
        served.assert_idle()
    oracle.close()


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = write_guard(tmp_path_factory.mktemp("models") / "guard", "Llama Guard 3 8B")
    with serving(path, ENGINE) as served:
        yield served
        served.assert_idle()


def test_the_shape_is_that_of_openai(guard: Served) -> None:
    client = guard.client()
    found = client.moderations.create(input="The cat", model="tiny")
    assert (found.model, found.id[:5]) == ("tiny", "modr-")
    (result,) = found.results
    scores, flags = (part.model_dump() for part in (result.category_scores, result.categories))
    assert len(OPENAI_CATEGORIES) == 13
    assert set(result.categories.model_dump(by_alias=True)) == set(OPENAI_CATEGORIES)
    assert set(scores) == set(flags)
    assert all(type(score) is float for score in scores.values())
    assert all(type(flag) is bool for flag in flags.values())
    own = own_words(result)["categories"]
    by_number = {name.split()[0]: score for name, score in own.items()}
    assert result.category_scores.violence == by_number["S1"]
    assert result.category_scores.illicit_violent == max(by_number["S1"], by_number["S9"])
    assert result.category_applied_input_types.violence == ["text"]
    # No category of this guard says it, and the answer does not claim it.
    assert result.category_applied_input_types.violence_graphic == []
    assert (result.category_scores.violence_graphic, flags["violence_graphic"]) == (0.0, False)


def test_what_is_flagged_has_a_category(guard: Served) -> None:
    texts = [f"text number {i}" for i in range(40)]
    found = guard.client().moderations.create(input=texts).results
    assert len(found) == 40
    scores = [own_words(one)["score"] for one in found]
    assert len(set(scores)) == 40
    for one, score in zip(found, scores, strict=True):
        assert one.flagged == (score >= 0.5)
        own = own_words(one)["categories"]
        assert sum(own.values()) == pytest.approx(score)


def test_text_in_parts_is_one_input(guard: Served) -> None:
    parts: Any = [{"type": "text", "text": "The"}, {"type": "text", "text": "cat"}]
    client = guard.client()
    (joined,) = client.moderations.create(input=parts).results
    (whole,) = client.moderations.create(input="The\ncat").results
    scores = [own_words(one)["score"] for one in (joined, whole)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({}, 400, "input", "missing"),
        ({"input": []}, 400, "input", "0 prompts"),
        ({"input": 3}, 400, "input", "input"),
        ({"input": ["a", 3]}, 400, "input", "input"),
        ({"input": [{"type": "image_url", "image_url": {"url": "x"}}]}, 400, "input", "no images"),
        ({"input": "a", "model": "other"}, 404, "model", "no guard 'other'"),
        ({"input": "a" * 9000}, 400, "input", "4096"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    guard: Served, body: Any, status: int, param: str, says: str
) -> None:
    found, error = guard.refused("/v1/moderations", body)
    assert (found, error["param"].split("[")[0]) == (status, param), error
    assert says in error["message"]


def test_a_model_that_is_no_guard_refuses(served: Served) -> None:
    with pytest.raises(BadRequestError, match="--guard"):
        served.client().moderations.create(input="a")
    with pytest.raises(NotFoundError, match="no guard 'x'"):
        served.client().moderations.create(input="a", model="x")


def test_guards_beside_the_model_are_asked_by_name(model: Path, tmp_path: Path) -> None:
    names = {"Llama Guard 3 8B": "a", "Qwen3Guard": "b"}
    guards = {
        name: LLM(write_guard(tmp_path / name, family), **ENGINE) for family, name in names.items()
    }
    with serving(model, guards=guards) as served:
        client = served.client()
        for name in ("a", "b"):
            assert client.moderations.create(input="The cat", model=name).model == name
        assert client.moderations.create(input="The cat").model == "a"
        assert client.completions.create(model="tiny", prompt="The cat", max_tokens=2).choices
        with pytest.raises(NotFoundError, match="'a', 'b'"):
            client.moderations.create(input="a", model="c")
        for one in guards.values():
            assert not one.engine.requests
    for one in guards.values():
        one.close()


def test_an_answer_is_judged_by_the_last_of_several_lines(tmp_path: Path) -> None:
    """WildGuard is known by its name; the words of lines before are the likeliest ones."""
    path = write_guard(tmp_path / "guard", "WildGuard")
    oracle = Oracle(path)
    chat = [{"role": "user", "content": "The cat"}, {"role": "assistant", "content": "sat"}]
    prompt, written = oracle.prompt(chat), ""
    expected = {}
    for name in ("harmful request", "response refusal", "harmful response"):
        written += f"{name.capitalize()}:"
        no, expected[name] = oracle.shares(prompt, written, [" no", " yes"])
        written += " yes\n" if expected[name] > no else " no\n"
    oracle.close()
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": None}))
    with LLM(path, **ENGINE) as llm:
        verdict = asyncio.run(judged(llm, "WildGuard-7B", chat))
    assert verdict.categories == pytest.approx(expected, rel=1e-4)
    assert verdict.score == verdict.categories["harmful response"]


async def judged(llm: LLM, name: str, messages: list[dict[str, Any]]) -> Verdict:
    engine = AsyncEngine(llm.engine)
    engine.start()
    turns = WorkPools(8)
    try:
        guard = known_judge(name, llm.text, engine, turns.prompts)
        assert isinstance(guard, Guard)
        return await guard.judge(messages, StreamCaller("", "a", b"", False))
    finally:
        turns.close()
        await asyncio.to_thread(engine.stop, 5.0)


def test_a_model_that_is_no_guard_cannot_be_one(model: Path) -> None:
    with LLM(model, **ENGINE) as llm, pytest.raises(ValueError, match=r"--guard x.*Llama Guard"):
        composed(llm, ServeOptions(), guards={"x": llm})


def test_few_slots_are_enough(tmp_path: Path) -> None:
    """More categories than sequences may run at once are ranked some at a time."""
    path = write_guard(tmp_path / "guard", "Llama Guard 3 8B")
    found = []
    for most in (3, 64):
        with serving(path, ENGINE | {"max_num_seqs": most}) as served:
            (one,) = served.client().moderations.create(input="The cat").results
            found.append(one)
    own = [own_words(one)["categories"] for one in found]
    assert own[0] == pytest.approx(own[1], rel=1e-4)


def test_a_tokenizer_that_mixes_verdicts_up_is_refused(tmp_path: Path) -> None:
    path = write_guard(tmp_path / "guard", "Llama Guard 3 8B")
    file = path / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"]["merges"].remove(["1", "0"])
    file.write_text(json.dumps(spec))
    with serving(path, ENGINE) as served:
        status, error = served.refused("/v1/moderations", {"input": "a"})
        assert (status, error["param"]) == (400, "model")
        assert "does not tell apart" in error["message"]
