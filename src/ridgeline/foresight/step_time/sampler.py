"""What was measured of steps: a reservoir in which what is rare is not forgotten.

Samples lie in 24 bins, by the number of tokens (to powers of two) and by whether contexts are long.
Each bin keeps its last 64, so what is common does not drown what is rare. This runs in the engine's
thread, so it is plain Python; it knows nothing of clocks and files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.foresight.step_time.features import Windows, of_record
from ridgeline.model.cost.costs import Features

_PER_BIN = 64
_NUM_SIZES = 12  # powers of two of tokens: 1, 2 to 3, ... 2048 and more
_LONG = 512  # positions of a sequence, from which a context is long
_NUM_AFTER = 256


class Measured(NamedTuple):
    """A step: its features, and the seconds that scheduling and executing it took."""

    features: Features
    seconds: float


class After(NamedTuple):
    """Between two steps: rows of the first, requests that ended in it, seconds to the second."""

    num_rows: int
    num_ended: int
    seconds: float


class Samples:
    """A reservoir of steps, and of what followed them."""

    def __init__(
        self,
        steps: Iterable[Measured] = (),
        after: Iterable[After] = (),
        *,
        per_bin: int = _PER_BIN,
    ) -> None:
        """Begin with samples of before."""
        self._bins: list[deque[Measured]] = [deque(maxlen=per_bin) for _ in range(2 * _NUM_SIZES)]
        self._after: tuple[deque[After], deque[After]] = (
            deque(maxlen=_NUM_AFTER),  # no request ended
            deque(maxlen=_NUM_AFTER),
        )
        for step in steps:
            self.add(step)
        for sample in after:
            self.add_after(sample)

    def add(self, sample: Measured) -> None:
        """Keep a step; the oldest of its bin goes."""
        tokens, seqs, _, positions, _ = sample.features
        size = min(tokens.bit_length(), _NUM_SIZES) - 1
        self._bins[2 * size + (positions >= _LONG * seqs)].append(sample)

    def add_after(self, sample: After) -> None:
        """Keep what followed a step."""
        self._after[sample.num_ended > 0].append(sample)

    def steps(self) -> list[Measured]:
        """Return all steps that are kept."""
        return [sample for kept in self._bins for sample in kept]

    def thinned(self) -> list[Measured]:
        """Return at most 64 steps of each bin, evenly over all that it keeps."""
        return [
            kept[i * len(kept) // num]
            for kept in self._bins
            for num in (min(len(kept), _PER_BIN),)
            for i in range(num)
        ]

    def after(self) -> list[After]:
        """Return what followed steps."""
        return [sample for kept in self._after for sample in kept]


class Watcher:
    """Makes samples of the records of an engine, in the order in which they come."""

    def __init__(self, samples: Samples, windows: Windows) -> None:
        """Keep them in ``samples``; ``windows`` are those of the model's layers."""
        self.samples = samples
        self._windows = windows
        self._num_rows = self._num_ended = 0
        self._executed_s: float | None = None  # when the step before was executed

    def take(self, record: Record) -> Measured | None:
        """Take a record; return the sample that it is, if it is a step that says something.

        A step in which an item or the backend failed says nothing of time.
        """
        if isinstance(record, RequestRecord):
            self._num_ended += 1
        if not isinstance(record, StepRecord):
            return None
        if self._executed_s is not None and _follows(record):
            gap_s = record.start_s - self._executed_s
            self.samples.add_after(After(self._num_rows, self._num_ended, gap_s))
        self._executed_s, self._num_ended = None, 0
        if record.errors or not record.sampled:
            return None
        seconds = record.schedule_s + record.execute_s
        sample = Measured(of_record(record, self._windows), seconds)
        self._num_rows = sample.features.num_rows
        self._executed_s = record.start_s + seconds
        self.samples.add(sample)
        return sample


def _follows(step: StepRecord) -> bool:
    """Whether a step came at once behind the one before: some request of it was there already.

    Requests are numbered as they come, and the oldest that runs is in every step.
    """
    if step.resumed or step.aborted:
        return False
    return not step.arrived or min(work[0][0] for work in step.work) < step.arrived[0]
