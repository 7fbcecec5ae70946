"""A plan for a load in words: the one sentence that answers, and each choice in a few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ridgeline.planner.capacity.load import OfferedLoad, Slo
from ridgeline.planner.capacity.option import MOST_BUSY, CapacityOption
from ridgeline.system import svg
from ridgeline.system.report import counted, figure


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
    return f"{name_of(choice)} in {counted(hosts, name)}"


def _nearest(choices: Sequence[CapacityOption], load: OfferedLoad, slos: Sequence[Slo]) -> str:
    options = [choice for choice in choices if choice.latencies is not None]
    if not options:
        best = max(choices, key=lambda choice: choice.knee_per_s or 0.0)
        most_per_s = MOST_BUSY * (best.knee_per_s or 0.0)
        return (
            f"{name_of(best)} {_verb(best)} up to {per_second(most_per_s)}; you ask for "
            f"{figure(load.rate_per_s or 0)}"
        )
    best = min(options, key=lambda c: c.latencies.excess(slos) if c.latencies is not None else 0.0)
    latencies = best.latencies
    bounds = "; ".join(_bound(best, slo) for slo in slos if latencies and latencies.over(slo) > 1)
    verb = "are" if _num_things(best) > 1 else "is"
    return f"nothing here meets it: the nearest {verb} {name_of(best)}{_for(best)}, with {bounds}"


def _verb(choice: CapacityOption) -> str:
    return "hold" if _num_things(choice) > 1 else "holds"


def _num_things(choice: CapacityOption) -> int:
    """Return how many devices are rented or bought, or machines where those are rented whole."""
    return choice.num_devices if choice.num_machines is None else choice.num_machines


def per_second(rate_per_s: float) -> str:
    """Return a rate for people: "1 request/s", "2.5 requests/s"."""
    text = figure(rate_per_s)
    return f"{text} request{'s'[: text != '1']}/s"


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
    """Return "2 x l4", with what divides the model; of machines "1 x p5.48xlarge (8 replicas)"."""
    memory, device = choice.placement.memory, choice.placement.device
    name = f"{_num_things(choice)} x {device.machine or device.id}"
    if choice.placement.num_devices == 1 and (not device.machine or choice.replicas == 1):
        return name
    ways = [f"tp {memory.tp}"] if memory.tp > 1 else []
    ways += [f"pp {memory.pp}"] if memory.pp > 1 else []
    copies = [f"{choice.replicas} replicas"] if choice.replicas > 1 else []
    return f"{name} ({', '.join([*copies, *ways])})"


def _for(choice: CapacityOption) -> str:
    return "" if choice.usd_per_hour is None else f" for {choice.usd_per_hour:,.2f} USD an hour"


_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 260, 290, 96
_BAR, _STEP, _MOST = 22, 34, 14
_MACHINE, _POWER = svg.COLOURS[0], svg.COLOURS[2]
_COLOURS = {"meets the bounds": "#2da44e", "does not": "#c9ced6"}
_NAMED = 12  # of the best choices, besides the frontier


def choices_svg(title: str, answer: str, choices: Sequence[CapacityOption]) -> str:
    """Return the picture of choices: of a purchase its costs, else what devices bear.

    Raises ValueError as these do.
    """
    if any(choice.owned is not None for choice in choices):
        return purchase_svg(title, answer, choices)
    return pareto_svg(title, answer, choices)


def purchase_svg(title: str, answer: str, choices: Sequence[CapacityOption]) -> str:
    """Return a stacked bar for each of the best choices: its price and its power.

    Raises ValueError if none of them answers within the bounds.
    """
    drawn = [choice for choice in choices if choice.usd_per_million_tokens][:_MOST]
    if not drawn:
        raise ValueError("there is nothing to draw: no choice answers within the bounds")
    scale = (_WIDTH - _LEFT - _RIGHT) / max(one.usd_per_million_tokens or 0 for one in drawn)
    colours = {"the machine, in USD for a million tokens": _MACHINE, "its power": _POWER}
    parts = svg.heading(title, colours, answer)
    for i, choice in enumerate(drawn):
        parts += _bar(choice, _TOP + _STEP * i, scale)
    return svg.picture(_WIDTH, _TOP + _STEP * len(drawn) + 24, parts)


def _bar(choice: CapacityOption, y: float, scale: float) -> Iterator[str]:
    million, power = (
        choice.usd_per_million_tokens or 0.0,
        choice.power_usd_per_million_tokens or 0.0,
    )
    bill, speed = choice.bill, choice.per_user
    assert bill is not None
    ink = svg.INK if choice.meets_slo else svg.FAINT
    yield svg.text(_LEFT - 12, y + 16, bought_name(choice), size=svg.SMALL, anchor="end", fill=ink)
    machine = million - power
    yield svg.box(_LEFT, y, machine * scale, _BAR, _MACHINE, f"the machine: {machine:,.2f} USD")
    at = _LEFT + machine * scale
    yield svg.box(at, y, power * scale, _BAR, _POWER, f"power: {power:,.2f} USD")
    each = "" if speed is None else f", {speed:,.0f} tokens/s each"
    said = f"{million:,.2f}; {bill.usd:,.0f} USD, {bill.watts:,.0f} W{each}"
    yield svg.text(at + power * scale + 8, y + 16, said, size=svg.SMALL, fill=ink)


def pareto_svg(title: str, answer: str, choices: Sequence[CapacityOption]) -> str:
    """Return the picture; choices of which no latency is known are left out.

    Raises ValueError if that is all of them.
    """
    dots = [(c.per_user, c.per_device, c) for c in choices if c.per_user and c.per_device]
    if not dots:
        raise ValueError("there is nothing to draw: no choice can serve the load")
    xs, ys = [x for x, _, _ in dots], [y for _, y, _ in dots]
    across = svg.Axis("tokens/s that a user sees", min(xs) / 1.25, max(xs) * 1.4)
    up = svg.Axis("tokens/s that a device bears", min(ys) / 1.25, max(ys) * 1.4)
    chart = svg.Chart(across, up, height=560)
    frontier = sorted((x, y) for x, y, c in dots if c.on_frontier)
    chart.curve(frontier, svg.COLOURS[0])
    for x, y, choice in sorted(dots, key=lambda dot: dot[2].on_frontier):  # its dots lie on top
        cost = "no price" if choice.usd_per_hour is None else f"{choice.usd_per_hour:.2f} USD/h"
        colour = _COLOURS["meets the bounds" if choice.meets_slo else "does not"]
        chart.dot(x, y, colour, f"{name_of(choice)}, {cost}")
    named = {id(c) for c in choices[:_NAMED]}
    for x, y, choice in sorted(dots, key=lambda dot: not dot[2].on_frontier):
        if choice.on_frontier or id(choice) in named:
            ink = svg.INK if choice.on_frontier else svg.FAINT
            chart.name(x, y, name_of(choice), ink, size=svg.SMALL, must=False)
    return chart.picture(title, _COLOURS, note=answer)
