"""What owning devices costs: the price of things over the hours that they work, and their power.

Sums of facts from a table, and of assumptions that have a name. It reads no file and has no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.model.cost.hardware import Device, Offer

_DAYS = 365.25  # of a year


class Host(NamedTuple):
    """What cards and processors are put into.

    Attributes:
        name: what one calls it; empty where a device is a machine of its own.
        usd: assumed, with memory and disks.
        watts: beside its cards, assumed.
        most: how many devices it holds.
    """

    name: str
    usd: float
    watts: float
    most: int


NO_HOST = Host("", 0.0, 0.0, 1)
PC = Host("PC", 1_200.0, 100.0, 2)
SERVER = Host("server", 8_000.0, 300.0, 8)


class Bill(NamedTuple):
    """What a number of devices costs.

    Attributes:
        usd: to buy, with what they are put into.
        hosts: of PCs or servers.
        watts: at most.
        power_usd_per_hour: of work.
        spread_usd_per_hour: the price over all hours of work.
    """

    usd: float
    hosts: int
    watts: float
    power_usd_per_hour: float
    spread_usd_per_hour: float


@dataclass(frozen=True, slots=True)
class Owned:
    """A device that one buys; it costs as an hour of rent does (``Price``).

    Attributes:
        offer: its price.
        watts: of one device, at most.
        ranks: devices of one replica, which stand in one machine.
        usd_per_kwh: of electricity.
        years: until it is worth nothing.
        hours_per_day: that it works.
    """

    offer: Offer
    watts: float
    ranks: int
    usd_per_kwh: float
    years: float
    hours_per_day: float

    @property
    def host(self) -> Host:
        """What it is put into: a PC holds two cards, more want a server."""
        if not self.offer.needs:
            return NO_HOST
        return PC if self.offer.needs == "pc" and self.ranks <= PC.most else SERVER

    @property
    def provider(self) -> str:
        """Whose price it is, in words."""
        return f"{self.offer.item}, {self.offer.kind}"

    @property
    def date(self) -> str:
        """Of the price."""
        return self.offer.date

    def bill(self, num: int) -> Bill:
        """Return what ``num`` devices cost, all replicas of them."""
        host = self.host
        hosts = math.ceil(num / (host.most // self.ranks * self.ranks)) if host.name else 0
        usd = num * self.offer.usd + hosts * host.usd
        watts = num * self.watts + hosts * host.watts
        hours = self.years * _DAYS * self.hours_per_day
        return Bill(
            usd,
            hosts,
            watts,
            power_usd_per_hour=watts / 1e3 * self.usd_per_kwh,
            spread_usd_per_hour=usd / hours,
        )

    def of(self, num: int, device: Device, ranks: int = 1) -> float:
        """Return what an hour of work of ``num`` devices costs, of its own ranks each replica."""
        bill = self.bill(num)
        return bill.power_usd_per_hour + bill.spread_usd_per_hour
