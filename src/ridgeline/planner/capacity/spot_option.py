"""A choice on machines that can be taken away: how many, their cost, what an eviction spoils."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

from ridgeline.foresight.simulator.fleet.routers import least_work
from ridgeline.foresight.simulator.fleet.serving import serve_fleet
from ridgeline.planner.capacity.candidate import Alive, Candidate, bounds_of
from ridgeline.planner.capacity.load import LoadFlags, OfferedLoad
from ridgeline.planner.capacity.option import CapacityOption, seen_of
from ridgeline.planner.capacity.spot import (
    EVICTIONS_PER_HOUR,
    NOTICE_S,
    EvictionLoss,
    Spot,
    availability,
    eviction,
    goodput_per_s,
    replicas_for,
    share_again,
    start_seconds,
    up_share,
)
from ridgeline.planner.catalogue import prices_of, spot_terms


def with_spot(
    choice: CapacityOption,
    load: OfferedLoad,
    asked: LoadFlags,
    today: date,
    is_near: bool,
    alive: Alive,
) -> CapacityOption:
    """Return the choice with what spot machines would do; as it is where it misses a bound.

    Args:
        choice: on demand.
        load: what comes.
        asked: the flags: how often machines go, with what notice, at what price.
        today: old prices warn.
        is_near: simulate an eviction too, where requests come at a rate.
        alive: called at every simulated step.

    Raises:
        ValueError: machines are taken away sooner than they start.
    """
    if not choice.meets_slo:
        return choice
    placement = choice.placement
    own = Path(asked.prices) if asked.prices is not None else None
    prices, _ = prices_of(placement.device, "spot", today, own)
    provider = prices[0].provider if prices else ""
    terms = spot_terms(provider)
    per_hour = asked.evictions_per_hour or terms.evictions_per_hour or EVICTIONS_PER_HOUR
    notice_s = terms.notice_s if asked.notice is None else asked.notice
    notice_s = NOTICE_S if notice_s is None else notice_s
    start_s = start_seconds(placement.ledger.weights_bytes * placement.setting.pp)
    # A replica goes when any of its devices does.
    up = up_share(per_hour * placement.num_devices, 0.0, start_s)
    num = replicas_for(choice.replicas, up)
    spoilt = EvictionLoss()
    if is_near and load.rate_per_s is not None:
        spoilt = _simulated(choice, load, asked, num, per_hour, notice_s, start_s, alive)
    devices = num * placement.num_devices
    return replace(
        choice,
        spot=Spot(
            replicas=num,
            needed=choice.replicas,
            availability=availability(choice.replicas, num, up),
            provider=provider,
            usd_per_hour=prices[0].of(devices, placement.device) if prices else None,
            usd_per_hour_on_demand=choice.usd_per_hour,
            evictions_per_hour=per_hour,
            notice_s=notice_s,
            start_s=start_s,
            **spoilt._asdict(),
        ),
    )


def _simulated(
    choice: CapacityOption, load: OfferedLoad, asked: LoadFlags, num: int, per_hour: float,
    notice_s: float, start_s: float, alive: Alive,
) -> EvictionLoss:  # fmt: skip
    """Return what one eviction spoils, of ``num`` replicas."""
    bounds = bounds_of(choice.placement)
    candidate = Candidate(choice.placement, choice.latency_model, bounds, None, load, alive)
    some = min(num, 4)  # whether others are beside those does not change what one loses
    part = load.share(1, 120 * some, is_read=candidate.is_ours)
    scale = num / some
    part = [replace(one, arrival_s=(one.arrival_s or 0.0) * scale) for one in part]
    args = (part, candidate.settings(), candidate.times, some)
    drained = eviction(*args, notice_s, start_s, drain=True)
    cut = eviction(*args, 0.0, start_s, drain=False)  # without heeding the notice
    shares = [
        seen_of(ended, asked.slos(), candidate.begin_s(1)).good_share
        for ended in (serve_fleet(*args, router=least_work()), drained.ended)
    ]
    all_per_hour = per_hour * choice.placement.num_devices * num
    rate_per_s = load.rate_per_s or 0.0
    return EvictionLoss(
        tokens_again=drained.tokens_again,
        share_again=share_again(rate_per_s, drained, all_per_hour),
        tokens_lost=cut.tokens_lost,
        requests_lost=cut.requests_lost,
        goodput_per_s=goodput_per_s(rate_per_s, shares[0], drained, shares[1], all_per_hour),
    )
