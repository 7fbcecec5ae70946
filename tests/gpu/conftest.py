"""Tests of the cuda backend that need torch: ``make test-gpu`` has an environment with it.

All is computed on the CPU, by torch's twins of the kernels, or by Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os

from ridgeline.backends.cuda.device import TWINS

if importlib.util.find_spec("torch") is not None:  # else these tests are left out, not the others
    os.environ[TWINS] = "1"
    import torch

    torch.set_num_threads(1)
