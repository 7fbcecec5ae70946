"""Our own engine on a device, as its backends count themselves: no GPU and no torch is needed.

On processors it is the cpu backend, on NVIDIA GPUs the cuda backend. Of other devices nothing but
the shape of a model is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.backends import BACKENDS, cuda
from ridgeline.backends.interface import Footprint, Setup
from ridgeline.model.cost.format_bytes import FORMATS, Format, Storage
from ridgeline.model.cost.hardware import Device
from ridgeline.model.shape.cache_groups import cache_groups
from ridgeline.model.shape.model import ModelArch
from ridgeline.planner.memory.flags import AUTO, PlanFlags
from ridgeline.planner.memory.ledger import (
    COMPUTED,
    FROM_FILE,
    EngineMemory,
    EngineOverheads,
    Line,
    Sizes,
)
from ridgeline.planner.memory.model_spec import ModelSpec
from ridgeline.system.machine import usable_cpus

OWN = "ridgeline"  # the engine's name
# Of NVIDIA GPUs with compute capability 8.0 or newer; a device that a user describes has none.
_GENERATIONS = ("ampere", "ada", "hopper", "blackwell", "")
_OF_PROCESSORS = ("cpu", "reference")


def is_on_gpu(engine: EngineOverheads, device: Device) -> bool:
    """Whether this is our engine on a device that its cuda backend computes on."""
    return engine.name == OWN and computes_on(device)


def computes_on(device: Device) -> bool:
    """Whether the cuda backend computes on a device."""
    return device.kind == "gpu" and device.generation in _GENERATIONS


def on_gpu(engine: EngineOverheads, arch: ModelArch | None) -> EngineOverheads:
    """Return how our engine divides a GPU's memory, with the backend's own constants.

    None is a model of which no more than its sizes is known.
    """
    return replace(
        engine,
        looks_ahead=arch is None or cuda.runs_ahead(arch),
        gpu_memory_utilization=1 - cuda.KEPT_SHARE,
        context_bytes=cuda.CONTEXT_BYTES,
        context_name="driver, runtime and graphs",
    )


def gpu_setup(
    spec: ModelSpec, flags: PlanFlags, engine: EngineOverheads, num_ranks: int = 1
) -> Setup:
    """Return the setup that the cuda backend would run with.

    Raises ValueError if it refuses the model, a format, or this number of ranks.
    """
    stages = flags.ranks("pipeline_parallel_size", "1") or 1
    if stages > 1:
        raise ValueError(
            f"--pipeline-parallel-size {stages}: the cuda backend has no stages: use "
            f"--tensor-parallel-size"
        )
    longest = flags.context or spec.shape.max_position
    setup = _wanted(spec, spec.arch, flags, engine, longest)
    return cuda.settle(replace(setup, tensor_parallel_size=num_ranks), spec.arch)


def gpu_formats() -> Mapping[str, float]:
    """Return the bits of a weight in each format of the cuda backend, the widest first."""
    bits = {name: cuda.weight_bits(name) for name in cuda.FORMATS}
    return dict(sorted(bits.items(), key=lambda of: -of[1]))


def gpu_storage(setup: Setup) -> Storage:
    """Return how the cuda backend stores a model's weights, whatever they are stored as."""
    plain = FORMATS["f32" if setup.dtype == "f32" else "bf16"]
    return Storage(plain, Format(setup.dtype, cuda.weight_bits(setup.dtype)))


def sizes_on_gpu(
    spec: ModelSpec, flags: PlanFlags, engine: EngineOverheads, num_ranks: int
) -> Sizes:
    """Return what the cuda backend says of one of several ranks of a model.

    Of a model that our engine does not run it is what the file says. Raises ValueError as
    ``gpu_setup`` does.
    """
    setup = gpu_setup(spec, flags, engine, num_ranks)
    arch, checkpoint = spec.arch, spec.checkpoint
    if arch is None:
        return sizes_of_file(spec, flags)
    weights = (
        cuda.expected_bytes(arch, setup)
        if checkpoint is None
        else cuda.packed_bytes(checkpoint, setup)
    )
    sizes = _sizes(spec, weights, setup, cuda.footprint(arch, setup))
    return replace(sizes, num_ranks=num_ranks)


def sizes_on_cpu(spec: ModelSpec, flags: PlanFlags, memory: EngineMemory) -> Sizes:
    """Return what the backend says that would run a model on processors.

    Of a model whose file is not here it is what is known of the file. Raises ValueError if no
    backend can run it so.
    """
    checkpoint = spec.checkpoint
    if checkpoint is None:
        return sizes_of_file(spec, flags)
    wanted = _wanted(spec, checkpoint.arch, flags, memory.engine, memory.context)
    problems: list[ValueError] = []
    for backend in (BACKENDS[name] for name in _OF_PROCESSORS):
        try:
            setup = backend.check(wanted, checkpoint.arch)
            footprint = backend.footprint(checkpoint.arch, setup)
        except ValueError as problem:
            problems.append(problem)
            continue
        return _sizes(spec, backend.packed_bytes(checkpoint, setup), setup, footprint)
    raise problems[0]


def sizes_of_file(spec: ModelSpec, flags: PlanFlags) -> Sizes:
    """Return what the file says of its weights, if they are to be as it has them."""
    stored = spec.stored if flags.dtype == AUTO else None
    return Sizes(weights=stored, weights_how=FROM_FILE, adapters=_adapter_line(spec))


def _wanted(
    spec: ModelSpec, arch: ModelArch | None, flags: PlanFlags, engine: EngineOverheads,
    longest: int,
) -> Setup:  # fmt: skip
    return Setup(
        dtype=flags.dtype,
        kv_cache_dtype=flags.kv_cache_dtype,
        block_size=engine.block_size,
        threads=usable_cpus(),
        max_model_len=longest,
        max_num_seqs=min(engine.max_num_seqs, engine.max_num_batched_tokens),
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_lora_rank=spec.adapters.max_lora_rank,
        groups=() if arch is None else cache_groups(arch),
    )


def _sizes(
    spec: ModelSpec, weights: Mapping[str, int], setup: Setup, footprint: Footprint
) -> Sizes:
    return Sizes(
        weights=weights,
        weights_how=COMPUTED,
        kv_bytes_per_token=footprint.kv_bytes_per_token,
        state_bytes_per_seq=footprint.state_bytes_per_seq,
        step_bytes=footprint.step_bytes,
        windows=tuple(group.window for group in setup.groups),
        adapters=_adapter_line(spec),
    )


def _adapter_line(spec: ModelSpec) -> Line | None:
    room = spec.adapters
    return Line("adapters", room.num_bytes, room.how) if room.num_bytes else None
