"""What the drawings of mechanisms share: colours of requests, headings, words inside of boxes."""

from __future__ import annotations

from html import escape

from ridgeline.system import svg

WIDTH = 900
COLOURS = (
    *("#1f6feb", "#d9480f", "#2da44e", "#8250df", "#bf8700"),
    *("#cf222e", "#0a7ea4", "#bc4c9b", "#57606a", "#7a5c3e"),
)


def colour_of(number: int) -> str:
    """Return the colour of a request."""
    return COLOURS[number % len(COLOURS)]


def light(colour: str, share: float = 0.65) -> str:
    """Return a colour mixed with this share of white."""
    values = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(one + (255 - one) * share):02x}" for one in values)


def heading(title: str, note: str = "") -> list[str]:
    """Return the two lines above a drawing."""
    parts = [svg.text(24, 34, title, size=18, weight=600)]
    return [*parts, svg.text(24, 56, note, size=svg.SMALL, fill=svg.FAINT)] if note else parts


def box(
    x: float, y: float, width: float, height: float, fill: str, title: str = "",
    edge: str = "#ffffff",
) -> str:  # fmt: skip
    """Return a filled box with an edge; ``title`` is shown where a pointer rests on it."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
        f'fill="{fill}" stroke="{edge}"><title>{escape(title)}</title></rect>'
    )


def word(
    x: float, y: float, text: str, *, fill: str = svg.INK, size: int = svg.SMALL,
    anchor: str = "middle", weight: int = 400,
) -> str:  # fmt: skip
    """Return a word inside of a box: it has no white edge, as other texts of pictures have."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = svg.FAINT) -> str:
    """Return a line with a small head at its second end; it runs down, or to the right."""
    line = svg.line(x1, y1, x2, y2, colour, 1.5)
    if abs(x2 - x1) > abs(y2 - y1):
        head = f"{x2:.1f},{y2:.1f} {x2 - 7:.1f},{y2 - 4:.1f} {x2 - 7:.1f},{y2 + 4:.1f}"
    else:
        head = f"{x2:.1f},{y2:.1f} {x2 - 4:.1f},{y2 - 7:.1f} {x2 + 4:.1f},{y2 - 7:.1f}"
    return f'{line}<polygon points="{head}" fill="{colour}"/>'
