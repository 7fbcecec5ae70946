"""The CPU backend: kernels emitted as LLVM IR from Python, one compiled call per step.

This module is its interface; code outside imports nothing else of it. ``layout`` says where weights
and buffers lie in memory, ``emit`` writes the kernels, ``measure`` says what this machine can do.
Read in this order: ``layout.formats``, then in ``emit`` ``ir`` (how kernels are written), ``isa``
(what differs between processors), ``gemm``, ``activations``, ``rows``, ``attention``, ``experts``,
``lora``, ``argmax``, ``draw`` (the kernels), ``feed_forward``, ``inputs``, ``step`` (which call
them, with code for each kind of layer), ``threads``, ``compile``; then ``batch`` and ``runner``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ridgeline.backends.cpu.kernels.compile import host_target
from ridgeline.backends.cpu.kernels.threads import MOST_THREADS
from ridgeline.backends.cpu.layout.model_weights import footprint as _footprint
from ridgeline.backends.cpu.layout.packed_sizes import packed_bytes as _packed_bytes
from ridgeline.backends.cpu.layout.shapes import (
    MIXED_ROWS,
    OUTPUT_SPLIT_ROWS,
    PRUNED_ROWS,
    ROW_BLOCK,
    TOKENS,
)
from ridgeline.backends.cpu.pipeline.split import check_stages
from ridgeline.backends.cpu.runner import load_runner
from ridgeline.backends.interface import BackendContext, BackendRunner, Footprint, S, Setup
from ridgeline.core.scheduling.policies import SplitFuse
from ridgeline.model.cost.format_bytes import own_kv_cache_dtype
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import ModelArch

if TYPE_CHECKING:
    from ridgeline.backends.cpu.measure.roofs import Rates, Roof, measure_read, measure_roof

__all__ = [
    "Rates", "Roof", "budget_bytes", "check", "describe", "footprint", "join_stage",
    "least_prompt_tokens", "looks_ahead", "measure_read", "measure_roof", "new_runner",
    "packed_bytes", "step_knots",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import what measures the machine when it is asked for: a start needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ridgeline.backends.cpu.measure import roofs

    return getattr(roofs, name)


def check(setup: S, arch: ModelArch) -> S:
    """Return a setup in which "auto" is left of ``dtype`` only: blocks as the file has them.

    An encoder reads all its tokens at once, where one scale per row is a quarter faster than one
    per block. It keeps nothing for later steps, so its keys and values are as exact as its weights:
    in f32 or f16 beside f32 or bf16, and else of 8 bits. Raises ValueError, which names the flag,
    if the setup cannot be.
    """
    if setup.block_size % TOKENS:
        raise ValueError(
            f"--block-size is {setup.block_size}: the cpu backend needs a multiple of {TOKENS}"
        )
    if setup.threads > MOST_THREADS:
        raise ValueError(f"--threads is {setup.threads}: at most {MOST_THREADS} can work together")
    if setup.stages > 1:
        check_stages(arch, setup)
    dtype, kv_cache_dtype = setup.dtype, setup.kv_cache_dtype
    if kv_cache_dtype == "bf16":
        raise ValueError("--kv-cache-dtype bf16: the cpu backend has f16, which is as large")
    if kv_cache_dtype == "int8-int4" and any(a.latent for a in arch.attentions):
        raise ValueError("--kv-cache-dtype int8-int4: latent attention stores no values; use int8")
    return replace(
        setup,
        dtype="int8-row" if dtype == "auto" and arch.reads_whole else dtype,
        kv_cache_dtype=_kv_cache_dtype(dtype, arch) if kv_cache_dtype == "auto" else kv_cache_dtype,
    )


def _kv_cache_dtype(dtype: str, arch: ModelArch) -> str:
    if dtype == "bf16" and arch.reads_whole:
        return "f16"
    return own_kv_cache_dtype(dtype)


def packed_bytes(checkpoint: Checkpoint, setup: Setup) -> Mapping[str, int]:
    """Return the bytes of the weights as this backend holds them, by part; none is read."""
    return _packed_bytes(checkpoint, setup.dtype, setup.kv_cache_dtype)


def new_runner(checkpoint: Checkpoint, setup: Setup, context: BackendContext) -> BackendRunner:
    """Pack or map the weights, compile or load the kernels, start the threads."""
    if setup.stages > 1:
        from ridgeline.backends.cpu.pipeline.runner import load_stages

        return load_stages(checkpoint, setup, context)
    return load_runner(checkpoint, setup, context)


def join_stage(checkpoint: Checkpoint, address: tuple[str, int], **options: Any) -> None:
    """Be a stage of an engine elsewhere, until that ends: see ``pipeline.process.join``."""
    from ridgeline.backends.cpu.pipeline.process import join

    join(checkpoint, address, **options)


def budget_bytes(checkpoint: Checkpoint, setup: Setup) -> None:
    """Return None: a model takes the machine's memory."""


def least_prompt_tokens(arch: ModelArch, setup: Setup) -> int:
    """Return what the policy takes by itself: it was found for processors."""
    del arch, setup
    return SplitFuse.min_chunk


def looks_ahead(arch: ModelArch, setup: Setup) -> bool:
    """Whether there are several stages: all but the last look ahead."""
    del arch
    return setup.stages > 1


def step_knots() -> tuple[int, ...]:
    """Return where work is split otherwise, and some steps between and above."""
    few = (1, 2, PRUNED_ROWS, PRUNED_ROWS + 1, OUTPUT_SPLIT_ROWS, OUTPUT_SPLIT_ROWS + 1)
    some = (12, MIXED_ROWS, MIXED_ROWS + 1, 24, 32, 48)
    return (*few, *some, *(ROW_BLOCK * times for times in (1, 2, 3, 4, 8, 16, 32)))


def footprint(arch: ModelArch, setup: Setup) -> Footprint:
    """Return how much memory a setup takes on this machine."""
    return _footprint(arch, setup, has_tiles=host_target().processor.has_tiles)


def describe() -> str:
    """Return the instruction that byte products are made of on this machine."""
    return str(host_target().processor.dot.value)
