"""The search for choices: devices, how a model is divided over them, and how many replicas.

A formula (``steady``) says for each division how many replicas a load needs; the cheapest of these
are then simulated by the server's own code, and a replica more or fewer is tried. Where a load is
above 85 % of what replicas bear, no latency is given, only where the knee is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from ridgeline.foresight.explain import METRICS
from ridgeline.foresight.simulator.fleet import serve_fleet
from ridgeline.model.cost.device_time import DeviceTime
from ridgeline.model.cost.hardware import Device, Price
from ridgeline.model.cost.ownership import Owned
from ridgeline.planner.capacity.latency_model import (
    LatencyModel,
    Steady,
    knee,
    latency_model_of,
    most_seqs,
    steady,
    steady_closed,
)
from ridgeline.planner.capacity.load import PERCENTILES, LoadFlags, OfferedLoad, Slo
from ridgeline.planner.capacity.option import (
    MOST_BUSY,
    SHOWN,
    CancelCheck,
    Candidate,
    CapacityOption,
    SeenLatencies,
    engine_record,
    latencies_of,
    with_frontier,
    with_spot,
)
from ridgeline.planner.capacity.report import name_of
from ridgeline.planner.catalogue import HERE, offers, prices_of
from ridgeline.planner.memory.flags import AUTO, PlanFlags
from ridgeline.planner.memory.model_spec import ModelSpec
from ridgeline.planner.memory.placement import Placement, place
from ridgeline.system.report import figure

Report = Callable[[int, int], None]
_MOST_SIMULATED = 8  # choices, the cheapest first
_MOST_REPLICAS = 256  # of a search
_TIMES_FEWEST = (1, 2, 4, 8)  # ranks, as multiples of the fewest that hold the model
_MOST_RANKS = 8
_LEAST_REQUESTS, _MOST_REQUESTS = 240, 1200
# What a formula's mean stands for, where only it is known: an exponential tail, cut.
_TAIL = {"mean": 1.0, "p50": 1.0, "p90": 1.5, "p95": 1.8, "p99": 2.5}


@dataclass(frozen=True, eq=False, slots=True)
class SearchResult:
    """The choices, the best first, and what was left out and why; if it was all, the reason."""

    choices: tuple[CapacityOption, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    why_none: str = ""


def search(
    spec: ModelSpec, flags: PlanFlags, load_flags: LoadFlags, load: OfferedLoad,
    devices: Sequence[Device], today: date, report: Report, check_cancel: CancelCheck,
) -> SearchResult:  # fmt: skip
    """Return what can be chosen for a load, the cheapest that meets its bounds first.

    ``check_cancel`` is called at every simulated step; what it raises ends the search. Raises
    ValueError if a price is damaged, or nothing holds the model.
    """
    warnings: list[str] = []
    sized: list[tuple[Candidate, int]] = []
    slos = load_flags.slos()
    for device in devices:
        check_cancel()
        fitting = _candidates(spec, flags, load_flags, load, device, today, warnings, check_cancel)
        sized += [(one, _replicas(one, load, slos, load_flags)) for one in fitting]
    sized.sort(key=lambda pair: _cost(pair[0], pair[1], load, slos))
    choices, most_usd = list[CapacityOption](), load_flags.max_usd_per_hour
    for number, (candidate, replicas) in enumerate(sized):
        check_cancel()
        report(min(number, _MOST_SIMULATED), min(len(sized), _MOST_SIMULATED))
        is_near = number < _MOST_SIMULATED
        choice = _decide(candidate, replicas, load, load_flags, is_simulated=is_near)
        choices.append(choice)
    report(_MOST_SIMULATED, _MOST_SIMULATED)
    choices.sort(key=_order)
    why_none = ""
    if most_usd is not None and choices:
        priced = [(c, c.usd_per_hour) for c in choices if c.usd_per_hour is not None]
        choices = [choice for choice, usd in priced if usd <= most_usd]
        why_none = "" if choices else _too_dear(priced, most_usd)
    if load_flags.spot:
        choices = [
            with_spot(c, load, load_flags, today, i < SHOWN, check_cancel)
            for i, c in enumerate(choices)
        ]
    frontier = with_frontier(choices)
    choices = [replace(c, on_frontier=i in frontier) for i, c in enumerate(choices)]
    notes = dict.fromkeys(choice.latency_model.note for choice in choices[:1])
    return SearchResult(tuple(choices), tuple(dict.fromkeys(warnings)), tuple(notes), why_none)


def _candidates(
    spec: ModelSpec, flags: PlanFlags, load_flags: LoadFlags, load: OfferedLoad, device: Device,
    today: date, warnings: list[str], check_cancel: CancelCheck,
) -> Iterator[Candidate]:  # fmt: skip
    for placement in _divisions(spec, flags, device):
        try:
            latency_model = latency_model_of(spec, placement)
        except ValueError as error:
            if device.id == HERE:
                raise
            warnings.append(str(error))
            return
        if most_seqs(engine_record(placement, latency_model.times), load) < 1:
            continue
        price, about = _price(device, placement, load_flags, today)
        warnings += about
        if price is not None or not load_flags.buy:
            yield Candidate(placement, latency_model, price, load, check_cancel)


def _price(
    device: Device, placement: Placement, load_flags: LoadFlags, today: date
) -> tuple[Price | Owned | None, list[str]]:
    """Return the cheapest price of renting a device, or that of owning it, and warnings."""
    if load_flags.buy:
        offer = offers().get(device.id)
        if offer is None:
            return None, [f"{device.id}: no price to buy it is known"]
        owned = Owned(
            offer, device.watts, placement.num_devices,
            usd_per_kwh=load_flags.usd_per_kwh, years=load_flags.years,
            hours_per_day=load_flags.hours_per_day,
        )  # fmt: skip
        most = owned.host.most if owned.host.name else device.max_ranks
        return (owned if owned.ranks <= most else None), []
    own = Path(load_flags.prices) if load_flags.prices is not None else None
    prices, old = prices_of(device, "on_demand", today, own)
    if not prices:
        return None, []
    return prices[0], [text for text in old if f"at {prices[0].provider} " in text]


def _divisions(spec: ModelSpec, flags: PlanFlags, device: Device) -> Iterator[Placement]:
    """Yield the fewest ranks that hold the model, and more of them, which answer sooner."""
    first = place(spec, device, flags, default_ranks=AUTO if device.id != HERE else "1")
    if not first.ledger.fits:
        return
    yield first
    if flags.ranks("tensor_parallel_size", AUTO) is not None or device.id == HERE:
        return
    for times in _TIMES_FEWEST[1:]:
        ranks = times * first.memory.tp
        if ranks * first.memory.pp > min(_MOST_RANKS, device.max_ranks):
            return
        wider = replace(flags, tensor_parallel_size=str(ranks))
        try:
            yield place(spec, device, wider, default_ranks="1")
        except ValueError:  # heads do not divide so
            return


# --- how many ----------------------------------------------------------------------------------


def settled_of(
    candidate: Candidate, load: OfferedLoad, replicas: int, factor: float = 1.0
) -> Steady | None:
    """Return where each of the replicas settles; None above 85 % of the knee."""
    times, settings, settled = candidate.latency_model.at(factor), candidate.settings, None
    rate = (load.rate_per_s or 0.0) / replicas
    if load.concurrency is not None:
        settled = steady_closed(times, load, settings, load.concurrency / replicas)
    elif rate <= MOST_BUSY * candidate.knee(factor):
        settled = steady(times, load, settings, rate)
    if settled is None:
        return None
    return replace(settled, ttft_s=settled.ttft_s + candidate.begin_s(replicas, factor))


def _by_formula(settled: Steady, load: OfferedLoad) -> SeenLatencies:
    means = {"ttft": 1e3 * settled.ttft_s, "tpot": 1e3 * settled.tpot_s}
    means["e2el"] = means["ttft"] + (load.mean_new - 1) * means["tpot"]
    ms = {
        m: {p: means[m] * (_TAIL[p] if m == "ttft" else 1) for p in ("mean", *PERCENTILES)}
        for m in METRICS
    }
    return SeenLatencies(ms, 1.0, is_simulated=False)


def _replicas(
    candidate: Candidate, load: OfferedLoad, slos: Sequence[Slo], load_flags: LoadFlags
) -> int:
    """Return the number asked for, or the fewest that hold the load within its bounds by formula.

    Where no number does, it is the fewest that bear the load at all.
    """
    if load_flags.replicas != AUTO:
        return int(load_flags.replicas)
    fewest = 1
    if load.rate_per_s is not None:
        most_per_s = MOST_BUSY * candidate.knee()
        fewest = max(1, math.ceil(load.rate_per_s / most_per_s)) if most_per_s else _MOST_REPLICAS

    def does(replicas: int) -> bool:
        settled = settled_of(candidate, load, replicas)
        return settled is not None and _by_formula(settled, load).meets(slos)

    low, high = fewest, fewest
    while not does(high):
        low, high = high + 1, 2 * high
        if high > max(_MOST_REPLICAS, fewest) or high > 64 * fewest:
            return fewest
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle + 1, high)
    return high


def _cost(
    candidate: Candidate, replicas: int, load: OfferedLoad, slos: Sequence[Slo]
) -> tuple[bool, bool, float]:
    """Return what to look at first: what meets bounds, what has a price, what is cheap."""
    settled = settled_of(candidate, load, replicas)
    does = settled is not None and _by_formula(settled, load).meets(slos)
    usd = candidate.usd_per_hour(replicas)
    if usd is None:
        num = replicas * candidate.placement.num_devices
        return not does, True, float(num * candidate.placement.device.usable_bytes)
    return not does, False, usd


def _too_dear(priced: Sequence[tuple[CapacityOption, float]], most_usd: float) -> str:
    """Return what the best of the choices costs, where all cost more than is allowed."""
    nothing = f"--max-usd-per-hour {most_usd:g} leaves nothing"
    if not priced:
        return f"{nothing}: no dated price is known of what holds the load; --prices FILE gives one"
    best, usd = priced[0]
    holds = (
        "holds the load" if best.meets_slo else "comes nearest, though it does not hold the load"
    )
    return f"{nothing}: the cheapest that {holds} is {name_of(best)} for {figure(usd)} USD per hour"


def _order(choice: CapacityOption) -> tuple[bool, bool, float, float]:
    cost = choice.usd_per_hour
    size = choice.num_devices * choice.placement.device.usable_bytes
    worse = choice.latencies is None or not choice.latencies.is_simulated
    return not choice.meets_slo, cost is None, cost if cost is not None else size, float(worse)


# --- a choice ----------------------------------------------------------------------------------


def _simulated(
    candidate: Candidate, load: OfferedLoad, replicas: int, slos: Sequence[Slo]
) -> SeenLatencies | None:
    """Return what requests of one of the replicas see; None above 85 % of the knee."""
    settled = settled_of(candidate, load, replicas)
    if settled is None:
        return None
    num_seqs = math.ceil(settled.num_seqs)
    num = min(_MOST_REQUESTS, max(_LEAST_REQUESTS, 4 * num_seqs))
    clients = None
    if load.concurrency is not None:
        clients = max(1, round(load.concurrency / replicas))
        num = min(_MOST_REQUESTS, max(12, 6 * clients))
    # Other engines fill a step with prompts; ours keeps them short while a client reads along.
    requests = load.share(replicas, num, is_read=candidate.is_ours)
    ended = serve_fleet(
        requests, candidate.simulated_settings(), candidate.times, 1, concurrency=clients
    )
    first = len(ended) // 4 if clients is None else min(clients, len(ended) // 2)
    return latencies_of(ended[first:], slos, candidate.begin_s(replicas))


def _decide(
    candidate: Candidate, replicas: int, load: OfferedLoad, load_flags: LoadFlags, *,
    is_simulated: bool,
) -> CapacityOption:  # fmt: skip
    slos = load_flags.slos()
    latencies = None
    if not is_simulated:
        settled = settled_of(candidate, load, replicas)
        latencies = _by_formula(settled, load) if settled is not None else None
    else:
        latencies = _simulated(candidate, load, replicas, slos)
        if load_flags.replicas == AUTO and slos:
            replicas, latencies = _nearby(candidate, load, replicas, latencies, slos)
    return _choice(candidate, replicas, load, slos, latencies)


def _nearby(
    candidate: Candidate, load: OfferedLoad, replicas: int, latencies: SeenLatencies | None,
    slos: Sequence[Slo],
) -> tuple[int, SeenLatencies | None]:  # fmt: skip
    """Try a replica more or fewer, as the simulation says; return the fewest that do."""
    alone = steady(candidate.latency_model.times, load, candidate.settings, 1e-9)
    hopeless = alone is None or any(
        _by_formula(alone, load).ms[slo.metric]["mean"] > slo.limit_ms for slo in slos
    )
    if latencies is None or hopeless:
        return replicas, latencies
    if latencies.meets(slos):
        while replicas > 1:
            fewer = _simulated(candidate, load, replicas - 1, slos)
            if fewer is None or not fewer.meets(slos):
                break
            replicas, latencies = replicas - 1, fewer
        return replicas, latencies
    first = replicas, latencies
    for _ in range(5):
        more_replicas = math.ceil(1.2 * replicas)
        replicas = more_replicas if more_replicas > replicas else replicas + 1
        latencies = _simulated(candidate, load, replicas, slos)
        if latencies is not None and latencies.meets(slos):
            return replicas, latencies
    return first


def _choice(
    candidate: Candidate, replicas: int, load: OfferedLoad, slos: Sequence[Slo],
    latencies: SeenLatencies | None,
) -> CapacityOption:  # fmt: skip
    latency_model = candidate.latency_model
    settled = {
        f: settled_of(candidate, load, replicas, f)
        for f in (latency_model.low, 1.0, latency_model.high)
    }
    middle = settled[1.0]
    factors = factors_of(latency_model, load, settled)
    worst = {m: high for m, (_, high) in factors.items()}
    rates = _rates(candidate, load, replicas, settled)
    borne = middle is not None and latencies is not None
    meets = borne and latencies is not None and latencies.meets(slos)
    sure = all(high is not None for high in worst.values())
    surely = meets and sure and latencies is not None and latencies.meets(
        slos, {m: high for m, high in worst.items() if high is not None}
    )  # fmt: skip
    price = candidate.price
    knee_per_s = None if load.rate_per_s is None else replicas * candidate.knee()
    return CapacityOption(
        placement=candidate.placement,
        replicas=replicas,
        latency_model=latency_model,
        latencies=latencies if middle is not None else None,
        factors=factors,
        knee_per_s=knee_per_s,
        utilisation=(load.rate_per_s or 0) / knee_per_s if knee_per_s else None,
        rate_per_s=rates[1],
        tokens_per_s=(rates[0] * load.mean_new, rates[1] * load.mean_new, rates[2] * load.mean_new),
        meets_slo=meets,
        surely=surely,
        usd_per_hour=candidate.usd_per_hour(replicas),
        price_note="" if price is None else f"{price.provider}, {price.date or 'no date'}",
        mean_new=load.mean_new,
        server_ms=1e3 * candidate.begin_s(replicas),
        owned=price if isinstance(price, Owned) else None,
        limited_by=_limit(candidate, load, slos, latencies if borne else None, middle),
    )


def factors_of(
    latency_model: LatencyModel, load: OfferedLoad, settled: Mapping[float, Steady | None]
) -> dict[str, tuple[float, float | None]]:
    """Return what each metric is multiplied by at both ends, by formula.

    ``settled`` are where a replica settles at the ends of the clock and in its middle. A first
    token may be as far off as the clock says of them, or further where steps take it there.
    """
    low, middle, high = (settled[factor] for factor in (latency_model.low, 1.0, latency_model.high))
    if middle is None or low is None:
        return dict.fromkeys(METRICS, (1.0, None))
    first_low = min(latency_model.first_low, low.ttft_s / middle.ttft_s)
    tpot_low, answer_s = low.tpot_s / middle.tpot_s, (load.mean_new - 1) * middle.tpot_s
    whole_s = middle.ttft_s + answer_s
    e2el_low = (first_low * middle.ttft_s + tpot_low * answer_s) / whole_s
    if high is None:
        return {"ttft": (first_low, None), "tpot": (tpot_low, None), "e2el": (e2el_low, None)}
    first_high = max(latency_model.first_high, high.ttft_s / middle.ttft_s)
    tpot_high = high.tpot_s / middle.tpot_s
    e2el_high = (first_high * middle.ttft_s + tpot_high * answer_s) / whole_s
    return {
        "ttft": (first_low, first_high),
        "tpot": (tpot_low, tpot_high),
        "e2el": (e2el_low, e2el_high),
    }


def _rates(
    candidate: Candidate, load: OfferedLoad, replicas: int, settled: dict[float, Steady | None]
) -> tuple[float, float, float]:
    """Return requests per second, at the slow end, in the middle and at the fast end."""
    latency_model = candidate.latency_model

    def answered(factor: float) -> float:
        if load.rate_per_s is None:
            state = settled[factor]
            return state.rate_per_s * replicas if state is not None else 0.0
        if settled[factor] is not None:
            return load.rate_per_s
        return min(
            load.rate_per_s, replicas * knee(latency_model.at(factor), load, candidate.settings)
        )

    return answered(latency_model.high), answered(1.0), answered(latency_model.low)


def _limit(
    candidate: Candidate, load: OfferedLoad, slos: Sequence[Slo], latencies: SeenLatencies | None,
    settled: Steady | None,
) -> str:  # fmt: skip
    """Return what gives in first: a bound, the cache, or what steps spend their time with."""
    if latencies is not None and slos and not latencies.meets(slos):
        return max(slos, key=latencies.over).name
    if settled is None:
        return "request rate"
    if settled.num_seqs > 0.9 * most_seqs(candidate.settings, load):
        return (
            "kv cache"
            if most_seqs(candidate.settings, load) < candidate.settings.max_num_seqs
            else ("max_num_seqs")
        )
    if not isinstance(candidate.latency_model.times, DeviceTime):
        return "measured step time"
    parts = {**candidate.latency_model.times.parts(settled.step)}
    parts["bandwidth"] = parts.pop("weights") + parts.pop("cache")
    return max(parts, key=lambda name: parts[name])
