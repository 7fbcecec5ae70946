"""The same answer in every family: tiny models of each, in each format, however requests run.

``test_same_answer`` has more ways to run, of one family. Here a few are tried of every structure:
windows, experts, latent attention, layers that keep a state, heads and keys of other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ridgeline.engine.llm
from ridgeline import LLM, RequestOutput, SamplingParams
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.records import Record, RequestRecord
from ridgeline.core.step import Event
from ridgeline.engine.setup.resolve import EngineConfig
from ridgeline.model.files.tensors import Checkpoint
from tests.answers.conftest import skip_without_torch
from tests.answers.tiny_families import write_family
from tests.parity.tiny_configs import CONFIGS, NEWER, VOCAB

pytestmark = pytest.mark.engine

FORMATS: dict[str, dict[str, Any]] = {
    "auto": {"backend": "cpu"},
    "f32": {"backend": "cpu", "dtype": "f32", "kv_cache_dtype": "f32"},
    "int8": {"backend": "cpu", "dtype": "int8", "kv_cache_dtype": "int8"},
    "reference": {"backend": "reference"},
    "cuda": {"backend": "cuda", "dtype": "f32"},
}
TOLERANCE = {"reference": 1e-4, "cuda": 1e-4}  # of logprobs; all others must agree bit for bit
# One of each kind of structure, which ``make test`` runs; the rest is of the full matrix.
OFTEN = {
    ("gemma3", "auto"), ("gpt-oss", "auto"), ("gemma4", "int8"), ("deepseek-v3", "auto"),
    ("qwen3.5-moe", "auto"), ("falcon-h1", "int8"), ("lfm2-moe", "f32"), ("neox", "int8"),
    ("nemotron-h-moe", "int8"), ("bloom", "auto"), ("phimoe", "auto"),
    ("bloom", "cuda"), ("exaone4", "cuda"), ("gpt-oss", "cuda"), ("qwen2-moe", "cuda"),
}  # fmt: skip
ON_REFERENCE_ALONE = ("gemma4-keys",)
ON_CPU = [name for name in CONFIGS | NEWER if name not in ON_REFERENCE_ALONE]
KEEP_STATES = (  # no draft is tried then
    "bamba", "falcon-h1", "granite-hybrid", "lfm2", "mamba2", "nemotron-h", "qwen3-next", "qwen3.5",
)  # fmt: skip
CONTEXT, NUM_TOKENS, BLOCK = 64, 12, 16
_GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
_DRAWN = replace(_GREEDY, temperature=0.9, seed=7)
_IDS = np.random.default_rng(11).integers(3, VOCAB, 200).tolist()
# The second begins as the first does, for two blocks and a half.
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (_IDS[:47], _GREEDY),
    (_IDS[:40] + _IDS[60:68], replace(_DRAWN, n=2)),
    (_IDS[70:72], _DRAWN),
    (_IDS[80:101], _GREEDY),
    (_IDS[110:143], replace(_DRAWN, seed=8)),
    # One block each, and two when they end: together too many for a small cache.
    (_IDS[150:164], _GREEDY),
    (_IDS[165:179], replace(_DRAWN, seed=9)),
    (_IDS[180:195], replace(_DRAWN, seed=10)),
]


class Engines:
    """Engines over one runner of a model and format, and what each request is answered alone."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self._path, self._options = path, options
        self.preempted = self.drafts = self.accepted = 0
        self.new()  # first: its runner has room for the checkpoints of all others
        llm = self.new(enable_prefix_caching=False)
        self.alone = [llm.generate(*request)[0] for request in REQUESTS]
        assert not self.preempted
        config = llm.config
        self.bytes_per_block = config.kv_bytes // config.num_blocks
        cache = KVCache(0, BLOCK, windows=tuple(group.window for group in config.groups))
        self.num_blocks = cache.most_blocks(CONTEXT, BLOCK)

    def new(self, **options: Any) -> LLM:
        base = {
            "max_model_len": CONTEXT,
            "max_num_seqs": 16,
            "threads": 1,
            "kv_cache_memory": 1 << 22,
            "speculative_config": "off",
            "enable_contrastive_search": False,
        }
        llm = LLM(self._path, **base | self._options | options)
        llm.engine.listeners.append(self._heard)
        return llm

    def _heard(self, record: Record) -> None:
        if isinstance(record, RequestRecord):
            self.preempted += record.num_preemptions
            self.drafts += record.num_draft_tokens
            self.accepted += record.num_accepted_tokens


Open = Callable[[str, str], Engines]


@pytest.fixture(scope="module")
def open_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Return the function from a family and a format to its engines; the last ones are kept.

    They share a runner, and with it whatever others left in its cache.
    """
    make_runner, runners = ridgeline.engine.llm.new_runner, {}
    known: dict[tuple[str, str], Engines] = {}

    def shared_runner(config: EngineConfig, checkpoint: Checkpoint, report: Any) -> Any:
        key = (checkpoint.path, config.backend, config.dtype, config.kv_cache_dtype, config.threads)
        if key not in runners:
            runners.clear()
            runners[key] = make_runner(config, checkpoint, report)
        return runners[key]

    def find(name: str, form: str) -> Engines:
        if (name, form) not in known:
            known.clear()
            path = write_family(tmp_path_factory.mktemp("family") / name, name)
            known[name, form] = Engines(path, FORMATS[form])
        return known[name, form]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ridgeline.engine.llm, "new_runner", shared_runner)
        yield find


CASES = [
    pytest.param(name, form, id=f"{name} {form}", marks=[] if often else [pytest.mark.full])
    for name in CONFIGS | NEWER
    for form in FORMATS
    for often in [(name, form) in OFTEN]
    if form in ("reference", "cuda") or name not in ON_REFERENCE_ALONE
]


def assert_same(form: str, outs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for out, want in zip(outs, wanted, strict=True):
        assert len(out.outputs) == len(want.outputs)
        for got, expected in zip(out.outputs, want.outputs, strict=True):
            assert got.token_ids == expected.token_ids
            for token, mine, theirs in zip(
                got.token_ids, got.logprobs, expected.logprobs, strict=True
            ):
                assert mine.keys() == theirs.keys()
                difference = abs(mine[token].logprob - theirs[token].logprob)
                assert difference <= TOLERANCE.get(form, 0.0)


def ask(llm: LLM, indexes: list[int]) -> list[RequestOutput]:
    return llm.generate([REQUESTS[i][0] for i in indexes], [REQUESTS[i][1] for i in indexes])


def engines_or_skip(name: str, form: str, open_engines: Open) -> Engines:
    """Return the engines of a family; skip what the cuda backend cannot run, here or at all."""
    skip_without_torch(FORMATS[form])
    try:
        return open_engines(name, form)
    except ValueError as refusal:
        if form != "cuda":
            raise
        pytest.skip(str(refusal))


@pytest.mark.parametrize(("name", "form"), CASES)
def test_however_requests_run(name: str, form: str, open_engines: Open) -> None:
    engines = engines_or_skip(name, form, open_engines)
    wanted, everyone = engines.alone, list(range(len(REQUESTS)))

    together = engines.new()
    order = [*everyone[::-1], 0, 3]
    assert_same(form, ask(together, order), [wanted[i] for i in order])

    in_chunks = engines.new(max_num_batched_tokens=BLOCK, max_num_seqs=3)
    assert_same(form, ask(in_chunks, everyone), wanted)

    warm = engines.new()
    cached = []
    for i in (0, 1, 0, 1, 4, 4):
        (out,) = ask(warm, [i])
        cached.append(out.num_cached_tokens)
        assert_same(form, [out], [wanted[i]])
    assert sum(cached[2:]) > 0
    assert cached[0] == 0

    memory = engines.num_blocks * engines.bytes_per_block
    for is_caching in (True, False):
        engines.preempted = 0
        tight = engines.new(
            kv_cache_memory=memory,
            max_num_batched_tokens=BLOCK,
            max_num_seqs=8,
            enable_prefix_caching=is_caching,
        )
        assert_same(form, ask(tight, everyone[::-1]), wanted[::-1])
        assert engines.preempted > 0 or not together.arch.attentions


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_request_goes_on_elsewhere(name: str, form: str, open_engines: Open) -> None:
    """Cut after any token and added to an engine that knows nothing of it: the rest is the same."""
    engines = engines_or_skip(name, form, open_engines)
    elsewhere, cuts = engines.new(enable_prefix_caching=False), {}
    for (prompt, params), whole in zip(REQUESTS[:6], engines.alone, strict=False):
        for cut in range(1, NUM_TOKENS):
            answers = tuple(tuple(answer.token_ids[:cut]) for answer in whole.outputs)
            request_id = elsewhere.engine.add(tuple(prompt), params, answers=answers)
            cuts[request_id] = whole, cut
    rest: dict[tuple[int, int], list[Event]] = {}
    while elsewhere.engine.has_work():
        for event in elsewhere.engine.step():
            rest.setdefault(event.seq_id, []).append(event)
    elsewhere.engine.check()
    assert len(rest) == 7 * (NUM_TOKENS - 1), "one of the six has two answers"
    for (request_id, index), events in rest.items():
        whole, cut = cuts[request_id]
        answer = whole.outputs[index]
        assert tuple(event.token for event in events) == tuple(answer.token_ids[cut:])
        for event, wanted in zip(events, answer.logprobs[cut:], strict=True):
            assert event.logprobs is not None
            difference = abs(event.logprobs.logprob - wanted[event.logprobs.token].logprob)
            assert difference <= TOLERANCE.get(form, 0.0)


@pytest.mark.full
@pytest.mark.parametrize("name", ON_CPU)
def test_on_two_threads(name: str, open_engines: Open) -> None:
    engines = open_engines(name, "auto")
    for options in ({}, {"max_num_batched_tokens": BLOCK, "max_num_seqs": 3}):
        llm = engines.new(threads=2, **options)
        assert_same("auto", ask(llm, [*range(len(REQUESTS))]), engines.alone)


@pytest.mark.full
@pytest.mark.parametrize("method", ["suffix", "lookahead"])
@pytest.mark.parametrize("name", [n for n in ON_CPU if not n.startswith(KEEP_STATES)])
def test_drafts_change_nothing(name: str, method: str, open_engines: Open) -> None:
    """Those of the suffix are mostly right, for all is asked twice, and the others mostly wrong."""
    engines = open_engines(name, "auto")
    config = {"always": True, "num_speculative_tokens": 5, "method": method}
    llm = engines.new(speculative_config=config)
    engines.drafts = engines.accepted = 0
    for _ in range(2):
        assert_same("auto", ask(llm, [*range(len(REQUESTS))]), engines.alone)
        assert_same("auto", ask(llm, [3]), [engines.alone[3]])
    assert engines.drafts >= engines.accepted + (method == "lookahead")
    assert engines.accepted or method == "lookahead"
