"""Loads a model onto a device, and divides the device's memory.

The memory of a step is measured: a step of the largest size is executed, and then the cache is made
of what is left.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ridgeline.backends.cuda import device as devices
from ridgeline.backends.cuda.model import weights as weights_
from ridgeline.backends.cuda.ranks.group import Ranks
from ridgeline.backends.cuda.ranks.shard import Shard
from ridgeline.backends.cuda.runner import CudaRunner, errors_named
from ridgeline.backends.interface import BackendContext, Setup
from ridgeline.backends.pooling import pooling_head
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, Work
from ridgeline.model.files.tensors import Checkpoint

_PROBED_GRAPHS = (1, 64, 512)  # sizes, from which the others' memory is estimated
_PLAIN = SamplingParams(temperature=0.8, top_p=0.9, seed=0)
# What takes most memory after the layers: rows of logits are copied, and ranked.
DEAREST = SamplingParams(top_p=0.9, seed=0, repetition_penalty=1.1, logprobs=20)
_MODEL_TOO_LARGE = (
    "the model and a step: end what else uses it (nvidia-smi lists that), take a --dtype of fewer "
    "bits, or lower --max-num-batched-tokens"
)
_SHORT_TOKENS = 512  # of a sequence; a cache that cannot hold it is of no use


def load_runner(
    checkpoint: Checkpoint, setup: Setup, context: BackendContext, ops: Any = None
) -> CudaRunner:
    """Return a runner with its weights on the GPU; ``ops`` as of ``load_rank``."""
    return load_rank(checkpoint, setup, context, 0, lambda device: Ranks(), ops)[0]


def load_rank(
    checkpoint: Checkpoint,
    setup: Setup,
    context: BackendContext,
    rank: int,
    meet: Callable[[torch.device], Ranks],
    ops: Any = None,
) -> tuple[CudaRunner, Ranks]:
    """Return the runner of a rank over its share of a model, and the rank among others.

    ``meet`` is called when the weights are loaded; it waits until all ranks have theirs. ``ops``
    are operations that compute on the CPU; None: kernels compute on the GPU of that number.
    Raises MemoryError or ValueError, with a way out, if the device has too little memory.
    """
    device = torch.device("cpu")
    if ops is None:
        device = torch.device(f"cuda:{rank}")
        torch.cuda.set_device(device)
        keep_kernels(context)
        context.announce()
        from ridgeline.backends.cuda import kernels  # Triton: on a GPU alone

        ops = kernels
    share = Shard(checkpoint.arch, rank, setup.tensor_parallel_size)
    with errors_named(_MODEL_TOO_LARGE):
        weights = weights_.load(checkpoint, setup.dtype, device, context.progress, share)
        ranks = meet(device)
        scorer = pooling_head(checkpoint)
        runner = CudaRunner(share, weights, setup, scorer=scorer, ops=ops, ranks=ranks)
        runner.graphs.say = context.say
        if setup.uses_all_memory:
            fill(runner, setup, ranks)
            check_cache(runner, setup, context.say)
    return runner, ranks


def keep_kernels(context: BackendContext) -> None:
    """Let Triton keep what it compiles beside our own kernels, unless the user has set a place."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(context.home() / "kernels" / "triton"))


def step_of(
    setup: Setup, num_groups: int, num_tokens: int, params: SamplingParams = _PLAIN
) -> Step:
    """Return a step of ``num_tokens``: as many single tokens as possible, and a prompt of the rest.

    All write into the first blocks. What they compute means nothing.
    """
    sampling = Sampling(params, 1, ())
    singles = min(setup.max_num_seqs, num_tokens) - 1
    longest = min(num_tokens - singles, setup.max_model_len - 1)
    work = []
    for i in range(singles + 1):
        count = longest if i == singles else 1
        need = -(-count // setup.block_size)
        tables = [tuple(range(need))] * num_groups
        tokens = (0,) * count
        item = Work(
            (-1, i), 0, tokens, tables[0],
            seeds=(i,), sampling=sampling, history=(0,), targets=(),
            state=0, others=tuple(tables[1:]),
        )  # fmt: skip
        work.append(item)
    return Step(tuple(work), (), (), (), ())


def blocks_of_rest(
    free_bytes: int, total_bytes: int, step_bytes: int, kept_bytes: int, block_bytes: int
) -> int:
    """Return how many blocks of the cache the device has room for beside steps and what is kept."""
    rest = free_bytes - int(devices.KEPT_SHARE * total_bytes) - step_bytes - kept_bytes
    return max(rest, 0) // block_bytes


def check_cache(runner: CudaRunner, setup: Setup, say: Callable[[str], None]) -> None:
    """Say how long a sequence may be, if the cache holds none of ``max_model_len`` tokens.

    Raises ValueError if it does not even hold a short one.
    """
    cache = KVCache(0, setup.block_size, windows=tuple(group.window for group in runner.groups))
    max_model_len = setup.max_model_len
    most_blocks = partial(cache.most_blocks, max_num_batched_tokens=setup.max_num_batched_tokens)
    if (num_blocks := runner.num_blocks) >= most_blocks(max_model_len):
        return
    lengths = range(0, max_model_len, setup.block_size)
    fits = bisect_right(lengths, num_blocks, key=most_blocks) - 1
    room = f"beside weights and steps the GPU has room for a sequence of {lengths[fits]:,} tokens"
    if lengths[fits] < min(_SHORT_TOKENS, max_model_len):
        raise ValueError(f"{room}: lower --max-num-batched-tokens or take a --dtype of fewer bits")
    say(f"{room}, not of {max_model_len:,}: longer requests are refused")


def fill(runner: CudaRunner, setup: Setup, ranks: Ranks) -> None:
    """Make the cache of what the device has left beside weights, adapters, a step and graphs.

    Of several devices the one that has least left decides.
    """
    groups, max_num_batched_tokens = len(runner.groups), setup.max_num_batched_tokens
    step = step_of(setup, groups, max_num_batched_tokens, DEAREST)
    needed = max(len(item.table) for item in step.work)
    runner.resize(max(needed, 1))
    runner.graphs.pads = runner.runs_ahead = False
    for one in (step_of(setup, groups, max_num_batched_tokens), step):
        runner.execute(one)  # compiles, and settles what is allocated once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner.execute(step)
    step_bytes = torch.cuda.max_memory_allocated() - before
    runner.graphs.pads = True
    torch.cuda.empty_cache()
    graph_bytes = _graph_bytes(runner, setup)
    runner.runs_ahead = runner.looks_ahead
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    blocks = setup.num_blocks
    if block_bytes := runner.cache.block_bytes:  # none in a model without attention
        kept_bytes = graph_bytes + setup.lora_bytes
        blocks = blocks_of_rest(free_bytes, total_bytes, step_bytes, kept_bytes, block_bytes)
    runner.resize(ranks.least(blocks, runner.device))


def _graph_bytes(runner: CudaRunner, setup: Setup) -> int:
    """Return what all graphs will take, estimated from a few that are captured and dropped."""
    sizes = [size for size in _PROBED_GRAPHS if size in runner.graphs.sizes]
    free_before, _ = torch.cuda.mem_get_info()
    for size in reversed(sizes):  # the others fit into the memory of the largest
        runner.execute(step_of(setup, len(runner.groups), size))
    free_bytes, _ = torch.cuda.mem_get_info()
    taken = max(free_before - free_bytes, 0)
    runner.graphs.forget()
    torch.cuda.empty_cache()
    largest = runner.graphs.sizes[-1] / sizes[-1]
    kinds = 2 if setup.max_lora_rank else 1  # steps with adapters have graphs of their own
    return int(taken * kinds * max(largest, len(runner.graphs.sizes) / len(sizes)))
