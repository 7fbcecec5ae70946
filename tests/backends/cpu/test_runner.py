"""The CPU runner on tiny models: formats that round, and the same bits however work is split.

What it has in common with runners of other backends is asked in tests/backends/test_runners.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ridgeline.backends.cpu.batch import Batch, arrange
from ridgeline.core.step import Step
from tests.backends.runners import (
    ALL,
    CPU_FORMATS,
    GREEDY,
    MODELS,
    TOKENS,
    VOCAB,
    Make,
    error,
    forget,
    make,
    pool,
    reference,
    step,
    work,
)
from tests.tiny import ARCHS, LATENT, PLAIN, checkpoint, random_arrays

__all__ = ["make"]  # a fixture
ROUNDED = ["all biases", "qk norm", "mixed windows", "partial rope", "long rope", "one kv head"]
ROUNDED += [
    "norms behind",
    "norms around",
    "beside",
    "beside, own",
    "two ropes",
    "learnt positions",
    "experts",
    "many experts",
    "sinks",
    "kinds",
    "shared keys and values",
    "keys and values of layer 0",
    "latent",
]


# --- formats that round ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "int8") for name in ROUNDED]
    + [(name, "int8-int4 cache") for name in [*ROUNDED[:4], "shared keys and values"]],
)
def test_logits_are_near_the_references(make: Make, name: str, kind: str) -> None:
    """A long prompt (split by tokens), some rows (mixed), then one to three (by outputs)."""
    runner, wanted = make(name, kind), reference(checkpoint(MODELS[name])).prompt_logits(TOKENS)
    bounds = (0, 68, 80, 83, 85, 86, len(TOKENS))
    parts = [runner.prompt_logits(TOKENS[a:b], a) for a, b in pairwise(bounds)]
    assert error(np.concatenate(parts), wanted) < CPU_FORMATS[kind].error


@pytest.mark.parametrize(
    ("name", "limit"), [("experts beside", 0.08), ("latent of compressed queries", 0.12)]
)
def test_experts_in_bytes(make: Make, name: str, limit: float) -> None:
    """By the middle row: rounding sends a row to another expert now and then."""
    wanted = reference(checkpoint(MODELS[name])).prompt_logits(TOKENS)
    rows = ((make(name).prompt_logits(TOKENS) - wanted) ** 2).mean(axis=1)
    assert np.sqrt(np.median(rows) / (wanted**2).mean()) < limit


@pytest.mark.parametrize("name", ["plain", "partial rope"])
def test_a_cache_of_half_floats(make: Make, name: str) -> None:
    kind = "f32, f16 cache"
    wanted = reference(checkpoint(ARCHS[name])).prompt_logits(TOKENS)
    assert error(make(name, kind).prompt_logits(TOKENS), wanted) < CPU_FORMATS[kind].error


@pytest.mark.parametrize("how", ["last", "mean", "cls"])
@pytest.mark.parametrize("name", ["plain", "beside", "learnt positions"])
def test_vectors_are_near_the_references(make: Make, name: str, how: str) -> None:
    for size in (5, 12, 40):
        text = step(pool(TOKENS[:size], 0, how))
        (wanted,) = reference(checkpoint(ARCHS[name])).execute(text).vectors.values()
        (found,) = make(name, "int8").execute(text).vectors.values()
        assert error(np.array(found), np.array(wanted)) < 0.2


def test_of_equal_logits_the_first_token_wins(make: Make) -> None:
    """Whichever thread found it."""
    model = checkpoint(PLAIN, random_arrays(PLAIN) | {"head": np.zeros((VOCAB, 24), np.float32)})
    for threads in (1, 2, 3):
        runner = make(model, threads=threads)
        greedy = work(TOKENS[:3], (0,), params=GREEDY)
        assert runner.execute(step(greedy)).tokens == ((0,),)


def test_a_short_text_touches_its_own_blocks_only(make: Make) -> None:
    """Were layers apart, a first token would wait for a huge page from the system for each."""
    runner = make("plain", num_blocks=64)
    runner.execute(step(work(TOKENS[:20], (3, 5))))
    assert np.flatnonzero(runner.cache.reshape(64, -1).any(axis=1)).tolist() == [3, 5]


# --- the same numbers --------------------------------------------------------------------------


KINDS = ["f32", "bf16", "int8", "int8-row", "int4"]
OTHERS = ["norms behind", "norms around", "beside", "two ropes", "learnt positions", "experts"]
OTHERS += ["many experts", "experts", "kinds", "shared keys and values", "experts beside"]
OTHERS += [*LATENT, "latent"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mixed windows", kind) for kind in KINDS]
    + [(name, KINDS[2 + i % 2]) for i, name in enumerate(OTHERS)],
)
def test_a_text_in_pieces(make: Make, name: str, kind: str) -> None:
    runner = make(name, kind, threads=2)
    whole = runner.prompt_logits(TOKENS)
    for sizes in ([1] * 20, [3, 4, 1, 2, 60], [70, 5], [16, 16, 33], [66, 2, 11], [7, 17, 15, 6]):
        forget(runner)
        start = 0
        for size in sizes:
            part = runner.prompt_logits(TOKENS[start : start + size], start)
            assert (part == whole[start : start + size]).all()
            start += size


def crowd() -> Step:
    """All kinds of work: long and short prompts, decodes, with and without samples."""
    return step(
        work(TOKENS[:70], (0, 1, 2, 3, 4)),
        work(TOKENS[5:45], (5, 6, 7), end=30),
        work(TOKENS[20:23], (8,), params=GREEDY),
        work(TOKENS[40:41], (9,)),
        work(TOKENS[30:66], (10, 11, 12), params=replace(ALL, temperature=1.0, n=3), seeds=(1, 2)),
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("plain", kind) for kind in KINDS[:-1]]
    + [(name, KINDS[3 - i % 2]) for i, name in enumerate(OTHERS)],
)
def test_any_number_of_threads(make: Make, name: str, kind: str) -> None:
    few = step(work(TOKENS[:1], (13,)), work(TOKENS[3:5], (14,)))
    some = step(work(TOKENS[2:10], (13,)), work(TOKENS[7:8], (14,)), work(TOKENS[:5], (15,)))
    wanted = None
    for threads in (1, 2, 3, 4):
        runner = make(name, kind, threads=threads)
        got = [*map(runner.execute, (crowd(), few, some)), runner.prompt_logits(TOKENS).tobytes()]
        wanted = wanted or got
        assert got == wanted
        runner.close()


def test_who_is_done_takes_rows_of_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that owns no rows at all does some of the other's, and nothing changes."""
    runner = make(threads=2)
    wanted = runner.prompt_logits(TOKENS)

    def to_the_first(*args: Any, **named: Any) -> Batch:
        batch = arrange(*args, **named)
        end = len(batch.blocks) - 1
        return replace(batch, block_bounds=[0, end, end], output_begins=[0, end])

    monkeypatch.setattr("ridgeline.backends.cpu.runner.arrange", to_the_first)
    counters = runner.profile()
    for _ in range(20):
        assert np.array_equal(runner.prompt_logits(TOKENS), wanted)
    assert counters.take()["linears"][1] > 0


def test_a_step_may_be_executed_again(make: Make) -> None:
    runner = make(threads=2)
    once = runner.execute(crowd())
    assert runner.execute(crowd()) == once
    alone = [runner.execute(step(item)) for item in crowd().work]
    for i, output in enumerate(alone):
        assert output.tokens[0] == once.tokens[i]
        assert output.logprobs.get(0) == once.logprobs.get(i)


@pytest.mark.parametrize("kind", ["int8", "f32, f16 cache"])
def test_any_size_of_blocks(make: Make, kind: str) -> None:
    wanted = None
    for block_size in (16, 32, 48):
        runner = make("window", kind, block_size=block_size)
        tables = [(5, 2, 9, 1, 7, 3), (0, 8, 4)]
        parts = [work(TOKENS[:50], tables[0], end=41), work(TOKENS[9:40], tables[1])]
        rest = work(TOKENS[:50], tables[0], start=41)
        got = runner.execute(step(*parts)), runner.execute(step(rest))
        wanted = wanted or got
        assert got == wanted


@pytest.mark.parametrize("how", ["last", "mean", "cls"])
@pytest.mark.parametrize("kind", ["f32", "int8", "int8-row", "bf16"])
def test_a_vector_depends_on_its_text_alone(make: Make, kind: str, how: str) -> None:
    """Bit for bit: beside anything, on any number of threads; the last state also in pieces."""
    (wanted,) = make("plain", kind).execute(step(pool(TOKENS[:37], 0, how))).vectors.values()
    others = crowd().work
    for threads in (1, 2, 3):
        runner = make("plain", kind, threads=threads)
        for before in (0, 1, 2, 5):
            items = (*others[:before], pool(TOKENS[:37], 16, how), *others[before:])
            assert runner.execute(step(*items)).vectors == {before: wanted}
        if how == "last":
            for cut in (1, 3, 16, 30, 36):
                forget(runner)
                runner.execute(step(work(TOKENS[:37], tuple(range(16, 22)), end=cut)))
                rest = pool(TOKENS[:37], 16, how, start=cut)
                assert runner.execute(step(*others[:2], rest)).vectors == {2: wanted}
        runner.close()
