"""The model of time of a running engine, learnt from its own steps.

Steps are sampled as they come; a fit is made when it is asked for and enough is new. Between two
fits one factor follows the machine's speed: the mean of actual / predicted over two seconds of busy
time. It knows no threads, no files and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from ridgeline.core.records import Record
from ridgeline.planner.fit import fit
from ridgeline.planner.samples import After, Measured, Samples, Watcher
from ridgeline.simulator.steptime import StepTime, Windows

NUM_NEEDED = 200  # steps, before a model of time can be trusted
_NUM_BETWEEN = 2000  # steps from one fit to the next, once many were seen
_BUSY_S = 2.0
_CUT = 3.0  # a step that took so many times what the steps before did met something else


class Learned:
    """Samples of an engine's steps, the model of time that explains them, and the speed now.

    Attributes:
        num_seen: steps that were sampled.
    """

    def __init__(self, windows: Windows, max_num_tokens: int) -> None:
        """Learn of a model with layers of these windows, in steps of at most so many tokens."""
        self.num_seen = 0
        self._watcher = Watcher(Samples(), windows)
        self._windows = windows
        self._knots = [1 << i for i in range(max_num_tokens.bit_length())]
        self._model: StepTime | None = None
        self._speed = 1.0
        self._next_fit = NUM_NEEDED

    def on_record(self, record: Record) -> None:
        """Take a record of the engine; where they are made, in their order."""
        sample = self._watcher.take(record)
        if sample is None:
            return
        self.num_seen += 1
        if self._model is not None:
            ratio = sample.seconds / self._model.seconds(sample.features)
            ratio = min(_CUT * self._speed, ratio)
            self._speed += (1 - exp(-sample.seconds / _BUSY_S)) * (ratio - self._speed)

    def news(self) -> tuple[Sequence[Measured], Sequence[After]] | None:
        """Return samples if it is time for a fit. Call it where records are made."""
        if self.num_seen < self._next_fit:
            return None
        self._next_fit = self.num_seen + min(self.num_seen, _NUM_BETWEEN)
        return self._watcher.samples.steps(), self._watcher.samples.after()

    def fit(self, steps: Sequence[Measured], after: Sequence[After]) -> None:
        """Fit the model of time anew; this takes tens of milliseconds, anywhere."""
        self._model = fit(steps, after, self._knots, windows=self._windows)
        self._speed = 1.0

    def times(self) -> StepTime | None:
        """Return the model of time at the speed of now; None if too few steps were seen."""
        return None if self._model is None else self._model.scaled(self._speed)
