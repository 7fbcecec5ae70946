"""The cuda backend where there is no GPU: all is computed on the CPU, by twins of the kernels.

Nothing here needs torch until a model is loaded.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from ridgeline.backends import cuda
from ridgeline.backends.cuda import device
from ridgeline.backends.cuda.device import DeviceFacts
from ridgeline.backends.interface import BackendContext, BackendRunner, Setup
from ridgeline.bench import gpu
from ridgeline.model.files.tensors import Checkpoint

TWINS = "ridgeline.backends.cuda.measure.twins"
ORDERED = "tests.gpu.ordered_twins"
LONG_S = 3600.0  # a busy processor takes longer than a GPU may
ROOT = Path(__file__).parents[2]


def compute_on_cpu(patch: pytest.MonkeyPatch, ops: str = TWINS) -> None:
    """Let ``--backend cuda`` compute by a module of operations, without asking for a GPU.

    The processes of ranks compute by it too.
    """

    def new_runner(checkpoint: Checkpoint, setup: Setup, context: BackendContext) -> BackendRunner:
        from ridgeline.backends.cuda.loading import load_runner
        from ridgeline.backends.cuda.processes.runner import load_ranks

        load = load_ranks if setup.tensor_parallel_size > 1 else load_runner
        return load(checkpoint, setup, context, import_module(ops))

    patch.setattr(cuda, "check", cuda.settle)
    patch.setattr(cuda, "budget_bytes", lambda checkpoint, setup: None)  # it takes the machine's
    patch.setattr(cuda, "new_runner", new_runner)
    patch.setenv("PYTHONPATH", str(ROOT))  # of ranks, which import the module by its name


def measure_in_small(patch: pytest.MonkeyPatch) -> None:
    """Let whatever measures a GPU compute small shapes on the CPU, for as long as that takes."""
    patch.setattr(gpu, "_MODULE", "tests.gpu.tiny_part")
    patch.setattr(gpu, "_SILENT_S", LONG_S)
    for part in gpu.PARTS:
        patch.setitem(gpu.PARTS, part, LONG_S)


def say_there_is_a_gpu(patch: pytest.MonkeyPatch, *, has_torch: bool = True) -> None:
    """Let the machine have a GPU, and torch beside it or not, as far as it is asked for facts."""
    known = DeviceFacts(driver=(13, 0))
    if has_torch:
        newest = version("torch"), True, (13, 0), (13, 0)
        known = DeviceFacts(*newest, gpu="NVIDIA H200", capability=(9, 0))
    patch.setattr(device, "facts", lambda: known)
    patch.setattr(device, "has_driver", lambda: True)
