"""The plan: a model on the devices that were asked for, as values and as one JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from ridgeline.engine.setup.home import stores
from ridgeline.model.cost.hardware import Device
from ridgeline.model.cost.shapes import active_params, mtp_params, weight_params
from ridgeline.planner.capacity.load import (
    DEFAULT_PURCHASE_SLO,
    LoadFlags,
    OfferedLoad,
    Slo,
    load_of,
)
from ridgeline.planner.capacity.option import (
    BOOT_S,
    FETCH_BYTES_PER_S,
    SHOWN,
    CancelCheck,
    CapacityOption,
)
from ridgeline.planner.capacity.report import verdict
from ridgeline.planner.capacity.search import Report, search
from ridgeline.planner.catalogue import (
    ALL,
    HERE,
    SHOP,
    cards_here,
    find_devices,
    find_machine,
    user_devices,
)
from ridgeline.planner.memory.flags import AUTO, PlanFlags
from ridgeline.planner.memory.ledger import ASSUMED
from ridgeline.planner.memory.model_spec import ModelSpec, adapter_room, read_model_spec
from ridgeline.planner.memory.own_engine import OWN, computes_on, is_on_gpu
from ridgeline.planner.memory.placement import Placement, cannot_compute, place, sentence
from ridgeline.planner.memory.published_formula import Published, published_formula
from ridgeline.planner.offload import (
    Offload,
    as_llamacpp_has_it,
    can_offload,
    host_of,
    offload,
    vllm_note,
)
from ridgeline.planner.single_device import able_devices, check_speeds
from ridgeline.system.report import gib

_MANY = 2  # devices: then sizes of divisions are chosen


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What a model needs, and what fits.

    Attributes:
        spec: the model.
        placements: on each device that was asked for, in that order.
        best: the placement that the plan speaks of: the smallest that fits, else the largest.
        published: what a well-known formula says, if it was asked.
        assumptions: what was taken for granted, each a sentence.
        warnings: what may mislead, each a sentence.
        choices: for a load: the cheapest that meets its bounds first.
        load: the load, if one was asked for.
        slos: its bounds.
        why_none: why there is no choice, though some device holds the load.
        offload: where it is asked for, or nothing else fits: over cards, RAM and disk.
    """

    spec: ModelSpec
    placements: tuple[Placement, ...]
    best: Placement
    published: Published | None
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    choices: tuple[CapacityOption, ...] = ()
    load: OfferedLoad | None = None
    slos: tuple[Slo, ...] = ()
    why_none: str = ""
    offload: Offload | None = None

    @property
    def asks_offload(self) -> bool:
        """Whether the answer is of a model over the devices of a machine."""
        return self.offload is not None and self.offload.is_asked

    @property
    def answer(self) -> str:
        """The sentence that answers."""
        if self.load is None and self.offload is not None:
            if self.offload.is_asked:
                return self.offload.answer
            if self.best.ledger.fits:  # in the RAM of this machine, which has a card as well
                return f"{sentence(self.best)}; {self.offload.offer}"
            return sentence(self.best, self.offload.offer)
        if self.load is None:
            return sentence(self.best)
        return self.why_none or verdict(self.choices, self.load, self.slos)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document: bytes, and what is read by programs."""
        shape = self.spec.shape
        document: dict[str, Any] = {
            "model": {
                "name": self.spec.name,
                "num_params": weight_params(shape),
                "num_active_params": active_params(shape),
                "kinds": list(shape.kinds),
            },
            "answer": self.answer,
            "memory": memory_of(self.best),
            "devices": [row_of(placement) for placement in self.placements],
        }
        document["time"] = self.choices[0].time() if self.choices else None
        # None says that no load was asked for; an empty list, that nothing bears it.
        is_asked = self.load is not None
        document["choices"] = [choice.as_dict() for choice in self.choices] if is_asked else None
        document["offload"] = None if self.offload is None else self.offload.as_dict()
        document["published"] = None if self.published is None else self.published.as_dict()
        document["assumptions"] = list(self.assumptions)
        document["warnings"] = list(self.warnings)
        return document


def plan(
    model: str | Path | Mapping[str, Any], *, compare_published: bool = False,
    today: date | None = None, report: Report = lambda done, total: None, **flags: Any,
) -> Plan:  # fmt: skip
    """Return what a model needs in memory and what fits beside it; for a load, what to choose.

    Args:
        model: a config.json as parsed or its path; a directory; a .gguf file; a model's name.
        compare_published: also say what the best-known formula makes of it.
        today: prices of more than 90 days before it warn.
        report: is told of choices that are looked at, and of how many.
        flags: fields of ``PlanFlags`` and of ``LoadFlags``.

    Raises:
        ValueError: the model, a device, a price or a flag is wrong, or contradicts another.
        OSError: a file cannot be read.
    """
    of_load = {name: flags.pop(name) for name in LoadFlags.__dataclass_fields__ if name in flags}
    load_flags = LoadFlags(**of_load)
    spec = read_model_spec(model, stores())
    return plan_for(spec, PlanFlags(**flags), compare_published, load_flags, today, report)


def plan_for(
    spec: ModelSpec, flags: PlanFlags, compare_published: bool = False,
    load_flags: LoadFlags | None = None, today: date | None = None,
    report: Report = lambda done, total: None, check_cancel: CancelCheck = lambda: None,
) -> Plan:  # fmt: skip
    """Return the plan for a model that was read. Raises ValueError as ``plan`` does.

    ``check_cancel`` is called at every simulated step; what it raises ends the plan.
    """
    shape = spec.shape
    spec = replace(spec, adapters=adapter_room(flags, spec.checkpoint))
    flags, load_flags, clients = _clients(flags, load_flags)
    load, cut = load_of(load_flags) if load_flags is not None and load_flags.is_given else None, ""
    if load is not None:
        longest = min(flags.context or shape.max_position, shape.max_position) or load.longest
        if load.longest > longest:
            cut = f"requests of more than {longest:,} tokens end there, as the context does"
        load = load.cut(longest)
        flags = replace(flags, context=flags.context or load.longest)
    usual = HERE if spec.checkpoint is not None else ALL
    own = user_devices(flags)
    if flags.asks_machine:
        return _over_machine(spec, flags, load, own, compare_published)
    usual = ",".join(own) or usual
    on = flags.on or (SHOP if load_flags is not None and load_flags.buy else usual)
    devices, taken_for = find_devices(on, own)
    if load is not None:
        check_speeds(devices)
    devices, left_out = able_devices(spec, devices, flags)
    default_ranks = AUTO if len(devices) >= _MANY else "1"
    if load is not None and on != HERE:
        default_ranks = AUTO
    placements = tuple(
        place(spec, device, flags, default_ranks=AUTO if device.machine else default_ranks)
        for device in devices
    )
    fitting = [p for p in placements if p.ledger.fits]
    best = (
        min(fitting, key=lambda p: p.num_devices * p.device.usable_bytes)
        if fitting
        else max(placements, key=lambda p: p.device.usable_bytes)
    )
    published = (
        published_formula(spec, best.memory.context, best.memory.concurrency)
        if compare_published
        else None
    )
    taken_for += [*clients, *([cut] if cut else [])]
    assumptions = [*taken_for, *_assumptions(spec, flags, best)]
    warnings = [*left_out, *_warnings(spec, best)]
    choices, why_none = tuple[CapacityOption, ...](), ""
    if load is not None and load_flags is not None:
        day = today or date.today()
        chosen = search(spec, flags, load_flags, load, devices, day, report, check_cancel)
        choices, why_none = chosen.choices, chosen.why_none
        best = choices[0].placement if choices else best
        assumptions = [*taken_for, *_assumptions(spec, flags, best), *chosen.notes]
        assumptions += _of_load(spec, flags, load_flags, load, choices)
        warnings = [*left_out, *_warnings(spec, best), *chosen.warnings]
    offered = None
    asks_more = on == HERE or not fitting or flags.ram_bandwidth or flags.disk_bandwidth
    if load is None and asks_more:
        offered, said = _offered(spec, flags, placements, best, is_here=on == HERE)
        assumptions += said
    return Plan(
        spec=spec,
        placements=placements,
        best=best,
        published=published,
        assumptions=tuple(dict.fromkeys(assumptions)),
        warnings=tuple(dict.fromkeys(warnings)),
        choices=choices,
        load=load,
        slos=load_flags.slos() if load_flags is not None else (),
        why_none=why_none,
        offload=offered,
    )


def _offered(
    spec: ModelSpec, flags: PlanFlags, placements: Sequence[Placement], best: Placement, *,
    is_here: bool,
) -> tuple[Offload | None, list[str]]:  # fmt: skip
    """Return what llama.cpp would do where the model fits on no card, and what is to be said of it.

    Of this machine its cards and its RAM are taken, of others one card and the RAM that it takes.
    Without an offer it is said which flags have no use.
    """
    bandwidths = {"ram": flags.ram_bandwidth, "disk": flags.disk_bandwidth}
    unused = [
        f"--{place}-bandwidth is not used: no part of the model is planned there"
        for place, given in bandwidths.items()
        if given is not None
    ]
    cards = [one for one in placements if can_offload(one.device)]
    if not cards or any(one.ledger.fits for one in cards):
        return None, unused
    if not is_here and (best.num_devices > 1 or not can_offload(best.device)):
        return None, unused
    chosen = find_machine(HERE).devices if is_here else [best.device]
    with suppress(ValueError):  # of a card whose speed is not known nothing is offered
        offered = _over(spec, flags, chosen, is_asked=False)
        notes = [f"llama.cpp: {note}" for note in offered.notes]
        has_experts = any(matrix.copies > 1 for _, matrix in spec.shape.matrices())
        if not has_experts and (note := vllm_note(best)):
            notes.append(note)
        return offered, notes
    return None, unused


def _over(
    spec: ModelSpec, flags: PlanFlags, chosen: Sequence[Device], *, is_asked: bool
) -> Offload:
    """Return the model over the cards and the processor of a machine."""
    processors = [one for one in chosen if one.kind == "cpu"]
    cards = [one for one in chosen if one.kind == "gpu"]
    host = host_of(flags, processors[0] if processors else None)
    return offload(spec, flags, cards, host, is_asked=is_asked)


def _over_machine(
    spec: ModelSpec, flags: PlanFlags, load: OfferedLoad | None, own: Mapping[str, Device],
    compare_published: bool,
) -> Plan:  # fmt: skip
    """Return the plan for a model over the cards and the RAM of one machine.

    Raises ValueError where a load is given as well, or as ``offload`` does.
    """
    if load is not None:
        raise ValueError("--ram, and devices joined by +, are planned for one request at a time")
    if flags.on is None and len(own) != 1 and not cards_here():
        raise ValueError(
            "--ram is of the machine that a card is in, and here is no card that is known: name "
            "one with --on, such as --on 4090"
        )
    chosen = find_machine(flags.on or (next(iter(own)) if len(own) == 1 else HERE), own)
    cards = {one.id: one for one in chosen.devices if one.kind == "gpu"}
    over = _over(spec, flags, chosen.devices, is_asked=True)
    alone, _ = as_llamacpp_has_it(spec, flags)
    placements = tuple(place(spec, one, alone, default_ranks="1") for one in cards.values())
    best = max(placements, key=lambda one: one.device.usable_bytes)
    memory = best.memory
    assumptions = [*chosen.notes, *over.notes, *_assumptions(spec, alone, best)]
    return Plan(
        spec=spec,
        placements=placements,
        best=best,
        published=published_formula(spec, memory.context, memory.concurrency)
        if compare_published
        else None,
        assumptions=tuple(dict.fromkeys(assumptions)),
        warnings=tuple(dict.fromkeys(_warnings(spec, best))),
        offload=over,
    )


def _clients(
    flags: PlanFlags, load_flags: LoadFlags | None
) -> tuple[PlanFlags, LoadFlags | None, list[str]]:
    """Take ``--concurrency`` for the load where nothing else says how requests of it arrive.

    Raises ValueError where the load has another flag for it.
    """
    if load_flags is None or flags.concurrency is None or not load_flags.is_given:
        return flags, load_flags, []
    if load_flags.buy and load_flags.users is None and load_flags.max_concurrency == 1:
        raise ValueError(
            f"--concurrency {flags.concurrency} is about memory alone: with --buy, --users says "
            "how many people ask at the same time"
        )
    if load_flags.request_rate or load_flags.trace_file or load_flags.max_concurrency:
        if load_flags.max_concurrency == flags.concurrency:
            return flags, load_flags, []
        raise ValueError(
            f"--concurrency {flags.concurrency} is about memory alone, and the load says how many "
            "requests are served at once: give --max-concurrency for a number of clients, or "
            "--max-num-seqs for the most sequences that the engine runs"
        )
    said = f"--concurrency {flags.concurrency}: clients that each ask again (--max-concurrency)"
    load_flags = replace(load_flags, max_concurrency=flags.concurrency)
    return replace(flags, concurrency=None), load_flags, [said]


def _of_load(
    spec: ModelSpec,
    flags: PlanFlags,
    load_flags: LoadFlags,
    load: OfferedLoad,
    choices: Sequence[CapacityOption],
) -> Iterator[str]:
    if load.concurrency is not None and load_flags.max_concurrency is None:
        yield "one request at a time: --request-rate or --max-concurrency says otherwise"
    if load_flags.buy:
        yield from _of_purchase(load_flags, choices)
        if flags.dtype == AUTO and spec.storage.linear.bits >= 16:
            yield "weights as they are stored: --dtype q4_k plans for a third of them"
    if load.rate_per_s is not None:
        yield "requests are spread over replicas by chance; prompts share no beginning"
    shown = [choice for choice in choices if choice.spot is not None][:SHOWN]
    for choice in shown:
        if choice.spot is not None:
            often, notice = choice.spot.assumed()
            yield from [often] if load_flags.evictions_per_hour is None else []
            yield from [notice] if load_flags.notice is None else []
    if shown:
        yield (
            f"a spot machine boots in {BOOT_S:g} s, and fetches and loads weights at "
            f"{FETCH_BYTES_PER_S / 1e9:g} GB/s"
        )
    if any(choice.placement.device.parent and choice.usd_per_hour for choice in choices):
        yield "slices are paid as the whole cards that they share, however few are used of one"


def _of_purchase(load_flags: LoadFlags, choices: Sequence[CapacityOption]) -> Iterator[str]:
    if load_flags.trace_file is None:
        lengths = f"{load_flags.prompt_tokens} tokens, answers of {load_flags.new_tokens}"
        yield f"prompts of {lengths}: --prompt-tokens and --new-tokens say otherwise"
    if load_flags.slo == DEFAULT_PURCHASE_SLO:
        yield (
            "it must begin an answer within 5 s (19 of 20 times) and write 10 tokens a second for "
            "each: --slo says otherwise"
        )
    yield (
        f"it works {load_flags.hours_per_day:g} hours a day for {load_flags.years:g} years, and is "
        f"worth nothing then; a kWh costs {load_flags.usd_per_kwh:g} USD; watts are the most that "
        f"it may draw"
    )
    owned = [choice.owned for choice in choices if choice.owned is not None]
    for host in sorted({one.host for one in owned if one.host.name}):
        yield (
            f"a {host.name} around cards or a processor costs {host.usd:,.0f} USD, draws "
            f"{host.watts:g} W and holds {host.most}"
        )
    if owned:
        oldest, newest = min(one.date for one in owned), max(one.date for one in owned)
        yield (
            f"prices are from {oldest} to {newest}, most of them list prices at launch; memory has "
            f"become more expensive since: check current prices"
        )


def memory_of(placement: Placement) -> dict[str, Any]:
    """Return the "memory" of a plan's document: of the whole model, and of one device."""
    ledger, whole, memory = placement.ledger, placement.whole, placement.memory
    # Sizes that the user gave are of each device.
    of_weights = 1 if memory.weights_bytes is None else placement.num_devices
    of_kv = 1 if memory.kv_cache_bytes is None else placement.num_devices
    exact = ledger.max_concurrency_exact
    kv_tokens = int(exact * memory.context)
    further = round(ledger.further_token_bytes)
    return {
        "device": placement.device.id,
        "num_devices": placement.num_devices,
        "context_tokens": memory.context,
        "concurrency": memory.concurrency,
        "weights_bytes": whole.weights_bytes * of_weights,
        "kv_bytes": whole.kv_bytes * of_kv,
        "kv_bytes_per_further_token": round(whole.further_token_bytes),
        "max_context_tokens": placement.max_context,
        "max_concurrency": placement.max_concurrency,
        "max_concurrency_exact": round(exact, 3),
        "fits": ledger.fits,
        "lines": [
            {"name": line.name, "bytes": line.num_bytes, "how": line.how} for line in ledger.lines
        ],
        "per_device": {
            "weights_bytes": ledger.weights_bytes,
            "kv_bytes": ledger.kv_bytes,
            "kv_bytes_per_further_token": further,
            "activation_bytes": ledger.activation_bytes,
            "overhead_bytes": ledger.overhead_bytes,
            "needed_bytes": ledger.needed_bytes,
            "total_bytes": ledger.total_bytes,
            "capacity_bytes": ledger.capacity_bytes,
            "budget_bytes": ledger.budget_bytes,
            "kv_budget_bytes": ledger.kv_budget_bytes,
            "kv_blocks": kv_tokens // memory.engine.block_size,
            "kv_tokens": kv_tokens,
        },
    }


def row_of(placement: Placement) -> dict[str, Any]:
    """Return a device's row of the document: what fits on it."""
    ledger, memory = placement.ledger, placement.memory
    return {
        "device": placement.device.id,
        "tp": memory.tp,
        "pp": memory.pp,
        "dtype": placement.storage.name,
        "engine": memory.engine.name,
        "fits": ledger.fits,
        "total_bytes": ledger.total_bytes,
        "capacity_bytes": ledger.capacity_bytes,
        "spare_bytes": ledger.spare_bytes,
        "max_context_tokens": placement.max_context,
        "max_concurrency": placement.max_concurrency,
        "would_help": list(placement.would_help),
    }


def _assumptions(spec: ModelSpec, flags: PlanFlags, best: Placement) -> Iterator[str]:
    shape, memory, engine = spec.shape, best.memory, best.memory.engine
    yield from shape.assumptions
    if spec.stored is None and flags.weights_memory is None:
        for tower in shape.towers:
            yield (
                f"only the half that reads text is counted, not the one of {tower}: "
                f"--weights-memory says the size of both"
            )
    if flags.context is None:
        yield f"sequences of {memory.context:,} tokens: --context says otherwise"
    is_ours = is_on_gpu(engine, best.device)
    if is_ours and flags.dtype == AUTO and spec.storage.linear.bits < 16:
        yield f"weights in bf16, as {OWN} computes on GPUs: --dtype int8 or int4 takes less"
    kept = "of what weights and activations leave" if engine.of_free else "of the device"
    share = f"{engine.gpu_memory_utilization:.0%}"
    yield f"rules of {engine.name}: the cache may use up to {share} {kept}"
    if (num_mtp := mtp_params(shape)) > 0:
        yield (
            f"{num_mtp / 1e9:.1f} B parameters that predict several tokens are not counted: only "
            f"speculative decoding loads them"
        )
    windows = any(layer.cache.window for layer in shape.layers)
    if windows:
        frees = "are given back" if engine.frees_windows else "are kept: nothing gives them back"
        yield f"blocks that have left the sliding window {frees}"
    copies = memory.tp // min(shape.num_kv_heads, memory.tp)
    if copies > 1:
        yield (
            f"{memory.tp} ranks share {shape.num_kv_heads} key and value heads: {copies} of them "
            f"keep the same"
        )
    if "latent" in shape.kinds and memory.tp > 1:
        yield f"each of {memory.tp} ranks keeps all of the latent cache"
    if any(layer.cache.state_values for layer in shape.layers):
        yield f"states of sequences are kept in f32{', each twice' if is_ours else ''}"
    if spec.adapters.num_bytes and best.num_devices > 1:
        yield "each rank keeps adapters whole"
    if any(line.how == ASSUMED and "driver" in line.name for line in best.ledger.lines):
        yield "driver, graphs and the like are of this size on most machines: see --overhead-memory"


def _warnings(spec: ModelSpec, best: Placement) -> Iterator[str]:
    device, form = best.device, best.storage.linear.name.partition(" ")[0]
    if device.memory_known == "label":
        yield f"{device.id}: its capacity is its label in decimal GB, and not measured"
    if device.memory_known == "estimated":
        yield (
            f"{device.id}: its capacity is estimated, within 1 %: what its driver reports, less "
            f"what drivers keep"
        )
    if device.confidence == "low":
        yield f"{device.id}: facts of low confidence ({device.source})"
    if form == "fp8" and cannot_compute(device, form):
        yield f"{device.id} has no fp8 units: weights are widened as they are used"
    own = (spec.storage.plain.name, spec.storage.linear.name)
    if "bf16" in own and cannot_compute(device, "bf16"):
        yield f"{device.id} cannot compute bf16: planned in f16, as by vllm's --dtype half"
    if best.memory.engine.name == OWN and device.kind != "cpu":
        yield _of_own_engine(spec, device)
    if device.id == "here" and spec.checkpoint is not None and not best.ledger.fits:
        missing = max(0, -best.ledger.spare_bytes)
        yield (
            f"it starts here all the same, with a short cache: weights that do not fit, at least "
            f"{gib(missing)}, are read from the disk whenever a step needs them"
        )
    if device.kind == "soc" and best.memory.engine.name not in (OWN, "llamacpp"):
        name = best.memory.engine.name
        yield f"{device.id} runs llama.cpp or MLX, not {name}: this is what {name} would take"
    if device.is_sram:
        needed = -(-(best.ledger.weights_bytes + best.ledger.kv_bytes) // device.usable_bytes)
        yield f"{device.id} has only SRAM: weights and cache need {needed:,} chips"


def _of_own_engine(spec: ModelSpec, device: Device) -> str:
    """Return what is to be said of our engine on a device that is no processor."""
    rules = f"on {device.id} this is what its rules would take"
    if not computes_on(device):
        return f"{OWN} computes on processors, and on NVIDIA GPUs from Ampere on: {rules}"
    if why := spec.why_no_arch:
        return f"{OWN} does not know how it would run this model ({why}): {rules}"
    if device.has_passed:
        return f"times of {OWN} on {device.id} are estimated from figures of other engines"
    return (
        f"{OWN} has not been measured on any GPU yet: this is what its cuda backend counts, and "
        f"times are estimated from figures of other engines"
    )
