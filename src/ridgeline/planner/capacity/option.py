"""A choice: a model on a number of devices of a kind under a load, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.core.records import EngineRecord
from ridgeline.core.scheduling.policies import SplitFuse
from ridgeline.foresight.explain import METRICS
from ridgeline.foresight.simulator.fleet import Evict, RequestOutcome, least_work, serve_fleet
from ridgeline.foresight.simulator.run import SimRequest, TimeModel
from ridgeline.model.cost.costs import Features
from ridgeline.model.cost.hardware import Price
from ridgeline.model.cost.ownership import Bill, Owned
from ridgeline.planner.capacity.latency_model import LatencyModel, knee, queue_s
from ridgeline.planner.capacity.load import PERCENTILES, LoadFlags, OfferedLoad, Slo
from ridgeline.planner.catalogue import prices_of, provider_of, spot_terms
from ridgeline.planner.memory.placement import Placement

MOST_BUSY = 0.85  # of the knee: above it a time to the first token means nothing


@dataclass(frozen=True, eq=False, slots=True)
class SeenLatencies:
    """What requests saw: of each metric the mean and percentiles in ms, and how many did well.

    Attributes:
        ms: metric -> percentile or "mean" -> milliseconds.
        good_share: of the requests, those within every bound.
        is_simulated: or a formula's means stand for all percentiles.
    """

    ms: Mapping[str, Mapping[str, float]]
    good_share: float
    is_simulated: bool

    def meets(self, slos: Sequence[Slo], factors: Mapping[str, float] | None = None) -> bool:
        """Whether all bounds hold, also with each metric multiplied."""
        return self.excess(slos, factors) <= 1

    def excess(self, slos: Sequence[Slo], factors: Mapping[str, float] | None = None) -> float:
        """Return the worst of latency over bound; 0 without bounds."""
        return max((self.over(slo, factors) for slo in slos), default=0.0)

    def over(self, slo: Slo, factors: Mapping[str, float] | None = None) -> float:
        """Return latency over bound."""
        factor = (factors or {}).get(slo.metric, 1.0)
        return factor * self.ms[slo.metric][slo.percentile] / slo.limit_ms


def latencies_of(
    ended: Sequence[RequestOutcome], slos: Sequence[Slo], begin_s: float = 0.0
) -> SeenLatencies:
    """Return what the requests of a simulation saw, if each begins `begin_s` later."""
    rows = [_latencies_ms(one, begin_s) for one in ended]
    good = sum(
        all(row.get(slo.metric, 0.0) <= slo.limit_ms for slo in slos) and not one.is_lost
        for row, one in zip(rows, ended, strict=True)
    )
    ms = {m: _summary([row[m] for row in rows if m in row]) for m in METRICS}
    return SeenLatencies(ms, good / len(ended), is_simulated=True)


def _latencies_ms(ended: RequestOutcome, begin_s: float) -> dict[str, float]:
    if ended.first_token_s is None or ended.is_lost:
        return {}
    latencies_ms = {
        "ttft": 1e3 * (begin_s + ended.first_token_s - ended.arrival_s),
        "e2el": 1e3 * (begin_s + ended.finish_s - ended.arrival_s),
    }
    if ended.num_new > 1:
        latencies_ms["tpot"] = 1e3 * (ended.finish_s - ended.first_token_s) / (ended.num_new - 1)
    return latencies_ms


def _summary(values: Iterable[float]) -> dict[str, float]:
    """Return mean and percentiles, by nearest rank; zeros of nothing."""
    ordered = sorted(values) or [0.0]
    ranks = {name: math.ceil(share * len(ordered)) - 1 for name, share in PERCENTILES.items()}
    return {"mean": sum(ordered) / len(ordered)} | {n: ordered[i] for n, i in ranks.items()}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class CapacityOption:
    """A number of replicas on devices of a kind.

    Attributes:
        placement: one replica: the device, and how the model is divided.
        replicas: how many.
        latency_model: the model of time.
        latencies: of its requests; None above 85 % of the knee.
        server_ms: the part of a first token's time that is not the engine's steps, in the mean:
            what the server takes for a request, and what it waits for others' prompts.
        factors: metric -> (low, high): what its 90 % interval multiplies it by; high is None where
            the load could be more than the replicas bear.
        knee_per_s: the most requests per second that all replicas bear; None in a closed loop.
        utilisation: the load's part of it; None in a closed loop.
        rate_per_s: requests per second that are answered.
        tokens_per_s: of answers, over all replicas; low, middle, high.
        meets_slo: whether every bound holds, and it bears the load.
        surely: whether it does so at the slow end of the interval too.
        usd_per_hour: of all devices, at the cheapest price that may be used; None without one.
        price_note: whose price.
        mean_new: tokens of an answer.
        limited_by: what gives in first.
        owned: where it is bought: what one device costs.
        spot: on machines that can be taken away.
        on_frontier: no other has both more tokens per device and more per user.
    """

    placement: Placement
    replicas: int
    latency_model: LatencyModel
    latencies: SeenLatencies | None
    factors: Mapping[str, tuple[float, float | None]]
    knee_per_s: float | None
    utilisation: float | None
    rate_per_s: float
    tokens_per_s: tuple[float, float, float]
    meets_slo: bool
    surely: bool
    usd_per_hour: float | None
    price_note: str
    mean_new: float
    limited_by: str
    server_ms: float = 0.0
    owned: Owned | None = None
    spot: Spot | None = None
    on_frontier: bool = False

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.replicas * self.placement.num_devices

    @property
    def num_machines(self) -> int | None:
        """Machines of a cloud that are rented whole; None where devices are rented."""
        placement = self.placement
        if not placement.device.machine:
            return None
        return placement.device.num_wholes(self.num_devices, placement.num_devices)

    @property
    def goodput_per_s(self) -> float:
        """Requests per second within every bound."""
        return self.rate_per_s * self.latencies.good_share if self.latencies is not None else 0.0

    @property
    def usd_per_million_tokens(self) -> float | None:
        """What a million tokens of good answers cost; None without a price or a good answer."""
        return None if self.usd_per_hour is None else self._per_million(self.usd_per_hour)

    @property
    def bill(self) -> Bill | None:
        """What all devices cost to own; None where they are rented."""
        return None if self.owned is None else self.owned.bill(self.num_devices)

    @property
    def power_usd_per_million_tokens(self) -> float | None:
        """The part of power in what a million tokens cost; None as that, or of rented devices."""
        return None if self.bill is None else self._per_million(self.bill.power_usd_per_hour)

    def _per_million(self, usd_per_hour: float) -> float | None:
        tokens = self.goodput_per_s * self.mean_new * 3600
        return usd_per_hour / tokens * 1e6 if tokens else None

    @property
    def per_device(self) -> float:
        """Tokens of answers per second that a device bears; in a closed loop, that it gives."""
        if self.knee_per_s is None:
            return self.tokens_per_s[1] / self.num_devices
        return MOST_BUSY * self.knee_per_s * self.mean_new / self.num_devices

    @property
    def per_user(self) -> float | None:
        """Tokens per second that one user sees; None where no latency is given."""
        if self.latencies is None or not self.latencies.ms["tpot"]["mean"]:
            return None
        return 1e3 / self.latencies.ms["tpot"]["mean"]

    def interval_ms(self, metric: str, percentile: str) -> tuple[float, float, float | None] | None:
        """Return low, middle and high of a latency; None where none is given."""
        if self.latencies is None:
            return None
        middle, (low, high) = self.latencies.ms[metric][percentile], self.factors[metric]
        return middle * low, middle, None if high is None else middle * high

    @property
    def first_parts_ms(self) -> dict[str, float] | None:
        """A first token's mean time in two parts: the engine's and the server's; None without one.

        Published figures of engines are of the first part alone.
        """
        if self.latencies is None:
            return None
        engine_ms = max(0.0, self.latencies.ms["ttft"]["mean"] - self.server_ms)
        return {"engine": engine_ms, "server": self.server_ms}

    def as_dict(self) -> dict[str, Any]:
        """Return an element of the document's "choices"."""
        memory = self.placement.memory
        return {
            "device": self.placement.device.id,
            "replicas": self.replicas,
            "tp": memory.tp,
            "pp": memory.pp,
            "num_devices": self.num_devices,
            "dtype": self.placement.storage.name,
            "engine": memory.engine.name,
            "meets_slo": self.meets_slo,
            "surely_meets_slo": self.surely,
            "goodput_per_s": self.goodput_per_s,
            "ttft_ms": self._latency("ttft"),
            "ttft_parts_ms": self.first_parts_ms,
            "tpot_ms": self._latency("tpot"),
            "e2el_ms": self._latency("e2el"),
            "output_tokens_per_s": self.tokens_per_s[1],
            "tokens_per_s_per_device": self.per_device,
            "tokens_per_s_per_user": self.per_user,
            "utilisation": self.utilisation,
            "holds_up_to_per_s": None if self.knee_per_s is None else MOST_BUSY * self.knee_per_s,
            "usd_per_hour": self.usd_per_hour,
            "usd_per_million_output_tokens": self.usd_per_million_tokens,
            "price": self.price_note or None,
            "purchase": self._purchase(),
            "spot": None if self.spot is None else self.spot.as_dict(),
            "on_frontier": self.on_frontier,
            "limited_by": self.limited_by,
            "source": self.latency_model.source,
            "simulated": self.latencies is not None and self.latencies.is_simulated,
            "num_machines": self.num_machines,
        }

    def _purchase(self) -> dict[str, Any] | None:
        if self.bill is None or self.owned is None:
            return None
        return {
            "usd": self.bill.usd,
            "hosts": self.bill.hosts,
            "host": self.owned.host.name or None,
            "watts": self.bill.watts,
            "usd_of_power_per_million_output_tokens": self.power_usd_per_million_tokens,
            "confidence": self.owned.offer.confidence,
        }

    def _latency(self, metric: str) -> dict[str, float | None] | None:
        if self.latencies is None:
            return None
        columns: dict[str, float | None] = {}
        for name in self.latencies.ms[metric]:
            interval = self.interval_ms(metric, name)
            assert interval is not None
            columns |= {f"{name}_low": interval[0], name: interval[1], f"{name}_high": interval[2]}
        return columns

    def time(self) -> dict[str, Any]:
        """Return the document's "time": means of this choice, each with its interval."""
        document: dict[str, Any] = {}
        for metric in ("ttft", "tpot"):
            interval = self.interval_ms(metric, "mean")
            low, middle, high = interval if interval is not None else (None, None, None)
            document |= {f"{metric}_ms": middle, f"{metric}_ms_low": low, f"{metric}_ms_high": high}
        low, middle, high = self.tokens_per_s
        name = "output_tokens_per_s"
        document |= {name: middle, f"{name}_low": low, f"{name}_high": high}
        document["ttft_parts_ms"] = self.first_parts_ms
        return document | {"source": self.latency_model.source, "utilisation": self.utilisation}


def with_frontier(choices: Sequence[CapacityOption]) -> set[int]:
    """Return the indices of choices that no other beats per device and per user (Pareto, 1906)."""
    dots = [(c.per_device, c.per_user) for c in choices]
    return {
        i
        for i, (device, user) in enumerate(dots)
        if user is not None
        and not any(
            u is not None and d >= device and u >= user and (d, u) != (device, user)
            for d, u in dots
        )
    }


CancelCheck = Callable[[], None]
_MOST_TOKENS = 1 << 40
_MOST = 1 << 13  # tokens; more are in no step
_KNEES = 2  # docs/adr/0054-pieces-that-suit-the-device.md


class _Watched:
    """A model of time that asks at each step whether its answer is still wanted."""

    def __init__(self, times: TimeModel, check_cancel: CancelCheck) -> None:
        self._times, self._check_cancel = times, check_cancel
        self.windows = times.windows
        self.after = times.after

    def seconds(self, features: Features) -> float:
        """Return the seconds of a step, unless the answer is not wanted any more."""
        self._check_cancel()
        return self._times.seconds(features)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A division on a device, with its model of time."""

    placement: Placement
    latency_model: LatencyModel
    price: Price | Owned | None
    load: OfferedLoad
    check_cancel: CancelCheck
    knees: dict[float, float] = field(default_factory=dict)

    def knee(self, factor: float = 1.0) -> float:
        """Return the most requests per second that a replica bears, if all takes so much longer."""
        if factor not in self.knees:
            self.knees[factor] = knee(self.latency_model.at(factor), self.load, self.settings)
        return self.knees[factor]

    def begin_s(self, replicas: int, factor: float = 1.0) -> float:
        """Return what a first token takes besides its steps that take `factor` longer.

        Clients of a closed loop begin at once.
        """
        latency_model, clients = self.latency_model, self.load.concurrency
        if clients is None or not latency_model.queue_share:
            return latency_model.request_s
        queued_s = queue_s(latency_model.at(factor), self.load, self.settings, clients / replicas)
        return latency_model.request_s + latency_model.queue_share * queued_s

    def usd_per_hour(self, replicas: int) -> float | None:
        """Return what this number of replicas costs to rent or to own; None without a price."""
        ranks, device = self.placement.num_devices, self.placement.device
        return None if self.price is None else self.price.of(replicas * ranks, device, ranks)

    @property
    def times(self) -> TimeModel:
        """Its model of time, as simulations use it."""
        return _Watched(self.latency_model.times, self.check_cancel)

    @property
    def is_ours(self) -> bool:
        """Whether this engine's own rules hold."""
        return self.placement.memory.engine.name == "ridgeline"

    @cached_property
    def settings(self) -> EngineRecord:
        """How its engine is set up."""
        return engine_record(self.placement, self.latency_model.times)

    def simulated_settings(self) -> EngineRecord:
        """Return the same with no more blocks than the load can hold."""
        longest = sorted(sum(lengths) for lengths in self.load.lengths)
        return with_blocks_for(self.settings, longest[-self.settings.max_num_seqs :])


def engine_record(placement: Placement, times: TimeModel) -> EngineRecord:
    """Return how the engine of a placement is set up by itself, with all blocks it has room for."""
    engine, device = placement.memory.engine, placement.device
    tokens = int(placement.ledger.max_concurrency_exact * placement.memory.context)
    return EngineRecord(
        policy="splitfuse",
        block_size=engine.block_size,
        num_blocks=min(tokens, _MOST_TOKENS) // engine.block_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=_MOST_TOKENS,
        enable_prefix_caching=False,
        seed=0,
        eos_ids=(),
        looks_ahead=engine.looks_ahead,
        # Our own for processors, else what suits the device.
        least_prompt_tokens=SplitFuse.min_chunk
        if device.kind == "cpu"
        else least_prompt_tokens(times.seconds),
    )


def with_blocks_for(settings: EngineRecord, seq_lens: Iterable[int]) -> EngineRecord:
    """Return the same settings with no more blocks than a simulation needs.

    ``seq_lens`` are the tokens of all sequences that can lie in the cache at once. A small model
    has room for thousands of times as many, which would take gigabytes here.
    """
    most_blocks = sum(num_tokens // settings.block_size + 2 for num_tokens in seq_lens)
    return replace(settings, num_blocks=min(settings.num_blocks, most_blocks))


def least_prompt_tokens(seconds: Callable[[Features], float]) -> int:
    """Return for how many tokens arithmetic takes twice as long as a step without prompts.

    ``seconds`` is a model of time. At most 8,192.
    """
    step_s, many_s, more_s = (seconds(_step(num)) for num in (1, _MOST, 2 * _MOST))
    token_s = (more_s - many_s) / _MOST
    return max(1, min(_MOST, round(_KNEES * step_s / token_s))) if token_s > 0 else _MOST


def _step(num_tokens: int) -> Features:
    return Features(num_tokens, num_seqs=1, num_rows=1, num_positions=0, num_pairs=0)


def with_spot(
    choice: CapacityOption,
    load: OfferedLoad,
    load_flags: LoadFlags,
    today: date,
    is_near: bool,
    check_cancel: CancelCheck,
) -> CapacityOption:
    """Return the choice with what spot machines would do; as it is where it misses a bound.

    Args:
        choice: on demand.
        load: what comes.
        load_flags: the flags: how often machines go, with what notice, at what price.
        today: old prices warn.
        is_near: simulate an eviction too, where requests come at a rate.
        check_cancel: called at every simulated step.

    Raises:
        ValueError: machines are taken away sooner than they start.
    """
    if not choice.meets_slo:
        return choice
    placement = choice.placement
    own = Path(load_flags.prices) if load_flags.prices is not None else None
    prices, _ = prices_of(placement.device, "spot", today, own)
    provider = prices[0].provider if prices else provider_of(placement.device)
    terms = spot_terms(provider, placement.device)
    per_hour = load_flags.evictions_per_hour or terms.evictions_per_hour or EVICTIONS_PER_HOUR
    notice_s = terms.notice_s if load_flags.notice is None else load_flags.notice
    notice_s = NOTICE_S if notice_s is None else notice_s
    start_s = start_seconds(placement.ledger.weights_bytes * placement.memory.pp)
    # A replica goes when any of its devices does; those of a machine go with it, as do the others.
    ranks, together, num_taken = placement.num_devices, 1, placement.num_devices
    if placement.device.machine:
        num_taken = placement.device.num_wholes(ranks, ranks)
        together = max(1, placement.device.per_card // ranks)
    up = up_share(per_hour * num_taken, 0.0, start_s)
    needed = math.ceil(choice.replicas / together)
    num_units = replicas_for(needed, up)
    num = choice.replicas + (num_units - needed) * together
    loss = EvictionLoss()
    if is_near and load.rate_per_s is not None:
        often = per_hour * num_taken
        loss = _simulated(choice, load, load_flags, num, often, notice_s, start_s, check_cancel)
    return replace(
        choice,
        spot=Spot(
            replicas=num,
            needed=choice.replicas,
            availability=availability(needed, num_units, up),
            provider=provider,
            usd_per_hour=prices[0].of(num * ranks, placement.device, ranks) if prices else None,
            usd_per_hour_on_demand=choice.usd_per_hour,
            evictions_per_hour=per_hour,
            notice_s=notice_s,
            start_s=start_s,
            **loss._asdict(),
        ),
    )


def _simulated(
    choice: CapacityOption, load: OfferedLoad, load_flags: LoadFlags, num: int, per_hour: float,
    notice_s: float, start_s: float, check_cancel: CancelCheck,
) -> EvictionLoss:  # fmt: skip
    """Return what one eviction spoils, of ``num`` replicas that each go ``per_hour`` times."""
    candidate = Candidate(choice.placement, choice.latency_model, None, load, check_cancel)
    some = min(num, 4)  # whether others are beside those does not change what one loses
    part = load.share(1, 120 * some, is_read=candidate.is_ours)
    scale = num / some
    part = [replace(one, arrival_s=(one.arrival_s or 0.0) * scale) for one in part]
    args = (part, candidate.simulated_settings(), candidate.times, some)
    drained = eviction(*args, notice_s, start_s, drain=True)
    cut = eviction(*args, 0.0, start_s, drain=False)  # without heeding the notice
    shares = [
        latencies_of(ended, load_flags.slos(), candidate.begin_s(1)).good_share
        for ended in (serve_fleet(*args, router=least_work()), drained.ended)
    ]
    all_per_hour = per_hour * num
    rate_per_s = load.rate_per_s or 0.0
    return EvictionLoss(
        tokens_again=drained.tokens_again,
        share_again=share_again(rate_per_s, drained, all_per_hour),
        tokens_lost=cut.tokens_lost,
        requests_lost=cut.requests_lost,
        goodput_per_s=goodput_per_s(rate_per_s, shares[0], drained, shares[1], all_per_hour),
    )


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
    last_s = max(request.arrival_s or 0.0 for request in load)
    going = Evict(
        at_s=max(0.0, last_s / 2 - notice_s),
        replica=0,
        notice_s=min(notice_s, last_s / 2),
        drain=drain,
        back_s=last_s / 2 + start_s,
    )
    ended = serve_fleet(load, settings, times, num, router=least_work(), faults=[going])
    return Eviction(ended, min(1.0, last_s / 2 / start_s))
