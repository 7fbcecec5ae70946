"""Tests of the cuda backend that need torch: ``make test-gpu`` has an environment with it.

All is computed on the CPU, by torch's twins of the kernels, or by Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.gpu.on_cpu import compute_on_cpu

if importlib.util.find_spec("torch") is not None:  # else these tests are left out, not the others
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        compute_on_cpu(patch)
        yield
