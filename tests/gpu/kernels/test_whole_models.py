"""Whole tiny models on interpreted kernels, through the runner and the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tests.gpu.kernels.interpreter")

import numpy as np

from ridgeline.backends.cuda import kernels
from ridgeline.backends.cuda.ranks.shard import Shard
from ridgeline.backends.cuda.runner import CudaRunner
from ridgeline.core.params import SamplingParams
from tests.gpu.engines import IDS, answers, engine_over, runners
from tests.gpu.kernels.interpreter import MARKS

pytestmark = MARKS
# Windows and sinks; soft caps and heads of their own norms; experts; slopes.
MORE = ("gpt-oss", "gemma2", "mixtral", "bloom")


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]
)
def test_a_model_on_kernels_says_what_it_says_on_their_twins(name: str, tmp_path: Path) -> None:
    on_twins, plain, setup = runners(tmp_path, name)
    on_kernels = CudaRunner(Shard(on_twins.arch), on_twins.weights, setup, ops=kernels)
    for low, high in ((0, 20), (20, 21), (21, 30)):
        got, wanted = (one.prompt_logits(IDS[low:high], low) for one in (on_kernels, plain))
        assert np.abs(got - wanted).max() < 5e-6 * np.abs(wanted).max()
    requests = [
        (IDS[:20], SamplingParams(temperature=0.0, max_tokens=2)),
        (IDS[5:14], SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=3, max_tokens=2)),
    ]
    found, wanted = (answers(engine_over(one, setup), requests) for one in (on_kernels, on_twins))
    assert found == wanted
