"""Machines that can be taken away: how many are needed, and what an eviction costs.

Evictions are a Poisson process. First in closed form: each machine is up for a part of the time,
and at least ``k`` of ``n`` must be, with a probability of 99 %. Then one eviction is simulated,
with draining and without; what it spoils, times how often it happens, is taken from the goodput.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ridgeline.core.records import EngineRecord
from ridgeline.foresight.simulator.fleet.request_trip import RequestOutcome
from ridgeline.foresight.simulator.fleet.routers import least_work
from ridgeline.foresight.simulator.fleet.serving import Evict, serve_fleet
from ridgeline.foresight.simulator.run import SimRequest, TimeModel

EVICTIONS_PER_HOUR, NOTICE_S = 0.05, 30.0  # assumed unless told otherwise
FETCH_BYTES_PER_S, BOOT_S = 1e9, 60.0  # assumed
SHOWN = 3  # choices: of these an eviction is simulated
_SURELY = 0.99
_MOST_MORE = 64


class EvictionLoss(NamedTuple):
    """What an eviction spoils; None where none was simulated.

    Attributes:
        tokens_again: computed again for each eviction, with draining.
        share_again: what is computed again because of evictions, of all tokens that are computed.
        tokens_lost: of answers that are lost, for each eviction, without.
        requests_lost: without draining, for each eviction.
        goodput_per_s: requests a second that are answered within all bounds, each by itself, while
            machines come and go, with draining.
    """

    tokens_again: int | None = None
    share_again: float | None = None
    tokens_lost: int | None = None
    requests_lost: int | None = None
    goodput_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Spot:
    """What spot machines would do.

    Attributes:
        replicas: how many are taken, so that enough are there with a probability of 99 %.
        needed: replicas that must be up.
        availability: the probability that they are.
        provider: whose machines; empty without a price of spot machines.
        usd_per_hour: None without a price of spot machines.
        usd_per_hour_on_demand: of as many as are needed, on demand.
        evictions_per_hour: of one machine.
        notice_s: between notice and end.
        start_s: until another takes requests.
        tokens_again, share_again, tokens_lost, requests_lost, goodput_per_s: as in
            ``EvictionLoss``.
    """

    replicas: int
    needed: int
    availability: float
    provider: str
    usd_per_hour: float | None
    usd_per_hour_on_demand: float | None
    evictions_per_hour: float
    notice_s: float
    start_s: float
    tokens_again: int | None
    share_again: float | None
    tokens_lost: int | None
    requests_lost: int | None
    goodput_per_s: float | None

    def assumed(self) -> Iterator[str]:
        """Yield what was taken for granted of these machines, each a sentence."""
        whose = f" at {self.provider}" if self.provider else ""
        often, notice_s = self.evictions_per_hour, self.notice_s
        yield f"{often:g} evictions an hour of a spot machine{whose}: --evictions-per-hour"
        yield f"{notice_s:g} s of notice before a spot machine{whose} goes: --notice"

    def as_dict(self) -> dict[str, Any]:
        """Return the "spot" of a choice."""
        return asdict(self)


def start_seconds(weights_bytes: float) -> float:
    """Return how long a machine takes to start: boot it, and fetch and load the weights."""
    return BOOT_S + weights_bytes / FETCH_BYTES_PER_S


def up_share(evictions_per_hour: float, notice_s: float, start_s: float) -> float:
    """Return the part of the time for which a machine takes requests."""
    up_s = 3600 / evictions_per_hour
    return up_s / (up_s + max(0.0, notice_s + start_s))


def availability(needed: int, num: int, up: float) -> float:
    """Return the probability that at least ``needed`` of ``num`` are up, each by itself."""
    return sum(math.comb(num, i) * up**i * (1 - up) ** (num - i) for i in range(needed, num + 1))


def replicas_for(needed: int, up: float) -> int:
    """Return the fewest replicas of which enough are up with a probability of 99 %.

    Raises ValueError if machines are away for so long that no number near it is enough.
    """
    for num in range(needed, 4 * needed + _MOST_MORE):
        if availability(needed, num, up) >= _SURELY:
            return num
    raise ValueError(
        f"machines that are up for {up:.0%} of the time are not enough, however many: they are "
        "taken away faster than they start; --evictions-per-hour sets how often"
    )


class Eviction(NamedTuple):
    """What happened to a load of which one replica went in the middle.

    Attributes:
        ended: how each request ended.
        share_of_absence: for how much of the time until another is there the load went on.
    """

    ended: list[RequestOutcome]
    share_of_absence: float

    @property
    def tokens_again(self) -> int:
        """Tokens that were computed again."""
        return sum(one.num_again for one in self.ended)

    @property
    def tokens_lost(self) -> int:
        """Tokens of answers that were lost."""
        return sum(one.num_new for one in self.ended if one.is_lost)

    @property
    def requests_lost(self) -> int:
        """Requests without an answer."""
        return sum(one.is_lost for one in self.ended)


def goodput_per_s(
    rate_per_s: float, share_before: float, hit: Eviction, share_hit: float, per_hour: float
) -> float:
    """Return the requests a second within bounds while machines come and go.

    Args:
        rate_per_s: requests that come.
        share_before: of them, those within bounds while all machines are up.
        hit: an eviction, of a load at that rate for each machine.
        share_hit: of its requests, those within bounds.
        per_hour: evictions of all machines together. They are taken to be apart, as rare ones are.
    """
    spoilt = max(0.0, share_before - share_hit) * len(hit.ended) / hit.share_of_absence
    return max(0.0, rate_per_s * share_before - per_hour / 3600 * spoilt)


def share_again(rate_per_s: float, hit: Eviction, per_hour: float) -> float:
    """Return which share of the tokens that are computed are computed again; as above."""
    once = sum(one.num_computed - one.num_again for one in hit.ended) / len(hit.ended)
    again_per_s = per_hour / 3600 * hit.tokens_again
    return again_per_s / (rate_per_s * once + again_per_s)


def eviction(
    load: Sequence[SimRequest], settings: EngineRecord, times: TimeModel, num: int, notice_s: float,
    start_s: float, *, drain: bool,
) -> Eviction:  # fmt: skip
    """Serve a load of which one replica goes in the middle; return how requests ended."""
    last_s = max(asked.arrival_s or 0.0 for asked in load)
    going = Evict(
        at_s=max(0.0, last_s / 2 - notice_s),
        replica=0,
        notice_s=min(notice_s, last_s / 2),
        drain=drain,
        back_s=last_s / 2 + start_s,
    )
    ended = serve_fleet(load, settings, times, num, router=least_work(), faults=[going])
    return Eviction(ended, min(1.0, last_s / 2 / start_s))
