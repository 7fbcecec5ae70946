"""Whole models on the kernels themselves, in Triton's interpreter, behind the real runner."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tests.gpu.kernels.interpreter")

import numpy as np

from ridgeline.backends.cuda import kernels
from ridgeline.backends.cuda.model.weights import load
from ridgeline.backends.cuda.ranks.shard import Shard
from ridgeline.backends.cuda.runner import CudaRunner
from ridgeline.core.params import SamplingParams
from ridgeline.model.files.checkpoint import load_checkpoint
from tests.gpu.engines import IDS, answers, engine_over, runners
from tests.gpu.kernels.interpreter import MARKS

pytestmark = MARKS


@pytest.mark.parametrize("name", ["qwen2", "gpt-oss"])
def test_logits_and_tokens_are_the_references(name: str, tmp_path: Path) -> None:
    mine, plain, setup = runners(tmp_path, name)
    checkpoint = load_checkpoint(tmp_path / name)
    weights = load(checkpoint, setup.dtype, mine.device, lambda done, total: None)
    runner = CudaRunner(Shard(checkpoint.arch), weights, setup, ops=kernels, pads=True)
    for low, high in ((0, 9), (9, 10)):
        got, wanted = (one.prompt_logits(IDS[low:high], low) for one in (runner, plain))
        assert np.abs(got - wanted).max() < 2e-5 * np.abs(wanted).max()
    asked = [
        (IDS[:5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)),
        (IDS[9:12], SamplingParams(temperature=0.8, seed=3, max_tokens=3, ignore_eos=True)),
    ]
    wanted_tokens = answers(engine_over(plain, setup), asked)
    assert answers(engine_over(runner, setup), asked) == wanted_tokens
    assert runner.num_ahead
