"""The compiled draw against its twin in ``backends.sampler.rule``, bit for bit."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir

from ridgeline.backends.cpu.kernels.draw import emit_draw
from ridgeline.backends.cpu.layout.sampling_table import (
    ENTRY_BYTES,
    Draws,
    padded_vocab,
    scratch_bytes,
)
from ridgeline.backends.sampler.rule import Row, rank_tokens, sample
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, TokenLogprobs
from tests.backends.cpu.machine import LOCAL, Array, Machine, at, build

SIZES = (7, 512, 3000)  # of vocabularies: less than a vector, whole blocks, some and a rest
LARGEST = 0xFFFFFFFFFFFFFFFF
Result = tuple[int | None, TokenLogprobs | None]


class Kernel:
    """``draw`` for one vocabulary."""

    def __init__(self, vocab_size: int, name: str = "host") -> None:
        def emit(module: ir.Module) -> None:
            emit_draw(module, vocab_size)

        self.vocab_size = vocab_size
        self.machine: Machine = build(emit, name)
        self.buffers = [at(np.zeros(size, np.uint8)) for size in scratch_bytes(vocab_size).values()]

    def run(self, logits: Array, draws: Draws) -> list[Result]:
        """Fill in the table, entry by entry; logits must be as they were."""
        padded = at(np.full((len(logits), padded_vocab(self.vocab_size) + 64), 1e30, np.float32))
        padded[:, : self.vocab_size] = logits
        before = padded.copy()
        table, firsts = draws.write()
        num_entries = int(_memory(firsts, 4 * (draws.num_rows + 1)).view(np.int32)[-1])
        for i in range(num_entries):
            entry = _memory(table + i * ENTRY_BYTES, ENTRY_BYTES)
            self.machine.run("draw", entry, padded, padded.strides[0], *self.buffers)
        rest = slice(padded_vocab(self.vocab_size), None)
        for part in (slice(self.vocab_size), rest):
            assert padded[:, part].tobytes() == before[:, part].tobytes()
        counts = self.buffers[list(scratch_bytes(1)).index("draw_counts")]
        assert not counts.any()  # the next row begins with no history
        return draws.results()


def _memory(address: int, num_bytes: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def drawn(kernel: Kernel, logits: Array, rows: list[Row], num_top: int | None) -> list[Result]:
    draws = Draws(kernel.vocab_size)
    for i, row in enumerate(rows):
        assert draws.add([row], num_top) == i
    return kernel.run(logits, draws)


def wanted(logits: Array, rows: list[Row], num_top: int | None) -> list[Result]:
    tokens = sample(logits, np.arange(len(rows)), rows)
    out: list[Result] = []
    for i, token in enumerate(tokens):
        ranks = None
        if token is not None and num_top is not None:
            (ranks,) = rank_tokens(logits[i : i + 1], [token], num_top)
        out.append((token, ranks))
    return out


def row_of(params: SamplingParams, number: int, size: int, rng: np.random.Generator) -> Row:
    prompt, answer = rng.integers(0, size, (2, 1 + number % 40)).tolist()
    suppressed = tuple(rng.integers(0, size, 2).tolist()) if params.min_tokens else ()
    history = (*prompt, *answer) if params.penalises else ()
    sampling = Sampling(params, len(prompt), suppressed)
    seed, position = int(rng.integers(0, 1 << 63)) * 2, len(prompt) + len(answer)
    banned, again = rng.integers(0, size, (2, number % 3)).tolist()
    again = {token: float(amount) for token, amount in zip(again, (0.8, 1e30, 7), strict=False)}
    mask = masks(number, size, rng)
    return Row(sampling, seed, position, history, mask, tuple(banned), tuple(again.items()))


def masks(number: int, size: int, rng: np.random.Generator) -> bytes:
    """None, a few tokens, nearly all, a single one, or none at all; longer than need be or not."""
    share = (None, 0.01, 0.9, None, 1 / size, 0.0)[number % 6]
    if share is None:
        return b""
    allowed = rng.random(size + number % 3 * 16) < share
    return np.packbits(allowed, bitorder="little").tobytes()


@pytest.fixture(scope="module", params=SIZES)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return Kernel(request.param)


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 100},
    {"temperature": 1e-6},
    {"temperature": 5e-324},
    {"temperature": 0, "presence_penalty": 1.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100},
    {"top_k": 2999},
    {"top_k": 1 << 31},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"top_p": 1e-300},
    {"top_p": 0.999999, "temperature": 3},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 300, "top_p": 0.99, "min_p": 0.01},
    {"top_p": 0.8, "min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"repetition_penalty": 0.01, "frequency_penalty": -2.0, "presence_penalty": 2.0},
    {"logit_bias": {0: 5.0, 3: -100.0, 6: 0.1}, "repetition_penalty": 1.3},
    {"min_tokens": 16, "max_tokens": 200, "temperature": 0.3},
    {"min_tokens": 200, "max_tokens": 200, "top_k": 3},
    {"typical_p": 0.9},
    {"typical_p": 0.0, "min_p": 1.0},
    {"typical_p": 0.3, "temperature": 3, "top_k": 50, "top_p": 0.8},
    {"typical_p": 0.2, "top_n_sigma": 0.5, "min_p": 0.5},
    {"typical_p": 0.999999, "temperature": 1e-6},
    {"typical_p": 1e-300, "temperature": 100},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 1e-6, "temperature": 2},
    {"top_n_sigma": 100.0, "top_p": 0.9},
    {"xtc_probability": 1.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02, "temperature": 1.3},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01, "min_p": 0.1, "top_n_sigma": 2.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.5, "top_k": 4, "repetition_penalty": 1.3},
    {
        "temperature": 1.2,
        "top_k": 200,
        "typical_p": 0.9,
        "top_p": 0.9,
        "min_p": 0.01,
        "top_n_sigma": 1.5,
        "xtc_probability": 1.0,
        "xtc_threshold": 0.05,
    },
]


@pytest.mark.parametrize("shape", ["normal", "ties", "flat", "peaked", "wide", "zeros"])
@pytest.mark.parametrize("num_top", [None, 0, 5])
def test_any_parameters(kernel: Kernel, shape: str, num_top: int | None) -> None:
    size = kernel.vocab_size
    rng = np.random.default_rng(size)
    logits = rng.normal(0, 3, (len(PARAMS), size)).astype(np.float32)
    if shape == "ties":
        logits = np.round(logits)
    elif shape == "flat":
        logits[:] = 2.5
    elif shape == "peaked":
        logits[:, size // 2] = 60
    elif shape == "wide":
        logits *= np.float32(1e37)
    elif shape == "zeros":
        logits = rng.choice(np.float32([0.0, -0.0]), logits.shape)
    rows = [row_of(SamplingParams(**p), i, size, rng) for i, p in enumerate(PARAMS)]
    assert drawn(kernel, logits, rows, num_top) == wanted(logits, rows, num_top)


@pytest.mark.parametrize("name", [*LOCAL[1:], "arm"])
def test_other_processors(name: str) -> None:
    kernel, rng = Kernel(600, name), np.random.default_rng(3)
    here = kernel.machine.is_local  # elsewhere an entry may not point to anything
    few = PARAMS if here else [{}, {"top_p": 0.9}, {"temperature": 0.8, "top_k": 40}, *PARAMS[-15:]]
    rows = [row_of(SamplingParams(**p), i, 600, rng) for i, p in enumerate(few)]
    if not here:
        rows = [row._replace(mask=b"", banned=(), repeats=(), history=()) for row in rows]
    logits = rng.normal(0, 3, (len(few), 600)).astype(np.float32)
    num_top = 3 if here else 0
    assert drawn(kernel, logits, rows, num_top) == wanted(logits, rows, num_top)


LOGITS = st.one_of(
    st.integers(-24, 24).map(lambda quarters: quarters / 4),
    st.floats(-(2.0**127), 2.0**127, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38]),
)


@st.composite
def cases(draw_from: st.DrawFn) -> tuple[list[float], SamplingParams, int, list[int], int | None]:
    share = st.floats(0, 1)
    params = SamplingParams(
        temperature=draw_from(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]) | st.floats(0, 100)),
        top_k=draw_from(st.integers(-1, 45)),
        top_p=draw_from(st.just(1.0) | share),
        min_p=draw_from(st.just(0.0) | share),
        repetition_penalty=draw_from(st.just(1.0) | st.floats(0.01, 100)),
        presence_penalty=draw_from(st.floats(-2, 2)),
        frequency_penalty=draw_from(st.floats(-2, 2)),
        logit_bias=draw_from(
            st.none() | st.dictionaries(st.integers(0, 39), st.floats(-100, 100), max_size=4)
        ),
        min_tokens=draw_from(st.integers(0, 4)),
        typical_p=draw_from(st.just(1.0) | share),
        top_n_sigma=draw_from(st.just(-1.0) | st.floats(0, 4)),
        xtc_probability=draw_from(st.sampled_from([0.0, 1.0]) | share),
        xtc_threshold=draw_from(st.floats(0, 0.5)),
    )
    logits = draw_from(st.lists(LOGITS, min_size=40, max_size=40))
    history = draw_from(st.lists(st.integers(0, 39), max_size=9))
    return (
        logits,
        params,
        draw_from(st.integers(0, LARGEST)),
        history,
        draw_from(st.none() | st.integers(0, 50)),
    )


@pytest.fixture(scope="module")
def small() -> Kernel:
    return Kernel(40)


@given(case=cases())
@settings(max_examples=400, deadline=None)
def test_any_row(
    small: Kernel, case: tuple[list[float], SamplingParams, int, list[int], int | None]
) -> None:
    logits, params, seed, history, num_top = case
    sampling = Sampling(params, len(history) // 2, (1, 7))
    row = Row(sampling, seed, len(history), tuple(history) if params.penalises else ())
    values = np.array([logits], np.float32)
    assert drawn(small, values, [row], num_top) == wanted(values, [row], num_top)


@pytest.mark.parametrize("num_top", [None, 2])
def test_several_seeds_of_one_row(small: Kernel, num_top: int | None) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (2, 40)).astype(np.float32)
    params = SamplingParams(repetition_penalty=1.5, top_p=0.9)
    rows = [Row(Sampling(params, 2, ()), seed, 4, (1, 2, 3, 1)) for seed in range(5)]
    draws = Draws(40)
    assert [draws.add(rows, num_top), draws.add(rows[:1], num_top)] == [0, 1]
    _, firsts = draws.write()
    assert _memory(firsts, 12).view(np.int32).tolist() == [0, 5, 6]
    found = small.run(logits, draws)
    assert found[:5] == wanted(logits[[0] * 5], rows, num_top)
    assert found[5:] == wanted(logits[1:], rows[:1], num_top)
    assert len({token for token, _ in found[:5]}) > 1


def test_a_token_that_is_known_is_ranked(small: Kernel) -> None:
    logits = np.round(np.random.default_rng(6).normal(0, 2, (40, 40))).astype(np.float32)
    draws = Draws(40)
    for token in range(40):
        assert draws.rank(token, token % 4) == token
    for token, found in enumerate(small.run(logits, draws)):
        ranks = list(rank_tokens(logits[token : token + 1], [token], token % 4))
        assert found == (token, ranks[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_damaged_row_ends(kernel: Kernel, bad: float) -> None:
    """What it draws means nothing: the head says that the row is not finite. It must draw it."""
    size = kernel.vocab_size
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (len(PARAMS), size)).astype(np.float32)
    logits[:, rng.integers(0, size, 3)] = bad
    rows = [row_of(SamplingParams(**p), i, size, rng) for i, p in enumerate(PARAMS)]
    for token, _ in drawn(kernel, logits, rows, 3):
        assert token is None or 0 <= token < size
    logits[:] = bad
    drawn(kernel, logits, rows, 3)


def test_nothing_left_is_no_token(small: Kernel) -> None:
    nothing = Sampling(SamplingParams(min_tokens=1), 0, tuple(range(40)))
    one = Sampling(SamplingParams(min_tokens=1), 0, tuple(range(1, 40)))
    rows = [Row(sampling, 3, 0, ()) for sampling in (nothing, one)]
    logits = np.zeros((2, 40), np.float32)
    assert [token for token, _ in drawn(small, logits, rows, None)] == [None, 0]


def test_a_table_is_used_again(small: Kernel) -> None:
    """And grows: a step may ask for more than any before."""
    rng, draws = np.random.default_rng(8), Draws(40)
    for count in (3, 200, 1):
        draws.begin()
        logits = rng.normal(0, 2, (count, 40)).astype(np.float32)
        params = SamplingParams(repetition_penalty=1.2, logit_bias={i: i / 7 for i in range(20)})
        rows = [row_of(params, 39, 40, rng) for _ in range(count)]
        for row in rows:
            draws.add([row], 40)
        assert small.run(logits, draws) == wanted(logits, rows, 40)
