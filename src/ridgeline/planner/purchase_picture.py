"""The picture of a purchase: what a million tokens cost with each, by machine and power.

Pure: text out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ridgeline.planner.capacity.in_words import bought_name
from ridgeline.planner.capacity.option import CapacityOption
from ridgeline.planner.capacity.pareto import pareto_svg
from ridgeline.system import svg

_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 260, 290, 96
_BAR, _STEP, _MOST = 22, 34, 14
_MACHINE, _POWER = svg.COLOURS[0], svg.COLOURS[2]


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
