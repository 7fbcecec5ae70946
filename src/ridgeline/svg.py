"""The primitives of the program's pictures: SVG as text. It knows nothing of charts and units."""

from __future__ import annotations

import math
from html import escape

FONT, SMALL = 14, 12
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


def circle(x: float, y: float, colour: str) -> str:
    """Return a dot."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}" stroke="#fff"/>'


def box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    """Return a filled box; ``title`` is shown where a pointer rests on it."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour}"><title>{escape(title)}</title></rect>'
    )


def short(text: str, most: int = 130) -> str:
    """Return a text that fits in one line of a picture."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10, 20, ... between two numbers; only powers of ten if they are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) < 6 else (1,)
    return [t for d in decades for t in (step * 10.0**d for step in steps) if low <= t <= high]
