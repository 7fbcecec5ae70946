"""A roofline plot as SVG: how fast work goes, against how much it computes per byte it reads.

Below the sloping line memory is the limit, below a level line arithmetic is (Williams et al.,
2009). Plain text out; it measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.system import svg

_Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """One kind of work; ``series`` chooses its colour."""

    label: str
    series: str
    ops_per_byte: float
    ops_per_s: float


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
    series = list(dict.fromkeys(dot.series for dot in dots))
    colours = {name: svg.COLOURS[i % len(svg.COLOURS)] for i, name in enumerate(series)}
    ridges = [peak / read_bytes_per_s for peak in peaks.values()]
    xs = [*(dot.ops_per_byte for dot in dots), min(ridges) / 3, max(ridges) * 8]
    ys = [one / 1e9 for one in (*(dot.ops_per_s for dot in dots), *peaks.values())]
    across = svg.Axis("operations per byte read", min(xs) / 2, max(xs) * 2)
    up = svg.Axis("GOP/s", min(ys) / 2.5, max(ys) * 1.8)
    chart = svg.Chart(across, up, height=560, margin=128)
    low = max(across.low, up.low * 1e9 / read_bytes_per_s)  # where the slope comes in
    chart.parts += _slope(chart, low, max(ridges), read_bytes_per_s)
    for name, peak in peaks.items():
        y, begin = chart.y(peak / 1e9), chart.x(peak / read_bytes_per_s)
        label = f"{name}, {peak / 1e9:,.0f} GOP/s"
        chart.parts += [
            svg.line(begin, y, chart.right, y, svg.FAINT, 2),
            svg.text(chart.right + 8, y + 4, label, size=svg.SMALL, fill=svg.FAINT),
        ]
    for dot in dots:
        chart.dot(dot.ops_per_byte, dot.ops_per_s / 1e9, colours[dot.series])
    chart.parts += _labels(chart, dots, colours)
    return chart.picture(title, colours)


def _slope(chart: svg.Chart, low: float, ridge: float, read_bytes_per_s: float) -> Iterator[str]:
    """Draw the sloping roof between two numbers of operations per byte, with its name along it."""
    (x1, y1), (x2, y2) = (
        (chart.x(one), chart.y(one * read_bytes_per_s / 1e9)) for one in (low, ridge)
    )
    yield svg.line(x1, y1, x2, y2, svg.FAINT, 2)
    x, y = x1 + 0.3 * (x2 - x1) - 6, y1 + 0.3 * (y2 - y1) - 8
    turn = math.degrees(math.atan2(y2 - y1, x2 - x1))
    label = f"memory, {read_bytes_per_s / 1e9:,.0f} GB/s"
    yield svg.text(x, y, label, size=svg.SMALL, fill=svg.FAINT, turn=turn)


def _labels(
    chart: svg.Chart, dots: Sequence[RooflinePoint], colours: Mapping[str, str]
) -> Iterator[str]:
    """Name each dot where that covers neither a dot nor another name, if there is room."""
    places = [(chart.x(dot.ops_per_byte), chart.y(dot.ops_per_s / 1e9)) for dot in dots]
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in places]
    for dot, (x, y) in zip(dots, places, strict=True):
        width = svg.CHARACTER * len(dot.label)
        tries = [
            (x + 11 if side > 0 else x - 14 - width, y + 5 + step)
            for step in (0, -14, 14, -26, 26, -38, 38)
            for side in (1, -1)
        ]
        boxes = [(left, base - 11, left + width, base + 3) for left, base in tries]
        free = [i for i, box in enumerate(boxes) if _is_free(chart, box, taken)]
        chosen = (free or [0])[0]
        taken.append(boxes[chosen])
        yield svg.text(*tries[chosen], dot.label, fill=colours[dot.series])


def _is_free(chart: svg.Chart, box: _Box, taken: Sequence[_Box]) -> bool:
    left, top, right, bottom = box
    return (
        chart.left <= left
        and right <= chart.right
        and not any(a < right and c > left and b < bottom and d > top for a, b, c, d in taken)
    )
