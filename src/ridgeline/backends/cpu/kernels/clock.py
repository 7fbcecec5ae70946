"""Calls that count the cycles they take, by kind of work.

Only kernels that were compiled to be profiled contain any of this. Each thread has a row of
counters (``KINDS``) that only it writes and that only ever grow. ``CycleCounters`` reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.arrays import address, aligned
from ridgeline.backends.cpu.kernels.ir import I64, Function, Operand, Value
from ridgeline.backends.cpu.kernels.kernel import Kernel
from ridgeline.backends.cpu.layout.arguments import ARGUMENTS
from ridgeline.backends.cpu.layout.formats import VALUE_BYTES

# ``step`` is all of a step, the kinds before it included. ``experts`` are no cycles but how many
# experts' matrices were read, in all layers; of those whose tiles threads share, thread 0 counts.
KINDS = ("linears", "head", "attention", "row operations", "barrier", "step", "experts")
_CLOCK = Kernel("clock", ("out",))
ROW_WORDS = 8  # of a thread's counters: one cache line
_KIND_OF = {
    **dict.fromkeys(("matmul", "lora_down", "lora_up"), "linears"),
    "argmax": "head",
    "draw": "head",
    "attend": "attention",
    "barrier": "barrier",
    **dict.fromkeys(("add_bias", "softcap"), "head"),
    **dict.fromkeys(("rope", "norm", "add", "copy", "scale", "gate", "length"), "row operations"),
    **dict.fromkeys(
        ("gate_attended", "convolve", "unit", "delta", "scan", "gate_heads"), "row operations"
    ),
    **{f"quantise_{form}": "row operations" for form in VALUE_BYTES},
}


class TimedFunction(Function):
    """A function ``(args, thread)`` whose calls are counted by what they do."""

    def __init__(self, module: object, name: str, num_args: int) -> None:
        super().__init__(module, name, num_args)
        self._name = name
        self._begin = self._cycles()

    def call(self, name: str, *args: Operand) -> None:
        """Call, and count the cycles that it takes; calls of no kind count inside."""
        of_any_shape, _, _ = name.partition(".")
        is_head = (self._name, name) == ("head", "matmul")
        kind = "head" if is_head else _KIND_OF.get(of_any_shape)
        begin = self._cycles() if kind else None
        super().call(name, *args)
        if kind and begin:
            self._count(kind, begin)

    def finish(self) -> None:
        """End the function."""
        if self._name == "step":
            self._count("step", self._begin)
        super().finish()

    def _count(self, kind: str, begin: Value) -> None:
        args, thread = self.args
        counters = self.load(args + 8 * ARGUMENTS.index("counters"), I64, 8)
        at = counters + thread * (8 * ROW_WORDS) + 8 * KINDS.index(kind)
        self.store(self.load(at, I64, 8) + self._cycles() - begin, at, 8)

    def _cycles(self) -> Value:
        return read_cycles(self)


def count_expert(fn: Function, args: Value, thread: Value) -> None:
    """Count that this thread reads one expert's matrices."""
    counters = fn.load(args + 8 * ARGUMENTS.index("counters"), I64, 8)
    at = counters + thread * (8 * ROW_WORDS) + 8 * KINDS.index("experts")
    fn.store(fn.load(at, I64, 8) + 1, at, 8)


def read_cycles(fn: Function) -> Value:
    """Return a count that grows steadily, at a rate that is measured (``CycleCounters``)."""
    is_x86 = "x86" in fn.raw.module.triple
    return fn.intrinsic(f"llvm.read{'cycle' if is_x86 else 'steady'}counter", I64)


def emit_clock(module: object) -> None:
    """``clock``: store the count that calls are timed with."""
    fn = _CLOCK.begin(module)
    fn.store(read_cycles(fn), fn.args[0], 8)
    fn.finish()


class CycleCounters:
    """Where compiled code spent its time: the threads' counters, in cycles and seconds."""

    def __init__(self, clock: Callable[[int], None], threads: int) -> None:
        """Begin to count; ``clock`` is the compiled function."""
        self._clock = clock
        self._words: NDArray[np.int64] = aligned((threads, ROW_WORDS), np.int64)
        self._previous = self._words.copy()
        self._begin = self._now()

    @property
    def address(self) -> int:
        """Where thread 0's row is."""
        return address(self._words)

    def take(self) -> Mapping[str, NDArray[np.int64]]:
        """Return the cycles of each thread ``[threads]`` by kind, since the last call.

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
