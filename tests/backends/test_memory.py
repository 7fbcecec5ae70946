"""A runner's own account of its memory: no array is missing, none counts twice."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.backends.arrays import memory_use
from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.interface import BackendRunner, MemoryUse
from ridgeline.backends.reference.runner import ReferenceRunner
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, Work
from tests.tiny import ARCHS, BY_LAYER, LATENT, PLAIN, changed, checkpoint, new_setup

SHAPE = {"num_blocks": 40, "block_size": 16, "max_model_len": 512, "threads": 2}
WIDE = replace(PLAIN, vocab_size=5000)
OWN = ("ridgeline", "builtins", "numpy", "collections")


def all_bytes(runner: BackendRunner) -> int:
    """Bytes of all arrays that can be reached from a runner; parts of one array count once."""
    places, seen, ahead = (
        set[tuple[int, int]](),
        set[int](),
        [object.__getattribute__(runner, "__dict__")],
    )
    while ahead:
        found: Any = ahead.pop()
        if id(found) in seen or isinstance(found, type):
            continue
        seen.add(id(found))
        if isinstance(found, memoryview):
            found = np.frombuffer(found, np.uint8)
        if isinstance(found, np.ndarray):
            places.add((found.ctypes.data, found.ctypes.data + found.nbytes))
        elif type(found).__module__.partition(".")[0] in OWN and not callable(found):
            ahead += gc.get_referents(found)
    end, total = 0, 0
    for low, high in sorted(places):
        total += max(0, high - max(low, end))
        end = max(end, high)
    return total


def run(runner: BackendRunner) -> None:
    """Draw behind a prompt, ranking its tokens, and keep states: most arrays grow."""
    params = SamplingParams(temperature=0.7, prompt_logprobs=1, presence_penalty=0.5)
    prompt = tuple(range(3, 40))
    sampling = Sampling(params, len(prompt), ())
    work = Work((0, 0), 0, prompt, (0, 1, 2), (1,), sampling, prompt, prompt[1:], similar=True)
    assert not runner.execute(Step((work,), (), (), (), ())).errors


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("arch", ["plain", "tied", "all biases", "qk norm", *BY_LAYER, *LATENT])
def test_of_the_reference(arch: str) -> None:
    runner = ReferenceRunner(checkpoint((ARCHS | BY_LAYER | LATENT)[arch]), new_setup(**SHAPE))
    for act in (lambda: None, lambda: run(runner)):
        act()
        assert sum(part.num_bytes for part in runner.memory().values()) == all_bytes(runner)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [
        ("int8", "int8"),
        pytest.param("f32", "int8", marks=pytest.mark.full),
        ("f32", "int8-int4"),
    ],
)
def test_of_the_cpu_backend(dtype: str, kv_cache_dtype: str, kernels: Path) -> None:
    arch = changed(WIDE, qkv_bias=True)
    runner = CpuRunner(
        checkpoint(arch),
        new_setup(dtype=dtype, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=64, **SHAPE),
        kernel_cache=kernels,
    )
    for act in (lambda: None, lambda: run(runner)):
        act()
        memory = runner.memory()
        grown = memory.pop("kernels")
        assert sum(part.num_bytes for part in memory.values()) == all_bytes(runner)
        assert grown.resident_bytes >= 0
    assert memory["states"].num_bytes == 40 * 16 * arch.hidden_size * 4
    assert memory["kv_cache"].num_bytes == runner.cache.nbytes
    runner.close()


def test_a_cache_is_in_memory_as_its_blocks_are_used(kernels: Path) -> None:
    shape = SHAPE | {"num_blocks": 20_000}
    runner = CpuRunner(
        checkpoint(PLAIN),
        new_setup(dtype="int8", kv_cache_dtype="f32", max_num_batched_tokens=64, **shape),
        kernel_cache=kernels,
    )
    before = runner.memory()["kv_cache"]
    assert before.num_bytes > 64 << 20
    assert before.resident_bytes == 0
    run(runner)
    once = runner.memory()["kv_cache"].resident_bytes
    run(runner)
    again = runner.memory()["kv_cache"].resident_bytes
    runner.close()
    assert 0 < once == again <= 4 << 20  # one huge page, or the ends of two


def test_mapped_weights_are_in_memory_when_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    mapped = np.memmap(file, np.uint8, "r")
    assert memory_use([mapped], is_mapped=True) == MemoryUse(1 << 20, 0, is_mapped=True)
    assert not mapped.any()
    assert memory_use([mapped], is_mapped=True) == MemoryUse(1 << 20, 1 << 20, is_mapped=True)


def test_an_array_counts_once() -> None:
    array = np.ones(1 << 16, np.uint8)
    assert memory_use([array, array]).num_bytes == memory_use([array]).num_bytes == 1 << 16
    assert memory_use([np.zeros(0)]) == MemoryUse(0, 0)
