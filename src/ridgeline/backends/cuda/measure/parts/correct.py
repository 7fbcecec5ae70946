"""Each kernel against its twin: in float64, or to the bit."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.cases import CASES
from ridgeline.backends.cuda.measure.part import Case, Part


def measure(part: Part) -> None:
    """Compare all kernels: the two that all steps spend their time in first."""
    part.run(cases(part))


def cases(part: Part) -> Iterator[Case]:
    """Yield the cases of every operation that there is."""
    first = ("attend", "product")
    for name in (*first, *(name for name in twins.__all__ if name not in first)):
        yield from CASES[name](part)
