"""The runner of the first rank: it tells the others what to do, and does it itself.

Each rank executes the same steps over its share of the model. So all that is decided in a runner
(draws, what runs ahead, which request fails) is decided everywhere alike, and none of it travels.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from ridgeline.backends.cuda.loading import keep_kernels, load_rank
from ridgeline.backends.cuda.processes.rank_processes import (
    Loaded,
    NewAdapter,
    OldAdapter,
    Processes,
)
from ridgeline.backends.cuda.ranks.group import Ranks, connect
from ridgeline.backends.cuda.runner import CudaRunner
from ridgeline.backends.interface import (
    BackendContext,
    CacheMemory,
    Counters,
    KeptAdapter,
    MemoryUse,
    Setup,
    Traffic,
)
from ridgeline.backends.step_codec import StepEncoder
from ridgeline.core.records import StepRecord
from ridgeline.core.step import Step, StepOutput
from ridgeline.model.files.adapters import AdapterWeights
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import ModelArch


class RanksRunner:
    """A runner over all ranks.

    Attributes:
        arch: the whole model.
        num_blocks: of the cache, on every rank.
        looks_ahead: as of a single one.
        first: the runner of this rank.
        processes: all other ranks.
    """

    def __init__(
        self, arch: ModelArch, first: CudaRunner, ranks: Ranks, processes: Processes
    ) -> None:
        """Take a runner whose ranks are ready for their first step."""
        self.arch, self.first, self.processes, self._ranks = arch, first, processes, ranks
        self.num_blocks, self.looks_ahead = first.num_blocks, first.looks_ahead
        self._encoder, self._old = StepEncoder(), deque[int]()
        self._memory = processes.end_loading()
        weakref.finalize(self, processes.close)

    @property
    def lost(self) -> str:
        """Which rank is no more, and how it ended."""
        return self.processes.lost or ""

    def execute(self, step: Step) -> StepOutput:
        """Execute a step on all ranks. Raises DeviceLost if one is lost, or does not go on."""
        while self._old:
            self.processes.tell(OldAdapter(self._old.popleft()))
        with self.processes.call(self._encoder.write(step)):
            self._ranks.advance()
            return self.first.execute(step)

    def prompt_logits(self, tokens: Sequence[int], start: int = 0) -> NDArray[np.float32]:
        """Return the logits after each token of one text, for measuring."""
        with self.processes.call({"tokens": tokens, "start": start}):
            self._ranks.advance()
            return self.first.prompt_logits(tokens, start)

    def memory(self) -> dict[str, MemoryUse]:
        """Return what this rank keeps now, and the others since they were ready."""
        uses = dict(self.first.memory())
        for rank, memory in self._memory.items():
            uses |= {
                f"rank {rank}.{name}": part._replace(device=part.device or f"rank {rank}")
                for name, part in memory.items()
            }
        return uses

    def add_adapter(self, number: int, weights: AdapterWeights) -> KeptAdapter:
        """Let work name an adapter by this number while what is returned is kept.

        All ranks have it before the next step. Raises ValueError as ``CudaRunner.add_adapter``.
        """
        adapter = self.first.add_adapter(number, weights)
        self.processes.tell(NewAdapter(number, weights))
        weakref.finalize(adapter, self._old.append, number).atexit = False
        return adapter

    def traffic(self, step: StepRecord, num_experts: int | None = None) -> dict[str, Traffic]:
        """Return nothing: kernels on a device are not counted."""
        return self.first.traffic(step, num_experts)

    def cache_memory(self) -> CacheMemory:
        """Raise ValueError: devices' memory is not read by the processor."""
        return self.first.cache_memory()

    def give_back(self, *, weights: bool) -> None:
        """Raise ValueError: the devices' memory is reserved for as long as the process runs."""
        self.first.give_back(weights=weights)

    def profile(self, announce: Callable[[], None]) -> Counters:
        """Raise ValueError: nothing counts inside kernels."""
        return self.first.profile(announce)


def load_ranks(
    checkpoint: Checkpoint, setup: Setup, context: BackendContext, ops: ModuleType | None = None
) -> RanksRunner:
    """Load a model onto as many devices as ``setup`` says; ``ops`` as of ``load_rank``.

    Raises DeviceLost, which names the rank and says why, if one of them cannot load its share, or
    does not go on.
    """
    count = setup.tensor_parallel_size
    if ops is None:
        keep_kernels(context)
    plain = Setup(**{field.name: getattr(setup, field.name) for field in fields(Setup)})
    processes = Processes(checkpoint.path, plain, ops.__name__ if ops else None)

    def report(done: int, total: int) -> None:
        processes.progress[0] += 1
        context.progress(done, total)

    def meet(device: torch.device) -> Ranks:
        processes.expect(Loaded)
        processes.progress[:] = 0  # from here on all ranks do the same
        processes.tell("meet")
        processes.progress[0] += 1
        ranks = processes.connected(
            lambda: connect(processes.folder, 0, count, device, processes.progress)
        )
        processes.on_lost = ranks.abort
        return ranks

    try:
        heard = context._replace(progress=report)
        first, ranks = load_rank(checkpoint, setup, heard, 0, meet, ops)
        return RanksRunner(checkpoint.arch, first, ranks, processes)
    except BaseException as error:
        processes.close()
        processes.raise_lost(error)
        raise
