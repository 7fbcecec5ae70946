"""The cuda backend: NVIDIA GPUs, by kernels in Triton that torch launches.

Other code imports only this module. It imports torch when a model is loaded and not before, so a
machine without torch can plan, and is told what is missing. ``layer_spec`` says what is refused,
``sizes`` what a model takes, ``device`` what there is to compute on. ``model`` has the layers as
calls of operations, ``step`` a step's arrays and graphs, ``kernels`` the operations, and
``measure`` what a GPU has to return, by the same operations in torch, and how fast it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.backends.cuda import approval, device, gpu_models, sizes
from ridgeline.backends.cuda.device import CONTEXT_BYTES, KEPT_SHARE, describe
from ridgeline.backends.cuda.layer_spec import missing, runs_ahead
from ridgeline.backends.cuda.ranks import shard as share
from ridgeline.backends.cuda.sizes import FORMATS, footprint, weight_bits
from ridgeline.backends.interface import BackendContext, BackendRunner, S, Setup
from ridgeline.core.scheduling.policies import SplitFuse
from ridgeline.model.cost.costs import linear_flops, weight_bytes
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import ModelArch
from ridgeline.system.report import gib

__all__ = [
    "CONTEXT_BYTES", "FORMATS", "KEPT_SHARE", "approval", "budget_bytes", "check", "describe",
    "expected_bytes", "footprint", "gpu_models", "least_prompt_tokens", "looks_ahead", "new_runner",
    "packed_bytes", "runs_ahead", "settle", "step_knots", "weight_bits",
]  # fmt: skip

_OPS_PER_BYTE = 256.0  # of a GPU whose rates are not known


def check(setup: S, arch: ModelArch) -> S:
    """Return a setup without "auto". Raises ValueError, which names the flag, if it cannot be."""
    device.check()
    device.check_count(setup.tensor_parallel_size)
    return settle(setup, arch)


def settle(setup: S, arch: ModelArch | None) -> S:
    """Return a setup without "auto", as ``check`` does, on any machine: no GPU is asked for.

    None is a model of which no more than its sizes is known: then only formats are checked. Raises
    ValueError, which names the flag, if it cannot be.
    """
    if arch is not None:
        if what := missing(arch):
            raise ValueError(f"--backend cuda has no {what} yet: use --backend cpu")
        share.check(arch, setup.tensor_parallel_size)
    dtype = "bf16" if setup.dtype == "auto" else setup.dtype
    if dtype not in FORMATS:
        raise ValueError(f"--dtype {dtype}: the cuda backend has {', '.join(FORMATS)}")
    of_cache = "f32" if dtype == "f32" else "bf16"
    if setup.kv_cache_dtype not in ("auto", of_cache):
        raise ValueError(
            f"--kv-cache-dtype {setup.kv_cache_dtype}: the cuda backend has {of_cache} with "
            f"--dtype {dtype}"
        )
    if setup.block_size % 16:
        raise ValueError(
            f"--block-size is {setup.block_size}: the cuda backend needs a multiple of 16"
        )
    return replace(setup, dtype=dtype, kv_cache_dtype=of_cache)


def packed_bytes(checkpoint: Checkpoint, setup: Setup) -> Mapping[str, int]:
    """Return the bytes of the weights as this backend holds them, by part; none is read."""
    return sizes.weights_bytes(checkpoint, setup.dtype, setup.tensor_parallel_size)


def expected_bytes(arch: ModelArch, setup: Setup) -> Mapping[str, int]:
    """Return the same of a model whose config alone is known, for files of 16 bits a weight."""
    return sizes.arch_bytes(arch, setup.dtype, setup.tensor_parallel_size, {})


def budget_bytes(checkpoint: Checkpoint, setup: Setup) -> int:
    """Return the device memory that a model may take.

    Raises ValueError, which names the largest format that fits, if the weights are larger.
    """
    room = device.budget_bytes()
    need = sum(packed_bytes(checkpoint, setup).values())
    if need <= room:
        return room
    raise ValueError(too_large(checkpoint, setup.dtype, room, setup.tensor_parallel_size))


def too_large(checkpoint: Checkpoint, dtype: str, room: int, ranks: int = 1) -> str:
    """Return the error about weights of which a rank's part is larger than ``room`` bytes."""
    need = {form: sum(sizes.weights_bytes(checkpoint, form, ranks).values()) for form in FORMATS}
    fitting = [form for form, size in need.items() if size <= room and size < need[dtype]]
    way_out = "take a smaller model, or --backend cpu"
    if fitting:
        best = max(fitting, key=lambda form: need[form])
        way_out = f"--dtype {best} takes {gib(need[best])}"
    return (
        f"--backend cuda: the weights take {gib(need[dtype])} in {dtype}, and the GPU has "
        f"{gib(room)} to give: {way_out}"
    )


def new_runner(checkpoint: Checkpoint, setup: Setup, context: BackendContext) -> BackendRunner:
    """Load a model onto the device, or onto several."""
    if setup.tensor_parallel_size > 1:
        from ridgeline.backends.cuda.processes.runner import load_ranks

        return load_ranks(checkpoint, setup, context)
    from ridgeline.backends.cuda.loading import load_runner

    return load_runner(checkpoint, setup, context)


def looks_ahead(arch: ModelArch, setup: Setup) -> bool:
    """Whether steps of this model run ahead."""
    del setup
    return runs_ahead(arch)


def step_knots() -> tuple[int, ...]:
    """Return some sizes of graphs, and some above the largest."""
    return (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 2049, 4096)


def least_prompt_tokens(arch: ModelArch, setup: Setup) -> int:
    """Return how many tokens of prompts a step should have at least: see ``interface``.

    Products are computed in 16 bits, whatever the weights are stored in; f32 has no matrix units,
    so what suits processors is taken.
    """
    if setup.dtype == "f32":
        return SplitFuse.min_chunk
    read_bytes = weight_bytes(arch, weight_bits(setup.dtype) / 8)
    ops_per_byte = device.ops_per_byte() or _OPS_PER_BYTE
    return max(SplitFuse.min_chunk, round(2 * read_bytes * ops_per_byte / linear_flops(arch, 1)))
