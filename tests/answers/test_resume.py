"""A request of a real model is cut after any token and goes on elsewhere: the rest is the same.

All ways of choosing tokens and of ending an answer are tried; structures and formats of models are
in ``test_same_answer_of_families``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams, StructuredOutputsParams
from ridgeline.core.records import Record, RequestRecord
from tests.answers.test_same_answer import RARE_SAMPLERS
from tests.real_models import real_model

pytestmark = pytest.mark.engine

NUM_TOKENS = 20
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
STORY = "Once upon a time, in a small village by the sea, there lived an old lighthouse keeper"


def _params(**wishes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 2} | wishes)


def _form(**form: Any) -> dict[str, Any]:
    return {"ignore_eos": False, "structured_outputs": StructuredOutputsParams(**form)}


REQUESTS: dict[str, tuple[str, SamplingParams]] = {
    "greedy": ("The capital of France is", _params(temperature=0)),
    "repeats": ("1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7 8 9 1 2 3 4", _params(temperature=0)),
    "drawn": (STORY, _params(temperature=0.8, seed=17, top_k=40, top_p=0.9, min_p=0.02)),
    "three answers": ("def fibonacci(n):", _params(temperature=0.8, seed=4, n=3)),
    "penalties": (
        "Water boils at",
        _params(
            temperature=0.8,
            seed=6,
            n=2,
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            presence_penalty=0.2,
        ),
    ),
    "stop strings": (
        "The sea. The sea. The sea.",
        _params(temperature=1.2, seed=7, n=2, stop=[" the", ".\n", ", and"], min_tokens=4),
    ),
    "broken characters": (
        "Say \u00fc and \U0001f600 and \u65e5\u672c:",
        _params(temperature=1.3, seed=9, logit_bias={28: -5, 335: 2}, stop=["zq"]),
    ),
    "rare samplers": ("One, two, three. One, two, three. One, two,", _params(**RARE_SAMPLERS)),
    "schema": (
        "Anna is 31 years old. As JSON:",
        _params(temperature=0.7, seed=2, **_form(json=SCHEMA)),
    ),
    "expression": (
        "Anna is 31 years old. As JSON:",
        _params(temperature=0.9, seed=5, n=2, **_form(regex=r"[a-c]{3,9}-[0-9]{2,12}")),
    ),
    "ranked prompt": ("2 + 2 =", _params(temperature=0, max_tokens=6, prompt_logprobs=1)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "drafts off": {"speculative_config": "off"},
    "drafts always": {"speculative_config": {"always": True, "num_speculative_tokens": 5}},
    "cache in 8 and 4 bits": {"kv_cache_dtype": "int8-int4", "speculative_config": "off"},
}
# What is told of a token of one answer: number of the answer, token, text, log-probabilities and
# how it ended.
News = tuple[int, Any, str, Any, Any, Any, Any]


def _new_llm(**options: Any) -> LLM:
    base = {"threads": 1, "kv_cache_memory": "48MiB", "max_model_len": 256}
    return LLM(real_model("smollm2"), **base | options)


def _add(llm: LLM, prompt: str, params: SamplingParams, answers: list[list[int]]) -> int:
    ids = tuple(llm.text.encode(prompt))
    return llm.engine.add(
        ids,
        params,
        new_text=partial(llm.text.new_text, ids, params),
        new_constraint=llm.text.new_constraint(params),
        token_rules=llm.text.lexicon.rules(params),
        answers=tuple(map(tuple, answers)),
    )


def _run(llm: LLM) -> dict[int, list[News]]:
    """Run until all have ended; return what was told of each request, with exact numbers."""
    found: dict[int, list[News]] = {}
    while llm.engine.has_work():
        for event in llm.engine.step():
            ranked = event.logprobs and [
                (token, struct.pack("<d", logprob)) for token, logprob in event.logprobs.top
            ]
            news = event.seq_id[1], event.token, event.text, ranked, *event[4:7]
            found.setdefault(event.seq_id[0], []).append(news)
    llm.engine.check()
    return found


@pytest.fixture(scope="module", params=OPTIONS)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """Return two engines; the second has an empty cache and keeps nothing in it."""
    options = OPTIONS[request.param]
    whole = _new_llm(**options | {"speculative_config": "off"})
    with whole, _new_llm(**options, enable_prefix_caching=False) as elsewhere:
        yield whole, elsewhere


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)])
def test_the_rest_of_every_request_is_the_same(engines: tuple[LLM, LLM], every: int) -> None:
    whole, elsewhere = engines
    records: list[Record] = []
    elsewhere.engine.listeners.append(records.append)
    for name, (prompt, params) in REQUESTS.items():
        _add(whole, prompt, params, [])
        ((_, told),) = _run(whole).items()
        rests = {}
        for cut in range(1, len(told), every):
            answers: list[list[int]] = [[] for _ in range(params.num_seqs)]
            for index, token, *_ in told[:cut]:
                answers[index].append(token)
            rests[_add(elsewhere, prompt, params, answers)] = told[cut:]
        found = _run(elsewhere)
        assert found.keys() == rests.keys()
        for request_id, rest in rests.items():
            for index in range(params.num_seqs):  # answers of a request may run in other steps
                mine, theirs = (
                    [news for news in side if news[0] == index]
                    for side in (found[request_id], rest)
                )
                assert mine == theirs, f"{name}, answer {index}, {len(rest)} before the end"
    ended = [record for record in records if isinstance(record, RequestRecord)]
    assert len(ended) > 200 // every
    if elsewhere.config.speculative_config:
        assert sum(record.num_accepted_tokens for record in ended) > 0
