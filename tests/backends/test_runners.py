"""Runners of all backends: what a step computes, samples, copies and reports, whatever it mixes.

Numbers are held against the plain computation of tests/tiny.py. The cuda backend takes part where
torch is (``make test-gpu``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import StepOutput
from ridgeline.model.files.tensors import Checkpoint
from tests.backends.runners import (
    EXACT,
    FORMATS,
    GREEDY,
    MAX_LEN,
    MODELS,
    PROMPT_TOO,
    TOKENS,
    VOCAB,
    Make,
    Runner,
    assert_near,
    error,
    log_softmax,
    make,
    new_runner,
    pool,
    reference,
    step,
    work,
)
from tests.tiny import (
    ARCHS,
    BY_LAYER,
    LATENT,
    PLAIN,
    changed,
    checkpoint,
    plain_logits,
    random_arrays,
)

__all__ = ["make"]  # a fixture

BLOCK_SIZES = {"reference": (3, 4, 16)}  # of others multiples of 16


@pytest.fixture(params=EXACT)
def kind(request: pytest.FixtureRequest) -> str:
    """A backend, by its format that rounds least."""
    return str(request.param)


@pytest.fixture
def new(make: Make, kind: str) -> Callable[..., Runner]:
    """Return the function that makes runners of this backend; a block has 16 tokens."""
    return partial(make, kind=kind)


@cache
def expected(name: str, tokens: tuple[int, ...], max_len: int = MAX_LEN) -> NDArray[np.float64]:
    """Logprobs after each token, the plain way."""
    arch = MODELS[name]
    return log_softmax(plain_logits(arch, random_arrays(arch), tokens, max_len))


# --- the right numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_prompt(new: Callable[..., Runner], name: str) -> None:
    tokens = TOKENS[:23]
    output = new(name).execute(step(work(tokens, (9, 3), params=PROMPT_TOO)))
    wanted = expected(name, tokens)
    assert len(output.prompt_logprobs[0]) == len(tokens) - 1
    for position, entry in enumerate(output.prompt_logprobs[0]):
        assert entry.token == tokens[position + 1]
        assert entry.rank == 1 + sum(logprob > entry.logprob for _, logprob in entry.top)
        assert_near(entry, wanted[position])
    assert_near(output.logprobs[0][0], wanted[-1])
    assert output.tokens == ((int(wanted[-1].argmax()),),)
    assert not output.errors


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_references(new: Callable[..., Runner], kind: str, name: str) -> None:
    """A long prompt (split by tokens), some rows (mixed), then one to three (by outputs)."""
    runner, wanted = new(name), reference(checkpoint(MODELS[name])).prompt_logits(TOKENS)
    parts = [runner.prompt_logits(TOKENS[:68])]
    for start, end in ((68, 80), (80, 83), (83, 85), (85, 86), (86, MAX_LEN)):
        parts.append(runner.prompt_logits(TOKENS[start:end], start))
    got = np.concatenate(parts)
    assert error(got, wanted) < FORMATS[kind].error
    per_row = np.abs(got - wanted).max(axis=1) / np.abs(wanted).max(axis=1)
    assert per_row.max() < 1e-4


@pytest.mark.parametrize("name", ["long rope", "scaled rope"])
def test_the_engines_length_chooses_the_rope(new: Callable[..., Runner], name: str) -> None:
    tokens = TOKENS[:20]
    for max_len in (32, 33):
        output = new(name, max_model_len=max_len).execute(step(work(tokens, (0, 1))))
        assert_near(output.logprobs[0][0], expected(name, tokens, max_len)[-1])
    differ = np.abs(expected(name, tokens, 32) - expected(name, tokens, 33)).max() > 0.01
    assert differ == (name == "long rope")


Cut = tuple[tuple[int, ...], list[int]]


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[Cut], list[int], int]:
    """Which size of blocks, sequences with their cuts into chunks, an order of blocks, a seed."""
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        first, length = draw(st.integers(0, 20)), draw(st.integers(1, 26))
        cuts = draw(st.sets(st.integers(1, length - 1))) if length > 1 else set()
        sequences.append((TOKENS[first : first + length], [0, *sorted(cuts), length]))
    blocks = draw(st.permutations(range(40)))
    return draw(st.integers(0, 2)), sequences, blocks, draw(st.integers(0, 1 << 16))


@pytest.mark.parametrize(
    "name", ["plain", "window", "mixed windows", "partial rope", "qk norm", *BY_LAYER, *LATENT]
)
@pytest.mark.parametrize("of", EXACT)
@given(plan=plans())
@settings(max_examples=25, deadline=None)
def test_any_chunks_in_any_company_from_any_blocks(
    of: str, name: str, plan: tuple[int, list[Cut], list[int], int]
) -> None:
    size, sequences, blocks, seed = plan
    block_size = BLOCK_SIZES.get(of, (16, 32, 48))[size]
    rng, runner = np.random.default_rng(seed), made(name, of, block_size)
    left = {}
    for index, (tokens, cuts) in enumerate(sequences):
        num = -(-len(tokens) // block_size)
        table, blocks = tuple(blocks[:num]), blocks[num:]
        number = next(_NUMBERS)
        left[index] = [work(tokens, table, start=a, end=b, index=number) for a, b in pairwise(cuts)]
    while left:
        chosen = [i for i in left if rng.random() < 0.7] or list(left)
        order = [int(i) for i in rng.permutation(chosen)]
        items = [left[i].pop(0) for i in order]
        left = {i: chunks for i, chunks in left.items() if chunks}
        output = runner.execute(step(*items))
        for place, (i, item) in enumerate(zip(order, items, strict=True)):
            tokens = sequences[i][0]
            if item.start + len(item.tokens) < len(tokens):
                assert output.tokens[place] == ()
                assert place not in output.logprobs
            else:
                assert_near(output.logprobs[place][0], expected(name, tokens)[-1])


_NUMBERS = count(1000)  # of sequences: no two of a runner have the same


@cache
def made(name: str, kind: str, block_size: int) -> Runner:
    """One runner for many examples: what others left in its cache must not matter."""
    return new_runner(checkpoint(MODELS[name]), kind, block_size=block_size, num_blocks=40)


def test_a_prompt_longer_than_every_tile(new: Callable[..., Runner]) -> None:
    """The reference attends 256 queries at a time; logits of prompts come 256 at a time, too."""
    arch = changed(PLAIN, windows=(None, 100))
    tokens = tuple(int(token) for token in np.random.default_rng(1).integers(0, VOCAB, 600))
    runner = new(checkpoint(arch), num_blocks=41, max_model_len=640, max_num_batched_tokens=640)
    plain = partial(plain_logits, arch, random_arrays(arch), max_model_len=640)
    wanted = log_softmax(plain(tokens))
    items = [
        work(tokens, tuple(range(38)), params=PROMPT_TOO),
        work(tokens[:20], (39, 40)),
    ]
    output = runner.execute(step(*items))
    assert len(output.prompt_logprobs[0]) == 599
    for position, entry in enumerate(output.prompt_logprobs[0]):
        assert_near(entry, wanted[position])
    assert_near(output.logprobs[0][0], wanted[-1])
    assert_near(output.logprobs[1][0], wanted[19])
    # Decoding with 600 tokens behind, beside a sequence with 20.
    pair = [
        work((*tokens, 3), tuple(range(38)), start=600),
        work((*tokens[:20], 3), (39, 40), start=20),
    ]
    far, near = runner.execute(step(*pair)).logprobs.values()
    assert_near(far[0], log_softmax(plain((*tokens, 3))[-1]))
    assert_near(near[0], log_softmax(plain((*tokens[:20], 3))[-1]))


@pytest.mark.parametrize("end", [2, 5, 9])
def test_a_step_in_the_middle_of_prompts_samples_nothing(
    new: Callable[..., Runner], end: int
) -> None:
    output = new().execute(step(work(TOKENS[:20], (0, 1), end=end)))
    assert output == StepOutput(((),), {}, {}, {})


# --- the cache ---------------------------------------------------------------------------------


def test_copied_blocks_part_ways(new: Callable[..., Runner]) -> None:
    runner, prompt = new(), TOKENS[:22]
    runner.execute(step(work(prompt, (0, 1))))
    left, right = (*prompt, 11), (*prompt, 22)
    forked = [work(left, (0, 1), start=22), work(right, (0, 5), start=22, index=1)]
    output = runner.execute(step(*forked, copies=((1, 5),)))
    assert_near(output.logprobs[0][0], expected("plain", left)[-1])
    assert_near(output.logprobs[1][0], expected("plain", right)[-1])
    # Each goes on from its own copy.
    left, right = (*left, 1), (*right, 1)
    output = runner.execute(
        step(work(right, (0, 5), start=23, index=1), work(left, (0, 1), start=23))
    )
    assert_near(output.logprobs[0][0], expected("plain", right)[-1])
    assert_near(output.logprobs[1][0], expected("plain", left)[-1])


@pytest.mark.parametrize("block_size", [16, 32])
def test_copies_read_every_source_before_they_write_a_target(
    new: Callable[..., Runner], block_size: int
) -> None:
    runner, size = new(block_size=block_size), block_size
    first, second = TOKENS[: size + 3], TOKENS[10 : size + 13]
    end = size + 2
    runner.execute(step(work(first, (0, 1), end=end), work(second, (2, 3), end=end)))
    chained = ((1, 3), (3, 6))
    items = work(first, (0, 3), start=end), work(second, (2, 6), start=end)
    output = runner.execute(step(*items, copies=chained))
    assert_near(output.logprobs[0][0], expected("plain", first)[-1])
    assert_near(output.logprobs[1][0], expected("plain", second)[-1])


def test_a_step_may_be_executed_again(new: Callable[..., Runner]) -> None:
    runner, sampled = new(), SamplingParams(temperature=1.0, logprobs=3, n=2)
    runner.execute(step(work(TOKENS[:22], (0, 1))))
    again = step(
        work((*TOKENS[:22], 3), (0, 4), start=22, params=sampled),
        work(TOKENS[20:31], (7, 8), params=sampled, seeds=(1, 2)),
        copies=((1, 4),),
    )
    assert runner.execute(again) == runner.execute(again)


# --- sampling in a step ------------------------------------------------------------------------


def test_the_quick_choice_is_the_exact_one(new: Callable[..., Runner]) -> None:
    """Without logprobs no row of logits is kept; the token is the same, and the plain one."""
    runner = new()
    for length in (1, 5, 17, 40):
        quick = work(TOKENS[:length], (0, 1, 2), params=GREEDY, index=length)
        exact = work(TOKENS[:length], (3, 4, 5), index=100 + length)
        output = runner.execute(step(quick, exact))
        assert output.tokens[0] == output.tokens[1]
        assert list(output.logprobs) == [1]
        assert output.tokens[0] == (int(expected("plain", TOKENS[:length])[-1].argmax()),)


def test_of_equal_logits_the_first_token_wins(new: Callable[..., Runner]) -> None:
    arrays = random_arrays(PLAIN) | {"head": np.zeros((VOCAB, 24), np.float32)}
    runner = new(checkpoint(PLAIN, arrays))
    assert runner.execute(step(work(TOKENS[:3], (0,), params=GREEDY))).tokens == ((0,),)


def test_each_seed_draws_for_itself_from_the_same_logits(new: Callable[..., Runner]) -> None:
    seeds = tuple(range(30))
    params = SamplingParams(temperature=2.0, logprobs=0, n=30)
    both = [
        work(TOKENS[:5], (0,), params=params, seeds=seeds),
        work(TOKENS[:9], (2,)),
    ]
    output = new().execute(step(*both))
    wanted = expected("plain", TOKENS[:5])[-1]
    assert len(set(output.tokens[0])) > 5
    for token, entry in zip(output.tokens[0], output.logprobs[0], strict=True):
        assert (entry.token, entry.top) == (token, ())
        assert entry.logprob == pytest.approx(wanted[token], abs=2e-4)
    (alone,) = new().execute(step(both[0]._replace(seeds=seeds[7:8]))).tokens
    assert alone == output.tokens[0][7:8]
    runner, item = new(), work(TOKENS[:5], (0,), start=3, params=params, seeds=seeds)
    runner.execute(step(work(TOKENS[:5], (0,), end=3, params=params)))
    assert runner.execute(step(item)).tokens[0] == output.tokens[0]  # the position counts
    assert len(output.tokens[1]) == 1


def test_penalties_use_the_history(new: Callable[..., Runner]) -> None:
    tokens = TOKENS[:12]
    plain = new().execute(step(work(tokens, (0,)))).tokens[0][0]
    params = SamplingParams(temperature=0, presence_penalty=2.0, repetition_penalty=100.0)
    seen = (*tokens[:-1], plain, tokens[-1])  # a history that ends in a different place
    item = work(tokens, (0,), params=params)._replace(history=seen)
    assert new().execute(step(item)).tokens[0][0] not in seen


# --- vectors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["last", "mean", "cls"])
@pytest.mark.parametrize("name", ["plain", "beside", "learnt positions"])
def test_vectors_are_the_references(new: Callable[..., Runner], name: str, how: str) -> None:
    for size in (5, 12, 40):
        text = step(pool(TOKENS[:size], 0, how))
        (wanted,) = reference(checkpoint(ARCHS[name])).execute(text).vectors.values()
        (found,) = new(name).execute(text).vectors.values()
        assert error(np.array(found), np.array(wanted)) < 1e-5


def test_a_text_with_damaged_keys_has_no_vector(new: Callable[..., Runner]) -> None:
    arrays = random_arrays(PLAIN)
    arrays["embed"][7] = np.inf
    runner = new(checkpoint(PLAIN, arrays))
    output = runner.execute(step(pool((3, 7, 5), 0, "mean"), pool((3, 4, 5), 8, "mean")))
    assert output.errors.keys() == {0}
    assert output.vectors.keys() == {1}


# --- damage ------------------------------------------------------------------------------------

POISON = 13
HEALTHY = tuple(token for token in TOKENS if token != POISON)


def sick(**arrays: Any) -> Checkpoint:
    """A model in which every value of one token's embedding is not a number."""
    found = random_arrays(PLAIN)
    found["embed"][POISON] = np.nan
    return checkpoint(PLAIN, found | arrays)


@pytest.fixture(params=FORMATS)
def poisoned(make: Make, request: pytest.FixtureRequest) -> Runner:
    return make(sick(), request.param)


@pytest.mark.parametrize("where", [0, 3, 8])
def test_a_damaged_token_fails_its_own_request_only(poisoned: Runner, where: int) -> None:
    victim = list(HEALTHY[:9])
    others = [
        work(HEALTHY[10:19], (0,)),  # as long: the reference computes both in one array
        work(HEALTHY[:21], (1, 2), params=PROMPT_TOO),
        work(HEALTHY[4:6], (3,)),
    ]
    before = poisoned.execute(step(others[0], work(tuple(victim), (5,)), *others[1:]))
    assert not before.errors
    victim[where] = POISON
    after = poisoned.execute(step(others[0], work(tuple(victim), (5,)), *others[1:]))
    assert set(after.errors) == {1}
    assert "finite" in after.errors[1]
    for i in (0, 2, 3):
        assert after.tokens[i] == before.tokens[i]
        assert after.logprobs[i] == before.logprobs[i]  # to the last bit
    assert after.prompt_logprobs[2] == before.prompt_logprobs[2]
    # Its block goes to other requests, which read it whole but fill it only partly.
    again = step(work(HEALTHY[10:19], (5,)))
    reused, elsewhere = poisoned.execute(again), poisoned.execute(step(work(HEALTHY[10:19], (6,))))
    assert not reused.errors
    assert reused.logprobs == elsewhere.logprobs
    short = poisoned.execute(step(work(HEALTHY[:5], (5,), index=9)))
    assert short == poisoned.execute(step(work(HEALTHY[:5], (7,))))


def test_a_damaged_decode_fails_alone(poisoned: Runner) -> None:
    """Of few rows, which the threads of the cpu backend share: its bits are those of one alone."""
    well, ill = work(HEALTHY[:1], (0,)), work((POISON,), (1,))
    beside = [] if isinstance(poisoned, CpuRunner) else [work(HEALTHY[1:2], (1,))]
    output = poisoned.execute(step(well, ill))
    assert set(output.errors) == {1}
    assert output.logprobs[0] == poisoned.execute(step(well, *beside)).logprobs[0]


def test_damage_in_the_middle_of_a_prompt_is_not_forgotten(poisoned: Runner) -> None:
    tokens = (HEALTHY[0], POISON, *HEALTHY[1:9])
    for end in (3, 4, 6):
        assert set(poisoned.execute(step(work(tokens, (0,), end=end))).errors) == {0}
    assert not poisoned.execute(step(work(HEALTHY[:9], (0,), end=6))).errors


def test_damaged_logits_are_an_error_of_their_row(new: Callable[..., Runner]) -> None:
    arrays = random_arrays(PLAIN)
    arrays["head"][5, 0] = np.inf
    output = new(
        checkpoint(PLAIN, arrays)
    ).execute(
        step(
            work(TOKENS[:5], (0,)),
            work(TOKENS[:9], (2,), end=4),  # asks for no logits yet
            work(TOKENS[:9], (5,), end=4, params=PROMPT_TOO),
        )
    )
    assert set(output.errors) == {0, 2}
    assert output.tokens == ((), (), ())
