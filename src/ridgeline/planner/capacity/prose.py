"""A plan for a load in words: the one sentence that answers, and each choice in a few."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.planner.capacity.load import OfferedLoad, Slo
from ridgeline.planner.capacity.option import MOST_BUSY, CapacityOption


def verdict(choices: Sequence[CapacityOption], load: OfferedLoad, slos: Sequence[Slo]) -> str:
    """Return what holds the load, at what cost; else the nearest that can, and by how much."""
    if not choices:
        return "nothing holds it: the model fits on none of these devices, or costs too much"
    best = choices[0]
    if best.meets_slo and best.bill is not None:
        return _to_buy(best)
    if best.meets_slo:
        busy = "" if best.utilisation is None else f"{best.utilisation:.0%} busy"
        parts = [
            part
            for part in (busy, _speed(best, load), *(_bound(best, slo) for slo in slos))
            if part
        ]
        details = f" ({'; '.join(parts)})" if parts else ""
        sure = ""
        if not best.surely:
            certain = next((c for c in choices if c.surely), None)
            sure = "; times may be off by more than it has to spare"
            if certain is not None:
                sure += f": {name_of(certain)}{_for(certain)} would hold it at their slow end too"
        return f"{name_of(best)} {_verb(best)} it{_for(best)}{details}{_first(best)}{sure}"
    return _nearest(choices, load, slos)


def _speed(choice: CapacityOption, load: OfferedLoad) -> str:
    """Return what a closed loop gives; in an open one what comes is answered."""
    low, middle, high = choice.tokens_per_s
    return "" if load.concurrency is None else f"{_span(low, middle, high)} tokens/s"


def _first(choice: CapacityOption) -> str:
    """Return where a first token's time goes, if a server takes any of it."""
    parts = choice.first_parts_ms
    if parts is None or not parts["server"]:
        return ""
    engine, server = parts["engine"], parts["server"]
    return f"; a first token takes the engine {engine:,.0f} ms, the server {server:,.0f}"


def _to_buy(best: CapacityOption) -> str:
    """Return what to buy, for how much, and what it will do."""
    bill, all_usd = best.bill, best.usd_per_million_tokens
    assert bill is not None
    speed = best.interval_ms("tpot", "mean")
    each = ""
    if speed is not None and speed[1]:
        low = "?" if speed[2] is None else f"{1e3 / speed[2]:,.0f}"
        each = f"; each user sees {1e3 / speed[1]:,.0f} ({low}-{1e3 / speed[0]:,.0f}) tokens/s"
    million = ""
    if all_usd is not None and best.power_usd_per_million_tokens is not None:
        million = (
            f"; a million tokens cost {all_usd:,.2f} USD, of which power "
            f"{best.power_usd_per_million_tokens:,.2f}"
        )
    sure = "" if best.surely else "; times may be off by more than it has to spare"
    return (
        f"buy {bought_name(best)} for {bill.usd:,.0f} USD, at most {bill.watts:,.0f} W{each}"
        f"{million}{sure}"
    )


def bought_name(choice: CapacityOption) -> str:
    """Return "2 x rtx3090 in 1 PC"; without a host what is a machine of its own."""
    if choice.bill is None or choice.owned is None or not choice.owned.host.name:
        return name_of(choice)
    hosts, name = choice.bill.hosts, choice.owned.host.name
    return f"{name_of(choice)} in {hosts} {name}{'s'[: hosts != 1]}"


def _nearest(choices: Sequence[CapacityOption], load: OfferedLoad, slos: Sequence[Slo]) -> str:
    seen = [choice for choice in choices if choice.seen is not None]
    if not seen:
        best = max(choices, key=lambda choice: choice.knee_per_s or 0.0)
        most_per_s = MOST_BUSY * (best.knee_per_s or 0.0)
        return (
            f"{name_of(best)} {_verb(best)} up to {per_second(most_per_s)}; you ask for "
            f"{_number(load.rate_per_s or 0)}"
        )
    best = min(seen, key=lambda c: c.seen.excess(slos) if c.seen is not None else 0.0)
    bounds = "; ".join(_bound(best, slo) for slo in slos if best.seen and best.seen.over(slo) > 1)
    verb = "are" if best.num_devices > 1 else "is"
    return f"nothing here meets it: the nearest {verb} {name_of(best)}{_for(best)}, with {bounds}"


def _verb(choice: CapacityOption) -> str:
    return "hold" if choice.num_devices > 1 else "holds"


def per_second(rate_per_s: float) -> str:
    """Return a rate for people: "1 request/s", "2.5 requests/s"."""
    text = _number(rate_per_s)
    return f"{text} request{'s'[: text != '1']}/s"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _bound(choice: CapacityOption, slo: Slo) -> str:
    interval = choice.interval_ms(slo.metric, slo.percentile)
    if interval is None:
        return ""
    return f"{slo.name} {_span(*interval)} ms of {slo.limit_ms:,g}"


def _span(low: float, middle: float, high: float | None) -> str:
    top = "?" if high is None else f"{high:,.0f}"
    return f"{middle:,.0f} ({low:,.0f}-{top})"


def span_ms(choice: CapacityOption, metric: str, percentile: str) -> str:
    """Return a latency with its interval, for a table; a dash where none is given."""
    interval = choice.interval_ms(metric, percentile)
    return "-" if interval is None else _span(*interval)


def name_of(choice: CapacityOption) -> str:
    """Return "2 x l4", with what divides the model."""
    setting, count = choice.placement.setting, choice.num_devices
    name = f"{count} x {choice.placement.device.id}"
    if choice.placement.num_devices == 1:
        return name
    ways = [f"tp {setting.tp}"] if setting.tp > 1 else []
    ways += [f"pp {setting.pp}"] if setting.pp > 1 else []
    copies = [f"{choice.replicas} replicas"] if choice.replicas > 1 else []
    return f"{name} ({', '.join([*copies, *ways])})"


def _for(choice: CapacityOption) -> str:
    return "" if choice.usd_per_hour is None else f" for {choice.usd_per_hour:,.2f} USD an hour"
