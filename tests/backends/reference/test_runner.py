"""The reference runner's own account: memory, the cache's size and slots, and progress."""

from __future__ import annotations

import math
import tracemalloc
from itertools import chain

import pytest

from ridgeline.backends.reference.runner import ReferenceRunner
from ridgeline.model.cost import costs
from ridgeline.model.shape.model import ModelArch
from tests.backends.runners import MODELS, TOKENS, step, work
from tests.tiny import BY_LAYER, LATENT, PLAIN, checkpoint, new_setup

NUM_BLOCKS, MAX_LEN = 40, 64


def make(arch: ModelArch, *, block_size: int = 4) -> ReferenceRunner:
    return ReferenceRunner(
        checkpoint(arch),
        new_setup(num_blocks=NUM_BLOCKS, block_size=block_size, max_model_len=MAX_LEN),
    )


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


@pytest.mark.parametrize("name", ["plain", "one kv head", "as many kv heads", *BY_LAYER, *LATENT])
def test_the_cache_is_as_large_as_the_formula_says(name: str) -> None:
    arch = MODELS[name]
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


@pytest.mark.parametrize("name", ["plain", "tied", "qk norm", "shared keys and values"])
def test_progress_reaches_the_files_size(name: str) -> None:
    seen: list[tuple[int, int]] = []
    ReferenceRunner(
        checkpoint(MODELS[name]),
        new_setup(num_blocks=1, block_size=1, max_model_len=2),
        progress=lambda done, total: seen.append((done, total)),
    )
    shapes = MODELS[name].matrix_shapes()
    total = sum(math.prod(shape) * 4 for shape in shapes.values())
    assert [part for part, _ in seen] == sorted({part for part, _ in seen})
    assert len(seen) == len(shapes.keys() - {"inputs"})  # a table that nobody decodes
    assert seen[-1] == (total, total)
