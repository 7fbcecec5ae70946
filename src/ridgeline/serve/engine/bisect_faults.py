"""A runner around a runner: the item that makes a step fail is found, and fails alone.

It relies on two promises of runners: a step may be executed again, and the result for a sequence
does not depend on the batch it is in. Copies are the exception: the failed attempt may
have overwritten their sources. Such a step is given up, and all its sequences start again; then
they have blocks and states of their own, so the next failure can be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from ridgeline.core.step import Runner, Step, StepOutput
from ridgeline.system.machine import DeviceLost

Value = TypeVar("Value")

_MESSAGE = "the model failed on this request; the server's log says more"


class StepLost(Exception):
    """The step failed and cannot be repeated; the cause is not known yet."""


class BisectingRunner:
    """Executes steps; if that raises, by halves, until each item runs or is the one that raises."""

    def __init__(self, runner: Runner, on_error: Callable[[BaseException], None]) -> None:
        """Run on ``runner``; ``on_error`` is told of each item that fails."""
        self._runner = runner
        self._on_error = on_error

    def execute(self, step: Step) -> StepOutput:
        """Execute a step; an exception becomes the error of the item that causes it.

        Raises StepLost if that cannot be found out, and DeviceLost if no step can run any more.
        """
        try:
            return self._runner.execute(step)
        except DeviceLost:
            raise
        except BaseException as error:  # panics of compiled libraries are no Exceptions
            if step.copies or step.state_copies:
                raise StepLost from error
            if len(step.work) == 1:
                self._on_error(error)
                return StepOutput(((),), errors={0: _MESSAGE})
        middle = len(step.work) // 2
        first = self.execute(step._replace(work=step.work[:middle]))
        second = self.execute(step._replace(work=step.work[middle:]))
        return StepOutput(
            first.tokens + second.tokens,
            {**first.logprobs, **_moved(second.logprobs, middle)},
            {**first.prompt_logprobs, **_moved(second.prompt_logprobs, middle)},
            {**first.errors, **_moved(second.errors, middle)},
            {**first.top, **_moved(second.top, middle)},
            {**first.similarity, **_moved(second.similarity, middle)},
            {**first.vectors, **_moved(second.vectors, middle)},
        )


def _moved(by_index: Mapping[int, Value], by: int) -> dict[int, Value]:
    return {index + by: value for index, value in by_index.items()}
