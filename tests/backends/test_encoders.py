"""Models whose tokens see what follows them: both backends against the plain computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends import cpu
from ridgeline.backends.cpu.layout.model_weights import logits_stride
from ridgeline.backends.cpu.layout.packed_sizes import packed_bytes
from ridgeline.backends.cpu.layout.shapes import PRUNED_ROWS
from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.interface import Setup
from ridgeline.backends.reference import ReferenceRunner
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, Work
from tests.kept_kernels import KERNELS
from tests.tiny import ENCODERS, checkpoint, new_setup, plain_states, random_arrays

MAX_LEN = 96
VOCAB = 50
TOKENS = tuple(int(token) for token in np.random.default_rng(5).integers(0, VOCAB, MAX_LEN))
SIZES = (1, 5, 16, 37, 90)
# As in test_runner.py; norms that replace the residual stream bring errors back to size each time.
FORMATS = {
    "f32": ("f32", "f32", 1e-5),
    "f32, f16 cache": ("f32", "f16", 0.01),
    "int8": ("auto", "int8", 0.2),
    "int8, f16 cache": ("auto", "f16", 0.2),
    "int8-row": ("int8-row", "int8", 0.2),
    "bf16": ("bf16", "f16", 0.05),
}

Make = Callable[..., CpuRunner]


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    made: list[CpuRunner] = []

    def build(name: str, kind: str, threads: int = 1) -> CpuRunner:
        dtype, kv_cache_dtype, _ = FORMATS[kind]
        runner = CpuRunner(
            checkpoint(ENCODERS[name]),
            new_setup(
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                num_blocks=48,
                block_size=16,
                max_model_len=MAX_LEN,
                max_num_batched_tokens=512,
                threads=threads,
            ),
            kernel_cache=KERNELS,
        )
        made.append(runner)
        return runner

    yield build
    for runner in made:
        runner.close()


@cache
def expected(name: str, size: int) -> NDArray[np.float64]:
    """The state of the first token of a text, of its last, and their mean: the plain way."""
    arrays = random_arrays(ENCODERS[name])
    states = plain_states(ENCODERS[name], arrays, TOKENS[:size], MAX_LEN)
    return np.stack([states[0], states[-1], states.mean(axis=0)])


def vectors(runner: CpuRunner | ReferenceRunner, size: int) -> NDArray[np.float64]:
    """The same three as a backend makes them, each in a step of its own."""
    pools = ("cls", "last", "mean")
    return np.array([runner.execute(step(text(size, 0, pool))).vectors[0] for pool in pools])


def text(size: int, block: int, pool: str, first: int = 0) -> Work:
    tokens = TOKENS[first : first + size]
    sampling = Sampling(SamplingParams(pool=pool), size, ())
    table = tuple(range(block, block + 6))
    return Work((block, first), 0, tokens, table, (), sampling, (), (), pool=pool)


def step(*items: Work) -> Step:
    return Step(items, (), (), (), ())


def error(got: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    return float(np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ENCODERS)
def test_the_reference_is_the_plain_computation(name: str, size: int) -> None:
    runner = ReferenceRunner(
        checkpoint(ENCODERS[name]), new_setup(num_blocks=6, block_size=16, max_model_len=MAX_LEN)
    )
    assert error(vectors(runner, size), expected(name, size)) < 1e-5


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ENCODERS)
def test_the_cpu_backend_is_the_plain_computation(make: Make, name: str, kind: str) -> None:
    for threads in (1, 2):
        runner = make(name, kind, threads)
        for size in SIZES:
            runner.cache[:] = 0
            assert error(vectors(runner, size), expected(name, size)) < FORMATS[kind][2]


@pytest.mark.parametrize("name", ENCODERS)
def test_nothing_is_kept_for_an_output_head(make: Make, name: str) -> None:
    runner = make(name, "int8")
    arch, held = runner.arch, runner.memory()
    assert not [part for part in held if "head" in part and part.startswith("weights.")]
    packed = packed_bytes(checkpoint(arch), "auto", "int8")
    assert "head" not in packed
    assert sum(packed.values()) == sum(
        data.nbytes for parts in runner.weights.packed().values() for data in parts
    )
    # A model that draws keeps rows of logits and those of the proxy; and the head.
    setup = Setup("auto", "int8", 16, 2, MAX_LEN, max_num_seqs=256, max_num_batched_tokens=512)
    mine, drawing = (
        cpu.footprint(one, setup).step_bytes for one in (arch, replace(arch, has_head=True))
    )
    logits_bytes = 256 * logits_stride(VOCAB) + PRUNED_ROWS * runner.sizes.proxy_stride
    assert drawing - mine == logits_bytes
    weights = packed_bytes(checkpoint(replace(arch, has_head=True)), "auto", "int8")
    assert weights["head"] > 0.8 * VOCAB * arch.hidden_size  # a byte and more a weight


@pytest.mark.parametrize("pool", ["mean", "cls", "last"])
@pytest.mark.parametrize("kind", ["f32", "int8", "int8-row", "bf16"])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_vector_depends_on_its_text_alone(make: Make, name: str, kind: str, pool: str) -> None:
    """Bit for bit: beside any texts, on any number of threads, wherever its blocks are."""
    sizes = (1, 3, 17, 40, 90)
    runner = make(name, kind)
    wanted = [runner.execute(step(text(size, 0, pool))).vectors[0] for size in sizes]
    for threads in (1, 2, 3):
        runner = make(name, kind, threads)
        for shift in range(3):
            items = [text(size, 6 * i, pool) for i, size in enumerate(sizes)]
            items = items[shift:] + items[:shift]
            others = [text(11, 36, pool, 7), text(2, 42, pool, 9)][: shift + 1]
            found = runner.execute(step(*others, *items)).vectors
            want = wanted[shift:] + wanted[:shift]
            assert [found[i] for i in range(len(others), len(found))] == want
        few = runner.execute(step(text(3, 0, pool), text(1, 6, pool))).vectors
        assert [few[0], few[1]] == [wanted[1], wanted[0]]
        runner.close()


@pytest.mark.parametrize("name", ENCODERS)
def test_the_reference_beside_others(name: str) -> None:
    runner = ReferenceRunner(
        checkpoint(ENCODERS[name]), new_setup(num_blocks=48, block_size=16, max_model_len=MAX_LEN)
    )
    sizes = (1, 5, 40, 90, 5)
    found = runner.execute(step(*(text(n, 6 * i, "mean") for i, n in enumerate(sizes)))).vectors
    for i, size in enumerate(sizes):
        alone = runner.execute(step(text(size, 0, "mean"))).vectors[0]
        assert found[i] == pytest.approx(alone, abs=1e-5)
