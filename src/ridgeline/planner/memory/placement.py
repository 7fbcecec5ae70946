"""A model on a device: how it is divided, its ledger, and what fits beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeline.arch.cache_groups import cache_groups
from ridgeline.backends import BACKENDS
from ridgeline.backends.interface import Setup
from ridgeline.machine import usable_cpus
from ridgeline.physics.format_bytes import (
    BY_WIDTH,
    FORMATS,
    Storage,
    format_named,
    kv_bytes_of,
    own_kv_dtype,
    storage_of_dtype,
)
from ridgeline.physics.formats.module_names import Modules
from ridgeline.physics.hardware import Device
from ridgeline.planner.memory.flags import AUTO, PlanFlags
from ridgeline.planner.memory.ledger import (
    COMPUTED,
    ENGINES,
    FROM_FILE,
    EngineOverheads,
    Known,
    Ledger,
    Line,
    Setting,
    check_division,
    make_ledger,
)
from ridgeline.planner.memory.model_spec import ModelSpec
from ridgeline.planner.memory.what_fits import (
    max_concurrency,
    max_context,
    smallest_tp,
    widest_format,
)

_DEFAULT_CONTEXT = 4096
_MOST_RANKS = 16
_USUAL_ENGINES = {"cpu": "ridgeline", "soc": "llamacpp"}  # by kind of device; else vLLM
_OUR_DTYPES = ("f32", "bf16", "int8", "int8-row", "int4")


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """A model on one kind of device.

    Attributes:
        device: the device.
        setting: the load, and how the model is divided.
        ledger: of the fullest device.
        whole: of the whole model, as if it were on one.
        storage: how the weights are stored there.
        max_context: the longest context with which all sequences fit, at most what the model takes;
            None for any length.
        max_concurrency: the most sequences of the asked context.
        would_help: where it does not fit, what would make it: flags.
    """

    device: Device
    setting: Setting
    ledger: Ledger
    whole: Ledger
    storage: Storage
    max_context: int | None
    max_concurrency: int
    would_help: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """How many devices one replica takes."""
        return self.setting.tp * self.setting.pp


def place(
    subject: ModelSpec, device: Device, wishes: PlanFlags, *, default_ranks: str
) -> Placement:
    """Return the model on a device, divided as wished.

    Args:
        subject: the model.
        device: what to put it on.
        wishes: the flags.
        default_ranks: "1" or "auto": what holds where they leave tensor parallelism open.

    Raises:
        ValueError: a wish contradicts the device, the model or another wish, or the size of the
            model's weights is not known.
    """
    unknown = subject.shape.not_counted
    if unknown and subject.stored is None and wishes.weights_memory is None:
        raise ValueError(
            f"{subject.name}: {unknown[0]} describes weights that are not understood: give the "
            f"size of the model's files with --weights-memory"
        )
    engine = ENGINES[wishes.engine or _USUAL_ENGINES.get(device.kind, "vllm")]
    engine = replace(engine, max_num_seqs=wishes.max_num_seqs or engine.max_num_seqs)
    if engine.name == "ridgeline" and any(one.cache.state_values for one in subject.shape.layers):
        engine = replace(engine, frees_windows=False)
    storage = _storage(subject, wishes, device)
    setting = _setting(subject, device, wishes, engine, storage)
    tp = wishes.ranks("tensor_parallel_size", default_ranks)
    pp = wishes.ranks("pipeline_parallel_size", "1")
    if device.max_ranks == 1 and (tp or 1) * (pp or 1) > 1:
        raise ValueError(
            f"{device.id} has no link to other devices: a model cannot be split over several"
        )
    setting, known = _divide(subject, device, wishes, setting, storage, tp, pp)

    def ledger_of(asked: Setting) -> Ledger:
        return make_ledger(subject.shape, storage, known, device.usable_bytes, asked)

    ledger = ledger_of(setting)
    longest = max_context(ledger_of, setting)
    return Placement(
        device=device,
        setting=setting,
        ledger=ledger,
        whole=ledger_of(replace(setting, tp=1, pp=1)),
        storage=storage,
        max_context=_bounded(longest, subject.shape.max_position),
        max_concurrency=max_concurrency(ledger_of, setting),
        would_help=() if ledger.fits else tuple(_helps(subject, device, wishes, setting, storage)),
    )


def _bounded(longest: int | None, max_position: int) -> int | None:
    known = [length for length in (longest, max_position or None) if length is not None]
    return min(known) if known else None


def cannot_compute(device: Device, form: str) -> bool:
    """Whether a device is known to have no units for a format; processors compute any."""
    has_units = device.kind != "cpu" and bool(device.peak_ops_per_s)
    return has_units and form not in device.peak_ops_per_s


def _storage(subject: ModelSpec, wishes: PlanFlags, device: Device) -> Storage:
    storage = subject.storage
    if wishes.dtype != AUTO:
        storage = storage_of_dtype(wishes.dtype, subject.shape)
        kept = (*storage.kept.names, *subject.storage.kept.names)
        storage = replace(storage, kept=Modules(tuple(dict.fromkeys(kept))))
    if cannot_compute(device, "bf16"):  # the other format of 16 bits is as large
        plain, linear = (
            FORMATS["f16"] if one.name == "bf16" else one for one in (storage.plain, storage.linear)
        )
        storage = replace(storage, plain=plain, linear=linear)
    return storage


def _setting(
    subject: ModelSpec, device: Device, wishes: PlanFlags, engine: EngineOverheads, storage: Storage
) -> Setting:
    kv_dtype = wishes.kv_cache_dtype
    if kv_dtype == AUTO and engine.name == "ridgeline":
        kv_dtype = own_kv_dtype(AUTO if wishes.dtype == AUTO else format_named(wishes.dtype).name)
    elif kv_dtype == AUTO:
        kv_dtype = storage.plain.name if storage.plain.name in ("bf16", "f16", "f32") else "bf16"
    if kv_dtype == "int8-int4" and engine.name != "ridgeline":
        raise ValueError(
            f"--kv-cache-dtype int8-int4: {engine.name} has none; give fp8, or --engine ridgeline"
        )
    max_position = subject.shape.max_position
    if wishes.context and max_position and wishes.context > max_position:
        raise ValueError(
            f"--context {wishes.context} is more than the {max_position} tokens that the model was "
            f"trained for"
        )
    context = wishes.context or min(_DEFAULT_CONTEXT, max_position or _DEFAULT_CONTEXT)
    return Setting(
        context=context,
        concurrency=wishes.concurrency or 1,
        kv_value_bytes=kv_bytes_of(kv_dtype),
        block_size=wishes.block_size or engine.block_size,
        max_num_batched_tokens=wishes.max_num_batched_tokens or engine.max_num_batched_tokens,
        engine=engine,
        utilization=wishes.gpu_memory_utilization or engine.utilization,
        weights_bytes=wishes.size("weights_memory"),
        activation_bytes=wishes.size("activation_memory"),
        overhead_bytes=wishes.size("overhead_memory"),
        kv_cache_bytes=wishes.size("kv_cache_memory"),
    )


def _known(subject: ModelSpec, device: Device, wishes: PlanFlags, setting: Setting) -> Known:
    """Return what the file says, or the backend that would run it here."""
    checkpoint, adapters = subject.checkpoint, _adapter_line(subject)
    if checkpoint is None or (setting.engine.name != "ridgeline" or device.kind != "cpu"):
        stored = subject.stored if wishes.dtype == AUTO else None
        return Known(weights=stored, weights_how=FROM_FILE, adapters=adapters)
    groups = cache_groups(checkpoint.arch)
    wanted = Setup(
        dtype=wishes.dtype,
        kv_cache_dtype=wishes.kv_cache_dtype,
        block_size=setting.block_size,
        threads=usable_cpus(),
        max_model_len=setting.context,
        max_num_seqs=min(setting.engine.max_num_seqs, setting.max_num_batched_tokens),
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_lora_rank=subject.adapters.rank,
        groups=groups,
    )
    problems: list[ValueError] = []
    for backend in BACKENDS.values():
        try:
            setup = backend.check(wanted, checkpoint.arch)
            footprint = backend.footprint(checkpoint.arch, setup)
        except ValueError as problem:
            problems.append(problem)
            continue
        return Known(
            weights=backend.packed_bytes(checkpoint, setup),
            weights_how=COMPUTED,
            kv_bytes_per_token=footprint.kv_bytes_per_token,
            state_bytes_per_seq=footprint.state_bytes_per_seq,
            step_bytes=footprint.step_bytes,
            windows=tuple(group.window for group in groups),
            adapters=adapters,
        )
    raise problems[0]


def _adapter_line(subject: ModelSpec) -> Line | None:
    room = subject.adapters
    return Line("adapters", room.num_bytes, room.how) if room.num_bytes else None


def _divide(
    subject: ModelSpec, device: Device, wishes: PlanFlags, setting: Setting, storage: Storage,
    tp: int | None, pp: int | None,
) -> tuple[Setting, Known]:  # fmt: skip
    """Return the setting with both sizes chosen: the fewest devices on which it fits.

    Where it fits on none, it is left on one.
    """
    if subject.checkpoint is not None and device.kind == "cpu" and wishes.dtype not in (
        AUTO, *_OUR_DTYPES
    ):  # fmt: skip
        raise ValueError(
            f"--dtype {wishes.dtype}: this engine computes in {', '.join(_OUR_DTYPES)}"
        )
    known = _known(subject, device, wishes, setting)
    if tp is not None and pp is not None:
        check_division(subject.shape, tp, pp)
        return replace(setting, tp=tp, pp=pp), known
    most_ranks = min(_MOST_RANKS, device.max_ranks)

    def ledger_of(asked: Setting) -> Ledger:
        return make_ledger(subject.shape, storage, known, device.usable_bytes, asked)

    for stages in [pp] if pp is not None else _powers(min(most_ranks, len(subject.shape.layers))):
        asked = replace(setting, pp=stages)
        if tp is not None:
            asked = replace(asked, tp=tp)
            if ledger_of(asked).fits:
                return asked, known
        elif ranks := smallest_tp(ledger_of, subject.shape, asked, most_ranks):
            return replace(asked, tp=ranks), known
    return replace(setting, tp=tp or 1, pp=pp or 1), known


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def _helps(
    subject: ModelSpec, device: Device, wishes: PlanFlags, setting: Setting, storage: Storage
) -> Iterator[str]:
    """Yield flags, each of which alone would make it fit."""
    known = _known(subject, device, wishes, setting)

    def ledger_of(asked: Setting) -> Ledger:
        return make_ledger(subject.shape, storage, known, device.usable_bytes, asked)

    def in_format(name: str) -> Ledger:
        candidate = storage_of_dtype(name, subject.shape)
        beside = Known(adapters=known.adapters)
        return make_ledger(subject.shape, candidate, beside, device.usable_bytes, setting)

    most_ranks = min(_MOST_RANKS, device.max_ranks)
    ranks = smallest_tp(ledger_of, subject.shape, replace(setting, tp=1), most_ranks)
    if ranks is not None:
        yield f"--tensor-parallel-size {ranks}"
    narrower = [n for n in BY_WIDTH if FORMATS[n].bits < storage.linear.bits]
    if setting.weights_bytes is None and (widest := widest_format(in_format, tuple(narrower))):
        yield f"--dtype {widest}"
    if shorter := max_context(ledger_of, setting):
        yield f"--context {shorter}"
    if setting.concurrency > 1 and (fewer := max_concurrency(ledger_of, setting)):
        yield f"--concurrency {fewer}"
