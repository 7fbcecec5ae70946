"""A model on a device: how it is divided, its ledger, what fits beside it, and all of it in words.

How much context, how many sequences and which division fit are questions to a ledger the other way
round. They are answered by bisection over the same sum, so that what is said to fit does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args

from ridgeline.engine.setup.options import Dtype, KvCacheDtype
from ridgeline.model.cost.format_bytes import (
    BY_WIDTH,
    FORMATS,
    Storage,
    format_named,
    kv_bytes_of,
    own_kv_cache_dtype,
    storage_of_dtype,
)
from ridgeline.model.cost.hardware import Device
from ridgeline.model.cost.module_names import Modules
from ridgeline.planner.memory.flags import AUTO, PlanFlags
from ridgeline.planner.memory.ledger import (
    ENGINES,
    EngineMemory,
    EngineOverheads,
    Ledger,
    Sizes,
    check_division,
    make_ledger,
)
from ridgeline.planner.memory.model_spec import ModelSpec
from ridgeline.planner.memory.own_engine import (
    OWN,
    computes_on,
    gpu_formats,
    gpu_setup,
    gpu_storage,
    is_on_gpu,
    on_gpu,
    sizes_of_file,
    sizes_on_cpu,
    sizes_on_gpu,
)
from ridgeline.system.report import counted, gib

LedgerOf = Callable[[EngineMemory], Ledger]
DEFAULT_CONTEXT = 4096  # tokens, where nothing says how long texts are
_MOST_RANKS = 16
_USUAL_ENGINES = {"cpu": OWN, "soc": "llamacpp"}  # by kind of device; else vLLM
_, *_OUR_CACHES = get_args(KvCacheDtype)  # without "auto"
_, *_OUR_DTYPES = get_args(Dtype)
_MOST_TOKENS = 1 << 40
_MOST_SEQUENCES = 1 << 32


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """A model on one kind of device.

    Attributes:
        device: the device.
        memory: the load, and how the model is divided.
        ledger: of the fullest device.
        whole: of the whole model, as if it were on one.
        storage: how the weights are stored there.
        max_context: the longest context with which all sequences fit, at most what the model takes;
            None for any length.
        max_concurrency: the most sequences of the asked context.
        would_help: where it does not fit, what would make it: flags.
    """

    device: Device
    memory: EngineMemory
    ledger: Ledger
    whole: Ledger
    storage: Storage
    max_context: int | None
    max_concurrency: int
    would_help: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """How many devices one replica takes."""
        return self.memory.tp * self.memory.pp


def place(spec: ModelSpec, device: Device, flags: PlanFlags, *, default_ranks: str) -> Placement:
    """Return the model on a device, divided as wished.

    Args:
        spec: the model.
        device: what to put it on.
        flags: the flags.
        default_ranks: "1" or "auto": what holds where they leave tensor parallelism open.

    Raises:
        ValueError: a flag contradicts the device, the model or another flag, or the size of the
            model's weights is not known.
    """
    unknown = spec.shape.not_counted
    if unknown and spec.stored is None and flags.weights_memory is None:
        raise ValueError(
            f"{spec.name}: {unknown[0]} describes weights that are not understood: give the "
            f"size of the model's files with --weights-memory"
        )
    engine = engine_on(spec, device, flags)
    storage = _storage(spec, flags, device, engine)
    memory = _engine_memory(spec, device, flags, engine, storage)
    tp = flags.ranks("tensor_parallel_size", default_ranks)
    pp = flags.ranks("pipeline_parallel_size", "1")
    if device.max_ranks == 1 and (tp or 1) * (pp or 1) > 1:
        raise ValueError(
            f"{device.id} has no link to other devices: a model cannot be split over several"
        )
    if is_on_gpu(engine, device):
        pp = 1
    _check_formats(spec, device, flags, engine)
    ledger_of = _ledger_of(spec, device, flags, memory, storage)
    memory = _divide(spec, device, ledger_of, memory, tp, pp)
    ledger = ledger_of(memory)
    longest = max_context(ledger_of, memory)
    return Placement(
        device=device,
        memory=memory,
        ledger=ledger,
        whole=ledger_of(replace(memory, tp=1, pp=1)),
        storage=storage,
        max_context=_bounded(longest, spec.shape.max_position),
        max_concurrency=max_concurrency(ledger_of, memory),
        would_help=()
        if ledger.fits
        else tuple(_helps(spec, device, flags, ledger_of, memory, storage)),
    )


def engine_on(spec: ModelSpec, device: Device, flags: PlanFlags) -> EngineOverheads:
    """Return the engine whose rules apply on a device: the one asked for, or the usual one.

    On this machine's GPU the usual one is ours if the GPU has passed its checks and the model runs
    there.
    """
    name = flags.engine or _USUAL_ENGINES.get(device.kind, "vllm")
    runs_here = device.has_passed and spec.arch is not None
    if flags.engine is None and runs_here and not refusal(spec, device, flags):
        name = OWN
    engine = ENGINES[name]
    if name == OWN and any(one.cache.state_values for one in spec.shape.layers):
        engine = replace(engine, frees_windows=False)
    return _as_asked(on_gpu(engine, spec.arch) if is_on_gpu(engine, device) else engine, flags)


def _as_asked(engine: EngineOverheads, flags: PlanFlags) -> EngineOverheads:
    """Return an engine with the settings that the flags give it; the others are its own."""
    names = "block_size", "max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization"
    given = {name: value for name in names if (value := getattr(flags, name)) is not None}
    return replace(engine, **given)


def refusal(spec: ModelSpec, device: Device, flags: PlanFlags) -> str | None:
    """Return why our engine would not run a model on a GPU as wished; None where it would.

    Of other devices nothing is known to be refused.
    """
    if not computes_on(device):
        return None
    try:
        gpu_setup(spec, flags, _as_asked(ENGINES[OWN], flags))
    except ValueError as error:
        return str(error)
    return None


def _bounded(longest: int | None, max_position: int) -> int | None:
    limits = [length for length in (longest, max_position or None) if length is not None]
    return min(limits) if limits else None


def cannot_compute(device: Device, form: str) -> bool:
    """Whether a device is known to have no units for a format; processors compute any."""
    has_units = device.kind != "cpu" and bool(device.peak_ops_per_s)
    return has_units and form not in device.peak_ops_per_s


def _check_formats(
    spec: ModelSpec, device: Device, flags: PlanFlags, engine: EngineOverheads
) -> None:
    """Raise ValueError for a format that a model which runs on processors has not there."""
    if spec.checkpoint is None or device.kind != "cpu":
        return
    if flags.dtype not in (AUTO, *_OUR_DTYPES):
        raise ValueError(f"--dtype {flags.dtype}: this engine computes in {', '.join(_OUR_DTYPES)}")
    if engine.name == OWN and flags.kv_cache_dtype not in (AUTO, *_OUR_CACHES):
        raise ValueError(
            f"--kv-cache-dtype {flags.kv_cache_dtype}: this engine has {', '.join(_OUR_CACHES)}"
        )


def _storage(spec: ModelSpec, flags: PlanFlags, device: Device, engine: EngineOverheads) -> Storage:
    if is_on_gpu(engine, device):
        return gpu_storage(gpu_setup(spec, flags, engine))
    storage = spec.storage
    if flags.dtype != AUTO:
        storage = storage_of_dtype(flags.dtype, spec.shape)
        names = (*storage.plain_modules.names, *spec.storage.plain_modules.names)
        storage = replace(storage, plain_modules=Modules(tuple(dict.fromkeys(names))))
    if cannot_compute(device, "bf16"):  # the other format of 16 bits is as large
        plain, linear = (
            FORMATS["f16"] if one.name == "bf16" else one for one in (storage.plain, storage.linear)
        )
        storage = replace(storage, plain=plain, linear=linear)
    return storage


def _engine_memory(
    spec: ModelSpec, device: Device, flags: PlanFlags, engine: EngineOverheads, storage: Storage
) -> EngineMemory:
    kv_cache_dtype = flags.kv_cache_dtype
    if is_on_gpu(engine, device):
        kv_cache_dtype = gpu_setup(spec, flags, engine).kv_cache_dtype
    elif kv_cache_dtype == AUTO and engine.name == OWN:
        kv_cache_dtype = own_kv_cache_dtype(
            AUTO if flags.dtype == AUTO else format_named(flags.dtype).name
        )
    elif kv_cache_dtype == AUTO:
        kv_cache_dtype = (
            storage.plain.name if storage.plain.name in ("bf16", "f16", "f32") else "bf16"
        )
    if kv_cache_dtype == "int8-int4" and engine.name != OWN:
        ours = "" if computes_on(device) else f", or --engine {OWN}"
        raise ValueError(f"--kv-cache-dtype int8-int4: {engine.name} has none; give fp8{ours}")
    max_position = spec.shape.max_position
    if flags.context and max_position and flags.context > max_position:
        raise ValueError(
            f"--context {flags.context} is more than the {max_position} tokens that the model was "
            f"trained for"
        )
    context = flags.context or min(DEFAULT_CONTEXT, max_position or DEFAULT_CONTEXT)
    return EngineMemory(
        context=context,
        concurrency=flags.concurrency or 1,
        kv_value_bytes=kv_bytes_of(kv_cache_dtype),
        engine=engine,
        weights_bytes=flags.size("weights_memory"),
        activation_bytes=flags.size("activation_memory"),
        overhead_bytes=flags.size("overhead_memory"),
        kv_cache_bytes=flags.size("kv_cache_memory"),
    )


def _ledger_of(
    spec: ModelSpec, device: Device, flags: PlanFlags, memory: EngineMemory, storage: Storage
) -> LedgerOf:
    """Return what makes the ledger of a load and a division.

    It raises ValueError for a division that cannot be, or if our engine cannot run the model as
    wished.
    """
    is_by_rank = is_on_gpu(memory.engine, device)

    @cache
    def sizes_of(num_ranks: int) -> Sizes:
        if is_by_rank:
            return sizes_on_gpu(spec, flags, memory.engine, num_ranks)
        if memory.engine.name == OWN and device.kind == "cpu":
            return sizes_on_cpu(spec, flags, memory)
        return sizes_of_file(spec, flags)

    def ledger_of(trial: EngineMemory) -> Ledger:
        sizes = sizes_of(trial.tp if is_by_rank else 1)
        return make_ledger(spec.shape, storage, sizes, device.usable_bytes, trial)

    return ledger_of


def _divide(
    spec: ModelSpec, device: Device, ledger_of: LedgerOf, memory: EngineMemory,
    tp: int | None, pp: int | None,
) -> EngineMemory:  # fmt: skip
    """Return the same with both sizes chosen: the fewest devices on which it fits.

    Where it fits on none, it is left on one.
    """
    if tp is not None and pp is not None:
        check_division(spec.shape, tp, pp)
        return replace(memory, tp=tp, pp=pp)
    most_ranks = min(_MOST_RANKS, device.max_ranks)
    for stages in [pp] if pp is not None else _powers(min(most_ranks, len(spec.shape.layers))):
        trial = replace(memory, pp=stages)
        if tp is not None:
            trial = replace(trial, tp=tp)
            if ledger_of(trial).fits:
                return trial
        elif ranks := smallest_tp(ledger_of, trial, most_ranks):
            return replace(trial, tp=ranks)
    return replace(memory, tp=tp or 1, pp=pp or 1)


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def _helps(
    spec: ModelSpec, device: Device, flags: PlanFlags, ledger_of: LedgerOf, memory: EngineMemory,
    storage: Storage,
) -> Iterator[str]:  # fmt: skip
    """Yield flags, each of which alone would make it fit."""

    def in_format(name: str) -> Ledger:
        candidate = storage_of_dtype(name, spec.shape)
        beside = Sizes(adapters=sizes_of_file(spec, flags).adapters)
        return make_ledger(spec.shape, candidate, beside, device.usable_bytes, memory)

    def in_gpu_format(name: str) -> Ledger:
        other = replace(flags, dtype=name)
        candidate = _storage(spec, other, device, memory.engine)
        trial = _engine_memory(spec, device, other, memory.engine, candidate)
        trial = replace(trial, tp=memory.tp, pp=memory.pp)
        return _ledger_of(spec, device, other, trial, candidate)(trial)

    most_ranks = min(_MOST_RANKS, device.max_ranks)
    ranks = smallest_tp(ledger_of, replace(memory, tp=1), most_ranks)
    if ranks is not None:
        yield f"--tensor-parallel-size {ranks}"
    has_own = is_on_gpu(memory.engine, device)
    bits = gpu_formats() if has_own else {name: FORMATS[name].bits for name in BY_WIDTH}
    narrower = tuple(name for name, size in bits.items() if size < storage.linear.bits)
    of_format = in_gpu_format if has_own else in_format
    if memory.weights_bytes is None and (widest := widest_format(of_format, narrower)):
        yield f"--dtype {widest}"
    if shorter := max_context(ledger_of, memory):
        yield f"--context {shorter}"
    if memory.concurrency > 1 and (fewer := max_concurrency(ledger_of, memory)):
        yield f"--concurrency {fewer}"


def max_context(ledger_of: Callable[[EngineMemory], Ledger], memory: EngineMemory) -> int | None:
    """Return the longest context, in whole blocks, with which all sequences fit; 0 if none does.

    None if there is no end to it, because no layer's cache grows.
    """
    size = memory.engine.block_size

    def fits(num_blocks: int) -> bool:
        return ledger_of(replace(memory, context=num_blocks * size)).fits

    most = _MOST_TOKENS // size
    longest = _largest(fits, most)
    return None if longest == most else size * longest


def max_concurrency(ledger_of: Callable[[EngineMemory], Ledger], memory: EngineMemory) -> int:
    """Return the most sequences of the asked context that fit; 0 if none does."""
    return _largest(lambda n: ledger_of(replace(memory, concurrency=n)).fits, _MOST_SEQUENCES)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 0 to ``limit`` that fits, if what fits has no gaps."""
    if not fits(1):
        return 0
    low = 1
    while low < limit and fits(min(2 * low, limit)):
        low = min(2 * low, limit)
    high = min(2 * low, limit + 1)  # does not fit, or is beyond the limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def smallest_tp(
    ledger_of: Callable[[EngineMemory], Ledger], memory: EngineMemory, most_ranks: int
) -> int | None:
    """Return the least power of two of ranks, up to ``most_ranks``, on which it fits; or None.

    ``ledger_of`` raises ValueError for a number of ranks that cannot divide the model.
    """
    ranks = 1
    while ranks <= most_ranks:
        with suppress(ValueError):
            if ledger_of(replace(memory, tp=ranks)).fits:
                return ranks
        ranks *= 2
    return None


def widest_format(ledger_of_format: Callable[[str], Ledger], names: tuple[str, ...]) -> str | None:
    """Return the first of these formats, from the widest on, in which it fits."""
    return next((name for name in names if ledger_of_format(name).fits), None)


def length(tokens: int | None) -> str:
    """Return a context for people; None is one without an end."""
    return "any length" if tokens is None else f"{tokens:,}"


def parts_of(ledger: Ledger) -> list[tuple[str, int]]:
    """Return the five parts of a bar, which sum to the total."""
    return [
        ("weights", ledger.weights_bytes),
        ("KV cache", ledger.kv_bytes),
        ("activations", ledger.activation_bytes),
        ("framework", ledger.overhead_bytes),
        ("margin", ledger.lines[-1].num_bytes),
    ]


def sentence(placement: Placement, otherwise: str = "") -> str:
    """Return the answer: whether it fits, with how much to spare, and what fits beside it.

    ``otherwise`` is said behind where it does not: what runs it all the same.
    """
    ledger, memory = placement.ledger, placement.memory
    where = _where(placement)
    if not ledger.fits:
        missing = max(-ledger.spare_bytes, ledger.kv_need_bytes - ledger.kv_budget_bytes)
        ways = " or ".join(placement.would_help)
        hint = f"; it would with {ways}" if ways else ""
        hint += f"; {otherwise}" if otherwise else ""
        hint = hint or "; nothing that was tried makes it fit"
        return f"does not fit on {where}: {gib(missing)} too much{hint}"
    each = " on each" if placement.num_devices > 1 else ""
    sequences = counted(placement.max_concurrency, "sequence")
    if placement.max_concurrency >= 1 << 32:
        sequences = "any number of sequences"
    alternative = ""
    if placement.max_context is None or placement.max_context > memory.context:
        alone = "one sequence" if memory.concurrency == 1 else f"{memory.concurrency:,} sequences"
        alternative = f", or {alone} of {length(placement.max_context)}"
    return (
        f"fits on {where} with {gib(ledger.spare_bytes)} to spare{each}: {sequences} of "
        f"{memory.context:,} tokens{alternative}"
    )


def _where(placement: Placement) -> str:
    memory, device, count = placement.memory, placement.device, placement.num_devices
    if device.id == "here":
        return "this machine"
    if count == 1:
        return f"one {device.name}"
    ways = [f"tensor parallel {memory.tp}"] if memory.tp > 1 else []
    ways += [f"pipeline parallel {memory.pp}"] if memory.pp > 1 else []
    return f"{count} {device.name} ({', '.join(ways)})"
