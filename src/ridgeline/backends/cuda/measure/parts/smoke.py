"""Every line that only a GPU runs, first and small: loading, graphs, running ahead, the ledger."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.backends.cuda import device as devices
from ridgeline.backends.cuda.loading import load_runner
from ridgeline.backends.cuda.measure.part import Part
from ridgeline.backends.cuda.measure.shapes import BLOCK_SIZE, TINY, setup_of
from ridgeline.backends.cuda.model.weights import load
from ridgeline.backends.cuda.runner import CudaRunner
from ridgeline.backends.interface import BackendContext
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.scheduling.policies import SplitFuse
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.models.tensors import Checkpoint, Tensor

_LONGEST, _NUM_BLOCKS = 512, 400
_ERROR = {"f32": 1e-5, "bf16": 5e-2}  # of logits
_MEMORY_ERROR = 0.01
_WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "n": 2},
    {"temperature": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0, "logprobs": 1},
)


def measure(part: Part) -> None:
    """Compare a tiny model's logits with its twins', and its tokens in all ways of running."""
    found: dict[str, CudaRunner] = {}

    def loaded() -> None:
        checkpoint = _checkpoint()
        setup = setup_of(
            part.dtype_name,
            num_seqs=8,
            num_tokens=64,
            max_len=_LONGEST,
            num_blocks=_NUM_BLOCKS,
        )
        # Who fills the device probes a step and graphs, and makes blocks of the rest.
        filling = replace(setup, fills_device=True)
        runner = found["ours"] = load_runner(checkpoint, filling, BackendContext(Path.cwd))
        part.say("loaded", num_blocks=runner.num_blocks, ok=runner.num_blocks >= _NUM_BLOCKS)
        weights = load(checkpoint, part.dtype_name, torch.device("cpu"), lambda done, of: None)
        found["twin"] = CudaRunner(checkpoint.arch, weights, setup)

    def with_runner(check: Any) -> None:
        if found:
            check(part, found)

    checks = {"logits": _logits, "tokens": _tokens, "memory": _memory}
    part.run([("loaded", loaded)], need_s=0)
    part.run([(name, partial(with_runner, check)) for name, check in checks.items()], need_s=0)


def _checkpoint() -> Checkpoint:
    """Return a tiny model with random weights."""
    arch = TINY["tiny"].arch()
    tensors = {}
    for name, shape in arch.matrix_shapes().items():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        array = random.standard_normal(shape, np.float32) * np.float32(0.8 / shape[-1] ** 0.5)
        if name.endswith("norm"):
            array = array + np.float32(1)
        tensors[name] = Tensor(name, "F32", shape, np.atleast_2d(array).view(np.uint8))
    return Checkpoint(Path("tiny"), arch, tensors, (), None, (), None, {})


def _logits(part: Part, runners: dict[str, CudaRunner]) -> None:
    ids = [i * 37 % 900 + 3 for i in range(400)]
    for low, high in ((0, 37), (37, 38), (38, 100), (100, 163), (163, 226), (226, 289), (289, 290)):
        ours, twins = (
            torch.from_numpy(runner.prompt_logits(ids[low:high], low))
            for runner in (runners["ours"], runners["twin"])
        )
        part.near(f"logits of tokens {low} to {high}", ours, twins, _ERROR[part.dtype_name])


def _tokens(part: Part, runners: dict[str, CudaRunner]) -> None:
    """Run a workload eagerly, with graphs, and with graphs and ahead: the same tokens."""
    runner, wanted = runners["ours"], None
    for pads, ahead in ((False, False), (True, False), (True, True)):
        runner.graphs.pads, runner.runs_ahead = pads, ahead
        before = runner.num_ahead
        tokens = _answers(runner)
        wanted = wanted or tokens
        num_ahead = runner.num_ahead - before
        ok = tokens == wanted and not any(error for *_, error in tokens)
        ok = ok and (num_ahead > 0) == ahead
        part.say(f"tokens, graphs {pads}, ahead {ahead}", ok=ok, num_ahead=num_ahead)


# Answers of the longest prompts go on when others have ended: their contexts are cut in splits.
def _answers(runner: CudaRunner) -> list[tuple[Any, ...]]:
    kv = KVCache(_NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True)
    scheduler = Scheduler(
        kv, SplitFuse(), max_num_batched_tokens=60, max_num_seqs=8, looks_ahead=True
    )
    engine = Engine(scheduler, runner, itertools.count().__next__, max_model_len=_LONGEST)
    for i, wish in enumerate(_WISHES):
        prompt = tuple(j * 31 % 800 + i for j in range(365 - 90 * i))
        params = SamplingParams(seed=i, max_tokens=6 if i > 2 else 30, ignore_eos=True, **wish)
        engine.add(prompt, params)
    found = []
    while engine.has_work():
        found += [(event.seq_id, event.token, event.error) for event in engine.step()]
    return sorted(found, key=lambda one: one[0])


def _memory(part: Part, runners: dict[str, CudaRunner]) -> None:
    """Compare the ledger with what the device says; a CPU has tensors alone to be compared with."""
    runner = runners["ours"]
    held = runner.memory()
    if part.is_tiny:
        part.say("memory", bytes=sum(one.num_bytes for one in held.values()), ok=bool(held))
        return
    named = sum(one.num_bytes for one in held.values() if one.device)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    used = total_bytes - free_bytes
    left = devices.room_bytes()
    ok = abs(named - used) <= _MEMORY_ERROR * used
    lines = {name: one.num_bytes for name, one in held.items() if one.device}
    part.say("memory", named_bytes=named, used_bytes=used, left_bytes=left, lines=lines, ok=ok)
