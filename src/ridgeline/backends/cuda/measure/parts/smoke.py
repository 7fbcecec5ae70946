"""Every line that only a GPU runs, first and small: loading, graphs, running ahead, the ledger.

Models are tiny, and together need every operation; "correct" asks each of them alone.
"""

from __future__ import annotations

import gc
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ridgeline.backends.cuda import device as devices
from ridgeline.backends.cuda.loading import load_runner
from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.inputs.adapters import adaptable, random_adapter
from ridgeline.backends.cuda.measure.part import Case, Part
from ridgeline.backends.cuda.measure.shapes import BLOCK_SIZE, SMALL_ARCHS, setup_of
from ridgeline.backends.cuda.model.weights import load
from ridgeline.backends.cuda.ranks.shard import Shard
from ridgeline.backends.cuda.runner import CudaRunner
from ridgeline.backends.interface import BackendContext
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.cache.state_slots import StateSlots
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import NO_ADAPTER, Adapter
from ridgeline.core.scheduling.policies import SplitFuse
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.model.files.tensors import Checkpoint, Tensor
from ridgeline.model.shape.model import ModelArch

_LONGEST, _NUM_BLOCKS, _NUM_SEQS, _NUM_STATES = 512, 400, 8, 12
_ERROR = {"f32": 1e-3, "bf16": 5e-2, "int4": 5e-2}  # of logits
_MEMORY_ERROR = 0.01
_RANK, _ADAPTED = 24, (1, 2, 4)  # of adapters, and the requests that have one
# In 16 bits rounding sends some tokens to other experts.
_FORMATS = {"tiny": ("", "int4"), "latents and experts": ("f32",), "states": ("",)}
_PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "n": 2},
    {"temperature": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0, "logprobs": 1},
)


class _Model(NamedTuple):
    """A runner, the same on twins, and what both are called."""

    name: str
    dtype: str
    ours: CudaRunner
    twin: CudaRunner


def measure(part: Part) -> None:
    """Compare tiny models' logits with their twins', and their tokens in all ways of running."""
    for name, formats in _FORMATS.items():
        for dtype in formats:
            of_model = partial(_model, part, name, dtype or part.dtype_name)
            part.run([(f"{name} {dtype}".rstrip(), of_model)], need_s=0)
            gc.collect()  # a runner knows its graphs, and they know it
            if not part.is_tiny:
                torch.cuda.empty_cache()


def _model(part: Part, name: str, dtype: str) -> None:
    arch = SMALL_ARCHS[name]
    checkpoint = _checkpoint(arch)
    setup = setup_of(
        dtype,
        max_num_seqs=_NUM_SEQS,
        max_num_batched_tokens=64,
        max_model_len=_LONGEST,
        num_blocks=_NUM_BLOCKS,
    )
    setup = replace(setup, num_states=_NUM_STATES, max_lora_rank=_RANK)
    # Filling the device means: probe a step and graphs, and make blocks of the rest.
    fills = not part.is_tiny and name == "tiny" and dtype == part.dtype_name
    filling, on_cpu = replace(setup, uses_all_memory=fills), part.ops if part.is_tiny else None
    ours = load_runner(checkpoint, filling, BackendContext(Path.cwd), on_cpu)
    what = f"{name} {dtype}"
    part.say(f"{what} loaded", num_blocks=ours.num_blocks, ok=ours.num_blocks >= _NUM_BLOCKS)
    weights = load(checkpoint, dtype, torch.device("cpu"), lambda done, of: None)
    model = _Model(what, dtype, ours, CudaRunner(Shard(arch), weights, setup, ops=twins))
    part.run(_checks(part, model), need_s=0)


def _checks(part: Part, model: _Model) -> Iterator[Case]:
    yield f"{model.name} logits", partial(_logits, part, model)
    yield f"{model.name} tokens", partial(_tokens, part, model)
    yield f"{model.name} memory", partial(_memory, part, model)


def _checkpoint(arch: ModelArch) -> Checkpoint:
    """Return a model with random weights."""
    tensors = {}
    for name, shape in arch.matrix_shapes().items():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        array = random.standard_normal(shape, np.float32) * np.float32(0.8 / shape[-1] ** 0.5)
        if name.endswith("norm"):
            array = array + np.float32(1)
        tensors[name] = Tensor(name, "F32", shape, np.atleast_2d(array).view(np.uint8))
    return Checkpoint(Path("tiny"), arch, tensors, (), None, (), None, {})


def _logits(part: Part, model: _Model) -> None:
    ids = [i * 37 % 900 + 3 for i in range(400)]
    for low, high in ((0, 37), (37, 38), (38, 100), (100, 163), (163, 226), (226, 289), (289, 290)):
        ours, wanted = (
            torch.from_numpy(runner.prompt_logits(ids[low:high], low))
            for runner in (model.ours, model.twin)
        )
        what = f"{model.name} logits of tokens {low} to {high}"
        part.near(what, ours, wanted, _ERROR[model.dtype])
    failures = model.ours.graphs.failures
    part.say(f"{model.name} graphs", ok=not failures, failed=failures[0] if failures else None)


def _tokens(part: Part, model: _Model) -> None:
    """Run a workload eagerly, with graphs, and with graphs and ahead: the same tokens."""
    runner, wanted = model.ours, None
    shapes = adaptable(runner.arch)
    adapters = [runner.add_adapter(i, random_adapter(shapes, _RANK - i, seed=i)) for i in _ADAPTED]
    for pads, ahead in ((False, False), (True, False), (True, runner.looks_ahead)):
        runner.graphs.pads, runner.runs_ahead = pads, ahead
        before = runner.num_ahead
        tokens = _answers(runner)
        wanted = wanted or tokens
        num_ahead = runner.num_ahead - before
        ok = tokens == wanted and not any(error for *_, error in tokens)
        ok = ok and (num_ahead > 0) == ahead
        what = f"{model.name} tokens, graphs {pads}, ahead {ahead}"
        part.say(what, ok=ok, num_ahead=num_ahead)
    own_bytes = sum(one.num_bytes for one in adapters)
    part.say(f"{model.name} adapters", ok=runner.memory()["adapters"].num_bytes == own_bytes)


# Answers of the longest prompts go on when others have ended: their contexts are cut in splits.
def _answers(runner: CudaRunner) -> list[tuple[Any, ...]]:
    states = StateSlots(_NUM_SEQS, _NUM_STATES - _NUM_SEQS) if runner.states.are_there else None
    kv = KVCache(_NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True, states=states)
    scheduler = Scheduler(
        kv,
        SplitFuse(),
        max_num_batched_tokens=60,
        max_num_seqs=_NUM_SEQS,
        looks_ahead=runner.looks_ahead,
    )
    engine = Engine(scheduler, runner, itertools.count().__next__, max_model_len=_LONGEST)
    for i, own in enumerate(_PARAMS):
        prompt = tuple(j * 31 % 800 + i for j in range(365 - 90 * i))
        adapter = Adapter(i, bytes([i])) if i in _ADAPTED else NO_ADAPTER
        params = SamplingParams(seed=i, max_tokens=6 if i > 2 else 30, ignore_eos=True, **own)
        engine.add(prompt, params, adapter=adapter)
    events = []
    while engine.has_work():
        events += [(event.seq_id, event.token, event.error) for event in engine.step()]
    return sorted(events, key=lambda one: one[0])


def _memory(part: Part, model: _Model) -> None:
    """Compare the ledger with what the device says; a CPU has tensors alone to be compared with."""
    uses, what = model.ours.memory(), f"{model.name} memory"
    if part.is_tiny:
        part.say(what, bytes=sum(one.num_bytes for one in uses.values()), ok=bool(uses))
        return
    named = sum(one.num_bytes for one in uses.values() if one.device)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    used = total_bytes - free_bytes
    left = devices.budget_bytes()
    ok = abs(named - used) <= _MEMORY_ERROR * used
    lines = {name: one.num_bytes for name, one in uses.items() if one.device}
    part.say(what, named_bytes=named, used_bytes=used, left_bytes=left, lines=lines, ok=ok)
