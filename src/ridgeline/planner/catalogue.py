"""The catalogue of devices and prices: the package's tables, read once, and this machine.

The tables are data of ``physics``, which opens no file itself. The date of today comes in from
outside, so that what a plan says does not change from one look to the next.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import date
from functools import cache
from importlib.resources import files
from pathlib import Path

from ridgeline.engine_setup.home import default_home
from ridgeline.foresight.step_time.roof import kept_roof
from ridgeline.machine import available_bytes
from ridgeline.physics.hardware import (
    Device,
    Price,
    SpotTerms,
    parse_devices,
    parse_prices,
    parse_spot_terms,
    usable_prices,
)

HERE, ALL = "here", "all"
# What a plan over everything tries: devices that models are rented on, whole ones.
_RENTED = ("gpu", "npu", "tpu")


@cache
def devices() -> Mapping[str, Device]:
    """Return all devices and MIG slices by id."""
    return parse_devices(_table("devices.csv"), _table("mig.csv"))


def find_devices(ids: str) -> list[Device]:
    """Return the devices of a list of ids with commas between; ``here``, or ``all``.

    Raises ValueError for an id that is not in the catalogue, with those that are near it.
    """
    chosen: list[Device] = []
    for name in (part.strip() for part in ids.split(",")):
        if name == HERE:
            chosen.append(this_machine())
        elif name == ALL:
            whole = [d for d in devices().values() if not d.parent and d.kind in _RENTED]
            chosen += sorted(whole, key=lambda device: device.usable_bytes)
        elif name in devices():
            chosen.append(devices()[name])
        else:
            raise ValueError(_no_such(name))
    return list({device.id: device for device in chosen}.values())


def this_machine() -> Device:
    """Return this machine, with the memory that a process can still have.

    Where no roof was measured its bandwidth is 0, and nothing is known of its arithmetic.
    """
    roof = kept_roof(default_home())
    rates = {} if roof is None else {form: roof.ops_per_s(form) for form in ("bf16", "int8", "f32")}
    return Device(
        id=HERE,
        name="this machine",
        kind="cpu",
        usable_bytes=available_bytes(),
        is_measured=True,
        memory="RAM",
        read_bytes_per_s=0.0 if roof is None else roof.read_bytes_per_s(),
        peak_ops_per_s={},
        measured_ops_per_s=rates,
        max_ranks=1,
        source="the kernel" if roof is None else "the kernel, and its measured roof",
        confidence="high",
    )


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
    ages = {price.date: (today - _date(price)).days for price in prices if price.date}
    return usable_prices(prices, device, kind, days_old=ages, undated=own is not None)


def spot_terms(provider: str) -> SpotTerms:
    """Return how a provider takes machines away, as far as the catalogue knows."""
    return _spot_terms().get(provider.lower(), SpotTerms())


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
    return (files("ridgeline.physics") / "data" / name).read_text(encoding="utf-8")


def _no_such(name: str) -> str:
    whole = [device.id for device in devices().values() if not device.parent]
    parent = name.partition("/")[0]
    if "/" in name and parent in devices():
        slices = [d.id for d in devices().values() if d.parent == parent]
        known = f"its slices are {', '.join(slices)}" if slices else "it has no slices"
        return f"there is no slice {name!r} of {parent}: {known}"
    near = difflib.get_close_matches(name.lower(), whole, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"there is no device {name!r}: {hint}give {HERE}, {ALL}, or one of {', '.join(whole)}"
