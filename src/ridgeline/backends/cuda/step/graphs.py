"""Layers as CUDA graphs, one for each size of steps: single tokens and prompts replay the same.

A step is padded to the size of a graph; tokens of the padding have no table, and write nothing. On
a CPU the same padding can be done, and the layers just run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

LARGEST = 2048
SIZES = (
    1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1024, 64),
    *range(1024, LARGEST + 1, 128),
)  # fmt: skip


class Variant(NamedTuple):
    """What a graph is for, beside its size.

    Attributes:
        folds: whether partial results of attention are folded.
        single: whether each item is one token, so that programs have few rows.
        adapted: whether any item has an adapter.
    """

    folds: bool
    single: bool
    adapted: bool = False


class Graphs:
    """Runs layers, on a GPU by graphs that are captured when they are first needed.

    Attributes:
        pads: whether steps are padded.
        sizes: of graphs.
        failures: a line for each graph that could not be captured.
        say: told the first of them.
    """

    def __init__(
        self,
        run: Callable[[int, Variant, bool], torch.Tensor],
        device: torch.device,
        most: int,
        pads: bool | None = None,
    ) -> None:
        """Take the function that runs the layers.

        Args:
            run: takes how many tokens, the variant, and whether a graph is captured, in which
                programs are launched for the most folds that there may be; returns final states.
            device: a GPU, or a CPU, which has no graphs.
            most: tokens of the largest step.
            pads: whether steps are padded; by default on a GPU.
        """
        self._run, self._device = run, device
        self.failures: list[str] = []
        self.say: Callable[[str], None] = lambda line: None
        self.pads = device.type == "cuda" if pads is None else pads
        self.sizes: list[int] = [size for size in SIZES if size <= most]
        self._captured: dict[tuple[int, Variant], tuple[Any, Any]] = {}
        self._pool: Any = None

    def padded(self, num_tokens: int) -> int:
        """Return with how many tokens a step of ``num_tokens`` runs."""
        if not self.pads or num_tokens > self.sizes[-1]:
            return num_tokens
        return self.sizes[bisect_left(self.sizes, num_tokens)]

    def run(self, size: int, variant: Variant) -> torch.Tensor:
        """Run the layers over a padded step; return final states, valid until the next run."""
        if self._device.type != "cuda" or not self.pads or size > self.sizes[-1]:
            return self._run(size, variant, False)
        if (size, variant) not in self._captured:
            self._captured[size, variant] = self._capture(size, variant)
        graph, hidden = self._captured[size, variant]
        if graph is None:
            return self._run(size, variant, False)
        graph.replay()
        return hidden

    def _capture(self, size: int, variant: Variant) -> tuple[Any, Any]:
        """Capture one graph; all share the memory of the largest so far.

        What cannot be captured runs without a graph from then on: slower, but with the same
        results.
        """
        self._run(size, variant, True)  # compiles and loads what a capture cannot
        try:
            graph, hidden = captured(lambda: self._run(size, variant, True), self._pool)
        except RuntimeError as error:
            torch.cuda.synchronize()  # raises if more is lost than a graph
            why = f"a step of {size} tokens has no CUDA graph and is slower: {error}"
            self.failures.append(why.splitlines()[0])
            if len(self.failures) == 1:
                self.say(self.failures[0])
            return None, None
        self._pool = self._pool or graph.pool()
        return graph, hidden

    def forget(self) -> None:
        """Drop all graphs: what they read has moved."""
        self._captured.clear()
        self._pool = None


def captured(call: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    """Return a CUDA graph of a call that ran before, and what the call returned.

    Only this thread's calls can spoil it: other threads may call the driver meanwhile. Raises what
    the call raised, or RuntimeError if the driver cannot capture it.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = call()
    except RuntimeError as error:  # that the capture is void, or why
        first = error.__context__
        raise first if isinstance(first, RuntimeError) else error from None
    finally:
        torch.cuda.set_stream(stream)  # a capture that failed leaves its own
    return graph, output
