"""Devices, their slices and their prices, as facts of a table. It reads no file and has no clock.

Peaks are dense: sheets print twice that, for sparse weights. GB are decimal as on labels; what a
program can have is ``usable_bytes``. Figures are of one card, where sheets list pairs.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

# How a device's memory is known: as programs print it, by a rule from what its driver reports, or
# the decimal GB of its label.
MemoryKnown = Literal["seen", "estimated", "label"]

_OLD_DAYS = 90
_MOST_RANKS = 1024  # of devices that a table sets no end
_DEVICE_FIELDS = (
    "id", "name", "kind", "generation", "year", "bf16_tflops", "fp16_tflops", "fp8_tflops",
    "int8_tops", "fp4_tflops", "bf16_measured_tflops", "fp8_measured_tflops", "label_gb",
    "reported_mib", "usable_mib", "memory", "read_gb_per_s", "link", "link_gb_per_s",
    "pcie_gb_per_s", "tdp_w", "max_ranks", "rented", "date", "source", "confidence", "note",
)  # fmt: skip
_DEVICE_NUMBERS = tuple(
    name for name in _DEVICE_FIELDS
    if name.endswith(("flops", "tops", "_s", "_w", "_gb", "_mib", "ranks"))
)  # fmt: skip
# What drivers keep of the memory that they report: MiB, and a share. Of 24 GPUs of NVIDIA both are
# known, and the rule is off by 0.6 % at most; of 10 of AMD and 2 of Intel by 0.3 %. Where not even
# the report is known, it is the label as GiB.
_KEPT_BY_DRIVER = {"NVIDIA": (364, 0.003), "AMD": (0, 0.002), "Intel": (0, 0.01)}
_PRICE_FIELDS = ("device", "provider", "region", "kind", "usd_per_hour", "date", "source",
                 "confidence")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """One device, or a slice of one.

    Attributes:
        id: as people type it.
        name: in full.
        kind: gpu, npu, tpu, lpu, cpu, or soc: one memory for processor and graphics.
        usable_bytes: memory that programs can have.
        memory_known: how ``usable_bytes`` is.
        memory: its technology.
        read_bytes_per_s: of its memory.
        peak_ops_per_s: dense, by type of the factors: bf16, f16, fp8, int8, fp4.
        measured_ops_per_s: the most that was ever measured, for the types where it is known.
        link: between devices of one machine; link_bytes_per_s in one direction.
        link_bytes_per_s: 0 where devices cannot reach each other's memory.
        pcie_bytes_per_s: from the host, in one direction; 0 where that is not known.
        max_ranks: over how many of these a model can be divided.
        source: of the facts; with date and confidence.
        date: when they were gathered.
        confidence: high, medium or low.
        note: what is easily taken wrong.
        parent: of a slice: the whole device; else empty.
        per_card: how many of them a whole device makes, or a machine has; else 1.
        generation: devices of one compute alike.
        watts: at most; 0 where that is not known.
        is_rented: whether providers rent it, whole.
        has_passed: it is this machine's, and ``ridgeline bench gpu`` found nothing wrong on it.
        label_bytes: memory as its label says it; 0 where there is none.
        machine: the name of the machine that is rented with it, which has ``per_card`` of them.
    """

    id: str
    name: str
    kind: str
    usable_bytes: int
    memory_known: MemoryKnown
    memory: str
    read_bytes_per_s: float
    peak_ops_per_s: Mapping[str, float]
    measured_ops_per_s: Mapping[str, float]
    link: str = ""
    link_bytes_per_s: float = 0.0
    pcie_bytes_per_s: float = 0.0
    max_ranks: int = _MOST_RANKS
    source: str = ""
    date: str = ""
    confidence: str = ""
    note: str = ""
    parent: str = ""
    per_card: int = 1
    generation: str = ""
    watts: float = 0.0
    is_rented: bool = False
    has_passed: bool = False
    label_bytes: int = 0
    machine: str = ""

    def num_wholes(self, num: int, ranks: int = 1) -> int:
        """Return how many cards or machines hold ``num`` devices, ``ranks`` of them a replica.

        A replica stands in one of them, if that has as many.
        """
        if ranks > self.per_card:
            return num // ranks * -(-ranks // self.per_card)
        return -(-num // (self.per_card // ranks * ranks))

    @property
    def has_slots(self) -> bool:
        """Whether its memory is put into slots, so that it may have any size."""
        return "ch DDR" in self.memory

    @property
    def is_sram(self) -> bool:
        """Whether it has nothing but memory on the chip, and is planned by chips."""
        return self.memory == "SRAM"

    def ops_per_s(self, form: str) -> float | None:
        """Return what products of a type reach: measured where it is, else the dense peak.

        None where the device has no units for the type.
        """
        return self.measured_ops_per_s.get(form, self.peak_ops_per_s.get(form))


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour of one device costs.

    Attributes:
        device: its id.
        provider: who charges this price.
        region: or tier; empty if there is none.
        kind: on_demand or spot.
        usd_per_hour: of one device; of a machine that is rented by its name, of all it has.
        date: when it was seen, YYYY-MM-DD; empty if that is not known.
        source: where.
        confidence: high, medium or low.
    """

    device: str
    provider: str
    region: str
    kind: str
    usd_per_hour: float
    date: str
    source: str
    confidence: str

    def of(self, num: int, device: Device, ranks: int = 1) -> float:
        """Return the cost of an hour of ``num`` devices, ``ranks`` of them a replica.

        What shares a card or machine is paid once.
        """
        is_shared = self.device in (device.parent, device.machine)
        return self.usd_per_hour * (device.num_wholes(num, ranks) if is_shared else num)


@dataclass(frozen=True, slots=True)
class CloudMachine:
    """A machine that a cloud rents by a name.

    Attributes:
        name: as its provider writes it.
        provider: of the machine.
        device: the id of what is in it.
        num: how many of these.
        region: of its prices.
        usd_per_hour: of the whole machine, by kind of price: on_demand, spot. Only those known.
        evictions_per_hour: of a spot machine of this name; None where none is published.
        date: of the prices, YYYY-MM-DD.
        source: of the prices, or of the shape alone.
        confidence: high, medium or low.
    """

    name: str
    provider: str
    device: str
    num: int
    region: str
    usd_per_hour: Mapping[str, float]
    evictions_per_hour: float | None
    date: str
    source: str
    confidence: str

    @property
    def prices(self) -> tuple[Price, ...]:
        """Return its prices, those of the whole machine."""
        return tuple(
            Price(
                device=self.name, provider=self.provider, region=self.region, kind=kind,
                usd_per_hour=usd, date=self.date, source=self.source, confidence=self.confidence,
            )
            for kind, usd in self.usd_per_hour.items()
        )  # fmt: skip

    def holding(self, device: Device) -> Device:
        """Return the device as one of those in this machine: a model is divided over no more."""
        return replace(
            device,
            id=f"{device.id}@{self.name}",
            name=f"{device.name}, {self.num} in {self.name}",
            max_ranks=min(self.num, device.max_ranks),
            per_card=self.num,
            machine=self.name,
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """What a device is sold for.

    Attributes:
        device: its id.
        item: what one buys.
        needs: what it must be put into: pc, server, or nothing.
        kind: list, shop or used.
        usd: the price.
        date: of the price, YYYY-MM.
        source: where it was seen.
        confidence: high, medium or low.
    """

    device: str
    item: str
    needs: str
    kind: str
    usd: float
    date: str
    source: str
    confidence: str


@dataclass(frozen=True, slots=True)
class SpotTerms:
    """How a provider takes machines away; None where that is not known.

    Attributes:
        notice_s: seconds between the notice and the end.
        evictions_per_hour: of one machine, where the bands that the provider publishes end.
    """

    notice_s: float | None = None
    evictions_per_hour: float | None = None


def parse_offers(text: str) -> dict[str, Offer]:
    """Return what devices are sold for, by device, from the text of a CSV file.

    Raises ValueError for a damaged row.
    """
    return {
        row["device"]: Offer(**(row | {"usd": float(row["usd"])}))  # type: ignore[arg-type]
        for row in _rows(text, "buy.csv")
    }


def parse_machines(text: str) -> dict[str, CloudMachine]:
    """Return the machines that clouds rent, by name, from the text of a CSV file.

    Raises ValueError for a damaged row.
    """
    return {
        row["name"]: CloudMachine(
            name=row["name"],
            provider=row["provider"],
            device=row["device"],
            num=int(row["num"]),
            region=row["region"],
            usd_per_hour={
                kind: float(row[column])
                for kind, column in (
                    ("on_demand", "usd_per_hour"),
                    ("spot", "spot_usd_per_hour"),
                )
                if row[column]
            },
            evictions_per_hour=(
                float(row["evictions_per_hour"]) if row["evictions_per_hour"] else None
            ),
            date=row["date"],
            source=row["source"],
            confidence=row["confidence"],
        )
        for row in _rows(text, "vms.csv")
    }


def parse_spot_terms(text: str) -> dict[str, SpotTerms]:
    """Return the terms by provider, in lower case, from the text of a CSV file.

    Raises ValueError for a damaged row.
    """
    return {
        row["provider"].lower(): SpotTerms(
            *(float(row[key]) if row[key] else None for key in ("notice_s", "evictions_per_hour"))
        )
        for row in _rows(text, "spot.csv")
    }


def parse_devices(devices: str, slices: str) -> dict[str, Device]:
    """Return devices and their MIG slices by id, from the text of two CSV files.

    A slice has its share of memory and bandwidth by memory slices, of arithmetic by compute slices,
    and reaches no other: there is no peer-to-peer inside MIG. Raises ValueError for a damaged row.
    """
    by_id: dict[str, Device] = {}
    for row in _rows(devices, "devices.csv"):
        device = _device(row)
        by_id[device.id] = device
    for row in _rows(slices, "mig.csv"):
        whole = by_id[row["device"]]
        memory = int(row["memory_slices"]) / int(row["memory_slices_total"])
        compute = int(row["compute_slices"]) / int(row["compute_slices_total"])
        by_id[f"{whole.id}/{row['profile']}"] = replace(
            whole,
            id=f"{whole.id}/{row['profile']}",
            name=f"{whole.name}, MIG {row['profile']}",
            usable_bytes=int(float(row["label_gb"]) * 1e9),
            label_bytes=int(float(row["label_gb"]) * 1e9),
            memory_known="label",
            read_bytes_per_s=whole.read_bytes_per_s * memory,
            peak_ops_per_s={k: v * compute for k, v in whole.peak_ops_per_s.items()},
            measured_ops_per_s={k: v * compute for k, v in whole.measured_ops_per_s.items()},
            link="",
            link_bytes_per_s=0.0,
            max_ranks=1,
            source=row["source"],
            note="",
            watts=0.0,
            is_rented=False,
            parent=whole.id,
            per_card=int(row["max_instances"]),
        )
    return by_id


def parse_own_devices(text: str, name: str) -> dict[str, Device]:
    """Return the devices of a user's own CSV file by id, with any columns of ``devices.csv``.

    A row needs an id, memory and bandwidth. Raises ValueError, with line and column, for damage.
    """
    by_id: dict[str, Device] = {}
    for number, row in enumerate(_rows(text, name), start=2):
        if unknown := [column for column in row if column not in _DEVICE_FIELDS]:
            raise ValueError(
                f"{name}: there is no column {unknown[0]!r}: give some of "
                f"{','.join(_DEVICE_FIELDS)}"
            )
        row = {column: (row.get(column) or "").strip() for column in _DEVICE_FIELDS}
        for column in _DEVICE_NUMBERS:
            if row[column] and not 0 < _number(row[column]) < 1e12:
                raise _wrong(name, number, row, column, "a number above 0")
        if not row["id"] or "," in row["id"]:
            raise _wrong(name, number, row, "id", "a name without commas")
        if not row["read_gb_per_s"] or not (row["label_gb"] or row["usable_mib"]):
            raise ValueError(
                f"{name}, line {number}: {row['id']} needs read_gb_per_s, and label_gb or "
                f"usable_mib"
            )
        row["name"], row["kind"] = row["name"] or row["id"], row["kind"] or "gpu"
        device = _device(row)
        by_id[device.id.lower()] = device
    return by_id


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def parse_prices(text: str, name: str = "prices.csv") -> tuple[Price, ...]:
    """Return the prices of a CSV file. Raises ValueError, with line and field, for damage."""
    prices = []
    for number, row in enumerate(_rows(text, name), start=2):
        if missing := [name for name in _PRICE_FIELDS if name not in row]:
            raise ValueError(
                f"{name}, line {number}: {missing[0]} is missing; expected the columns "
                f"{','.join(_PRICE_FIELDS)}"
            )
        try:
            usd = float(row["usd_per_hour"])
        except ValueError:
            usd = 0.0
        if not 0 < usd < 1e6:
            raise _wrong(name, number, row, "usd_per_hour", "a number above 0")
        if row["kind"] not in ("on_demand", "spot"):
            raise _wrong(name, number, row, "kind", "on_demand or spot")
        prices.append(
            Price(
                device=row["device"],
                provider=row["provider"],
                region=row["region"],
                kind=row["kind"],
                usd_per_hour=usd,
                date=row["date"],
                source=row["source"],
                confidence=row["confidence"],
            )
        )
    return tuple(prices)


def _wrong(name: str, number: int, row: Mapping[str, str], field: str, expected: str) -> ValueError:
    return ValueError(f"{name}, line {number}: {field} is {row[field]!r}; expected {expected}")


def usable_prices(
    prices: Sequence[Price], device: Device, kind: str, *, days_old: Mapping[str, int],
    undated: bool = False,
) -> tuple[list[Price], list[str]]:  # fmt: skip
    """Return the prices of a device that may be used, cheapest first, and warnings.

    A price without a date is used only if ``undated`` says so: then the user named the file. One
    that is older than 90 days warns.

    Args:
        prices: all of them.
        device: of a slice without a price of its own those of the whole device are returned, which
            is what one rents.
        kind: on_demand or spot.
        days_old: how old each date is, by the date's text.
        undated: take those without a date too.
    """
    of_kind = [price for price in prices if price.kind == kind and (price.date or undated)]
    usable = [price for price in of_kind if price.device == (device.machine or device.id)]
    usable = usable or [price for price in of_kind if price.device == (device.parent or device.id)]
    usable.sort(key=lambda price: price.usd_per_hour)
    warnings = [
        f"the price of {price.device} at {price.provider} is {days_old[price.date]} days old"
        for price in usable
        if price.date and days_old[price.date] > _OLD_DAYS
    ]
    return usable, warnings


def _rows(text: str, name: str) -> Iterable[dict[str, str]]:
    rows = csv.DictReader(text.splitlines())
    if not rows.fieldnames:
        raise ValueError(f"{name} is empty")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ValueError(f"{name}, line {number}: wanted {len(rows.fieldnames)} columns")
        yield row


def _memory(row: Mapping[str, str]) -> tuple[int, MemoryKnown]:
    """Return the bytes that programs can have of a device, and how they are known."""
    if mib := row["usable_mib"]:
        return int(float(mib)) << 20, "seen"
    maker = row["name"].partition(" ")[0]
    if row["kind"] == "gpu" and maker in _KEPT_BY_DRIVER:
        reported = float(row["reported_mib"] or float(row["label_gb"]) * 1024)
        kept, share = _KEPT_BY_DRIVER[maker]
        return int(reported * (1 - share) - kept) << 20, "estimated"
    return int(float(row["label_gb"]) * 1e9), "label"


def _device(row: Mapping[str, str]) -> Device:
    usable_bytes, memory_known = _memory(row)
    peaks = {"bf16": "bf16_tflops", "f16": "fp16_tflops", "fp8": "fp8_tflops", "int8": "int8_tops",
             "fp4": "fp4_tflops"}  # fmt: skip
    measured = {"bf16": "bf16_measured_tflops", "fp8": "fp8_measured_tflops"}
    return Device(
        id=row["id"],
        name=row["name"],
        kind=row["kind"],
        usable_bytes=usable_bytes,
        memory_known=memory_known,
        memory=row["memory"],
        read_bytes_per_s=float(row["read_gb_per_s"]) * 1e9,
        peak_ops_per_s={k: float(row[v]) * 1e12 for k, v in peaks.items() if row[v]},
        measured_ops_per_s={k: float(row[v]) * 1e12 for k, v in measured.items() if row[v]},
        link=row["link"],
        link_bytes_per_s=float(row["link_gb_per_s"] or 0) * 1e9,
        pcie_bytes_per_s=float(row["pcie_gb_per_s"] or 0) * 1e9,
        max_ranks=int(float(row["max_ranks"] or _MOST_RANKS)),
        source=row["source"],
        date=row["date"],
        confidence=row["confidence"],
        note=row["note"],
        generation=row["generation"],
        watts=float(row["tdp_w"] or 0),
        is_rented=row["rented"] == "yes",
        label_bytes=int(float(row["label_gb"] or 0) * 1e9),
    )
