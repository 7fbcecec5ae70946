"""The same answer: a request's tokens and logprobs depend on nothing but the request.

Each way of running below (batch, chunks, cache, preemption, policy, blocks, threads) must repeat
what the requests answered one by one. On ``reference`` and on a CPU's twins of the ``cuda``
backend's kernels logprobs may differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import ridgeline.engine.llm
from ridgeline import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.engine.setup.resolve import EngineConfig
from ridgeline.model.files.tensors import Checkpoint
from tests.answers.conftest import BACKENDS, skip_without_torch
from tests.real_models import real_model

pytestmark = pytest.mark.engine

TOLERANCE = {"reference": 1e-4, "cuda": 1e-4}  # of logprobs; all others must agree bit for bit
NUM_TOKENS = 24
# Per token of smollm2, by format and whether it is the reference.
CACHE_BYTES = {
    (None, True): 46_080,
    (None, False): 12_600,
    ("f32", False): 46_080,
    ("f16", False): 23_040,
    ("int8-int4", False): 9_720,
}
NUM_BLOCKS = 512  # of the runner; an engine may use fewer
_STORY = "Once upon a time, in a small village by the sea, there lived an old lighthouse keeper"


def _params(**wishes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, **wishes)


GREEDY = _params(temperature=0)
SEEDED = _params(temperature=0.8, seed=17)
RARE_SAMPLERS: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 8,
    "dry_multiplier": 0.8,
    "bad_words": ["three", "the"],
    "typical_p": 0.9,
    "top_n_sigma": 2.0,
    "xtc_probability": 0.5,
}
REQUESTS: list[tuple[str, SamplingParams]] = [
    ("The capital of France is", GREEDY),
    (f"{_STORY} who", SEEDED),
    ("def fibonacci(n):", _params(temperature=0.8, seed=4, n=3)),
    (f"{_STORY} named Tom. Every night he", GREEDY),
    ("2 + 2 =", _params(temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2)),
    ("Water boils at", _params(temperature=0.8, seed=6, top_k=40, frequency_penalty=0.3)),
    ("The three primary colours are", SEEDED),
    ("One, two, three. One, two, three. One, two,", _params(**RARE_SAMPLERS)),
]


@dataclass
class Log:
    """The engine's records."""

    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    def __call__(self, record: Record) -> None:
        if isinstance(record, RequestRecord):
            self.requests.append(record)
        elif isinstance(record, StepRecord):
            self.steps.append(record)


Load = Callable[..., tuple[LLM, Log]]


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    """Return a function from options to an ``LLM`` and its records.

    Decoding the weights is what takes long, so models with the same block size and threads share a
    runner, and with it whatever others left in its cache; everything above it is built anew.
    """
    path = real_model("smollm2")
    make_runner, runners = ridgeline.engine.llm.new_runner, {}

    def shared_runner(config: EngineConfig, checkpoint: Checkpoint, report: Any) -> Any:
        assert config.num_blocks * config.block_size <= NUM_BLOCKS * 16
        key = (
            config.backend, config.dtype, config.kv_cache_dtype, config.block_size, config.threads
        )  # fmt: skip
        if key not in runners:
            runners.clear()  # one at a time: each holds all weights
            largest = replace(config, max_num_batched_tokens=2048)
            runners[key] = make_runner(largest, checkpoint, report)
        return runners[key]

    def build(backend: str, **options: Any) -> tuple[LLM, Log]:
        base = {
            "max_model_len": 128,
            "threads": 1,
            "kv_cache_tokens": 8192,
            "speculative_config": "off",
        }
        wishes = base | BACKENDS[backend] | options
        skip_without_torch(wishes)
        bytes_per_token = CACHE_BYTES[wishes.get("kv_cache_dtype"), backend == "reference"]
        wishes["kv_cache_memory"] = wishes.pop("kv_cache_tokens") * bytes_per_token
        llm = LLM(path, **wishes)
        llm.engine.listeners.append(log := Log())
        return llm, log

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ridgeline.engine.llm, "new_runner", shared_runner)
        yield build


Expected = list[RequestOutput]


@pytest.fixture(scope="module")
def alone(load: Load) -> Callable[[str], Expected]:
    """Return the function from a backend to the answers that it gives one by one."""
    known: dict[str, Expected] = {}

    def answers(backend: str) -> Expected:
        if backend not in known:
            llm, log = load(backend)
            known[backend] = [llm.generate(*request)[0] for request in REQUESTS]
            assert all(len(s.work) <= 3 and not s.preempted for s in log.steps)
        return known[backend]

    return answers


def ask(llm: LLM, indexes: list[int], num_tokens: int = NUM_TOKENS) -> list[RequestOutput]:
    chosen = [REQUESTS[i] for i in indexes]
    params = [replace(params, max_tokens=num_tokens) for _, params in chosen]
    return llm.generate([text for text, _ in chosen], params)


def assert_same(backend: str, outs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    """Assert that all answers are the wanted ones, as far as they go."""
    for out, want in zip(outs, wanted, strict=True):
        assert len(out.outputs) == len(want.outputs)
        for got, expected in zip(out.outputs, want.outputs, strict=True):
            where, length = f"answer {got.index} to {want.prompt!r}", len(got.token_ids)
            assert got.token_ids == expected.token_ids[:length], where
            assert got.text == expected.text or length < NUM_TOKENS, where
            assert got.logprobs is not None
            assert expected.logprobs is not None
            rows = zip(got.token_ids, got.logprobs, expected.logprobs[:length], strict=True)
            for token, mine, theirs in rows:
                difference = abs(mine[token].logprob - theirs[token].logprob)
                assert difference <= TOLERANCE.get(backend, 0.0), where
                assert mine.keys() == theirs.keys(), where


def test_in_batches(every_backend: str, load: Load, alone: Callable[[str], Expected]) -> None:
    wanted = alone(every_backend)
    llm, log = load(every_backend)
    everyone = list(range(len(REQUESTS)))
    crowd = [*everyone[::-1] * 6, 0, 3, 4, 5]
    for indexes, num_tokens in [([3, 0], NUM_TOKENS), (everyone, NUM_TOKENS), (crowd, 10)]:
        outs = ask(llm, indexes, num_tokens)
        assert_same(every_backend, outs, [wanted[i] for i in indexes])
    assert {len(step.work) for step in log.steps} >= {2, 10, 64}


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "is_caching"),
    [(8, 3, True), (8, 8, False), (16, 16, True), (33, 33, False), (2048, 256, False)],
)
def test_in_chunks(
    backend: str,
    num_tokens: int,
    num_seqs: int,
    is_caching: bool,
    load: Load,
    alone: Callable[[str], Expected],
) -> None:
    wanted = alone(backend)
    llm, log = load(
        backend,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_seqs,
        enable_prefix_caching=is_caching,
    )
    indexes = [3, 0, 1, 4]
    assert_same(backend, ask(llm, indexes), [wanted[i] for i in indexes])
    longest = len(llm.tokenizer.encode(REQUESTS[3][0]))
    (first, *_), *_ = (step.work for step in log.steps)
    assert first == ((first[0][0], 0), 0, min(num_tokens, longest))


def test_with_a_warm_prefix_cache(
    backend: str, load: Load, alone: Callable[[str], Expected]
) -> None:
    wanted = alone(backend)
    llm, _ = load(backend)
    for i, num_cached in [(1, 0), (1, 16), (3, 16), (3, 16)]:
        (out,) = ask(llm, [i])
        assert out.num_cached_tokens == num_cached
        assert_same(backend, [out], [wanted[i]])


@pytest.mark.parametrize("is_caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_preempted(
    backend: str, is_caching: bool, load: Load, alone: Callable[[str], Expected]
) -> None:
    wanted = alone(backend)
    llm, log = load(
        backend,
        kv_cache_tokens=128,
        enable_prefix_caching=is_caching,
    )
    indexes = [0, 1, 2, 3, 5]
    assert_same(backend, ask(llm, indexes), [wanted[i] for i in indexes])
    assert sum(record.num_preemptions > 0 for record in log.requests) >= 2


@pytest.mark.parametrize("policy", ["static", "orca", "splitfuse"])
def test_under_every_policy(
    backend: str, policy: str, load: Load, alone: Callable[[str], Expected]
) -> None:
    wanted = alone(backend)
    llm, _ = load(backend, policy=policy, max_num_seqs=4)
    indexes = [3, 2, 1, 0]
    assert_same(backend, ask(llm, indexes), [wanted[i] for i in indexes])


@pytest.mark.parametrize(
    "options", [{"threads": 2}, {"block_size": 1}, {"block_size": 32}], ids=str
)
def test_on_another_runner(
    backend: str, options: dict[str, Any], load: Load, alone: Callable[[str], Expected]
) -> None:
    if backend != "reference" and options.get("block_size") == 1:
        pytest.skip("blocks of other backends are multiples of 16 tokens")
    wanted = alone(backend)
    llm, _ = load(backend, **options)
    assert_same(backend, ask(llm, list(range(len(REQUESTS))), 8), wanted)
    assert_same(backend, ask(llm, [1], 4), [wanted[1]])


def test_what_others_ask_meanwhile(
    backend: str, load: Load, alone: Callable[[str], Expected]
) -> None:
    """Requests that come and go during an answer do not touch it."""
    wanted = alone(backend)[1]
    llm, _ = load(backend)
    text = ""
    for number, chunk in enumerate(llm.stream(*REQUESTS[1])):
        text += chunk.text
        if number == 3:
            stream = llm.stream(*REQUESTS[2])
            next(stream)
        if number == 8:
            stream.close()
            ask(llm, [0])
    assert text == wanted.outputs[0].text


# --- drafts ---------------------------------------------------------------------------------------

DRAFTS: dict[str, Any] = {"speculative_config": {"always": True, "num_speculative_tokens": 7}}


def ask_with_predictions(
    llm: LLM, indexes: list[int], wanted: Expected, num_tokens: int = NUM_TOKENS
) -> list[RequestOutput]:
    """Ask with predictions that are right in parts."""
    params = []
    for i in indexes:
        words = wanted[i].outputs[0].text.split(" ")
        words[len(words) // 2] = "something quite different"
        params.append(replace(REQUESTS[i][1], max_tokens=num_tokens, prediction=" ".join(words)))
    return llm.generate([REQUESTS[i][0] for i in indexes], params)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"kv_cache_tokens": 256},
        {"policy": "static", "max_num_seqs": 4},
        {"threads": 2},
        {"speculative_config": DRAFTS["speculative_config"] | {"method": "suffix"}},
    ],
    ids=["together", "in chunks", "preempted", "static", "two threads", "suffix"],
)
def test_with_drafts(
    every_backend: str, options: dict[str, Any], load: Load, alone: Callable[[str], Expected]
) -> None:
    wanted = alone(every_backend)
    llm, log = load(every_backend, **DRAFTS | options)
    for indexes in ([0], [4], [5], [3, 2, 1, 0], list(range(len(REQUESTS)))):
        outs = ask_with_predictions(llm, indexes, wanted)
        assert_same(every_backend, outs, [wanted[i] for i in indexes])
    num_drafts, num_accepted = (
        sum(getattr(record, name) for record in log.requests)
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert num_drafts > num_accepted > 20


def test_with_lookahead(backend: str, load: Load, alone: Callable[[str], Expected]) -> None:
    """Its drafts are made of draws behind wrong ones, and most are wrong again."""
    wanted = alone(backend)
    config = DRAFTS["speculative_config"] | {"method": "lookahead"}
    llm, log = load(backend, speculative_config=config)
    for indexes in ([4], [3, 2, 1, 0]):
        outs = ask(llm, indexes)
        assert_same(backend, outs, [wanted[i] for i in indexes])
    assert sum(record.num_accepted_tokens for record in log.requests) > 5


def test_drafts_leave_nothing_behind_in_the_cache(
    every_backend: str, load: Load, alone: Callable[[str], Expected]
) -> None:
    """A later prompt finds only what was said, not what was guessed."""
    wanted = alone(every_backend)
    llm, _ = load(every_backend, **DRAFTS)
    (first,) = ask_with_predictions(llm, [3], wanted)
    told = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    params = _params(temperature=0)
    (again,) = llm.generate([told], params)
    fresh, _ = load(every_backend, enable_prefix_caching=False)
    (expected,) = fresh.generate([told], params)
    assert again.num_cached_tokens >= 16 * (len(told) // 16 - 1)
    assert_same(every_backend, [again], [expected])


# --- searches -------------------------------------------------------------------------------------

BEAMS: list[tuple[str, SamplingParams]] = [
    (f"{_STORY} who", _params(use_beam_search=True, best_of=4, n=2)),
    ("2 + 2 =", _params(use_beam_search=True, n=3, length_penalty=2.0)),
    ("Water boils at", _params(use_beam_search=True, best_of=2)),
]
WORDS = StructuredOutputsParams(regex="( [a-z]{1,8}){4}")
OF_A_FORM = SamplingParams(use_beam_search=True, n=3, structured_outputs=WORDS, logprobs=1)
SEARCHES = [
    *BEAMS,
    ("One, two,", replace(OF_A_FORM, max_tokens=NUM_TOKENS)),
    (f"{_STORY} who", _params(penalty_alpha=0.6, top_k=4)),
    ("One, two, three. One, two, three. One, two,", _params(penalty_alpha=0.3, top_k=6)),
]


@pytest.fixture(scope="module")
def searches_alone(load: Load) -> Callable[[str], Expected]:
    """Return the function from a backend to what its searches find one request at a time."""
    known: dict[str, Expected] = {}

    def answers(backend: str) -> Expected:
        if backend not in known:
            llm, _ = load(backend)
            known[backend] = [llm.generate(*request)[0] for request in SEARCHES]
        return known[backend]

    return answers


@pytest.mark.parametrize(
    ("options", "is_preempted"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 16}, False),
        ({"kv_cache_tokens": 288}, True),
        ({"kv_cache_tokens": 288, "enable_prefix_caching": False}, True),
        ({"policy": "static", "max_num_seqs": 8}, False),
        ({"policy": "orca", "kv_cache_tokens": 288}, True),
        ({"threads": 2}, False),
        ({"block_size": 32}, False),
        ({"speculative_config": {"always": True}}, False),
    ],
    ids=str,
)
def test_searches(
    backend: str,
    options: dict[str, Any],
    is_preempted: bool,
    load: Load,
    searches_alone: Callable[[str], Expected],
    alone: Callable[[str], Expected],
) -> None:
    wanted, others = searches_alone(backend), alone(backend)
    llm, log = load(backend, **options)
    drawn = [2, 4, 0, 1, 3, 5]
    pairs = zip(SEARCHES, [REQUESTS[i] for i in drawn], strict=True)
    mixed = [request for pair in pairs for request in pair]
    outs = llm.generate([text for text, _ in mixed], [params for _, params in mixed])
    assert_same(backend, outs[::2], wanted)
    assert_same(backend, outs[1::2], [others[i] for i in drawn])
    assert any(record.num_preemptions for record in log.requests) >= is_preempted
    assert any(step.num_copies for step in log.steps)


def test_one_beam_is_greedy(backend: str, load: Load, alone: Callable[[str], Expected]) -> None:
    llm, _ = load(backend)
    text, params = REQUESTS[0]
    assert_same(
        backend, [llm.generate(text, replace(params, use_beam_search=True))[0]], [alone(backend)[0]]
    )


def test_contrastive_search_with_alpha_0_is_greedy(
    backend: str, load: Load, alone: Callable[[str], Expected]
) -> None:
    llm, _ = load(backend)
    text, params = REQUESTS[0]
    out = llm.generate(text, replace(params, penalty_alpha=0.0))
    assert_same(backend, out, [alone(backend)[0]])


def test_several_beams_find_a_likelier_answer_than_one(
    backend: str, searches_alone: Callable[[str], Expected], load: Load
) -> None:
    """Of each alone that is no law, so of all together."""
    llm, _ = load(backend)
    gained = 0.0
    for (text, params), found in zip(BEAMS, searches_alone(backend)[: len(BEAMS)], strict=True):
        totals = [out.cumulative_logprob for out in found.outputs]
        assert totals == sorted(totals, reverse=True)
        greedy = _params(temperature=0)
        (one,) = llm.generate(text, greedy)
        gained += totals[0] - one.outputs[0].cumulative_logprob
        (told,) = llm.generate(
            [*found.prompt_token_ids, *found.outputs[0].token_ids],
            replace(greedy, max_tokens=1, prompt_logprobs=0),
        )
        rows = told.prompt_logprobs[len(found.prompt_token_ids) :]
        ids = found.outputs[0].token_ids
        total = sum(row[token].logprob for row, token in zip(rows, ids, strict=True))
        assert total == pytest.approx(totals[0], abs=NUM_TOKENS * TOLERANCE.get(backend, 1e-9))
        assert params.best_of is None or len(found.outputs) == params.n
    assert gained > 0
