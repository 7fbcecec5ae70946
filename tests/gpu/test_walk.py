"""The walk of docs/architecture.md through a step on a GPU is as long as the page says."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

from ridgeline.backends import cuda
from ridgeline.backends.cuda.loading import load_runner
from ridgeline.backends.cuda.measure import twins
from tests.gpu.engines import NOWHERE
from tests.test_walks import check_row
from tests.tiny import PLAIN, checkpoint, new_setup
from tests.walks import row, step_walk

MOST_VISITS = 57, 42


def test_a_step_visits_what_the_table_says() -> None:
    setup = cuda.settle(new_setup(num_blocks=40), PLAIN)
    runner = load_runner(checkpoint(PLAIN), setup, NOWHERE, twins)
    check_row(row("the same, from `CudaRunner.execute`", step_walk(runner)), *MOST_VISITS)
