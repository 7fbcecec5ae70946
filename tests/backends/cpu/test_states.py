"""States on the CPU backend: the same bits however a text is served, and steps that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends import cpu
from ridgeline.backends.cpu.layout.packed_sizes import packed_bytes
from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.interface import Setup
from ridgeline.backends.reference.runner import ReferenceRunner
from ridgeline.core.scheduling.policies import Policy, SplitFuse, Static
from ridgeline.core.step import Step
from ridgeline.serve.engine.async_engine import BisectingRunner
from tests.backends.runners import TOKENS, step, work
from tests.backends.test_memory import all_bytes
from tests.backends.test_recurrent import KINDS, REQUESTS, Lone, answers, assert_same, ways
from tests.kept_kernels import KERNELS
from tests.tiny import RECURRENT, checkpoint, new_setup

BLOCK_SIZE, MAX_LEN = 16, 64
NAMES = ["short convolution", "delta rule", "state space"]
Make = Callable[..., CpuRunner]


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    """Return a function that makes runners; they are closed in the end."""
    made: list[CpuRunner] = []

    def build(name: str, dtype: str = "f32", **options: Any) -> CpuRunner:
        base = {"threads": 2, "num_states": 20, "max_num_batched_tokens": 256} | options
        base |= {"num_blocks": 40, "block_size": BLOCK_SIZE, "max_model_len": MAX_LEN}
        setup = new_setup(dtype=dtype, **base)
        made.append(CpuRunner(checkpoint(RECURRENT[name]), setup, kernel_cache=KERNELS))
        return made[-1]

    yield build
    for runner in made:
        runner.close()


def reference(name: str) -> NDArray[np.float32]:
    model = checkpoint(RECURRENT[name])
    runner = ReferenceRunner(model, new_setup(num_blocks=8, block_size=16, max_model_len=MAX_LEN))
    return runner.prompt_logits(TOKENS[:50])


@pytest.mark.parametrize(
    "name",
    [
        "short convolution with biases",
        "convolution of one token",
        "delta rule",
        "state space",
        "state space, normed first",
        "state space, plain",
        "states alone",
        "gated attention",
        "beside attention",
        "shared expert",
        "heads by turns",
    ],
)
def test_logits_are_the_references(make: Make, name: str) -> None:
    wanted = reference(name)
    got = make(name).prompt_logits(TOKENS[:50])
    assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("name", NAMES)
def test_logits_in_bytes(make: Make, name: str) -> None:
    """By the middle row: a random model's memories keep what rounding did to one of them."""
    wanted = reference(name)
    rows = ((make(name, "int8").prompt_logits(TOKENS[:50]) - wanted) ** 2).mean(axis=1)
    assert np.sqrt(np.median(rows) / (wanted**2).mean()) < 0.12


@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("name", [*NAMES, "gated attention", "beside attention"])
def test_no_bit_depends_on_cuts_and_threads(make: Make, name: str, dtype: str) -> None:
    """In pieces that are split by outputs, mixed and by tokens."""
    wanted = None
    for threads in (1, 3):
        runner = make(name, dtype, threads=threads)
        for sizes in ([50], [1, 6, 7, 16, 17, 3], [1] * 50):
            found, begin = [], 0
            for size in sizes:
                found.append(runner.prompt_logits(TOKENS[begin : begin + size], begin))
                begin += size
            logits = np.concatenate(found)
            wanted = logits if wanted is None else wanted
            assert logits.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_answers_however_they_are_served(make: Make, name: str) -> None:
    runner, requests = make(name), [(TOKENS[:40], {"temperature": 0}), *REQUESTS]
    requests.append(((*TOKENS[:35], *TOKENS[50:55]), {"temperature": 0}))
    options = {"block_size": BLOCK_SIZE}
    alone = [
        list(
            answers(runner, [one], num_blocks=40, seats=3, checkpoints=0, **options)[0][0].values()
        )
        for one in requests
    ]
    num_cached = num_copies = num_preempted = 0
    ways: list[tuple[Policy, int, int, int, int]] = [
        (SplitFuse(), 40, 64, 8, 12),
        (SplitFuse(), 7, 9, 5, 4),
        (SplitFuse(), 8, 30, 8, 1),
        (Static(), 40, 64, 3, 3),
    ]
    for policy, num_blocks, budget, seats, checkpoints in ways:
        together, checked = answers(
            runner,
            [*requests, *requests],
            policy=policy,
            num_blocks=num_blocks,
            budget=budget,
            seats=seats,
            checkpoints=checkpoints,
            **options,
        )
        assert [list(of_one.values()) for of_one in together] == [*alone, *alone]
        num_cached += checked.num_cached
        num_copies += checked.num_copies
        num_preempted += checked.num_preempted
    assert num_cached > 50
    assert num_copies > 20
    assert num_preempted > 3


@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("name", KINDS)
def test_drafts_change_no_bit_of_an_answer(make: Make, name: str, dtype: str) -> None:
    """Nor of its log-probabilities: alone, batched, in chunks, preempted, from checkpoints."""
    lone = Lone(make(name, dtype), BLOCK_SIZE, 3)
    num_drafts = num_again = num_cached = num_preempted = num_entries = 0
    for way in ways(7):
        checked = lone.with_drafts(0.8, **way)
        for one, other in lone.entries(checked):
            assert one == other
            num_entries += 1
        num_drafts += checked.num_drafts
        num_again += checked.num_again
        num_cached += checked.num_cached
        num_preempted += checked.num_preempted
    assert num_entries > 1000
    assert num_drafts > 500
    assert num_again > 25
    assert num_cached > 50
    assert num_preempted > 3


@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("name", KINDS)
def test_the_state_before_drafts_is_kept_bit_for_bit(make: Make, name: str, dtype: str) -> None:
    tokens, table = TOKENS[:30], (0, 1)
    runner, plain = make(name, dtype), make(name, dtype)
    item = work(tokens, table, end=19)._replace(state=1)
    for one in (runner, plain):
        one.execute(step(item))
    more = (*tokens[19:22], *TOKENS[40:45])  # the last five are guesses
    drafted = item._replace(start=19, tokens=more, state=1, seeds=(5,), drafts=5, save=((3, 2),))
    runner.execute(step(drafted))
    plain.execute(step(item._replace(start=19, tokens=more[:3])))
    assert runner._slots.states[2].tobytes() == plain._slots.states[1].tobytes()
    assert runner._slots.states[1].tobytes() != plain._slots.states[1].tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_resumes(make: Make, name: str) -> None:
    tokens, table = TOKENS[:30], (0, 1)
    runner = make(name)
    alone = runner.execute(step(work(tokens, table)._replace(state=0))).logprobs[0][0]
    first = work(tokens, table, end=20)._replace(state=1, save=((4, 2), (18, 3)))
    runner.execute(step(first))
    runner.execute(step(work(TOKENS[20:25], (5, 6))._replace(state=1)))  # it takes the slot
    later = work(tokens, table, start=18)._replace(state=0)
    assert_same(runner.execute(Step((later,), (), (), (), (), ((3, 0),))).logprobs[0][0], alone)
    earlier = work(tokens, table, start=4)._replace(state=0)
    swapped = Step((earlier,), (), (), (), (), ((2, 0), (0, 2)))
    assert_same(runner.execute(swapped).logprobs[0][0], alone)


@pytest.mark.parametrize("when", ["before the layers", "behind them"])
def test_a_step_that_failed_is_answered_by_halves(
    make: Make, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states were written once, and are not written twice."""
    items = [work(TOKENS[i : 3 * i + 12], (i,))._replace(state=i, seq_id=(i, 0)) for i in range(3)]
    begun = [item._replace(tokens=item.tokens[:7], seeds=()) for item in items]
    rest = [item._replace(start=7, tokens=item.tokens[7:]) for item in items]
    plain, runner = make("delta rule"), make("delta rule")
    for one in (plain, runner):
        one.execute(step(*begun))
    wanted = plain.execute(step(*rest))

    calls: list[int] = []
    whole = CpuRunner._results if when == "behind them" else CpuRunner._prepare

    def failing(self: CpuRunner, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1 and when == "before the layers":
            raise MemoryError
        found = whole(self, *args)
        if len(calls) == 1:
            raise MemoryError
        return found

    monkeypatch.setattr(CpuRunner, whole.__name__, failing)
    errors: list[Exception] = []
    got = BisectingRunner(runner, errors.append).execute(step(*rest))
    assert (got.tokens, got.errors, errors) == (wanted.tokens, {}, [])
    assert got.logprobs == wanted.logprobs
    assert len(calls) > 2
    assert runner._slots.states.tobytes() == plain._slots.states.tobytes()


def test_a_damaged_row_fails_alone(make: Make) -> None:
    """What is not finite stays in its own state."""
    runner = make("delta rule")
    runner.weights.embedding[TOKENS[3]] = np.nan
    clean = tuple(token for token in TOKENS if token != TOKENS[3])[:20]
    items = [work(clean, (0, 1))._replace(state=0), work(TOKENS[:9], (2,))._replace(state=1)]
    output = runner.execute(step(*items))
    assert [*output.errors] == [1]
    again = make("delta rule").execute(step(items[0]))
    assert_same(output.logprobs[0][0], again.logprobs[0][0])


@pytest.mark.parametrize("name", ["short convolution", "delta rule", "states alone"])
def test_what_the_backend_says_and_takes(make: Make, name: str) -> None:
    setup = cpu.check(Setup("int8", "f32", BLOCK_SIZE, 2, MAX_LEN, 4, 256), RECURRENT[name])
    found = cpu.footprint(RECURRENT[name], setup)
    runner = make(name, "int8", num_states=5)
    memory = runner.memory()
    assert memory["recurrent_states"].num_bytes == 5 * found.state_bytes_per_seq
    assert memory["kv_cache"].num_bytes == 40 * BLOCK_SIZE * found.kv_bytes_per_token
    memory.pop("kernels")
    assert sum(part.num_bytes for part in memory.values()) == all_bytes(runner)
    parts = packed_bytes(checkpoint(RECURRENT[name]), "int8", "f32")
    packed = sum(data.nbytes for _, data in runner.weights.arrays.values())
    assert sum(parts.values()) == packed
