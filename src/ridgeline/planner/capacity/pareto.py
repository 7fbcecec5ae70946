"""The picture of choices: tokens per second of a device against those of a user.

To the right answers come faster, upwards a device does more; the frontier is what no other choice
beats in both. Pure: text out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ridgeline import svg
from ridgeline.planner.capacity.in_words import name_of
from ridgeline.planner.capacity.option import Choice

_WIDTH, _HEIGHT = 900, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 40, 92, 64
_GOOD, _BAD = "#2da44e", "#c9ced6"
_ROW = 17  # pixels between two names
_NAMED = 8  # of the best choices, besides the frontier


def pareto_svg(title: str, answer: str, choices: Sequence[Choice]) -> str:
    """Return the picture; choices of which no latency is known are left out.

    Raises ValueError if that is all of them.
    """
    dots = [(c.per_user, c.per_device, c) for c in choices if c.per_user and c.per_device]
    if not dots:
        raise ValueError("there is nothing to draw: no choice bears the load")
    across = _Axis([x for x, _, _ in dots], _LEFT, _WIDTH - _RIGHT)
    up = _Axis([y for _, y, _ in dots], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        svg.text(24, 34, title, size=18, weight=600),
        svg.text(24, 58, svg.short(answer), size=svg.SMALL, fill=svg.FAINT),
        *_grid(across, up),
    ]
    frontier = sorted((across(x), up(y)) for x, y, c in dots if c.on_frontier)
    parts += [
        svg.line(*before, *behind, svg.COLOURS[0], 2) for before, behind in pairwise(frontier)
    ]
    placed: list[tuple[float, float]] = []
    named = {id(c) for c in choices[:_NAMED]}
    # The frontier's names come first, and its dots lie on top.
    names: list[str] = []
    for x, y, choice in sorted(dots, key=lambda dot: not dot[2].on_frontier):
        if choice.on_frontier or id(choice) in named:
            names += _name(across(x), up(y), choice, placed)
    for x, y, choice in sorted(dots, key=lambda dot: dot[2].on_frontier):
        parts += _dot(across(x), up(y), choice)
    parts += names
    parts += [
        svg.circle(_WIDTH - 330, 78, _GOOD), svg.text(_WIDTH - 318, 83, "meets the bounds"),
        svg.circle(_WIDTH - 180, 78, _BAD), svg.text(_WIDTH - 168, 83, "does not"),
    ]  # fmt: skip
    return svg.picture(_WIDTH, _HEIGHT, parts)


class _Axis:
    """A logarithmic scale from values to pixels, a little wider than the values."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        self.low, self.high = min(values) / 1.25, max(values) * 1.4
        self._begin, self._length = begin, end - begin

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self._begin + share * self._length


def _grid(across: _Axis, up: _Axis) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in svg.log_ticks(across.low, across.high):
        x = across(tick)
        yield svg.line(x, _TOP, x, bottom, svg.GRID, 1)
        yield svg.text(x, bottom + 20, f"{tick:,g}", size=svg.SMALL, anchor="middle")
    for tick in svg.log_ticks(up.low, up.high):
        y = up(tick)
        yield svg.line(_LEFT, y, right, y, svg.GRID, 1)
        yield svg.text(_LEFT - 8, y + 4, f"{tick:,g}", size=svg.SMALL, anchor="end")
    middle = (_LEFT + right) / 2
    yield svg.text(middle, _HEIGHT - 16, "tokens/s that a user sees", anchor="middle")
    label = "tokens/s that a device bears"
    yield svg.text(24, (_TOP + bottom) / 2, label, anchor="middle", turn=-90)


def _dot(x: float, y: float, choice: Choice) -> Iterator[str]:
    """Draw a dot; its name is shown where a pointer rests on it."""
    cost = "no price" if choice.usd_per_hour is None else f"{choice.usd_per_hour:.2f} USD/h"
    yield f"<g><title>{name_of(choice)}, {cost}</title>"
    yield svg.circle(x, y, _GOOD if choice.meets_slo else _BAD)
    yield "</g>"


def _name(x: float, y: float, choice: Choice, placed: list[tuple[float, float]]) -> Iterator[str]:
    """Write a name beside its dot, unless it would cover another name."""
    name = name_of(choice)
    width = 7.0 * len(name)
    is_left = x + 12 + width > _WIDTH
    begin = x - 12 - width if is_left else x + 12
    if any(abs(y - v) < _ROW and abs(begin - u) < 170 for u, v in placed):
        return
    placed.append((begin, y))
    colour = svg.INK if choice.on_frontier else svg.FAINT
    anchor, at = ("end", x - 10) if is_left else ("start", x + 10)
    yield svg.text(at, y + 4, name, size=svg.SMALL, fill=colour, anchor=anchor)
