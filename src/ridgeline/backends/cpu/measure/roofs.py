"""The roof of this machine: how fast memory can be read and how fast arithmetic can go.

Small kernels that do nothing else: reading walks a buffer far larger than the caches, in several
streams; arithmetic multiplies a small tile that stays in registers, as matrix products do, with
enough independent sums to hide latency. Rates are the best of several short rounds, because other
programs only ever slow a machine down. It knows nothing of models.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.arrays import address, aligned
from ridgeline.backends.cpu.kernels.compile import Kernels, Target, host_target
from ridgeline.backends.cpu.kernels.probes import (
    OPERANDS_BYTES,
    STREAMS,
    STRIDE_BYTES,
    compile_probes,
    tile_shape,
)
from ridgeline.system.machine import available_bytes

_READ_BYTES = 512 << 20  # several times the caches of most machines
_QUICK_READ_BYTES = 128 << 20
_ROUND_S, _ROUNDS = 0.016, 60  # short: some fall between the work of other programs
_QUICK_ROUND_S, _QUICK_ROUNDS = 0.008, 15


@dataclass(frozen=True, slots=True)
class Rates:
    """What some threads reach together. A multiply-add is two operations."""

    read_bytes_per_s: float
    int8_ops_per_s: float
    bf16_ops_per_s: float | None  # None where the processor has no such instruction
    f32_ops_per_s: float


@dataclass(frozen=True, slots=True)
class Roof:
    """What this machine reaches with one thread, and with ``threads``."""

    threads: int
    one_thread: Rates
    all_threads: Rates


@dataclass(frozen=True, slots=True)
class _Probe:
    """A kernel ``(memory, size, count)`` and its calls; ``per_count`` is bytes or ops."""

    kernel: Callable[[int, int, int], None]
    memories: Sequence[int]  # one for each thread
    size: int
    per_count: int
    owners: object  # code and memory that must live as long as it

    def seconds(self, count: int) -> float:
        """Run all threads at once; return how long they took from first start to last end."""
        starts, ends = [0.0] * len(self.memories), [0.0] * len(self.memories)
        together = threading.Barrier(len(self.memories))

        def work(number: int, memory: int) -> None:
            together.wait()
            starts[number] = time.perf_counter()
            self.kernel(memory, self.size, count)
            ends[number] = time.perf_counter()

        started = [threading.Thread(target=work, args=pair) for pair in enumerate(self.memories)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        return max(ends) - min(starts)

    def rate(self, round_s: float, best: float) -> float:
        """Return what all threads reach together in a round of about ``round_s``, per second.

        The number of repeats follows from the ``best`` rate so far, 0 at first. After a round in a
        slow moment the next one corrects it.
        """
        per_turn = len(self.memories) * self.per_count
        count = max(1, round(best * round_s / per_turn))
        return count * per_turn / self.seconds(count)


def measure_roof(
    threads: int, report: Callable[[int, int], None] = lambda done, total: None
) -> Roof:
    """Measure with one thread and with ``threads``, in about ten seconds.

    ``report`` is told how many of how many rounds are done. Rounds of different kinds alternate,
    so that a slow moment of the machine spoils none of them alone.
    """
    buffer = _buffer(_READ_BYTES)
    target = host_target()
    names = ["read", "int8", *(["bf16"] if target.processor.has_bf16 else []), "f32"]
    kernels = compile_probes(names, target)
    probes = {
        (name, count): _read_probe(kernels, buffer, count)
        if name == "read"
        else _tile_probe(kernels, name, count, target)
        for name in names
        for count in dict.fromkeys((1, threads))
    }
    best = dict.fromkeys(probes, 0.0)
    for turn in range(_ROUNDS):
        for done, (key, probe) in enumerate(probes.items()):
            report(turn * len(probes) + done, _ROUNDS * len(probes))
            best[key] = max(best[key], probe.rate(_ROUND_S, best[key]))

    def rates(n: int) -> Rates:
        return Rates(best["read", n], best["int8", n], best.get(("bf16", n)), best["f32", n])

    return Roof(threads, rates(1), rates(threads))


def measure_read(threads: int) -> float:
    """Return the bytes per second that ``threads`` read together, measured in under 0.5 s."""
    kernels = compile_probes(["read"], host_target())
    probe = _read_probe(kernels, _buffer(_QUICK_READ_BYTES), threads)
    best = 0.0
    for _ in range(_QUICK_ROUNDS):
        best = max(best, probe.rate(_QUICK_ROUND_S, best))
    return best


def _buffer(wanted_bytes: int) -> NDArray[np.uint8]:
    """Return memory that is really allocated: memory never written is one page of zeros."""
    buffer = aligned(min(wanted_bytes, available_bytes() // 4), np.uint8)
    buffer.fill(1)
    return buffer


def _read_probe(kernels: Kernels, buffer: NDArray[np.uint8], threads: int) -> _Probe:
    turn = STREAMS * STRIDE_BYTES
    size = len(buffer) // threads // turn * turn
    memories = [address(buffer) + number * size for number in range(threads)]
    return _Probe(kernels.function("read", 3), memories, size, size, (kernels, buffer))


def _tile_probe(kernels: Kernels, name: str, threads: int, target: Target) -> _Probe:
    rows, halves = tile_shape(target)
    ones, per_lane = {"int8": (0x01010101, 4), "bf16": (0x3F803F80, 2), "f32": (0x3F800000, 1)}[
        name
    ]
    operands = aligned((threads, OPERANDS_BYTES // 4), np.uint32)
    operands.fill(ones)
    memories = [address(row) for row in operands]
    per_count = rows * halves * 16 * per_lane * 2
    return _Probe(kernels.function(name, 3), memories, 0, per_count, (kernels, operands))
