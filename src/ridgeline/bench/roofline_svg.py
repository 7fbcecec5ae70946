"""A roofline plot as SVG: how fast work goes, against how much it computes per byte it reads.

Below the sloping line memory is the limit, below a level line arithmetic is (Williams et al.,
2009). Plain text out; it measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 900, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 128, 92, 70
_FONT, _SMALL = 14, 12
_INK, _FAINT, _GRID = "#24292f", "#57606a", "#e4e7eb"
COLOURS = ("#1f6feb", "#8250df", "#d9480f", "#2da44e")


@dataclass(frozen=True, slots=True)
class Dot:
    """One kind of work; ``series`` chooses its colour."""

    label: str
    series: str
    ops_per_byte: float
    ops_per_s: float


class _Axes:
    """From numbers to pixels, both axes logarithmic, with room for everything that is drawn."""

    def __init__(
        self, dots: Sequence[Dot], read_bytes_per_s: float, peaks: Sequence[float]
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
    title: str, dots: Sequence[Dot], read_bytes_per_s: float, peaks: Mapping[str, float]
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
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(series)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="{_FONT}" fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 32, title, size=18, weight=600),
        *_legend(colours),
        *_grid(axes),
        *_roofs(axes, read_bytes_per_s, peaks),
        *_dots(axes, dots, colours),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(
    x: float, y: float, text: str, *, size: int = _FONT, anchor: str = "start", weight: int = 400,
    fill: str = _INK, turn: float = 0.0,
) -> str:  # fmt: skip
    rotate = f' transform="rotate({turn:.1f} {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}" stroke="#ffffff" stroke-width="4" stroke-linejoin="round" '
        f'paint-order="stroke"{rotate}>{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}" stroke-linecap="round"/>'
    )


def _circle(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}" stroke="#fff"/>'


def _legend(colours: Mapping[str, str]) -> list[str]:
    parts, x = [], float(_LEFT + 6)
    for name, colour in colours.items():
        parts += [_circle(x, 59, colour), _text(x + 12, 64, name)]
        x += 44 + 7.2 * len(name)
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10, 20, ... between two numbers; only powers of ten if they are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) < 6 else (1,)
    return [t for d in decades for t in (step * 10.0**d for step in steps) if low <= t <= high]


def _grid(axes: _Axes) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in _ticks(axes.x_low, axes.x_high):
        x = axes.x(tick)
        parts.append(_line(x, _TOP, x, bottom, _GRID, 1))
        parts.append(_text(x, bottom + 20, f"{tick:,g}", size=_SMALL, anchor="middle"))
    for tick in _ticks(axes.y_low, axes.y_high):
        y = axes.y(tick)
        parts.append(_line(_LEFT, y, right, y, _GRID, 1))
        parts.append(_text(_LEFT - 8, y + 4, f"{tick / 1e9:,g}", size=_SMALL, anchor="end"))
    middle = (_LEFT + right) / 2
    parts.append(_text(middle, _HEIGHT - 22, "operations per byte read", anchor="middle"))
    parts.append(_text(24, (_TOP + bottom) / 2, "GOP/s", anchor="middle", turn=-90))
    return parts


def _roofs(axes: _Axes, read_bytes_per_s: float, peaks: Mapping[str, float]) -> list[str]:
    right, highest = _WIDTH - _RIGHT, max(peaks.values())
    low = max(axes.x_low, axes.y_low / read_bytes_per_s)  # where the slope comes in
    ridge = highest / read_bytes_per_s
    x1, y1 = axes.x(low), axes.y(low * read_bytes_per_s)
    x2, y2 = axes.x(ridge), axes.y(highest)
    parts = [_line(x1, y1, x2, y2, _FAINT, 2)]
    slope = math.degrees(math.atan2(y2 - y1, x2 - x1))
    text = f"memory, {read_bytes_per_s / 1e9:,.0f} GB/s"
    parts.append(_text(x1 + 0.3 * (x2 - x1) - 6, y1 + 0.3 * (y2 - y1) - 8, text, size=_SMALL,
                       fill=_FAINT, turn=slope))  # fmt: skip
    for name, peak in peaks.items():
        y = axes.y(peak)
        parts.append(_line(axes.x(peak / read_bytes_per_s), y, right, y, _FAINT, 2))
        label = f"{name}, {peak / 1e9:,.0f} GOP/s"
        parts.append(_text(right + 8, y + 4, label, size=_SMALL, fill=_FAINT))
    return parts


def _dots(axes: _Axes, dots: Sequence[Dot], colours: Mapping[str, str]) -> list[str]:
    """Draw dots, each label where it covers neither a dot nor another label, if there is room."""
    places = [(axes.x(dot.ops_per_byte), axes.y(dot.ops_per_s)) for dot in dots]
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in places]
    parts = [_circle(x, y, colours[dot.series]) for dot, (x, y) in zip(dots, places, strict=True)]
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
        parts.append(_text(left, base, dot.label, fill=colours[dot.series]))
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
