"""The reference runner against the plain computation of tests/tiny.py, whatever a step mixes."""

from __future__ import annotations

import math
import tracemalloc
from functools import cache
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ridgeline.backends.reference.runner import ReferenceRunner
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, StepOutput, TokenLogprobs, Work
from ridgeline.model.cost import costs
from ridgeline.model.shape.model import ModelArch
from tests.tiny import (
    ARCHS,
    BY_LAYER,
    LATENT,
    PLAIN,
    Arrays,
    changed,
    checkpoint,
    new_setup,
    plain_logits,
    random_arrays,
)

NUM_BLOCKS, MAX_LEN = 40, 64
VOCAB = PLAIN.vocab_size
# The whole distribution comes back, so that a wrong logit cannot hide.
ALL = SamplingParams(temperature=0, logprobs=VOCAB)
PROMPT_TOO = SamplingParams(temperature=0, logprobs=VOCAB, prompt_logprobs=VOCAB)
TOLERANCE = 2e-4
KINDS = ARCHS | BY_LAYER | LATENT
TOKENS = tuple(int(token) for token in np.random.default_rng(5).integers(0, VOCAB, MAX_LEN))


def make(arch: ModelArch, *, block_size: int = 4, arrays: Arrays | None = None) -> ReferenceRunner:
    return ReferenceRunner(
        checkpoint(arch, arrays),
        new_setup(num_blocks=NUM_BLOCKS, block_size=block_size, max_model_len=MAX_LEN),
    )


def work(
    tokens: tuple[int, ...],
    table: tuple[int, ...],
    *,
    start: int = 0,
    end: int | None = None,
    params: SamplingParams = ALL,
    seeds: tuple[int, ...] = (7,),
    index: int = 0,
) -> Work:
    """Compute ``tokens[start:end]`` of a sequence; sample where that reaches its last token."""
    end = len(tokens) if end is None else end
    targets = tokens[start + 1 : end + 1] if params.prompt_logprobs is not None else ()
    wanted = seeds if end == len(tokens) else ()
    sampling = Sampling(params, len(tokens), ())
    history = tokens if params.penalises else ()
    return Work((index, 0), start, tokens[start:end], table, wanted, sampling, history, targets)


def step(*items: Work, copies: tuple[tuple[int, int], ...] = ()) -> Step:
    return Step(items, copies, (), (), ())


def distribution(entry: TokenLogprobs) -> NDArray[np.float64]:
    """Logprobs by token id."""
    top = dict(entry.top)
    return np.array([top[token] for token in range(len(top))])


@cache
def expected(name: str, tokens: tuple[int, ...], max_len: int = MAX_LEN) -> NDArray[np.float64]:
    """Logprobs after each token, the plain way."""
    arch = KINDS[name]
    logits = plain_logits(arch, random_arrays(arch), tokens, max_len)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def assert_near(entry: TokenLogprobs, wanted: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(distribution(entry), wanted, atol=TOLERANCE)


# --- the right numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_whole_prompt(name: str) -> None:
    tokens = TOKENS[:23]
    output = make(KINDS[name]).execute(step(work(tokens, (9, 3, 4, 0, 39, 7), params=PROMPT_TOO)))
    wanted = expected(name, tokens)
    for position, entry in enumerate(output.prompt_logprobs[0]):
        assert entry.token == tokens[position + 1]
        assert_near(entry, wanted[position])
    assert len(output.prompt_logprobs[0]) == len(tokens) - 1
    assert_near(output.logprobs[0][0], wanted[-1])
    assert output.tokens == ((int(wanted[-1].argmax()),),)
    assert not output.errors


@pytest.mark.parametrize("name", ["long rope", "scaled rope"])
def test_the_engines_length_chooses_the_rope(name: str) -> None:
    arch, tokens = ARCHS[name], TOKENS[:20]
    for max_len in (32, 33):
        runner = ReferenceRunner(
            checkpoint(arch), new_setup(num_blocks=5, block_size=4, max_model_len=max_len)
        )
        output = runner.execute(step(work(tokens, (0, 1, 2, 3, 4))))
        assert_near(output.logprobs[0][0], expected(name, tokens, max_len)[-1])
    differ = np.abs(expected(name, tokens, 32) - expected(name, tokens, 33)).max() > 0.01
    assert differ == (name == "long rope")


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, ...], list[int]]], list[int], int]:
    """Block size, sequences with their cuts into chunks, an order of blocks, a seed."""
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        first, length = draw(st.integers(0, 20)), draw(st.integers(1, 26))
        cuts = draw(st.sets(st.integers(1, length - 1))) if length > 1 else set()
        sequences.append((TOKENS[first : first + length], [0, *sorted(cuts), length]))
    blocks = draw(st.permutations(range(NUM_BLOCKS)))
    return draw(st.sampled_from([3, 4, 16])), sequences, blocks, draw(st.integers(0, 1 << 16))


@pytest.mark.parametrize(
    "name", ["plain", "window", "mixed windows", "partial rope", "qk norm", *BY_LAYER, *LATENT]
)
@given(plan=plans())
@settings(max_examples=25, deadline=None)
def test_any_chunks_in_any_company_from_any_blocks(
    name: str,
    plan: tuple[int, list[tuple[tuple[int, ...], list[int]]], list[int], int],
) -> None:
    block_size, sequences, blocks, seed = plan
    rng, runner = np.random.default_rng(seed), made(name, block_size)
    left = {}
    for index, (tokens, cuts) in enumerate(sequences):
        count = -(-len(tokens) // block_size)
        table, blocks = tuple(blocks[:count]), blocks[count:]
        left[index] = [work(tokens, table, start=a, end=b, index=index) for a, b in pairwise(cuts)]
    while left:
        chosen = [i for i in left if rng.random() < 0.7] or list(left)
        items = [left[i].pop(0) for i in rng.permutation(chosen)]
        left = {i: chunks for i, chunks in left.items() if chunks}
        output = runner.execute(step(*items))
        for i, item in enumerate(items):
            tokens = sequences[item.seq_id[0]][0]
            if item.start + len(item.tokens) < len(tokens):
                assert output.tokens[i] == ()
                assert i not in output.logprobs
            else:
                assert_near(output.logprobs[i][0], expected(name, tokens)[-1])


@cache
def made(name: str, block_size: int) -> ReferenceRunner:
    """One runner for many examples: what others left in its cache must not matter."""
    return make(KINDS[name], block_size=block_size)


def test_a_prompt_longer_than_every_tile() -> None:
    """Queries attend 256 at a time, and logits of prompt_logprobs come 256 at a time."""
    arch = changed(PLAIN, windows=(None, 100))
    tokens = tuple(int(token) for token in np.random.default_rng(1).integers(0, VOCAB, 600))
    runner = ReferenceRunner(
        checkpoint(arch), new_setup(num_blocks=41, block_size=16, max_model_len=640)
    )
    wanted = plain_logits(arch, random_arrays(arch), tokens, 640)
    wanted -= np.log(np.exp(wanted).sum(axis=1, keepdims=True))
    items = [
        work(tokens, tuple(range(38)), params=PROMPT_TOO),
        work(tokens[:20], (39, 40), index=1),
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
    assert_near(far[0], log_softmax(plain_logits(arch, random_arrays(arch), (*tokens, 3), 640)[-1]))
    assert_near(
        near[0], log_softmax(plain_logits(arch, random_arrays(arch), (*tokens[:20], 3), 640)[-1])
    )


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return logits - np.log(np.exp(logits).sum())


def test_a_step_in_the_middle_of_prompts_samples_nothing() -> None:
    output = make(PLAIN).execute(step(work(TOKENS[:9], (0, 1, 2), end=5)))
    assert output == StepOutput(((),), {}, {}, {})


def test_attention_holds_little_at_once() -> None:
    """Neither the longest context, nor blocks reserved ahead, weigh on every sequence."""
    context = 1 << 15
    runner = ReferenceRunner(
        checkpoint(PLAIN), new_setup(num_blocks=context // 16, block_size=16, max_model_len=context)
    )
    table = tuple(range(context // 16))
    decodes = [work((1,), table, index=i) for i in range(200)]
    many = step(*decodes, work((1,) * context, table, start=context - 1, index=200))
    prompt = step(work((1,) * context, table, start=context - 1024))
    few = step(*decodes)
    for one, most_bytes in [(few, 2 << 20), (many, 32 << 20), (prompt, 64 << 20)]:
        tracemalloc.start()
        output = runner.execute(one)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert not output.errors
        assert peak_bytes < most_bytes


# --- the cache ---------------------------------------------------------------------------------


def test_copied_blocks_part_ways() -> None:
    runner, prompt = make(PLAIN), TOKENS[:6]
    runner.execute(step(work(prompt, (0, 1))))
    left, right = (*prompt, 11), (*prompt, 22)
    forked = [work(left, (0, 1), start=6), work(right, (0, 5), start=6, index=1)]
    output = runner.execute(step(*forked, copies=((1, 5),)))
    assert_near(output.logprobs[0][0], expected("plain", left)[-1])
    assert_near(output.logprobs[1][0], expected("plain", right)[-1])
    # Each goes on from its own copy.
    left, right = (*left, 1), (*right, 1)
    output = runner.execute(
        step(work(right, (0, 5), start=7, index=1), work(left, (0, 1), start=7))
    )
    assert_near(output.logprobs[0][0], expected("plain", right)[-1])
    assert_near(output.logprobs[1][0], expected("plain", left)[-1])


def test_copies_read_every_source_before_they_write_a_target() -> None:
    runner, first, second = make(PLAIN), TOKENS[:7], TOKENS[10:17]
    runner.execute(step(work(first, (0, 1), end=6), work(second, (2, 3), end=6, index=1)))
    chained = ((1, 3), (3, 6))
    output = runner.execute(
        step(work(first, (0, 3), start=6), work(second, (2, 6), start=6, index=1), copies=chained)
    )
    assert_near(output.logprobs[0][0], expected("plain", first)[-1])
    assert_near(output.logprobs[1][0], expected("plain", second)[-1])


@pytest.mark.parametrize("name", ["plain", "one kv head", "as many kv heads", *BY_LAYER, *LATENT])
def test_the_cache_is_as_large_as_the_formula_says(name: str) -> None:
    arch = KINDS[name]
    runner = make(arch, block_size=3)
    wanted = NUM_BLOCKS * 3 * costs.kv_bytes_per_token(arch, 4)
    assert sum(part.nbytes for part in chain(*runner.cache.by_layer.values())) == wanted
    assert runner.cache.blocks.nbytes == wanted
    assert runner.memory()["kv_cache"].num_bytes == wanted


def test_a_step_writes_its_own_slots_only() -> None:
    runner = make(PLAIN)
    runner.cache.blocks[:] = 3.0
    runner.execute(step(work(TOKENS[:7], (8, 2), start=2), work(TOKENS[:1], (5,), index=1)))
    written = {(8, 2), (8, 3), (2, 0), (2, 1), (2, 2), (5, 0)}
    for block in range(NUM_BLOCKS):
        for offset in range(4):
            for array in chain(*runner.cache.by_layer.values()):
                untouched = bool((array[block, offset] == 3.0).all())
                assert untouched == ((block, offset) not in written)


def test_a_step_may_be_executed_again() -> None:
    runner, sampled = make(PLAIN), SamplingParams(temperature=1.0, logprobs=3, n=2)
    runner.execute(step(work(TOKENS[:6], (0, 1))))
    again = step(
        work((*TOKENS[:6], 3), (0, 4), start=6, params=sampled),
        work(TOKENS[20:31], (7, 8, 9), params=sampled, seeds=(1, 2), index=1),
        copies=((1, 4),),
    )
    assert runner.execute(again) == runner.execute(again)


# --- sampling in a step ------------------------------------------------------------------------


def test_each_seed_draws_for_itself_from_the_same_logits() -> None:
    seeds = tuple(range(30))
    params = SamplingParams(temperature=2.0, logprobs=0, n=30)
    both = [
        work(TOKENS[:5], (0, 1), params=params, seeds=seeds),
        work(TOKENS[:9], (2, 3, 4), index=1),
    ]
    output = make(PLAIN).execute(step(*both))
    wanted = expected("plain", TOKENS[:5])[-1]
    assert len(set(output.tokens[0])) > 5
    for token, entry in zip(output.tokens[0], output.logprobs[0], strict=True):
        assert (entry.token, entry.top) == (token, ())
        assert entry.logprob == pytest.approx(wanted[token], abs=TOLERANCE)
    (alone,) = make(PLAIN).execute(step(both[0]._replace(seeds=seeds[7:8]))).tokens
    assert alone == output.tokens[0][7:8]
    runner, item = make(PLAIN), work(TOKENS[:5], (0, 1), start=3, params=params, seeds=seeds)
    runner.execute(step(work(TOKENS[:5], (0, 1), end=3, params=params)))
    assert runner.execute(step(item)).tokens[0] == output.tokens[0]  # the position counts
    assert len(output.tokens[1]) == 1


def test_penalties_use_the_history() -> None:
    tokens = TOKENS[:12]
    plain = make(PLAIN).execute(step(work(tokens, (0, 1, 2)))).tokens[0][0]
    params = SamplingParams(temperature=0, presence_penalty=2.0, repetition_penalty=100.0)
    seen = (*tokens[:-1], plain, tokens[-1])  # a history that ends in a different place
    item = work(tokens, (0, 1, 2), params=params)._replace(history=seen)
    assert make(PLAIN).execute(step(item)).tokens[0][0] not in seen


# --- damage ------------------------------------------------------------------------------------

POISON, HEALTHY = 13, tuple(token for token in TOKENS[:40] if token != 13)


@pytest.fixture
def poisoned() -> ReferenceRunner:
    """A model in which every value of one token's embedding is not a number."""
    arrays = random_arrays(PLAIN)
    arrays["embed"][POISON] = np.nan
    return make(PLAIN, arrays=arrays)


@pytest.mark.parametrize("where", [0, 3, 8])
def test_a_damaged_token_fails_its_own_request_only(poisoned: ReferenceRunner, where: int) -> None:
    victim = [*HEALTHY[:9]]
    neighbours = [
        work(HEALTHY[10:19], (0, 1, 2), index=1),  # as long: attends in the same array
        work(HEALTHY[:21], (3, 4, 5, 6, 7, 8), params=PROMPT_TOO, index=2),
        work(HEALTHY[4:6], (9,), index=3),
    ]
    healthy = work(tuple(victim), (20, 21, 22))
    before = poisoned.execute(step(neighbours[0], healthy, *neighbours[1:]))
    assert not before.errors
    victim[where] = POISON
    sick = work(tuple(victim), (20, 21, 22))
    after = poisoned.execute(step(neighbours[0], sick, *neighbours[1:]))
    assert set(after.errors) == {1}
    assert "finite" in after.errors[1]
    for i in (0, 2, 3):
        assert after.tokens[i] == before.tokens[i]
        assert after.logprobs[i] == before.logprobs[i]  # to the last bit
    assert after.prompt_logprobs[2] == before.prompt_logprobs[2]
    # Its blocks go to another request, which reads them whole but fills them only partly.
    reuse = work(HEALTHY[:5], (22, 20))
    assert poisoned.execute(step(reuse)) == make(PLAIN).execute(step(reuse))


def test_damage_in_the_middle_of_a_prompt_is_not_forgotten(poisoned: ReferenceRunner) -> None:
    tokens = (HEALTHY[0], POISON, *HEALTHY[1:6])
    output = poisoned.execute(step(work(tokens, (0, 1), end=4)))
    assert set(output.errors) == {0}


def test_damaged_logits_are_an_error_of_their_row() -> None:
    arrays = random_arrays(PLAIN)
    arrays["head"][5, 0] = np.inf
    output = make(
        PLAIN, arrays=arrays
    ).execute(
        step(
            work(TOKENS[:5], (0, 1)),
            work(TOKENS[:9], (2, 3, 4), end=4, index=1),  # asks for no logits yet
            work(TOKENS[:9], (5, 6, 7), end=4, params=PROMPT_TOO, index=2),
        )
    )
    assert set(output.errors) == {0, 2}
    assert output.tokens == ((), (), ())


# --- loading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "tied", "qk norm", "shared keys and values"])
def test_progress_reaches_the_files_size(name: str) -> None:
    seen: list[tuple[int, int]] = []
    ReferenceRunner(
        checkpoint(KINDS[name]),
        new_setup(num_blocks=1, block_size=1, max_model_len=2),
        progress=lambda done, total: seen.append((done, total)),
    )
    shapes = KINDS[name].matrix_shapes()
    total = sum(math.prod(shape) * 4 for shape in shapes.values())
    assert [part for part, _ in seen] == sorted({part for part, _ in seen})
    assert len(seen) == len(shapes.keys() - {"inputs"})  # a table that nobody decodes
    assert seen[-1] == (total, total)
