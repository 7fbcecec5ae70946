"""A roofline plot as SVG: how fast work goes, against how much it computes per byte it reads.

Below the sloping line memory is the limit, below a level line arithmetic is (Williams et al.,
2009). Plain text out; it measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline import svg

_WIDTH, _HEIGHT = 900, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 128, 92, 70


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """One kind of work; ``series`` chooses its colour."""

    label: str
    series: str
    ops_per_byte: float
    ops_per_s: float


class _Axes:
    """From numbers to pixels, both axes logarithmic, with room for everything that is drawn."""

    def __init__(
        self, dots: Sequence[RooflinePoint], read_bytes_per_s: float, peaks: Sequence[float]
    ) -> None:
        ridges = [peak / read_bytes_per_s for peak in peaks]
        xs = [*(dot.ops_per_byte for dot in dots), min(ridges) / 3, max(ridges) * 8]
        ys = [*(dot.ops_per_s for dot in dots), *peaks]
        self.x_low, self.x_high = min(xs) / 2, max(xs) * 2
        self.y_low, self.y_high = min(ys) / 2.5, max(ys) * 1.8

    def x(self, value: float) -> float:
        """Pixels from the left."""
        part = math.log(value / self.x_low) / math.log(self.x_high / self.x_low)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        part = math.log(value / self.y_low) / math.log(self.y_high / self.y_low)
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)


def roofline_svg(
    title: str, dots: Sequence[RooflinePoint], read_bytes_per_s: float, peaks: Mapping[str, float]
) -> str:
    """Return the picture.

    Args:
        title: what was measured.
        dots: the work; each series has a colour, in order of appearance.
        read_bytes_per_s: the sloping roof.
        peaks: the level roofs: name and operations per second.
    """
    axes = _Axes(dots, read_bytes_per_s, list(peaks.values()))
    series = list(dict.fromkeys(dot.series for dot in dots))
    colours = {name: svg.COLOURS[i % len(svg.COLOURS)] for i, name in enumerate(series)}
    parts = [
        svg.text(_LEFT, 32, title, size=18, weight=600),
        *_legend(colours),
        *_grid(axes),
        *_roofs(axes, read_bytes_per_s, peaks),
        *_dots(axes, dots, colours),
    ]
    return svg.picture(_WIDTH, _HEIGHT, parts)


def _legend(colours: Mapping[str, str]) -> list[str]:
    parts, x = [], float(_LEFT + 6)
    for name, colour in colours.items():
        parts += [svg.circle(x, 59, colour), svg.text(x + 12, 64, name)]
        x += 44 + 7.2 * len(name)
    return parts


def _grid(axes: _Axes) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in svg.log_ticks(axes.x_low, axes.x_high):
        x = axes.x(tick)
        parts.append(svg.line(x, _TOP, x, bottom, svg.GRID, 1))
        parts.append(svg.text(x, bottom + 20, f"{tick:,g}", size=svg.SMALL, anchor="middle"))
    for tick in svg.log_ticks(axes.y_low, axes.y_high):
        y = axes.y(tick)
        parts.append(svg.line(_LEFT, y, right, y, svg.GRID, 1))
        parts.append(svg.text(_LEFT - 8, y + 4, f"{tick / 1e9:,g}", size=svg.SMALL, anchor="end"))
    middle = (_LEFT + right) / 2
    parts.append(svg.text(middle, _HEIGHT - 22, "operations per byte read", anchor="middle"))
    parts.append(svg.text(24, (_TOP + bottom) / 2, "GOP/s", anchor="middle", turn=-90))
    return parts


def _roofs(axes: _Axes, read_bytes_per_s: float, peaks: Mapping[str, float]) -> list[str]:
    right, highest = _WIDTH - _RIGHT, max(peaks.values())
    low = max(axes.x_low, axes.y_low / read_bytes_per_s)  # where the slope comes in
    ridge = highest / read_bytes_per_s
    x1, y1 = axes.x(low), axes.y(low * read_bytes_per_s)
    x2, y2 = axes.x(ridge), axes.y(highest)
    parts = [svg.line(x1, y1, x2, y2, svg.FAINT, 2)]
    slope = math.degrees(math.atan2(y2 - y1, x2 - x1))
    text = f"memory, {read_bytes_per_s / 1e9:,.0f} GB/s"
    parts.append(svg.text(x1 + 0.3 * (x2 - x1) - 6, y1 + 0.3 * (y2 - y1) - 8, text, size=svg.SMALL,
                       fill=svg.FAINT, turn=slope))  # fmt: skip
    for name, peak in peaks.items():
        y = axes.y(peak)
        parts.append(svg.line(axes.x(peak / read_bytes_per_s), y, right, y, svg.FAINT, 2))
        label = f"{name}, {peak / 1e9:,.0f} GOP/s"
        parts.append(svg.text(right + 8, y + 4, label, size=svg.SMALL, fill=svg.FAINT))
    return parts


def _dots(axes: _Axes, dots: Sequence[RooflinePoint], colours: Mapping[str, str]) -> list[str]:
    """Draw dots, each label where it covers neither a dot nor another label, if there is room."""
    places = [(axes.x(dot.ops_per_byte), axes.y(dot.ops_per_s)) for dot in dots]
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in places]
    parts = [
        svg.circle(x, y, colours[dot.series]) for dot, (x, y) in zip(dots, places, strict=True)
    ]
    for dot, (x, y) in zip(dots, places, strict=True):
        width = 7.2 * len(dot.label)
        tries = [
            (x + 11 if side > 0 else x - 14 - width, y + 5 + step)
            for step in (0, -14, 14, -26, 26, -38, 38)
            for side in (1, -1)
        ]
        free = [(a, b) for a, b in tries if not _covers(_box(a, b, width), taken)]
        left, base = (free or tries)[0]
        taken.append(_box(left, base, width))
        parts.append(svg.text(left, base, dot.label, fill=colours[dot.series]))
    return parts


def _box(left: float, base: float, width: float) -> tuple[float, float, float, float]:
    return left, base - 11, left + width, base + 3


def _covers(
    box: tuple[float, float, float, float], others: Sequence[tuple[float, float, float, float]]
) -> bool:
    left, top, right, bottom = box
    return (
        right > _WIDTH - _RIGHT
        or left < _LEFT
        or any(a < right and c > left and b < bottom and d > top for a, b, c, d in others)
    )
