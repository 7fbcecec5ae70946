"""How large steps may be until a model of time is a guess: the sizes that it was fitted to.

A rate that few sequences show may be another with many. Positions and pairs are left out: they grow
with these counts, and each request has the same ones under any settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ridgeline.core.records import Record, StepRecord
from ridgeline.foresight.step_time.features import of_record
from ridgeline.model.cost.costs import Features

# A step counts for the nearest knot, so up to half way to the next power of two: 1.5 times. What is
# foreseen may go half as far beyond what was measured.
_TOLERANCE = 1.25


class Reach(NamedTuple):
    """The most tokens, sequences and rows of the head of any of some steps."""

    num_tokens: int
    num_seqs: int
    num_rows: int

    def exceeds(self, fitted: Reach) -> dict[str, tuple[int, int]]:
        """Return the counts for which these steps are too large for a model of time.

        Args:
            fitted: the reach of the steps that it was fitted to.

        Returns:
            The most of these steps and the most of those, by the names of the counts.
        """
        pairs = zip(self._fields, self, fitted, strict=True)
        return {name: (most, known) for name, most, known in pairs if most > _TOLERANCE * known}


def reach_of(features: Iterable[Features]) -> Reach | None:
    """Return the reach of steps with these features; None without any."""
    counts = [one[: len(Reach._fields)] for one in features]
    return Reach(*map(max, zip(*counts, strict=True))) if counts else None


def reach_of_run(records: Iterable[Record]) -> Reach | None:
    """Return the reach of the steps of a run; None if it has none."""
    return reach_of(of_record(record) for record in records if isinstance(record, StepRecord))


def in_words(excess: dict[str, tuple[int, int]]) -> str:
    """Return what ``Reach.exceeds`` found: "up to 8 sequences (measured: 4)"."""
    nouns = {"num_tokens": "tokens", "num_seqs": "sequences", "num_rows": "rows of logits"}
    found = [
        f"{most:,} {nouns[name]} (measured: {known:,})" for name, (most, known) in excess.items()
    ]
    return f"up to {', '.join(found)}"
