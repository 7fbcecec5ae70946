"""The program's pictures: SVG as text. Primitives, and a chart of dots and curves over two axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

FONT, SMALL = 14, 12
CHARACTER = 7.2  # pixels of a character of text, about
WIDTH = 900  # of a chart, in pixels
INK, FAINT, GRID = "#24292f", "#57606a", "#e4e7eb"
COLOURS = ("#1f6feb", "#8250df", "#d9480f", "#2da44e")


def picture(width: int, height: int, parts: list[str]) -> str:
    """Return a picture of this size in pixels on white, made of ``parts``."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="system-ui, sans-serif" '
        f'font-size="{FONT}" fill="{INK}">'
    )
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def text(
    x: float, y: float, text: str, *, size: int = FONT, anchor: str = "start", weight: int = 400,
    fill: str = INK, turn: float = 0.0,
) -> str:  # fmt: skip
    """Return a line of text with a white edge; ``turn`` in degrees, ``anchor`` as in SVG."""
    rotate = f' transform="rotate({turn:.1f} {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}" stroke="#ffffff" stroke-width="4" stroke-linejoin="round" '
        f'paint-order="stroke"{rotate}>{escape(text)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    """Return a line with round ends."""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}" stroke-linecap="round"/>'
    )


def circle(x: float, y: float, colour: str, title: str = "") -> str:
    """Return a dot; ``title`` is shown where a pointer rests on it."""
    shown = f"><title>{escape(title)}</title></circle>" if title else "/>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}" stroke="#fff"{shown}'


def box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    """Return a filled box; ``title`` is shown where a pointer rests on it."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour}"><title>{escape(title)}</title></rect>'
    )


def _short(text: str, most: int = 130) -> str:
    """Return as many whole clauses as fit; if that is none, as many characters."""
    if len(text) <= most:
        return text
    clauses = text[:most].rpartition("; ")[0]
    is_whole = clauses and clauses.count("(") == clauses.count(")")
    return clauses if is_whole else f"{text[: most - 3]}..."


def heading(title: str, colours: Mapping[str, str], note: str = "") -> list[str]:
    """Return what stands above a picture: its title, a small note, and the legend."""
    parts = [text(24, 34, title, size=18, weight=600)]
    if note:
        parts.append(text(24, 56, _short(note), size=SMALL, fill=FAINT))
    return parts + legend(colours, 78 if note else 62)


def legend(colours: Mapping[str, str], y: float) -> list[str]:
    """Return a row of dots in their colours, each with its name, ``y`` pixels from the top."""
    parts, x = [], 30.0
    for name, colour in colours.items():
        parts += [circle(x, y, colour), text(x + 12, y + 5, name)]
        x += 44 + CHARACTER * len(name)
    return parts


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10, 20, ... between two numbers; only powers of ten if they are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) < 6 else (1,)
    return [t for d in decades for t in (step * 10.0**d for step in steps) if low <= t <= high]


def round_ticks(low: float, high: float, most: int = 10) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten between two numbers, at most this many."""
    decade = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(one for n in (1, 2, 5, 10, 20) if (high - low) / (one := n * decade) <= most - 1)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart, logarithmic or in proportion.

    Attributes:
        name: what it measures, with the unit.
        low, high: its ends; above 0 where it is logarithmic.
        tick: how a number is written beside it.
        ticks: which numbers are; round ones, unless they are given.
    """

    name: str
    low: float
    high: float
    is_log: bool = True
    tick: str = "{:,g}"
    ticks: Sequence[float] = ()

    def share(self, value: float) -> float:
        """Return where a value lies: 0 is the low end, 1 the high one."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[tuple[float, str]]:
        """Return the numbers beside the axis, and how they are written."""
        marks = self.ticks or (log_ticks(self.low, self.high) if self.is_log else ())
        if len(marks) < 3:
            marks = round_ticks(self.low, self.high)
        return [(mark, self.tick.format(mark)) for mark in marks]


class Chart:
    """Dots and curves over two axes.

    Attributes:
        left, top, right, bottom: the ends of what is drawn in, in pixels.
        parts: what is drawn above the grid.
    """

    def __init__(self, across: Axis, up: Axis, *, height: int = 480, margin: int = 40) -> None:
        """Begin a chart of ``height`` in pixels, with a ``margin`` to the right."""
        self._across, self._up, self._height = across, up, height
        self.left, self.top, self.right, self.bottom = 84, 96, WIDTH - margin, height - 70
        self.parts: list[str] = []
        self._below: list[str] = []
        self._taken: list[tuple[float, float, float, float]] = []  # left, top, right, bottom

    def x(self, value: float) -> float:
        """Return where a value lies, in pixels from the left."""
        return self.left + self._across.share(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return where a value lies, in pixels from the top."""
        return self.bottom - self._up.share(value) * (self.bottom - self.top)

    def shade(
        self,
        title: str,
        *,
        across: tuple[float, float] | None = None,
        up: tuple[float, float] | None = None,
    ) -> None:
        """Shade the values between two numbers of one axis, below the grid."""
        left, right = map(self.x, across) if across else (self.left, self.right)
        bottom, top = map(self.y, up) if up else (self.bottom, self.top)
        self._below.append(box(left, top, right - left, bottom - top, "#ddf4ff", title))

    def dot(self, x: float, y: float, colour: str, title: str = "") -> None:
        """Draw a dot at two values."""
        self.parts.append(circle(self.x(x), self.y(y), colour, title))
        self._taken.append((self.x(x) - 8, self.y(y) - 8, self.x(x) + 8, self.y(y) + 8))

    def name(
        self, x: float, y: float, name: str, colour: str, *, size: int = FONT, must: bool = True
    ) -> None:
        """Name a dot where that covers neither a dot that was drawn nor another name.

        Where there is no such place, only a name that ``must`` be there is written.
        """
        width = CHARACTER * len(name) * size / FONT
        places = [
            (left, self.y(y) + 5 + step)
            for step in (0, -14, 14, -26, 26, -38, 38)
            for left in (self.x(x) + 11, self.x(x) - 14 - width)
        ]
        free = [place for place in places if self._is_free(*place, width)]
        if not free and not must:
            return
        left, base = (free or places)[0]
        self._taken.append((left, base - 11, left + width, base + 3))
        self.parts.append(text(left, base, name, size=size, fill=colour))

    def _is_free(self, left: float, base: float, width: float) -> bool:
        top, right, bottom = base - 11, left + width, base + 3
        is_inside = self.left <= left and right <= self.right
        covers = (a < right and c > left and b < bottom and d > top for a, b, c, d in self._taken)
        return is_inside and not any(covers)

    def curve(self, points: Iterable[tuple[float, float]], colour: str, width: float = 2) -> None:
        """Draw a line through points of two values each."""
        places = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{places}" fill="none" stroke="{colour}" '
            f'stroke-width="{width}" stroke-linejoin="round"/>'
        )

    def picture(self, title: str, colours: Mapping[str, str], note: str = "") -> str:
        """Return the picture; ``colours`` are by the names of what is drawn in them."""
        head = heading(title, colours, note)
        return picture(WIDTH, self._height, [*head, *self._below, *self._grid(), *self.parts])

    def _grid(self) -> list[str]:
        left, top, right, bottom = self.left, self.top, self.right, self.bottom
        parts = []
        for mark, label in self._across.labels():
            x = self.x(mark)
            parts.append(line(x, top, x, bottom, GRID, 1))
            parts.append(text(x, bottom + 20, label, size=SMALL, anchor="middle"))
        for mark, label in self._up.labels():
            y = self.y(mark)
            parts.append(line(left, y, right, y, GRID, 1))
            parts.append(text(left - 8, y + 4, label, size=SMALL, anchor="end"))
        middle, half = (left + right) / 2, (top + bottom) / 2
        parts.append(text(middle, self._height - 22, self._across.name, anchor="middle"))
        parts.append(text(22, half, self._up.name, anchor="middle", turn=-90))
        return parts
