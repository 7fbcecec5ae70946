"""Tests of the cuda backend that need torch: ``make test-gpu`` has an environment with it.

All is computed on the CPU, by torch's twins of the kernels, or by Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os

from ridgeline.backends.cuda.device import TWINS

os.environ[TWINS] = "1"
if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)
