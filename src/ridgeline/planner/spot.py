"""Machines that can be taken away: how many are needed, and what an eviction costs.

Evictions are a Poisson process. First in closed form: each machine is up for a part of the time,
and at least ``k`` of ``n`` must be, with a probability of 99 %. Then one eviction is simulated,
with draining and without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.core.records import EngineRecord
from ridgeline.simulator.fleet import Evict, serve_fleet
from ridgeline.simulator.run import Asked, Times

EVICTIONS_PER_HOUR, NOTICE_S = 0.05, 30.0  # assumed where nobody says otherwise
_FETCH_BYTES_PER_S, _BOOT_S = 1e9, 60.0  # assumed
_SURELY = 0.99
_MOST_MORE = 64


@dataclass(frozen=True, slots=True)
class Spot:
    """What spot machines would do.

    Attributes:
        replicas: so many, for as many as are needed with a probability of 99 %.
        needed: replicas that must be up.
        availability: the probability that they are.
        usd_per_hour: None without a price of spot machines.
        usd_per_hour_on_demand: of as many as are needed, on demand.
        evictions_per_hour: of one machine.
        notice_s: between notice and end.
        start_s: until another takes requests.
        tokens_again: computed again for each eviction, with draining.
        tokens_lost: of answers that nobody gets, for each eviction, without.
        requests_lost: without draining, for each eviction.
    """

    replicas: int
    needed: int
    availability: float
    usd_per_hour: float | None
    usd_per_hour_on_demand: float | None
    evictions_per_hour: float
    notice_s: float
    start_s: float
    tokens_again: int
    tokens_lost: int
    requests_lost: int

    def as_dict(self) -> dict[str, Any]:
        """Return the "spot" of a choice."""
        return asdict(self)


def start_seconds(weights_bytes: float) -> float:
    """Return how long a machine takes to start: boot it, and fetch and load the weights."""
    return _BOOT_S + weights_bytes / _FETCH_BYTES_PER_S


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
        f"with machines up for {up:.0%} of the time no number of them is enough: they are taken "
        f"away sooner than they start; --evictions-per-hour says how often"
    )


def eviction(
    load: Sequence[Asked], settings: EngineRecord, times: Times, num: int, notice_s: float,
    start_s: float, *, drain: bool,
) -> tuple[int, int, int]:  # fmt: skip
    """Serve a load of which one replica goes in the middle; return what that cost.

    Returns tokens that were computed again, tokens of answers that nobody got, requests lost.
    """
    last_s = max(asked.arrival_s or 0.0 for asked in load)
    going = Evict(
        at_s=max(0.0, last_s / 2 - notice_s),
        replica=0,
        notice_s=min(notice_s, last_s / 2),
        drain=drain,
        back_s=last_s / 2 + start_s,
    )
    ended = serve_fleet(load, settings, times, num, faults=[going])
    lost = [one for one in ended if one.is_lost]
    return sum(one.num_again for one in ended), sum(one.num_new for one in lost), len(lost)
