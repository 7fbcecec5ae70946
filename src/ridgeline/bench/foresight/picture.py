"""Predicted against actual as SVG: a dot for each figure of each run, above or below the truth.

To the right is what was measured, upwards by how much more was predicted: figures that differ by
powers of ten, and errors of a few percent, are seen in one picture. The grey band is 10 % to either
side. Plain text out; it measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ridgeline import svg

_WIDTH, _HEIGHT = 900, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 40, 96, 70
_BAND = 10.0  # percent
Pair = tuple[float, float]  # predicted, measured


def foresight_svg(title: str, figures: Mapping[str, Sequence[Pair]], unit: str) -> str:
    """Return the picture.

    Args:
        title: of what.
        figures: by their names, each with a colour: what was predicted and measured of each run.
            What is 0 is left out.
        unit: of all of them.

    Raises ValueError if there is nothing to draw.
    """
    known = {name: [p for p in pairs if min(p) > 0] for name, pairs in figures.items()}
    pairs = [pair for of_name in known.values() for pair in of_name]
    if not pairs:
        raise ValueError("there is nothing to draw: nothing was predicted and measured")
    low = min(measured for _, measured in pairs) / 1.5
    high = max(measured for _, measured in pairs) * 1.5
    most = 1.2 * max(_BAND, *(abs(_error(pair)) for pair in pairs))
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def x(value: float) -> float:
        return _LEFT + math.log(value / low) / math.log(high / low) * (right - _LEFT)

    def y(percent: float) -> float:
        return (_TOP + bottom) / 2 - percent / most * (bottom - _TOP) / 2

    said = f"{_BAND:g} % to either side"
    parts = [
        svg.text(24, 34, title, size=18, weight=600),
        *_legend(list(known)),
        svg.box(_LEFT, y(_BAND), right - _LEFT, y(-_BAND) - y(_BAND), svg.GRID, said),
        svg.line(_LEFT, y(0), right, y(0), svg.FAINT, 1),
    ]
    for tick in svg.log_ticks(low, high):
        parts.append(svg.line(x(tick), _TOP, x(tick), bottom, svg.GRID, 1))
        parts.append(svg.text(x(tick), bottom + 20, f"{tick:,g}", size=svg.SMALL, anchor="middle"))
    for percent in _percents(most):
        parts.append(svg.line(_LEFT - 4, y(percent), _LEFT, y(percent), svg.FAINT, 1))
        label = f"{percent:+,g} %" if percent else "0"
        parts.append(svg.text(_LEFT - 8, y(percent) + 4, label, size=svg.SMALL, anchor="end"))
    label = "predicted, above what was measured"
    parts += [
        svg.text((_LEFT + right) / 2, _HEIGHT - 22, f"measured, {unit}", anchor="middle"),
        svg.text(20, (_TOP + bottom) / 2, label, anchor="middle", turn=-90),
    ]
    for colour, (name, of_name) in zip(svg.COLOURS, known.items(), strict=False):
        for pair in of_name:
            predicted, measured = pair
            said = f"{name}: {predicted:,.4g} predicted, {measured:,.4g} measured"
            dot = svg.circle(x(measured), y(_error(pair)), colour)
            parts.append(f"<g><title>{said}</title>{dot}</g>")
    return svg.picture(_WIDTH, _HEIGHT, parts)


def _error(pair: Pair) -> float:
    """Return by how many percent more was predicted than measured."""
    predicted, measured = pair
    return 100 * (predicted / measured - 1)


def _percents(most: float) -> Iterator[float]:
    """Yield round percentages from ``-most`` to ``most``, about four to each side."""
    step = next(tick for tick in svg.log_ticks(most / 1000, most * 10) if most / tick <= 4.5)
    num = math.floor(most / step)
    yield from (step * i for i in range(-num, num + 1))


def _legend(names: Sequence[str]) -> Iterator[str]:
    at = 30.0
    for colour, name in zip(svg.COLOURS, names, strict=False):
        yield svg.circle(at, 62, colour)
        yield svg.text(at + 12, 67, name)
        at += 44 + 8 * len(name)
