"""Windows that give memory back: an engine with few blocks says what one with all of them says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.reference import ReferenceRunner
from ridgeline.core.engine import Engine
from ridgeline.core.kvcache import KVCache
from ridgeline.core.params import SamplingParams
from ridgeline.core.scheduler import Scheduler
from ridgeline.core.step import Event, Runner, SeqId
from tests.core.harness import POLICIES, finish
from tests.tiny import ARCHS, PLAIN, changed, checkpoint

WINDOWS = (20, 33)
MAX_LEN = 240
BUDGET = 24
BLOCK_SIZE = 16
NUM_BLOCKS = 45  # of the runner
ARCH = changed(PLAIN, windows=WINDOWS)
PROMPTS = [tuple((i * 7 + j * j) % 50 for j in range(70 + 11 * i)) for i in range(3)]


@pytest.fixture(scope="module", params=["reference", "int8", "int8-int4", "f32"])
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runner]:
    if request.param == "reference":
        yield ReferenceRunner(
            checkpoint(ARCH), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=MAX_LEN
        )
        return
    made = CpuRunner(
        checkpoint(ARCH),
        dtype="f32",
        cache_dtype=request.param,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=256,
        num_threads=1,
        kernel_cache=tmp_path_factory.mktemp("kernels"),
    )
    yield made
    made.close()


def answers(runner: Runner, num_blocks: int, window: int | None) -> dict[SeqId, list[Event]]:
    """What three long prompts, and then the first once more, are answered."""
    ticks = count()
    scheduler = Scheduler(
        KVCache(num_blocks, BLOCK_SIZE, window=window),
        POLICIES[2],
        max_num_batched_tokens=BUDGET,
        max_num_seqs=4,
    )
    engine = Engine(scheduler, runner, lambda: float(next(ticks)), max_model_len=MAX_LEN)
    greedy = SamplingParams(temperature=0, max_tokens=100, logprobs=1)
    for prompt in PROMPTS:
        engine.add(prompt, greedy)
    events = finish(engine)
    engine.add(PROMPTS[0], greedy)
    events += finish(engine)
    found: dict[SeqId, list[Event]] = {}
    for event in events:
        found.setdefault(event.seq_id, []).append(event)
    return found


def test_the_widest_window_is_what_the_cache_keeps() -> None:
    assert ARCH.cache_window == max(WINDOWS)
    assert ARCHS["mixed windows"].cache_window is None
    assert PLAIN.cache_window is None


def test_few_blocks_give_the_same_answers(runner: Runner) -> None:
    """All of three texts takes 3 times 12 blocks; here one of them may have 5 at once."""
    window = ARCH.cache_window
    few = KVCache(0, BLOCK_SIZE, window=window).most_blocks(MAX_LEN, BUDGET)
    assert few == 5
    wanted = answers(runner, NUM_BLOCKS, None)
    for num_blocks in (few, 2 * few, 3 * few):
        got = answers(runner, num_blocks, window)
        for seq_id, events in wanted.items():
            assert [e.token for e in got[seq_id]] == [e.token for e in events]
            for event, other in zip(got[seq_id], events, strict=True):
                assert event.logprobs is not None
                assert other.logprobs is not None
                is_exact = isinstance(runner, CpuRunner)
                error = abs(event.logprobs.logprob - other.logprobs.logprob)
                assert error <= (0.0 if is_exact else 1e-4)
