"""Pictures of choices: tokens per second, or of a purchase what a million tokens cost. Text out.

The first shows tokens per second of a device against those of a user. To the right answers come
faster, upwards a device does more; the frontier is what no other choice beats in both. The second
shows the cost of each choice by machine and power.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ridgeline.planner.capacity.option import CapacityOption
from ridgeline.planner.capacity.prose import bought_name, name_of
from ridgeline.system import svg

_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 260, 290, 96
_BAR, _STEP, _MOST = 22, 34, 14
_MACHINE, _POWER = svg.COLOURS[0], svg.COLOURS[2]
_COLOURS = {"meets the bounds": "#2da44e", "does not": "#c9ced6"}
_ROW = 17  # pixels between two names
_NAMED = 8  # of the best choices, besides the frontier


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
    parts = [
        svg.text(24, 34, title, size=18, weight=600),
        svg.text(24, 58, svg.short(answer), size=svg.SMALL, fill=svg.FAINT),
        svg.box(24, 72, 12, 12, _MACHINE, "machine"),
        svg.text(42, 83, "the machine, in USD for a million tokens", size=svg.SMALL),
        svg.box(300, 72, 12, 12, _POWER, "power"),
        svg.text(318, 83, "its power", size=svg.SMALL),
    ]
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
    placed: list[tuple[float, float]] = []
    named = {id(c) for c in choices[:_NAMED]}
    for x, y, choice in sorted(dots, key=lambda dot: not dot[2].on_frontier):
        if choice.on_frontier or id(choice) in named:
            _name(chart, x, y, choice, placed)
    for x, y, choice in sorted(dots, key=lambda dot: dot[2].on_frontier):  # its dots lie on top
        cost = "no price" if choice.usd_per_hour is None else f"{choice.usd_per_hour:.2f} USD/h"
        colour = _COLOURS["meets the bounds" if choice.meets_slo else "does not"]
        chart.dot(x, y, colour, f"{name_of(choice)}, {cost}")
    return chart.picture(title, _COLOURS, note=svg.short(answer))


def _name(
    chart: svg.Chart, x: float, y: float, choice: CapacityOption, placed: list[tuple[float, float]]
) -> None:
    """Write a name beside its dot, unless it would cover another name."""
    name, left, base = name_of(choice), chart.x(x), chart.y(y)
    is_left = left + 12 + svg.CHARACTER * len(name) > svg.WIDTH
    begin = left - 12 - svg.CHARACTER * len(name) if is_left else left + 12
    if any(abs(base - v) < _ROW and abs(begin - u) < 170 for u, v in placed):
        return
    placed.append((begin, base))
    colour = svg.INK if choice.on_frontier else svg.FAINT
    anchor, at = ("end", left - 10) if is_left else ("start", left + 10)
    chart.parts.append(svg.text(at, base + 4, name, size=svg.SMALL, fill=colour, anchor=anchor))
