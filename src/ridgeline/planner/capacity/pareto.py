"""The picture of choices: tokens per second of a device against those of a user.

To the right answers come faster, upwards a device does more; the frontier is what no other choice
beats in both. Pure: text out.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.planner.capacity.in_words import name_of
from ridgeline.planner.capacity.option import CapacityOption
from ridgeline.system import svg

_COLOURS = {"meets the bounds": "#2da44e", "does not": "#c9ced6"}
_ROW = 17  # pixels between two names
_NAMED = 8  # of the best choices, besides the frontier


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
