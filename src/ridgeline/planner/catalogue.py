"""The catalogue of devices and prices: the package's tables, read once, this machine, a user's own.

The tables are data of ``model.cost``, which opens no file itself. The date of today comes in from
outside, so that what a plan says does not change from one look to the next. A user describes one
device by flags, any number by a file. What they lack of a device of the catalogue is left open:
without arithmetic or bandwidth memory is planned, and no time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ridgeline.backends import cuda
from ridgeline.engine.calibration import stored_roof
from ridgeline.engine.setup.home import default_home
from ridgeline.model.cost.hardware import (
    CloudMachine,
    Device,
    Offer,
    Price,
    SpotTerms,
    parse_devices,
    parse_machines,
    parse_offers,
    parse_own_devices,
    parse_prices,
    parse_spot_terms,
    usable_prices,
)
from ridgeline.planner.memory.flags import MINE, PlanFlags
from ridgeline.system.machine import available_bytes

HERE, ALL, SHOP = "here", "all", "shop"
# Words of names that people leave out, or write in another way.
_BRANDS = re.compile(
    r"\b(?:nvidia|geforce|tesla|amd|radeon|apple|intel|gold|platinum|the|gpu|generation)\b"
)
_GB = re.compile(r"(?<=\d)\s*gi?b\b")
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*gi?b\b")
_SIZES_DIFFER = 0.07  # a B200 is sold with 180 GB, and as one of 192
_CORES = re.compile(r"\b(\d+)[- ]cores?\b")
# Of a machine of Azure the family and, without its size, the series.
_AZURE_SIZE = re.compile(r"Standard_([A-Z]+)\d+[a-z]*(.*)")
_OTHER_CARD = ("ti", "super")  # an RTX 2080 Ti is no RTX 2080
_NEAREST = 3
_TIMES = re.compile(r"\s*(\d{1,3})\s*x\s*(?=[a-z0-9])", re.IGNORECASE)  # 2x3090
_MOST_CARDS = 16  # that llama.cpp divides a model over
_SHOWN = 6  # other devices of a name
_MOST_MEANT = 16  # a name of more is none: "rtx"
_LEAST_LETTERS = 4  # of the beginning of a name


class Chosen(NamedTuple):
    """Devices that were asked for, and what each name was taken for where that was a guess."""

    devices: list[Device]
    notes: list[str]


@cache
def devices() -> Mapping[str, Device]:
    """Return all devices and MIG slices by id; of a family, what people most likely mean first."""
    return parse_devices(_table("devices.csv"), _table("mig.csv"))


@cache
def offers() -> Mapping[str, Offer]:
    """Return what devices are sold for, by device."""
    return parse_offers(_table("buy.csv"))


@cache
def machines() -> Mapping[str, CloudMachine]:
    """Return the machines that clouds rent, by name."""
    return parse_machines(_table("vms.csv"))


def find_devices(ids: str, own: Mapping[str, Device] = MappingProxyType({})) -> Chosen:
    """Return the devices of a list of names with commas between; ``here``, ``all`` or ``shop``.

    A name of the user's ``own`` devices (``planner.catalogue``) is taken first.

    A name is an id or a part of a device's name, such as "4090", "RTX 4090" or "h100/2g.20gb", or
    that of a machine of a cloud, such as "p5.48xlarge", which is then rented whole. Where it is of
    several, the likeliest is taken. Raises ValueError for what no device is called, with those that
    are near it.
    """
    chosen: list[Device] = []
    notes: list[str] = []
    for typed in (part.strip() for part in ids.split(",")):
        name = typed.lower()
        if name in own:
            chosen.append(own[name])
        elif name == HERE:
            chosen += [this_machine(), *cards_here()]
        elif name == ALL:
            rented = [d for d in devices().values() if d.is_rented]
            chosen += sorted(rented, key=lambda device: device.usable_bytes)
        elif name == SHOP:
            sold = [d for d in devices().values() if d.id in offers()]
            chosen += sorted(sold, key=lambda device: device.usable_bytes)
        elif name in devices():
            chosen.append(devices()[name])
        elif (machine := _machine(name)) is not None:
            chosen.append(machine.holding(devices()[machine.device]))
            notes.append(_rented(typed, machine))
        else:
            matches = _called(name)
            if not 1 <= len(matches) <= _MOST_MEANT:
                raise ValueError(_no_such(typed, matches))
            chosen.append(matches[0])
            notes.append(_taken(typed, matches))
    return Chosen(list({device.id: device for device in chosen}.values()), notes)


def find_machine(names: str, own: Mapping[str, Device] = MappingProxyType({})) -> Chosen:
    """Return the devices of one machine, each as often as it is there: ``2x3090+cpu-9950x``.

    ``here`` is this machine's processor and its cards.

    Raises ValueError as ``find_devices`` does, for names of several devices, and for a machine that
    no more is said of than its processors, or in which there are two of them.
    """
    chosen: list[Device] = []
    notes: list[str] = []
    for part in names.split("+"):
        times = _TIMES.match(part)
        name = part[times.end() :] if times else part
        if not name.strip():
            raise ValueError(f"--on {names}: a name is missing beside a +")
        found = find_devices(name, own)
        if name.strip().lower() == HERE:
            each = [[one] * (one.max_ranks if one.kind == "gpu" else 1) for one in found.devices]
            found = Chosen([one for alike in each for one in alike], found.notes)
        elif len(found.devices) != 1:
            raise ValueError(f"--on {names}: {name.strip()} is not one device: name those in it")
        chosen += found.devices * (int(times[1]) if times else 1)
        notes += found.notes
    if odd := [one.id for one in chosen if one.kind not in ("gpu", "cpu") or one.is_sram]:
        raise ValueError(f"--on {names}: {odd[0]} is not a card beside others: name cards")
    if sum(one.kind == "cpu" for one in chosen) > 1:
        raise ValueError(f"--on {names}: name one processor; of two --ram-bandwidth says the sum")
    cards = sum(one.kind == "gpu" for one in chosen)
    if cards == 0:
        raise ValueError(f"--on {names}: there is no card: add one, such as 4090+cpu-9950x")
    if cards > _MOST_CARDS:
        raise ValueError(f"--on {names}: {cards} cards: llama.cpp takes up to {_MOST_CARDS}")
    return Chosen(chosen, notes)


def _called(name: str) -> list[Device]:
    """Return the devices that a name may mean, the likeliest first.

    They have the memory that the name says: processors as their slots are filled, others as sold.
    """
    whole, _, part = name.partition("/")
    matches, size = _meant(whole), _SIZE.search(whole)
    if size is not None:
        sized_bytes = float(size[1]) * 1e9
        matches = matches or _meant(_SIZE.sub(" ", whole))
        sold = [one for one in matches if _has_memory(one, sized_bytes)]
        matches = sold or [_filled(one, sized_bytes) for one in matches if one.has_slots]
    if part:
        of_part = (devices().get(f"{device.id}/{part.strip().lower()}") for device in matches)
        return [device for device in of_part if device is not None]
    return matches


def _machine(name: str) -> CloudMachine | None:
    """Return the machine of a name, else the first of a series that is called so and no device."""
    name = name.partition("@")[2] or name
    by_name = {_letters(one): of for one, of in machines().items()}
    whole = by_name.get(_letters(name)) or by_name.get(f"standard{_letters(name)}")
    if whole is not None or not name or _called(name):
        return whole
    wanted = _letters(name).removeprefix("standard")
    return next((of for one, of in machines().items() if wanted in _series(one)), None)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _series(name: str) -> tuple[str, ...]:
    """Return what the series of a machine is called, from "Standard_ND96isr_H100_v5" "ndh100v5"."""
    if (azure := _AZURE_SIZE.fullmatch(name)) is not None:
        return (_letters(azure[1] + azure[2]),)
    parts = re.split(r"[.-]", name)
    return tuple(_letters("".join(parts[:end])) for end in range(1, len(parts)))


def _rented(typed: str, machine: CloudMachine) -> str:
    where = f" in {machine.region}" if machine.region else ""
    usd = machine.usd_per_hour.get("on_demand")
    spot = machine.usd_per_hour.get("spot")
    cost = "no dated price of it is known"
    if usd is not None:
        of_spot = "" if spot is None else f", {spot:g} as a spot machine"
        cost = f"{usd:g} USD per hour{of_spot} on {machine.date} ({machine.source})"
    return (
        f"--on {typed}: {machine.name} of {machine.provider}{where} has {machine.num} x "
        f"{machine.device}, and is paid whole: {cost}"
    )


def _meant(name: str) -> list[Device]:
    """Return the devices that are called so, whatever their memory."""
    wanted = "".join(_words(name))
    matches = _by_name().get(wanted, [])
    if not matches and len(wanted) >= _LEAST_LETTERS and not _SIZE.search(name):
        # "mi300" is none's name, but begins two
        begun = (of for called, of in _by_name().items() if called.startswith(wanted))
        matches = list({device.id: device for of in begun for device in of}.values())
    return matches


def _has_memory(device: Device, num_bytes: float) -> bool:
    return abs(device.label_bytes - num_bytes) <= _SIZES_DIFFER * num_bytes


def _filled(device: Device, num_bytes: float) -> Device:
    """Return a device with other memory in its slots."""
    size = int(num_bytes)
    return replace(
        device, name=f"{device.name}, {size / 1e9:g} GB", usable_bytes=size, label_bytes=size
    )


@cache
def _by_name() -> Mapping[str, list[Device]]:
    """Return whole devices by all they are called: runs of words of id, name and what is sold."""
    called: dict[str, list[Device]] = {}
    for device in _whole_devices():
        sold = offers().get(device.id)
        texts = (device.id, device.name, "" if sold is None else sold.item.partition(";")[0])
        for run in {run for text in texts for run in _runs(_words(text))}:
            called.setdefault(run, []).append(device)
    return called


def _whole_devices() -> list[Device]:
    return [device for device in devices().values() if not device.parent]


def _runs(words: list[str]) -> Iterator[str]:
    for begin in range(len(words)):
        for end in range(begin + 1, len(words) + 1):
            if words[end : end + 1] not in ([word] for word in _OTHER_CARD):
                yield "".join(words[begin:end])


def _words(text: str) -> list[str]:
    lower = _CORES.sub(r"core\1", text.lower().replace("laptop", "mobile"))
    return re.findall(r"[a-z0-9]+", _BRANDS.sub(" ", _GB.sub("", lower)))


def _taken(name: str, matches: list[Device]) -> str:
    first, *others = matches
    text = f"--on {name}: taken for {first.id} ({first.name})"
    if not others:
        return text
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return f"{text}; there are also {', '.join(d.id for d in others[:_SHOWN])}{more}"


def this_machine() -> Device:
    """Return this machine, with the memory that a process can still have.

    Where no roof was measured its bandwidth is 0, and nothing is known of its arithmetic.
    """
    roof = stored_roof(default_home())
    rates = {} if roof is None else {form: roof.ops_per_s(form) for form in ("bf16", "int8", "f32")}
    return Device(
        id=HERE,
        name="this machine",
        kind="cpu",
        usable_bytes=available_bytes(),
        memory_known="seen",
        memory="RAM",
        read_bytes_per_s=0.0 if roof is None else roof.read_bytes_per_s(),
        peak_ops_per_s={},
        measured_ops_per_s=rates,
        max_ranks=1,
        source="the kernel" if roof is None else "the kernel, and its measured roof",
        confidence="high",
    )


def cards_here() -> list[Device]:
    """Return this machine's GPUs that the catalogue knows, with the memory that is free on one.

    Of devices that a card's name may mean, or its beginning, the one with the card's memory is it.
    """
    gpus = cuda.gpu_models.cards()
    gate = cuda.approval.read(default_home()) if gpus else None
    here: dict[str, Device] = {}
    for gpu in gpus:
        words = _words(gpu.name)
        begun = ("".join(words[:count]) for count in range(len(words), 0, -1))
        meant = next((found for name in begun if (found := _by_name().get(name))), [])
        sizes = {one.id: abs(one.usable_bytes - gpu.total_bytes) for one in meant}
        device = min(meant, key=lambda one: sizes[one.id], default=None)
        if device is not None and sizes[device.id] < gpu.total_bytes / 10:
            here[device.id] = replace(
                device,
                usable_bytes=gpu.free_bytes,
                memory_known="seen",
                has_passed=gate is not None and gate.is_open,
                max_ranks=sum(other.name == gpu.name for other in gpus),
            )
    return list(here.values())


def prices_of(
    device: Device, kind: str, today: date, own: Path | None = None
) -> tuple[list[Price], list[str]]:
    """Return the prices of a device that may be used, cheapest first, and warnings.

    Args:
        device: what is to be rented.
        kind: on_demand or spot.
        today: prices of more than 90 days before it warn.
        own: a file of prices, used instead of the catalogue's; of these alone may one lack a date.

    Raises:
        ValueError: the file is damaged, or a date is none.
        OSError: it cannot be read.
    """
    text = own.read_text(encoding="utf-8") if own else _table("prices.csv")
    prices = parse_prices(text, str(own) if own else "prices.csv")
    if device.machine and not own:
        prices += machines()[device.machine].prices
    ages = {price.date: (today - _date(price)).days for price in prices if price.date}
    return usable_prices(prices, device, kind, days_old=ages, undated=own is not None)


def spot_terms(provider: str, device: Device) -> SpotTerms:
    """Return how a provider takes machines away, as far as the catalogue knows.

    A device in a machine of a name is of that machine's provider, and goes as often as it does.
    """
    machine = machines().get(device.machine)
    if machine is None:
        return _spot_terms().get(provider.lower(), SpotTerms())
    terms = _spot_terms().get(machine.provider.lower(), SpotTerms())
    often = machine.evictions_per_hour
    return terms if often is None else replace(terms, evictions_per_hour=often)


def provider_of(device: Device) -> str:
    """Return whose machine a device is in; empty where it is rented by itself."""
    machine = machines().get(device.machine)
    return "" if machine is None else machine.provider


@cache
def _spot_terms() -> Mapping[str, SpotTerms]:
    return parse_spot_terms(_table("spot.csv"))


def _date(price: Price) -> date:
    try:
        return date.fromisoformat(price.date)
    except ValueError as error:
        raise ValueError(
            f"the price of {price.device} at {price.provider} has the date {price.date!r}: write "
            f"YYYY-MM-DD"
        ) from error


@cache
def _table(name: str) -> str:
    return (files("ridgeline.model.cost") / "data" / name).read_text(encoding="utf-8")


def _no_such(name: str, matches: list[Device]) -> str:
    whole, slash, _ = name.lower().partition("/")
    if slash and (parents := [devices()[whole]] if whole in devices() else _called(whole)):
        slices = [d.id for d in devices().values() if d.parent == parents[0].id]
        slices_text = f"its slices are {', '.join(slices)}" if slices else "it has no slices"
        return f"there is no slice {name!r} of {parents[0].id}: {slices_text}"
    if matches:
        some = ", ".join(device.id for device in matches[:_SHOWN])
        return f"{name!r} is in the names of {len(matches)} devices, such as {some}: say which"
    near = [device.id for device in _meant(_SIZE.sub(" ", whole))] or _nearest(whole)
    hint = f"did you mean {' or '.join(near[:_NEAREST])}? " if near else ""
    return (
        f"there is no device {name!r}: {hint}give {HERE}, {ALL} (what can be rented), {SHOP} (what "
        f"can be bought), or one that `ridgeline plan --list-devices` lists; or describe "
        f"your own with --on mine --memory 24GiB --bandwidth 936 --tflops 71"
    )


def _nearest(name: str) -> list[str]:
    """Return the devices and machines whose id or name is written most like a name."""
    ids: dict[str, str] = {}
    for device in _whole_devices():
        for text in (device.id, device.name):
            ids.setdefault("".join(_words(text)), device.id)
    ids |= {"".join(_words(machine)): machine for machine in machines()}
    near = difflib.get_close_matches("".join(_words(name)), ids, n=2 * _NEAREST, cutoff=0.4)
    return list(dict.fromkeys(ids[text] for text in near))


def user_devices(flags: PlanFlags) -> dict[str, Device]:
    """Return the user's devices by what they are called, in lower case.

    Raises ValueError for a damaged file, and OSError if it cannot be read.
    """
    own: dict[str, Device] = {}
    if flags.devices is not None:
        text = Path(flags.devices).read_text(encoding="utf-8-sig")
        own = parse_own_devices(text, flags.devices)
        if not own:
            raise ValueError(f"--devices {flags.devices}: no device stands in it")
    if (num_bytes := flags.size("memory")) is not None:
        own[MINE] = _user_device(num_bytes, flags.bandwidth, flags.tflops)
    return own


def _user_device(num_bytes: int, gb_per_s: float | None, tflops: float | None) -> Device:
    peaks = {} if tflops is None else dict.fromkeys(("bf16", "f16"), tflops * 1e12)
    return Device(
        id=MINE,
        name="device of yours",
        kind="gpu",
        usable_bytes=num_bytes,
        memory_known="seen",
        memory="",
        read_bytes_per_s=(gb_per_s or 0.0) * 1e9,
        peak_ops_per_s=peaks,
        measured_ops_per_s={},
        source="the flags",
        confidence="high",
    )
