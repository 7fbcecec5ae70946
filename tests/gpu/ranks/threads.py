"""Ranks as threads of one process, which meet at a barrier in place of the library's sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import torch

from ridgeline.backends import cuda
from ridgeline.backends.cuda.loading import load_rank
from ridgeline.backends.cuda.ranks.group import Ranks
from ridgeline.backends.interface import Setup
from ridgeline.core.step import Step, StepOutput
from ridgeline.model.files.adapters import AdapterWeights
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.cache_groups import cache_groups
from tests.answers.tiny_families import write_family
from tests.gpu import ordered_twins as ordered
from tests.gpu.engines import BLOCK, LONGEST, NOWHERE


class Meeting:
    """What all ranks' groups share."""

    def __init__(self, count: int) -> None:
        self.barrier = Barrier(count)
        self.parts: list[Any] = [None] * count


class Group:
    """The library's group, as far as ranks use it; ``order`` is that of what it returns."""

    def __init__(self, meeting: Meeting, rank: int, order: list[int]) -> None:
        self._meeting, self._rank, self._order = meeting, rank, order

    def _allgather_base(self, found: torch.Tensor, sent: torch.Tensor) -> Group:
        parts, barrier = self._meeting.parts, self._meeting.barrier
        parts[self._rank] = sent
        barrier.wait()
        torch.cat([parts[rank] for rank in self._order], out=found)
        barrier.wait()
        return self

    def wait(self) -> None:
        pass


class ThreadRanks:
    """A runner over ranks that are threads: all of them have to say the same."""

    def __init__(
        self, checkpoint: Checkpoint, setup: Setup, order: list[int] | None = None
    ) -> None:
        count = setup.tensor_parallel_size
        self._threads, self._meeting = ThreadPoolExecutor(count), Meeting(count)
        order = order or list(range(count))

        def load(rank: int) -> Any:
            ranks = Ranks(
                rank, count, Group(self._meeting, rank, order), torch.zeros(count).numpy()
            )
            return load_rank(checkpoint, setup, NOWHERE, rank, lambda device: ranks, ordered)[0]

        self.runners = self._all(load, range(count))
        self.arch, self.num_blocks = checkpoint.arch, setup.num_blocks
        self.looks_ahead = self.runners[0].looks_ahead

    def _all(self, call: Callable[[Any], Any], of: Sequence[Any]) -> list[Any]:
        """Call for each rank in its thread; if one fails, the others do not wait for it."""

        def alone(one: Any) -> Any:
            try:
                return call(one)
            except BaseException:
                self._meeting.barrier.abort()
                raise

        return list(self._threads.map(alone, of))

    def add_adapter(self, number: int, weights: AdapterWeights) -> list[Any]:
        return [runner.add_adapter(number, weights) for runner in self.runners]

    def execute(self, step: Step) -> StepOutput:
        first, *others = self._all(lambda runner: runner.execute(step), self.runners)
        assert others == [first] * len(others)
        return first

    def prompt_logits(self, tokens: list[int], start: int = 0) -> Any:
        found = self._all(lambda runner: runner.prompt_logits(tokens, start), self.runners)
        assert all((one == found[0]).all() for one in found)
        return found[0]


def tiny_model(
    folder: Path, name: str, *, checks: bool = True, **settings: Any
) -> tuple[Checkpoint, Setup]:
    """Return a tiny model and what it runs with; ``checks`` asks whether it can."""
    checkpoint = load_checkpoint(write_family(folder / name, name))
    setup = Setup(
        dtype="f32",
        kv_cache_dtype="f32",
        block_size=BLOCK,
        threads=1,
        max_model_len=LONGEST,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_blocks=80,
        groups=cache_groups(checkpoint.arch),
    )
    setup = replace(setup, **settings)
    return checkpoint, cuda.settle(setup, checkpoint.arch) if checks else setup
