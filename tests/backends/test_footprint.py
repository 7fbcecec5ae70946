"""What a start sets aside for a step is what steps take, however many sequences may run."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends import cpu, reference
from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.interface import Setup
from ridgeline.backends.reference.runner import ReferenceRunner
from ridgeline.backends.sampler.step_output import PROMPT_ROWS
from ridgeline.core.params import SamplingParams
from ridgeline.core.scheduling.speculate import max_draws
from ridgeline.core.step import Runner, Sampling, Step, Work
from ridgeline.model.shape.model import ModelArch, Rope
from tests.tiny import BY_LAYER, LATENT, PLAIN, changed, checkpoint, new_setup

ARCH = replace(PLAIN, vocab_size=20_000)
MAX_LEN, PROMPT_LEN, BLOCK_SIZE = 512, 300, 16
BATCHED = 2048
SHAPE = {"block_size": BLOCK_SIZE, "max_model_len": MAX_LEN, "threads": 2}


def run_the_largest_step(runner: Runner, num_seqs: int) -> None:
    """Sample as many sequences as may run, one of them with a prompt whose tokens are ranked."""
    drawn = SamplingParams(temperature=1.0)
    blocks = -(-PROMPT_LEN // BLOCK_SIZE)
    prompt, sampling = tuple(range(PROMPT_LEN)), Sampling(drawn, 1, ())
    ranked = Sampling(replace(drawn, prompt_logprobs=1), PROMPT_LEN, ())
    items = [Work((0, 0), 0, prompt, tuple(range(blocks)), (1,), ranked, prompt, prompt[1:])]
    items += [
        Work((i, 0), 0, (i,), (blocks + i,), (1,), sampling, (i,), ()) for i in range(1, num_seqs)
    ]
    assert not runner.execute(Step(tuple(items), (), (), (), ())).errors


def arrays_of(runner: CpuRunner) -> Iterator[NDArray[np.generic]]:
    """Every array that the runner keeps, but for the cache and the weights."""
    for name, value in vars(runner._buffers).items():
        for array in value.values() if isinstance(value, dict) else [value]:
            if isinstance(array, np.ndarray) and name != "cache":
                yield array


def setup(max_num_seqs: int, dtype: str = "f32") -> Setup:
    return Setup(dtype, dtype, 16, 2, MAX_LEN, max_num_seqs, BATCHED)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("arch", (BY_LAYER | LATENT).values(), ids=BY_LAYER | LATENT)
def test_weights_are_those_that_are_decoded(arch: ModelArch) -> None:
    """The table of layers' inputs stays in its file."""
    model = checkpoint(arch)
    runner = ReferenceRunner(model, new_setup(num_blocks=2, **SHAPE))
    held = {name: part for name, part in runner.memory().items() if name.startswith("weights.")}
    decoded = {n: p.num_bytes for n, p in held.items() if not p.is_mapped and n != "weights.rope"}
    assert sum(decoded.values()) == sum(reference.packed_bytes(model, setup(1)).values())
    assert ("weights.inputs" in held) == (arch.input_size > 0)


@pytest.mark.parametrize("max_num_seqs", [1, pytest.param(256, marks=pytest.mark.full), 1024])
def test_of_the_cpu_backend(max_num_seqs: int, kernels: Path) -> None:
    runner = CpuRunner(
        checkpoint(ARCH),
        new_setup(
            dtype="int8",
            kv_cache_dtype="int8",
            num_blocks=max_num_seqs + MAX_LEN // BLOCK_SIZE,
            max_num_batched_tokens=BATCHED,
            **SHAPE,
        ),
        kernel_cache=kernels,
    )
    run_the_largest_step(runner, max_num_seqs)
    taken = sum(array.nbytes for array in arrays_of(runner))
    runner.close()
    assert taken > max(max_num_seqs, PROMPT_ROWS) * ARCH.vocab_size * 4
    counted = cpu.footprint(ARCH, setup(max_num_seqs, "int8")).step_bytes
    assert counted == pytest.approx(taken, rel=0.03)


@pytest.mark.parametrize("max_num_seqs", [1, 256, 1024])
def test_of_the_reference(max_num_seqs: int) -> None:
    blocks = max_num_seqs + MAX_LEN // BLOCK_SIZE
    runner = ReferenceRunner(checkpoint(ARCH), new_setup(num_blocks=blocks, **SHAPE))
    tracemalloc.start()
    run_the_largest_step(runner, max_num_seqs)
    _, taken = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counted = reference.footprint(ARCH, setup(max_num_seqs)).step_bytes
    assert taken <= counted  # which has room for longer contexts and wider tiles
    of_one = reference.footprint(ARCH, setup(1)).step_bytes
    logits_bytes = (max_draws(max_num_seqs) - max_draws(1)) * ARCH.vocab_size * 5
    assert counted - of_one == pytest.approx(logits_bytes, abs=1)


def of_heads(head_dim: int) -> ModelArch:
    return changed(PLAIN, head_dim=head_dim, rope=Rope(theta=1e4, dim=head_dim))


def bytes_per_token(arch: ModelArch, kv_cache_dtype: str) -> int:
    return cpu.footprint(
        arch, Setup("f32", kv_cache_dtype, 16, 2, MAX_LEN, 1, 64)
    ).kv_bytes_per_token


@pytest.mark.parametrize(
    "kv_cache_dtype", [pytest.param("int8", marks=pytest.mark.full), "int8-int4"]
)
def test_a_token_s_bytes_are_those_of_the_cache(kv_cache_dtype: str, kernels: Path) -> None:
    arch = of_heads(80)
    runner = CpuRunner(
        checkpoint(arch),
        new_setup(
            dtype="f32",
            kv_cache_dtype=kv_cache_dtype,
            num_blocks=9,
            max_num_batched_tokens=64,
            **SHAPE,
        ),
        kernel_cache=kernels,
    )
    held = runner.memory()["kv_cache"].num_bytes
    runner.close()
    assert held == 9 * BLOCK_SIZE * bytes_per_token(arch, kv_cache_dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_with_narrow_values_more_tokens_fit(head_dim: int) -> None:
    arch = of_heads(head_dim)
    assert bytes_per_token(arch, "int8") >= 1.29 * bytes_per_token(arch, "int8-int4")
