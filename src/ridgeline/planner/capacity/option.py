"""A choice: a model on a number of devices of a kind under a load, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.foresight.explain.compare import METRICS
from ridgeline.foresight.simulator.fleet.request_trip import RequestOutcome
from ridgeline.model.cost.ownership import Bill, Owned
from ridgeline.planner.capacity.latency_model import LatencyModel
from ridgeline.planner.capacity.load import PERCENTILES, Slo
from ridgeline.planner.capacity.spot import Spot
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


def seen_of(
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
        clock: the model of time.
        seen: latencies; None above 85 % of the knee.
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
    seen: SeenLatencies | None
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
    def goodput_per_s(self) -> float:
        """Requests per second within every bound."""
        return self.rate_per_s * self.seen.good_share if self.seen is not None else 0.0

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
        if self.seen is None or not self.seen.ms["tpot"]["mean"]:
            return None
        return 1e3 / self.seen.ms["tpot"]["mean"]

    def interval_ms(self, metric: str, percentile: str) -> tuple[float, float, float | None] | None:
        """Return low, middle and high of a latency; None where none is given."""
        if self.seen is None:
            return None
        middle, (low, high) = self.seen.ms[metric][percentile], self.factors[metric]
        return middle * low, middle, None if high is None else middle * high

    @property
    def first_parts_ms(self) -> dict[str, float] | None:
        """A first token's mean time in two parts: the engine's and the server's; None without one.

        Published figures of engines are of the first part alone.
        """
        if self.seen is None:
            return None
        engine_ms = max(0.0, self.seen.ms["ttft"]["mean"] - self.server_ms)
        return {"engine": engine_ms, "server": self.server_ms}

    def as_dict(self) -> dict[str, Any]:
        """Return an element of the document's "choices"."""
        setting = self.placement.setting
        return {
            "device": self.placement.device.id,
            "replicas": self.replicas,
            "tp": setting.tp,
            "pp": setting.pp,
            "num_devices": self.num_devices,
            "dtype": self.placement.storage.name,
            "engine": setting.engine.name,
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
            "simulated": self.seen is not None and self.seen.is_simulated,
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
        if self.seen is None:
            return None
        columns: dict[str, float | None] = {}
        for name in self.seen.ms[metric]:
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
