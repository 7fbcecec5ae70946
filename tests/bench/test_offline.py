"""Which steps of a run are decoding, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.bench.offline import decode_steps
from ridgeline.core.records import StepRecord

EMPTY = StepRecord(
    number=0,
    start_s=0.0,
    schedule_s=0.0,
    execute_s=0.0,
    commit_s=0.0,
    arrived=(),
    aborted=(),
    paused=(),
    resumed=(),
    work=(),
    drafts=(),
    sampled=(),
    ranked=(),
    similarities=(),
    errors=(),
    admitted=(),
    preempted=(),
    waits=(),
    num_copies=0,
    num_running=0,
    num_waiting=0,
    num_outside=0,
    is_read=True,
    blocks_used=0,
    blocks_indexed=0,
)


def run(*steps: list[int]) -> list[StepRecord]:
    """Steps of so many tokens for each sequence."""
    works = [tuple(((i, 0), 0, count) for i, count in enumerate(step)) for step in steps]
    return [replace(EMPTY, work=work) for work in works]


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([[8, 8], [1, 1], [1, 1]], (1, 3)),
        ([[8], [1, 4], [1, 4], [1, 1], [1, 1], [1]], (3, 5)),  # the first is done first
        ([[8], [1, 8], [1], [1]], (2, 4)),  # never both: what there is
        ([[1], [1], [1]], (1, 3)),  # a prompt of one token
    ],
)
def test_prompts_and_stragglers_are_no_decoding(
    steps: list[list[int]], wanted: tuple[int, int]
) -> None:
    num_streams = max(len(step) for step in steps)
    assert decode_steps(run(*steps), num_streams) == wanted
