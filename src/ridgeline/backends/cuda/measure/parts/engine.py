"""Whole steps: models of 7 and 8 billion random weights, and a workload on the engine."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from ridgeline.backends.cuda import least_prompt_tokens
from ridgeline.backends.cuda.measure.part import Case, Part
from ridgeline.backends.cuda.measure.shapes import (
    BLOCK_SIZE,
    Shape,
    models,
    random_runner,
    setup_of,
)
from ridgeline.backends.cuda.runner import CudaRunner
from ridgeline.backends.cuda.step.staging import Pending
from ridgeline.backends.interface import Setup
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.scheduling.policies import SplitFuse
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.step import Sampling, Step, Work

_FORMATS = (
    ("llama3-8b", "bf16"), ("qwen2.5-7b", "bf16"), ("llama3-8b", "int4"), ("llama3-8b", "int8"),
)  # fmt: skip
_WAYS = {"graphs and ahead": (True, True), "graphs": (True, False), "neither": (False, False)}
# Requests, tokens of prompts, tokens of answers; the peer runs the same.
WORKLOAD, TINY_WORKLOAD = (64, 512, 128), (3, 40, 6)


class _LoadedModel(NamedTuple):
    """A model in a format: ``name`` is of both."""

    name: str
    shape: Shape
    setup: Setup
    runner: CudaRunner


def measure(part: Part) -> None:
    """Measure each model in each format; a runner is dropped before the next is made."""
    formats = (("tiny", "f32"), ("tiny", "int4")) if part.is_tiny else _FORMATS
    for name, dtype in formats:
        part.run([(f"{name} {dtype}", partial(_model, part, name, dtype))], need_s=20)
        gc.collect()  # a runner knows its graphs, and they know it
        if not part.is_tiny:
            torch.cuda.empty_cache()


def _model(part: Part, name: str, dtype: str) -> None:
    begin_s = time.perf_counter()
    shape = models(part)[name]
    if part.is_tiny:
        sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 128}
    else:
        sizes = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "max_model_len": 2304}
    # 256 texts of 1,100 tokens take 38 GB with Llama-3-8B.
    setup = setup_of(dtype, num_blocks=80 if part.is_tiny else 256 * 72, **sizes)
    model = _LoadedModel(f"{name} {dtype}", shape, setup, random_runner(part, shape, setup))
    part.synchronize()
    part.say(f"{model.name} made", seconds=time.perf_counter() - begin_s)
    part.run(_cases(part, model), need_s=4)


def _cases(part: Part, model: _LoadedModel) -> Iterator[Case]:
    context, batches = (32, (1, 4)) if part.is_tiny else (1024, (1, 64, 8, 256))
    for batch in batches:
        yield f"{model.name} decode {batch}", partial(_decode, part, model, batch, context)
    length = 48 if part.is_tiny else 2048
    yield f"{model.name} prefill {length}", partial(_prefill, part, model, length)
    yield f"{model.name} workload", partial(_workload, part, model)
    yield f"{model.name} memory", partial(_memory, part, model)


def _decode(part: Part, model: _LoadedModel, batch: int, context: int) -> None:
    num_steps, runner = 3 if part.is_tiny else 30, model.runner
    floor = _floor(runner, batch, batch * context)
    for way, (pads, ahead) in _WAYS.items():
        runner.graphs.pads, runner.runs_ahead = pads, ahead
        took_s, host_us = _steps(part, runner, batch, context, num_steps if pads else 3)
        part.say(
            f"{model.name} decode {batch} x {context}, {way}",
            tok_per_s=batch / took_s,
            ms=took_s * 1e3,
            host_us=host_us,
            batch=batch,
            way=way,
            **floor,
        )


def _floor(runner: CudaRunner, rows: int, context: int) -> dict[str, Any]:
    """Return the least that a step of ``rows`` tokens reads and computes.

    ``context`` is the number of tokens whose keys and values are read.
    """
    matrices = [
        size
        for name, size in runner.arch.matrix_shapes().items()
        if len(size) == 2 and name != "embed"
    ]
    of_weights = sum(
        one.num_bytes
        for name, one in runner.memory().items()
        if name.startswith("weights.") and name != "weights.embedding"
    )
    of_token = runner.cache.block_bytes // runner.block_size
    flops = 2 * rows * sum(outputs * inputs for outputs, inputs in matrices)
    return {"least_bytes": of_weights + context * of_token, "flops": flops}


def _steps(
    part: Part, runner: CudaRunner, batch: int, context: int, num_steps: int
) -> tuple[float, dict[str, float]]:
    """Return the time of a step of single tokens, and microseconds of the host by what it does."""
    need = -(-(context + num_steps + 8) // BLOCK_SIZE)
    tables = [tuple(range(i * need, (i + 1) * need)) for i in range(batch)]
    sampling = Sampling(SamplingParams(temperature=0.8), context, ())
    tokens = [1] * batch

    def step(number: int) -> None:
        work = tuple(
            Work(
                (i, 0), context + number, (tokens[i],), tables[i],
                seeds=(i,), sampling=sampling, history=(), targets=(),
            )
            for i in range(batch)
        )  # fmt: skip
        output = runner.execute(Step(work, (), (), (), ()))
        if output.errors:
            raise RuntimeError(f"a step failed: {output.errors}")
        tokens[:] = [drawn for (drawn,) in output.tokens]

    for number in range(3):  # compiles, captures, and fills tables
        step(number)
    part.synchronize()
    with _timed(runner) as host_s:
        begin_s = time.perf_counter()
        for number in range(3, 3 + num_steps):
            step(number)
        took_s = (time.perf_counter() - begin_s) / num_steps
    host_us = {what: 1e6 * seconds / num_steps for what, seconds in host_s.items()}
    host_us["rest"] = 1e6 * took_s - sum(host_us.values())
    return took_s, host_us


@contextmanager
def _timed(runner: CudaRunner) -> Iterator[dict[str, float]]:
    """Measure what the host does in a step, by calls that do not contain each other."""
    seconds: dict[str, float] = {}

    def timed(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*given: Any, **named: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - begin_s

        return measured

    places = runner.timed_calls() | {"waits": (Pending, "get")}
    before = {what: getattr(owner, name) for what, (owner, name) in places.items()}
    for what, (owner, name) in places.items():
        setattr(owner, name, timed(what, before[what]))
    try:
        yield seconds
    finally:
        for what, (owner, name) in places.items():
            setattr(owner, name, before[what])


def _prefill(part: Part, model: _LoadedModel, length: int) -> None:
    runner, shape = model.runner, model.shape
    runner.graphs.pads = True
    sampling = Sampling(SamplingParams(temperature=0), length, ())
    tokens = tuple(i % 900 + 1 for i in range(length))
    table = tuple(range(length // BLOCK_SIZE + 1))
    work = Work((7, 0), 0, tokens, table, seeds=(1,), sampling=sampling, history=(), targets=())
    step = Step((work,), (), (), (), ())
    runner.runs_ahead = False
    runner.execute(step)
    took_s = part.host_seconds(lambda: runner.execute(step), 3)
    floor = _floor(runner, length, length)
    pairs = length * length // 2
    floor["flops"] += 4 * pairs * shape.heads * shape.head_dim * shape.layers
    floor["flops"] -= 2 * (length - 1) * shape.vocab * shape.hidden  # one row has logits
    part.say(f"{model.name} prefill {length}", tok_per_s=length / took_s, ms=took_s * 1e3, **floor)


def _workload(part: Part, model: _LoadedModel) -> None:
    """Run requests on the engine: prompts in pieces, mixed steps; cold, then warm."""
    runner = model.runner
    runner.graphs.pads = runner.runs_ahead = True
    count, num_in, num_out = TINY_WORKLOAD if part.is_tiny else WORKLOAD
    for what in ("cold", "warm"):
        engine = _engine(model)
        chosen = random.Random(3)
        for _ in range(count):
            prompt = tuple(chosen.randrange(runner.arch.vocab_size) for _ in range(num_in))
            engine.add(prompt, SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True))
        before = runner.num_ahead, runner.num_in_vain
        begin_s, num_steps, num_tokens = time.perf_counter(), 0, 0
        while engine.has_work():
            num_tokens += sum(event.token is not None for event in engine.step())
            num_steps += 1
        took_s = time.perf_counter() - begin_s
        part.say(
            f"{model.name} workload {count} x ({num_in} + {num_out}), {what}",
            tok_per_s=num_tokens / took_s,
            seconds=took_s,
            steps=num_steps,
            num_ahead=runner.num_ahead - before[0],
            num_in_vain=runner.num_in_vain - before[1],
            ok=num_tokens == count * num_out,
            workload=what,
        )


def _engine(model: _LoadedModel) -> Engine:
    setup, runner = model.setup, model.runner
    scheduler = Scheduler(
        KVCache(runner.num_blocks, BLOCK_SIZE, enable_prefix_caching=False),
        SplitFuse(min_chunk=least_prompt_tokens(runner.arch, setup)),
        max_num_batched_tokens=setup.max_num_batched_tokens,
        max_num_seqs=setup.max_num_seqs,
        looks_ahead=runner.looks_ahead,
    )
    return Engine(scheduler, runner, time.monotonic, max_model_len=setup.max_model_len)


def _memory(part: Part, model: _LoadedModel) -> None:
    uses = model.runner.memory()
    lines = {line: round(one.num_bytes / 1e9, 3) for line, one in uses.items()}
    part.say(f"{model.name} memory", gb=sum(lines.values()), lines=lines)
