"""A model that is larger than a card: over cards, RAM and disk, how fast that is, and the flags.

It is what llama.cpp does. For a token each device reads what lies on it, one behind the other; for
a prompt the cards compute, and weights in RAM are streamed to them for each batch of tokens.
Constants were chosen by published figures (tests/data/offload_speed.json): speeds are intervals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from ridgeline.foresight.step_time.features import of_items
from ridgeline.model.cost.device_time import device_time, efficiency_of
from ridgeline.model.cost.format_bytes import FORMATS
from ridgeline.model.cost.gguf_mixes import MIX_NAMES, MIXES
from ridgeline.model.cost.hardware import Device
from ridgeline.planner.capacity.latency_model import efficiencies
from ridgeline.planner.catalogue import HERE
from ridgeline.planner.memory.flags import AUTO, PlanFlags
from ridgeline.planner.memory.ledger import ASSUMED, COMPUTED, Line
from ridgeline.planner.memory.model_spec import ModelSpec
from ridgeline.planner.memory.placement import Placement, place
from ridgeline.planner.memory.spread import (
    LayerSpread,
    ModelPart,
    parts_of_model,
    spread,
    streamed_bytes,
)
from ridgeline.system.report import counted, gib

_GIB = 1 << 30
_SYSTEM_BYTES = 3 * _GIB  # of RAM, that the system and other programs keep
_RUNTIME_BYTES = _GIB  # of RAM, that llama.cpp takes beside weights
_PC_BYTES_PER_S, _SERVER_BYTES_PER_S = 89.6e9, 307.2e9
_LARGEST_PC_BYTES = 256 * _GIB
_DISK_BYTES_PER_S = 5e9
_PCIE_BYTES_PER_S = 32e9  # of a card of which it is not known
_PCIE_REACH = 0.8  # that copies reach
# Of RAM's bandwidth, what a processor reaches while it computes: of whole layers, of experts.
DENSE_REACH, EXPERTS_REACH = 0.55, 0.43
HOP_S = 1e-4  # from a card to the processor and back, for a layer whose experts are in RAM
FACTOR_90 = 2.25  # nine in ten published figures are within it
LONG_CONTEXT = 16384  # from here on a note says what keeps a dense model's cache on the card
PROMPT_FACTOR = 3.5  # the same of prompts: few figures, half of them of one machine
_DISK_FACTOR = 3.0  # the same where the disk is read for each token: few figures


class HostMachine(NamedTuple):
    """What the cards are in.

    Attributes:
        ram_bytes: all of its RAM; None for as much as the model takes.
        ram_bytes_per_s: None where nothing says it.
        disk_bytes_per_s: that weights are read with.
    """

    ram_bytes: int | None
    ram_bytes_per_s: float | None
    disk_bytes_per_s: float = _DISK_BYTES_PER_S


class OnDevice(NamedTuple):
    """What is on one device.

    Attributes:
        device: its id; "ram" or "disk".
        capacity_bytes: what it has; None where that is as much as is needed.
        lines: what takes it.
        token_s: seconds of a token that go into it.
    """

    device: str
    capacity_bytes: int | None
    lines: tuple[Line, ...]
    token_s: float

    @property
    def total_bytes(self) -> int:
        """All lines."""
        return sum(line.num_bytes for line in self.lines)


@dataclass(frozen=True, eq=False, slots=True)
class Offload:
    """A model over the devices of a machine.

    Attributes:
        cards: in the order in which llama.cpp is told of them.
        uses: each card, RAM, and the disk if it is needed.
        spread: where the parts are.
        dtype: the format of the weights.
        prompt_tokens_per_s: that a prompt is read with.
        factor: nine in ten speeds are within it.
        flags: of llama-server, without the model.
        is_asked: the user described the machine; else it is offered, as nothing else fits.
        notes: what was taken for granted, each a sentence.
    """

    cards: tuple[Device, ...]
    uses: tuple[OnDevice, ...]
    spread: LayerSpread
    dtype: str
    prompt_tokens_per_s: float
    factor: float
    flags: str
    is_asked: bool
    notes: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """What one request is answered with, behind half of the context."""
        return 1 / sum(one.token_s for one in self.uses)

    @property
    def command(self) -> str:
        """What to type."""
        return f"llama-server -m MODEL.gguf {self.flags}"

    @property
    def answer(self) -> str:
        """The sentence that answers where the machine was described."""
        prompts = _range(self.prompt_tokens_per_s, PROMPT_FACTOR)
        return f"runs on {self._place_and_speed()} for one request, and reads prompts at {prompts}"

    @property
    def offer(self) -> str:
        """What is said behind the sentence that it does not fit."""
        return f"llama.cpp runs it on {self._place_and_speed()}"

    def _place_and_speed(self) -> str:
        counts = Counter(card.name for card in self.cards)
        cards = " and ".join(
            f"{n} {name}" if n > 1 else f"one {name}" for name, n in counts.items()
        )
        sizes = {one.device: one.total_bytes for one in self.uses}
        disk = f" and {gib(sizes['disk'])} read from disk" if "disk" in sizes else ""
        speed = _range(self.tokens_per_s, self.factor)
        return f"{cards} with {gib(sizes['ram'])} of RAM{disk}: {speed}"

    def as_dict(self) -> dict[str, Any]:
        """Return its part of the plan's document."""
        return {
            "engine": "llamacpp",
            "dtype": self.dtype,
            "tokens_per_s": round(self.tokens_per_s, 3),
            "tokens_per_s_low": round(self.tokens_per_s / self.factor, 3),
            "tokens_per_s_high": round(self.tokens_per_s * self.factor, 3),
            "prompt_tokens_per_s": round(self.prompt_tokens_per_s, 1),
            "prompt_tokens_per_s_low": round(self.prompt_tokens_per_s / PROMPT_FACTOR, 1),
            "prompt_tokens_per_s_high": round(self.prompt_tokens_per_s * PROMPT_FACTOR, 1),
            "num_gpu_layers": self.spread.num_gpu_layers,
            "num_cpu_moe": self.spread.num_cpu_moe,
            "tensor_split": list(self.spread.split),
            "command": self.command,
            "is_asked": self.is_asked,
            "devices": [
                {
                    "device": one.device,
                    "capacity_bytes": one.capacity_bytes,
                    "total_bytes": one.total_bytes,
                    "token_ms": round(1e3 * one.token_s, 3),
                    "lines": [
                        {"name": line.name, "bytes": line.num_bytes, "how": line.how}
                        for line in one.lines
                    ],
                }
                for one in self.uses
            ],
            "notes": list(self.notes),
        }


def _range(value: float, factor: float) -> str:
    return f"{_rate(value)} tokens/s ({_rate(value / factor)} to {_rate(value * factor)})"


def _rate(value: float) -> str:
    return f"{value:,.{2 if value < 1 else 1 if value < 10 else 0}f}"


def as_llamacpp_has_it(spec: ModelSpec, flags: PlanFlags) -> tuple[PlanFlags, list[str]]:
    """Return the flags with llama.cpp and a format that it has, and what is said of the format."""
    flags = replace(
        flags, engine="llamacpp", tensor_parallel_size=None, pipeline_parallel_size=None,
        gpu_memory_utilization=None, ram=None, on=None, memory=None, bandwidth=None, tflops=None,
    )  # fmt: skip
    stored = spec.storage.linear if flags.dtype == AUTO else FORMATS.get(flags.dtype)
    if stored is None or stored.name in _GGUF or flags.weights_memory is not None:
        return flags, []
    form = "q8_0" if stored.bits >= 8 else "q4_k_m"
    note = f"{stored.name} is not a format of llama.cpp: planned in {form}"
    if form == "q8_0":
        note += "; --dtype q4_k_m takes half"
    return replace(flags, dtype=form), [note]


_GGUF = frozenset(
    {name for name in FORMATS if name.startswith(("q", "iq"))}
    | {"f32", "bf16", "f16", "mxfp4", *MIXES, *MIX_NAMES}
)


def host_of(flags: PlanFlags, processor: Device | None) -> HostMachine:
    """Return the machine that the flags describe, as far as they do."""
    ram = flags.size("ram")
    bandwidth = None if flags.ram_bandwidth is None else flags.ram_bandwidth * 1e9
    if processor is not None:
        others = _SYSTEM_BYTES if processor.id == HERE else 0  # of this machine, what is free
        ram = ram or processor.usable_bytes + others
        bandwidth = bandwidth or processor.read_bytes_per_s or None
    disk = _DISK_BYTES_PER_S if flags.disk_bandwidth is None else flags.disk_bandwidth * 1e9
    return HostMachine(ram, bandwidth, disk)


def can_offload(device: Device) -> bool:
    """Whether it is a card of which llama.cpp can use the host's RAM as well."""
    return device.kind == "gpu" and not device.is_sram and not device.parent


def offload(
    spec: ModelSpec, flags: PlanFlags, cards: Sequence[Device], host: HostMachine, *, is_asked: bool
) -> Offload:
    """Return a model over cards, fastest first, and the RAM and the disk beside them.

    Raises ValueError where too little is known of a card, where the RAM is too small for what must
    be in it, and as ``place`` does.
    """
    cards = sorted(cards, key=lambda one: -one.read_bytes_per_s)
    flags, notes = as_llamacpp_has_it(spec, flags)
    placed = {card.id: place(spec, card, flags, default_ranks="1") for card in cards}
    first = placed[cards[0].id]
    total = first.whole.weights_bytes - spec.adapters.num_bytes
    num_layers = len(spec.shape.layers) + 1
    parts = parts_of_model(spec.shape, first.storage, total, first.memory)
    layout = spread(parts, num_layers, [_room(placed[card.id]) for card in cards])
    host, on_disk, said = _host_for(host, layout)
    notes += said
    uses = [
        _card(spec, placed[card.id], own, streamed_bytes(layout.in_ram))
        for card, own in zip(cards, layout.on_cards, strict=True)
    ]
    uses.append(_ram(layout, host, on_disk, first))
    if on_disk:
        share = on_disk / _weights(layout.in_ram)
        read_s = share * sum(part.read_bytes for part in layout.in_ram) / host.disk_bytes_per_s
        again = Line("weights, read again", on_disk, COMPUTED)
        uses.append(OnDevice("disk", None, (again,), read_s))
    notes += _notes(layout, host, on_disk, first, cards)
    return Offload(
        cards=tuple(cards),
        uses=tuple(uses),
        spread=layout,
        dtype=first.storage.name,
        prompt_tokens_per_s=_prompt_rate(spec, placed, cards, layout, host, on_disk),
        factor=_DISK_FACTOR if on_disk else FACTOR_90,
        flags=" ".join(_flags(layout, first, flags)),
        is_asked=is_asked,
        notes=tuple(notes),
    )


def _notes(
    layout: LayerSpread, host: HostMachine, on_disk: int, first: Placement, cards: Sequence[Device]
) -> Iterator[str]:
    """Yield what is taken for granted of speeds, of the file and of the order of cards."""
    if on_disk:
        yield (
            f"{gib(on_disk)} of the weights find no room in RAM and are read from the file at "
            f"{host.disk_bytes_per_s / 1e9:g} GB/s (--disk-bandwidth): with "
            f"{_needed(layout) / _GIB:,.0f} GB of RAM none would be"
        )
    yield f"MODEL.gguf is the model's file in {first.storage.name}"
    yield (
        f"speeds are of one request, behind {first.memory.context // 2:,} tokens: a processor "
        f"reaches {DENSE_REACH:.0%} of its RAM's bandwidth, of experts {EXPERTS_REACH:.0%}; of 35 "
        f"published figures nine in ten are within {FACTOR_90:g} times, of 10 of prompts within "
        f"{PROMPT_FACTOR:g}"
    )
    parts = (*layout.in_ram, *chain.from_iterable(layout.on_cards))
    has_experts = any(part.is_experts for part in parts)
    is_split = layout.num_gpu_layers < layout.num_layers
    if is_split and not has_experts and first.memory.context >= LONG_CONTEXT:
        yield (
            "the cache of layers in RAM is there too, where attention over long contexts is slow: "
            "llama.cpp from August 2026 on keeps it on the card with -ngl 99 --n-cpu-ffn N, N as "
            "small as fits; how fast that is was not checked"
        )
    if len(cards) > 1:
        order = ", ".join(f"CUDA{i} is {card.id}" for i, card in enumerate(cards))
        yield f"{order}: -ts counts their layers in this order"


def _room(placement: Placement) -> int:
    """Return what a card has for weights and cache."""
    ledger = placement.ledger
    fixed = ledger.activation_bytes + ledger.overhead_bytes
    adapters = sum(line.num_bytes for line in ledger.lines if line.name == "adapters")
    return ledger.capacity_bytes - fixed - adapters


def _weights(parts: Sequence[ModelPart]) -> int:
    return sum(part.num_bytes for part in parts)


def _kv(parts: Sequence[ModelPart]) -> int:
    return sum(part.kv_bytes for part in parts)


def _needed(layout: LayerSpread) -> int:
    """Return the RAM with which nothing is read from the disk again."""
    return _weights(layout.in_ram) + _kv(layout.in_ram) + _RUNTIME_BYTES + _SYSTEM_BYTES


def _host_for(host: HostMachine, layout: LayerSpread) -> tuple[HostMachine, int, list[str]]:
    """Return the host with what it was not said of it, the weights that it reads from the disk, and
    what was assumed.

    Raises ValueError if the RAM cannot hold what is no weight.
    """  # fmt: skip
    needed, on_disk, notes = _needed(layout), 0, []
    if host.ram_bytes is not None:
        least = needed - _weights(layout.in_ram)
        if host.ram_bytes < least:
            raise ValueError(
                f"--ram {host.ram_bytes / _GIB:.3g}GB is too little: the cache of layers that are "
                f"not on a card, llama.cpp and the system take {gib(least)}, and with "
                f"{needed / _GIB:,.0f}GB no weight is read from the disk"
            )
        on_disk = max(0, needed - host.ram_bytes)
    if host.ram_bytes_per_s is None:
        size = host.ram_bytes or needed
        is_pc = size <= _LARGEST_PC_BYTES
        rate = _PC_BYTES_PER_S if is_pc else _SERVER_BYTES_PER_S
        what = "two channels of DDR5-5600" if is_pc else "eight channels of DDR5-4800"
        notes.append(f"RAM of {rate / 1e9:g} GB/s, {what}: --ram-bandwidth says otherwise")
        host = host._replace(ram_bytes_per_s=rate)
    return host, on_disk, notes


def _lines(parts: Sequence[ModelPart]) -> Iterator[Line]:
    """Yield the lines of weights and cache of some parts of a model."""
    groups: dict[str, int] = {}
    for part in parts:
        name = "weights, experts" if part.is_experts else "weights, layers"
        name = "weights, embedding" if part.layer < 0 else name
        name = "weights, head (a copy of the embedding)" if part.used_twice else name
        groups[name] = groups.get(name, 0) + part.num_bytes
    yield from (Line(name, size, COMPUTED) for name, size in groups.items())
    if size := _kv(parts):
        yield Line("KV cache", size, COMPUTED)


def _without(lines: Iterator[Line], num_bytes: int) -> Iterator[Line]:
    """Yield lines less this number of bytes of weights, which are only in the file."""
    for line in sorted(lines, key=lambda one: -one.num_bytes):
        less = min(num_bytes, line.num_bytes) if line.name != "KV cache" else 0
        num_bytes -= less
        if less < line.num_bytes:
            yield line._replace(num_bytes=line.num_bytes - less)


def _card(spec: ModelSpec, placement: Placement, own: Sequence[ModelPart], buffer: int) -> OnDevice:
    """Return what is on a card, and what a token takes there."""
    device, ledger, memory = placement.device, placement.ledger, placement.memory
    lines = [*_lines(own)]
    if spec.adapters.num_bytes:
        lines.append(Line("adapters", spec.adapters.num_bytes, spec.adapters.how))
    lines.append(Line("activations", ledger.activation_bytes, COMPUTED))
    lines.append(Line("driver and runtime", ledger.overhead_bytes, ASSUMED))
    if buffer:
        lines.append(Line("buffer for weights from RAM", buffer, COMPUTED))
    efficiency = efficiency_of(device, "llamacpp", efficiencies())
    num_layers = len({part.layer for part in own if not part.is_experts})
    token_s = efficiency.layer_s * num_layers
    token_s += _read_bytes(own, memory.concurrency) / _rate_of(device) / efficiency.memory
    return OnDevice(device.id, ledger.capacity_bytes, tuple(lines), token_s)


def _rate_of(device: Device) -> float:
    if not device.read_bytes_per_s:
        raise ValueError(f"{device.id}: how fast it is depends on its bandwidth: give --bandwidth")
    return device.read_bytes_per_s


def _read_bytes(parts: Sequence[ModelPart], num_seqs: int) -> float:
    """Return what a token of one sequence reads, with half of the cache full."""
    return sum(part.read_bytes + part.kv_bytes / num_seqs / 2 for part in parts)


def _ram(layout: LayerSpread, host: HostMachine, on_disk: int, first: Placement) -> OnDevice:
    """Return what is in RAM, and what a token takes there."""
    lines = [*_without(_lines(layout.in_ram), on_disk)]
    lines.append(Line("llama.cpp", _RUNTIME_BYTES, ASSUMED))
    lines.append(Line("system and other programs", _SYSTEM_BYTES, ASSUMED))
    rate, num_seqs = host.ram_bytes_per_s or _PC_BYTES_PER_S, first.memory.concurrency
    experts = [part for part in layout.in_ram if part.is_experts]
    layers = [part for part in layout.in_ram if not part.is_experts]
    token_s = _read_bytes(layers, num_seqs) / (rate * DENSE_REACH)
    token_s += _read_bytes(experts, num_seqs) / (rate * EXPERTS_REACH)
    token_s += HOP_S * layout.num_expert_layers_in_ram
    return OnDevice("ram", host.ram_bytes, tuple(lines), token_s)


def _prompt_rate(
    spec: ModelSpec, placed: dict[str, Placement], cards: Sequence[Device], layout: LayerSpread,
    host: HostMachine, on_disk: int,
) -> float:  # fmt: skip
    """Return the tokens of a prompt of the context that are read in a second, in largest steps.

    The cards compute one behind the other, the first also what is in RAM, which is streamed to it.
    """
    memory = placed[cards[0].id].memory
    batch = min(memory.engine.max_num_batched_tokens, memory.context)
    num_on_cards = max(1, sum(layout.split))
    seconds = 0.0
    for i, card in enumerate(cards):
        rest = layout.num_layers - sum(layout.split) if i == 0 else 0
        share = (layout.split[i] + rest) / max(num_on_cards, layout.num_layers)
        efficiency = efficiency_of(card, "llamacpp", efficiencies())
        storage = placed[card.id].storage
        times = device_time(spec.shape, storage, memory.kv_value_bytes, card, efficiency)
        middle = [((memory.context - batch) // 2, batch, 1)]
        seconds += share * times.seconds(of_items(middle, times.windows))
    streamed = sum(
        part.num_bytes * (1 - (1 - part.read_bytes / part.num_bytes) ** batch)
        for part in layout.in_ram
        if part.layer >= 0
    )
    seconds += streamed / (cards[0].pcie_bytes_per_s or _PCIE_BYTES_PER_S) / _PCIE_REACH
    return batch / (seconds + on_disk / host.disk_bytes_per_s)


def _flags(layout: LayerSpread, first: Placement, flags: PlanFlags) -> Iterator[str]:
    """Yield the flags of llama-server that make this spread."""
    yield f"-ngl {layout.num_gpu_layers}"
    in_ram = layout.num_expert_layers_in_ram
    if in_ram:
        yield f"--n-cpu-moe {layout.num_cpu_moe}"
    if len(layout.split) > 1:
        yield f"-ts {','.join(map(str, layout.split))}"
    yield f"-c {first.memory.context * first.memory.concurrency}"
    if first.memory.concurrency > 1:
        yield f"-np {first.memory.concurrency}"
    if flags.max_num_batched_tokens is not None:
        yield f"-b {flags.max_num_batched_tokens} -ub {flags.max_num_batched_tokens}"


def vllm_note(placement: Placement) -> str | None:
    """Return what vLLM's own offload would do, of a model without experts; else None.

    It keeps a part of the weights in RAM and reads it over PCIe for each step.
    """
    device, ledger = placement.device, placement.ledger
    if placement.memory.engine.name != "vllm" or not device.read_bytes_per_s:
        return None
    missing = max(-ledger.spare_bytes, ledger.kv_need_bytes - ledger.kv_budget_bytes)
    if missing >= ledger.weights_bytes:
        return None
    link = (device.pcie_bytes_per_s or _PCIE_BYTES_PER_S) * _PCIE_REACH
    efficiency = efficiency_of(device, "vllm", efficiencies())
    on_card = (ledger.weights_bytes - missing) / device.read_bytes_per_s / efficiency.memory
    return (
        f"vLLM has --cpu-offload-gb {-(-missing // _GIB)}: it reads that over PCIe for each step, "
        f"so about {_rate(1 / (missing / link + on_card))} tokens/s"
    )


def layers_in_words(layout: LayerSpread) -> str:
    """Return where the layers are, for people."""
    on_cards = counted(max(0, layout.num_gpu_layers - 1), "layer")
    if layout.num_expert_layers_in_ram:
        experts = counted(layout.num_expert_layers_in_ram, "layer")
        return f"{on_cards} on cards, the experts of {experts} of these in RAM"
    return f"{on_cards} of {layout.num_layers - 1} on cards"
