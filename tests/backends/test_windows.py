"""Windows that give memory back: an engine with few blocks says what one with all of them says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.reference.runner import ReferenceRunner
from ridgeline.core.cache.kvcache import NOWHERE, KVCache
from ridgeline.core.decoding.search import new_search
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.step import Event, Runner, SeqId, Step, StepOutput
from ridgeline.model.shape.cache_groups import CacheGroup, cache_groups
from ridgeline.model.shape.model import ModelArch
from tests.core.harness import POLICIES, finish
from tests.kept_kernels import KERNELS
from tests.tiny import ARCHS, BY_LAYER, PLAIN, changed, checkpoint, new_setup

MAX_LEN = 240
BLOCK_SIZE = 16
NUM_BLOCKS = 200  # of the runner
_SEEN_BY = {None: None, 5: 37, 6: 20}  # wider windows than those of ``tests.tiny``


def _wider(arch: ModelArch) -> ModelArch:
    layers = (
        replace(
            layer,
            mixer=replace(layer.known_attention, window=_SEEN_BY[layer.known_attention.window]),
        )
        for layer in arch.layers
    )
    return replace(arch, layers=tuple(layers))


ARCHITECTURES = {
    "all alike": changed(PLAIN, windows=(33, 33)),
    "two windows": changed(PLAIN, windows=(20, 33)),
    "Gemma 3": changed(PLAIN, windows=(20, 20, 20, 20, 20, None), qk_norm="head"),
    "gpt-oss": _wider(ARCHS["sinks"]),
    "other heads": _wider(ARCHS["kinds"]),
    "Gemma 4": _wider(BY_LAYER["shared keys and values"]),
}
PROMPTS = [tuple((i * 7 + j * j) % 50 for j in range(70 + 11 * i)) for i in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=70, logprobs=1)
SHORT = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
REQUESTS = [(prompt, GREEDY) for prompt in PROMPTS]


def make(arch: ModelArch, form: str, groups: tuple[CacheGroup, ...]) -> Runner:
    settings: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_model_len": MAX_LEN,
        "groups": groups,
    }  # fmt: skip
    if form == "reference":
        return ReferenceRunner(checkpoint(arch), new_setup(**settings))
    return CpuRunner(
        checkpoint(arch),
        new_setup(
            dtype="f32", kv_cache_dtype=form, max_num_batched_tokens=256, threads=1, **settings
        ),
        kernel_cache=KERNELS,
    )


Pair = tuple[Runner, Runner, tuple[CacheGroup, ...]]


@pytest.fixture(scope="module", params=["reference", "int8", "int8-int4", "f32"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[*ARCHITECTURES])
def pair(request: pytest.FixtureRequest, form: str) -> Iterator[Pair]:
    """Yield a runner that keeps all blocks in one table, and one with groups."""
    arch = ARCHITECTURES[request.param]
    groups = cache_groups(arch)
    runners = [make(arch, form, of) for of in ((), groups)]
    yield runners[0], runners[1], groups
    for runner in runners:
        getattr(runner, "close", lambda: None)()


@pytest.fixture(scope="module")
def wanted(pair: Pair) -> dict[SeqId, list[Event]]:
    """Return what the runner with one table answers."""
    return answers(pair[0], (None,), NUM_BLOCKS, 24, REQUESTS)[0]


class Watched:
    """A runner that counts what happened on the way."""

    def __init__(self, runner: Runner, kv: KVCache) -> None:
        self._runner, self._kv = runner, kv
        self.num_given = self.num_copies = self.num_cached = self.num_preempted = 0

    def execute(self, step: Step) -> StepOutput:
        tables = [table for w in step.work for table in (w.table, *w.others)]
        self.num_given += sum(table.count(NOWHERE) for table in tables)
        self.num_copies += len(step.copies)
        self.num_cached += sum(length for _, length in step.admitted)
        self.num_preempted += len(step.preempted)
        output = self._runner.execute(step)
        self._kv.pool.check()
        return output


def answers(
    runner: Runner,
    windows: tuple[int | None, ...],
    num_blocks: int,
    budget: int,
    requests: list[tuple[tuple[int, ...], SamplingParams]],
) -> tuple[dict[SeqId, list[Event]], Watched]:
    """What requests that come together, then the first alone, and then one that goes on from
    there, are answered.
    """
    ticks = count()
    kv = KVCache(num_blocks, BLOCK_SIZE, windows=windows)
    scheduler = Scheduler(kv, POLICIES[2], max_num_batched_tokens=budget, max_num_seqs=4)
    watched = Watched(runner, kv)
    engine = Engine(
        scheduler, watched, lambda: float(next(ticks)), max_model_len=MAX_LEN, new_search=new_search
    )
    for request in requests:
        engine.add(*request)
    events = finish(engine)
    again = engine.add(*requests[0])
    events += finish(engine)
    said = [e.token for e in events if e.seq_id == (again, 0) and e.token is not None]
    engine.add((*requests[0][0], *said, 3, 1), SHORT)
    events += finish(engine)
    found: dict[SeqId, list[Event]] = {}
    for event in events:
        found.setdefault(event.seq_id, []).append(event)
    return found, watched


def same(runner: Runner, got: dict[SeqId, list[Event]], wanted: dict[SeqId, list[Event]]) -> None:
    error = 0.0 if isinstance(runner, CpuRunner) else 1e-4
    for seq_id, events in wanted.items():
        assert [e.token for e in got[seq_id]] == [e.token for e in events]
        for event, other in zip(got[seq_id], events, strict=True):
            assert event.logprobs is not None
            assert other.logprobs is not None
            assert abs(event.logprobs.logprob - other.logprobs.logprob) <= error


@pytest.mark.parametrize("budget", [7, 24])
def test_few_blocks_give_the_same_answers(
    pair: Pair, wanted: dict[SeqId, list[Event]], budget: int
) -> None:
    """One text of those that run together may have as many blocks as it needs, and no more."""
    _, grouped, groups = pair
    windows = tuple(group.window for group in groups)
    few = KVCache(0, BLOCK_SIZE, windows=windows).most_blocks(MAX_LEN, budget)
    got, watched = answers(grouped, windows, few, budget, REQUESTS)
    same(grouped, got, wanted)
    assert watched.num_given
    assert watched.num_cached


def test_those_that_gave_way_say_the_same(pair: Pair, wanted: dict[SeqId, list[Event]]) -> None:
    """Two texts fit as prompts, and not as they grow."""
    _, grouped, groups = pair
    windows = tuple(group.window for group in groups)
    kv = KVCache(0, BLOCK_SIZE, windows=windows)
    num_blocks = max(2 * kv.most_blocks(90, 7), kv.most_blocks(MAX_LEN, 7))
    got, watched = answers(grouped, windows, num_blocks, 7, REQUESTS)
    same(grouped, got, wanted)
    # Where all layers have windows, a sequence that begins has all that it will ever hold.
    assert watched.num_preempted or None not in windows


def test_forks_and_beams_share_the_blocks_of_each_group(pair: Pair) -> None:
    plain, grouped, groups = pair
    windows = tuple(group.window for group in groups)
    forked = SamplingParams(temperature=1.0, n=3, seed=7, max_tokens=30, logprobs=1)
    beams = SamplingParams(
        use_beam_search=True, n=2, best_of=3, temperature=0, max_tokens=30, logprobs=1
    )
    requests = [(PROMPTS[1], forked), (PROMPTS[2], beams)]
    wanted, _ = answers(plain, (None,), NUM_BLOCKS, 64, requests)
    got, watched = answers(grouped, windows, NUM_BLOCKS, 64, requests)
    assert watched.num_given
    assert watched.num_copies >= 2 * len(groups)
    same(grouped, got, wanted)


def test_a_prompt_in_one_piece_or_many_has_the_same_logits(pair: Pair) -> None:
    plain, grouped, _ = pair
    text = PROMPTS[2]
    wanted: Any = plain.prompt_logits(text)  # type: ignore[attr-defined]
    for cut in (1, 50):
        got: Any = grouped.prompt_logits(text[:cut])  # type: ignore[attr-defined]
        rest: Any = grouped.prompt_logits(text[cut:], cut)  # type: ignore[attr-defined]
        # BLAS adds in another order when it has fewer rows; a key too few changes far more.
        error = 0.0 if isinstance(grouped, CpuRunner) else 1e-3
        assert abs(got - wanted[:cut]).max() <= error
        assert abs(rest - wanted[cut:]).max() <= error


def test_arrays_are_as_large_as_the_groups_need(pair: Pair) -> None:
    plain, grouped, groups = pair
    sizes = [runner.memory()["kv_cache"].num_bytes for runner in (plain, grouped)]  # type: ignore[attr-defined]
    assert sizes[1] <= sizes[0]
    assert len(groups) * sizes[1] < 2 * sizes[0] or len(groups) > 2
