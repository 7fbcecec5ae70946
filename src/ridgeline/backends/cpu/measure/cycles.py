"""Where compiled code spent its time: the counters of kernels compiled to be profiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.arrays import address, aligned
from ridgeline.backends.cpu.emit.clock import KINDS, ROW_WORDS


class CycleCounters:
    """The threads' counters, in seconds."""

    def __init__(self, clock: Callable[[int], None], num_threads: int) -> None:
        """Begin to count; ``clock`` is the compiled function."""
        self._clock = clock
        self._words: NDArray[np.int64] = aligned((num_threads, ROW_WORDS), np.int64)
        self._previous = self._words.copy()
        self._begin = self._now()

    @property
    def address(self) -> int:
        """Where thread 0's row is."""
        return address(self._words)

    def take(self) -> Mapping[str, NDArray[np.int64]]:
        """Return the cycles of each thread ``[num_threads]`` by kind, since the last call.

        Of the kind "experts" it is how many experts' matrices it read.
        """
        now = self._words.copy()
        cycles, self._previous = now - self._previous, now
        return {kind: cycles[:, i] for i, kind in enumerate(KINDS)}

    def seconds_per_cycle(self) -> float:
        """Return what one cycle is, by all the time since counting began."""
        (begin, begin_s), (now, now_s) = self._begin, self._now()
        return (now_s - begin_s) / (now - begin)

    def _now(self) -> tuple[int, float]:
        word = np.zeros(1, np.int64)
        self._clock(address(word))
        return int(word[0]), time.monotonic()
