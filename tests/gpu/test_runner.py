"""A runner's own account: memory, the largest step, what a step costs the host, and errors."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

import torch

from ridgeline.backends import cuda
from ridgeline.backends.cuda.loading import (
    DEAREST,
    blocks_of_rest,
    check_cache,
    fill,
    load_runner,
    step_of,
)
from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.model.weights import build
from ridgeline.backends.cuda.ranks.group import Ranks
from ridgeline.backends.cuda.ranks.shard import Shard
from ridgeline.backends.cuda.runner import CudaRunner
from ridgeline.backends.cuda.step.staging import StagedArray, Staging
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.scheduling.policies import Load, SplitFuse
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.step import Sampling, Step, Work
from ridgeline.model.shape.model import ModelArch
from ridgeline.system.machine import DeviceLost
from tests.gpu.engines import NOWHERE, runners
from tests.tiny import PLAIN, RECURRENT, checkpoint, new_setup


def runner_of(arch: ModelArch, **settings: Any) -> CudaRunner:
    setup = cuda.settle(new_setup(**{"num_blocks": 40} | settings), arch)
    return load_runner(checkpoint(arch), setup, NOWHERE, twins)


def test_every_tensor_is_named_once_in_the_ledger() -> None:
    runner = runner_of(PLAIN)
    named = sum(part.num_bytes for part in runner.memory().values())
    places, ahead, seen = set(), [runner], set()
    while ahead:
        found = ahead.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            places.add((storage.data_ptr(), storage.nbytes()))
        elif isinstance(found, dict):
            ahead += found.values()
        elif isinstance(found, list | tuple | set):
            ahead += found
        elif type(found).__module__.startswith("ridgeline"):
            slots = [s for c in type(found).__mro__ for s in getattr(c, "__slots__", ())]
            ahead += [getattr(found, slot, None) for slot in slots]
            ahead += vars(found).values() if hasattr(found, "__dict__") else ()
    assert named == sum(size for _, size in places)


def test_what_is_reckoned_of_weights_and_cache_is_what_they_take() -> None:
    for dtype in ("f32", "bf16"):
        runner = runner_of(PLAIN, dtype=dtype, kv_cache_dtype="auto")
        memory = runner.memory()
        of_weights = [part.num_bytes for name, part in memory.items() if name.startswith("weights")]
        setup = cuda.settle(new_setup(dtype=dtype, kv_cache_dtype="auto"), PLAIN)
        reckoned = cuda.packed_bytes(checkpoint(PLAIN), setup)
        assert sum(reckoned.values()) == sum(of_weights) - memory["weights.rope"].num_bytes
        of_token = cuda.footprint(PLAIN, setup).kv_bytes_per_token
        assert memory["kv_cache"].num_bytes == 40 * 16 * of_token


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_the_largest_step_runs_in_the_blocks_that_it_names(name: str, tmp_path: Path) -> None:
    runner, _, setup = runners(tmp_path, name)
    step = step_of(setup, len(runner.groups), setup.max_num_batched_tokens)
    assert sum(len(item.tokens) for item in step.work) == setup.max_num_batched_tokens
    assert len(step.work) == setup.max_num_seqs
    runner.resize(max(len(item.table) for item in step.work))
    output = runner.execute(step)
    assert not output.errors
    assert all(len(tokens) == 1 for tokens in output.tokens)
    dearest = runner.execute(step_of(setup, len(runner.groups), 64, DEAREST))
    assert all(len(ranks[0].top) == 20 for ranks in dearest.logprobs.values())
    assert len(dearest.logprobs) == setup.max_num_seqs
    for count in (1, 5, 30):
        small = step_of(setup, len(runner.groups), count)
        assert sum(len(item.tokens) for item in small.work) == count
        assert not runner.execute(small).errors
    runner.resize(setup.num_blocks)
    assert runner.cache.blocks.shape[0] == setup.num_blocks


@pytest.mark.parametrize("arch", RECURRENT.values(), ids=list(RECURRENT))
def test_a_step_that_failed_can_be_computed_again(arch: ModelArch) -> None:
    """States are those before it, and slots are copied as often as a step says."""
    found = []
    sampling = Sampling(SamplingParams(temperature=0), 9, ())
    first = Work((0, 0), 0, (5, 6, 7, 8), (0,), (), sampling, (), (), state=0, save=((2, 3),))
    then = first._replace(start=4, tokens=(9,), seeds=(1,), save=())
    other = first._replace(seq_id=(0, 1), start=2, tokens=(7, 8, 9), table=(1,), state=1)
    other = other._replace(seeds=(1,), save=())
    for fails in (False, True):
        runner = runner_of(arch, num_states=4)
        assert not runner.looks_ahead
        runner.execute(Step((first,), (), (), (), ()))
        if fails:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runner.model, "logits", out_of_memory)
                with pytest.raises(MemoryError):
                    runner.execute(Step((then,), (), (), (), ()))
        runner.execute(Step((then,), (), (), (), ()))
        runner.execute(Step((other,), ((0, 1),), (), (), (), ((3, 1),)))
        hidden = [
            runner.states.by_layer[i][n]
            for i in runner.states.by_layer
            for n in runner.states.by_layer[i]
        ]
        now = [2 * slot + int(runner.states._current[slot]) for slot in (0, 1)]
        found.append([part[now] for part in hidden])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)
        assert torch.allclose(plain[0], plain[1], rtol=1e-4, atol=1e-4)  # two ways to the same text


def out_of_memory(*given: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_cache_gets_what_is_left() -> None:
    gib = 1 << 30
    assert blocks_of_rest(60 * gib, 100 * gib, 3 * gib, 5 * gib, gib) == 50
    assert blocks_of_rest(5 * gib, 100 * gib, 3 * gib, 5 * gib, gib) == 0


class Device:
    """What ``torch.cuda`` says of a GPU of which ``free`` bytes are left; a step takes ``step``."""

    def __init__(self, free: int, step: int, patch: pytest.MonkeyPatch) -> None:
        for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda: None)
        patch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000 + step)
        patch.setattr(torch.cuda, "mem_get_info", lambda: (free, 1 << 24))


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_cache_fills_the_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _, setup = runners(tmp_path, name)
    of_block, spare = runner.cache.block_bytes, (1 << 24) // 50
    Device(spare + 70_000 + 100 * of_block + of_block // 2, 70_000, monkeypatch)
    fill(runner, setup, Ranks())
    assert runner.num_blocks == runner.cache.blocks.shape[0] == 100
    assert runner.graphs.pads
    assert runner.runs_ahead
    assert not runner.execute(step_of(setup, len(runner.groups), 64)).errors


def test_a_cache_that_is_too_small_is_named_at_start(tmp_path: Path) -> None:
    """In tokens: a short sequence has to fit, and of a long one it is said."""
    runner, _, setup = runners(tmp_path, "qwen2")
    setup, said = replace(setup, max_model_len=1000), list[str]()
    for num_blocks, line in ((63, None), (62, "992 tokens, not of 1,000: longer requests are "),
                             (32, " 512 tokens, not of 1,000")):  # fmt: skip
        runner.resize(num_blocks)
        check_cache(runner, setup, said.append)
        assert len(said) == (line is not None)
        assert line is None or line in said.pop()
    runner.resize(31)
    with pytest.raises(ValueError, match="for a sequence of 496 tokens: lower --max-num-batched"):
        check_cache(runner, setup, said.append)
    check_cache(runner, replace(setup, max_model_len=496), said.append)
    assert not said


def test_after_a_copy_without_memory_tables_are_whole() -> None:
    """The same step finds its blocks when it is computed again."""
    sampling, works = Sampling(SamplingParams(temperature=0), 9, ()), []
    for table in ((7,), (7, 3), (7, 3, 5)):  # a text that grows, in blocks apart
        start = 16 * len(table) - 16
        tokens = tuple((start + n) % 90 for n in range(16))
        works.append(Work((0, 0), start, tokens, table, (1,), sampling, (), ()))
    found = []
    for fails in (False, True):
        runner = runner_of(PLAIN)
        for work in works:
            step = Step((work,), (), (), (), ())
            if fails:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(runner._steps.staging, "send", out_of_memory)
                    with pytest.raises(MemoryError):
                        runner.execute(step)
            found.append(runner.execute(step).tokens)
    assert found[:3] == found[3:]


def test_after_a_copy_without_memory_the_logits_of_a_text_are_right() -> None:
    text = [n % 50 for n in range(48)]
    whole = runner_of(PLAIN).prompt_logits(text)
    runner = runner_of(PLAIN)
    runner.prompt_logits(text[:16])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._steps.staging, "send", out_of_memory)
        with pytest.raises(MemoryError):
            runner.prompt_logits(text[16:], 16)
    np.testing.assert_allclose(runner.prompt_logits(text[16:], 16), whole[16:], atol=1e-5)


def test_after_a_step_with_an_unknown_adapter_each_draws_by_its_own_rule() -> None:
    """The row of an earlier sequence was given to another before that step failed."""
    greedy, drawn = (Sampling(SamplingParams(temperature=t), 9, ()) for t in (0, 2.0))
    earlier = Work((0, 0), 0, (5, 6), (0,), (1,), greedy, (), ())
    later = Work((1, 0), 0, (5, 6), (1,), (7,), drawn, (), ())
    gone = Work((2, 0), 0, (5, 6), (2,), (1,), greedy, (), (), adapter=3)
    found = []
    for fails in (False, True):
        runner = runner_of(PLAIN, max_lora_rank=8)
        found.append(runner.execute(Step((earlier,), (), (), (), ())).tokens)
        if fails:
            with pytest.raises(KeyError):
                runner.execute(Step((later, gone), (), (), (), ()))
        found.append(runner.execute(Step((later,), (), (), (), ())).tokens)
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_parts_of_a_copy_are_apart_and_aligned() -> None:
    parts = {
        "a": StagedArray((3,), torch.int32),
        "b": StagedArray((2, 2), torch.int64),
        "c": StagedArray((1,), torch.float64),
    }
    staging = Staging(parts, torch.device("cpu"))
    for value, (name, part) in enumerate(parts.items()):
        assert staging.device[name].data_ptr() % 16 == 0
        assert staging.host[name].shape == part.shape
        staging.host[name][:] = value
    staging.send()
    assert [staging.device[name].unique().tolist() for name in parts] == [[0], [1], [2]]


def test_a_step_of_256_sequences_takes_few_calls_of_python() -> None:
    """Counted with a device that does nothing: of scheduling, a step ahead, and folding."""
    arch = PLAIN
    setup = cuda.settle(
        new_setup(max_model_len=512, max_num_seqs=256, max_num_batched_tokens=2048, num_blocks=64),
        arch,
    )
    shapes = arch.matrix_shapes()
    weights = build(arch, lambda name: torch.zeros(shapes[name]), "f32", torch.device("cpu"))
    ops = SimpleNamespace(**{name: getattr(twins, name) for name in dir(twins)})

    def draw(logits: Any, row_of: Any, *rest: Any, **more: Any) -> Any:
        return torch.full(row_of.shape, 5, dtype=torch.int32), torch.ones_like(row_of).int()

    ops.draw = draw
    runner = CudaRunner(Shard(arch), weights, setup, ops=ops)
    hidden = torch.zeros(2048, arch.hidden_size)
    runner.graphs.run = lambda size, variant: hidden
    runner.model.logits = lambda rows: rows
    kv = KVCache(256 * 20, 16, enable_prefix_caching=True)
    scheduler = Scheduler(
        kv, SplitFuse(), max_num_batched_tokens=2048, max_num_seqs=256, looks_ahead=True
    )
    engine = Engine(scheduler, runner, iter(range(10**9)).__next__, max_model_len=512)
    for i in range(256):
        prompt = tuple((i * 7 + j) % 90 for j in range(100))
        params = SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=200)
        engine.add(prompt, params)
    load = Load(is_read=False)
    while any(s.num_generated < 2 for r in engine.requests.values() for s in r.sequences):
        engine.step(load)
    num_calls, num_steps = 0, 32

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(num_steps):
            engine.step(load)
    finally:
        sys.setprofile(None)
    assert runner.num_ahead >= 256 * (num_steps - 1)
    assert num_calls / num_steps <= 6_500


@pytest.mark.parametrize(
    ("error", "becomes", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), MemoryError, "--max-num-batched-tokens"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access"), DeviceLost, "illegal"),
        (RuntimeError("shapes differ"), RuntimeError, "^shapes differ$"),
        (torch.AcceleratorError("CUDA error: unspecified launch failure\nmore"), DeviceLost,
         "cannot use it again: CUDA error: unspecified launch failure$"),
    ],
)  # fmt: skip
def test_errors_of_a_device_are_one_line(error: Exception, becomes: type, words: str) -> None:
    runner = runner_of(PLAIN)

    def fails(*given: Any) -> None:
        raise error

    runner.graphs.run = fails
    setup = new_setup(num_blocks=40)
    with pytest.raises(becomes, match=words):
        runner.execute(step_of(setup, 1, 64))
