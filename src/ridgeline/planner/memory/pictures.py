"""A plan's pictures as SVG: pure functions, text out. They measure nothing and read no file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ridgeline.planner.memory.placement import Placement, parts_of
from ridgeline.system import svg
from ridgeline.system.report import gib

_LEFT, _RIGHT, _TOP = 190, 210, 96
_BAR, _STEP = 30, 52
COLOURS = {
    "weights": "#1f6feb",
    "KV cache": "#2da44e",
    "activations": "#d9480f",
    "framework": "#8250df",
    "margin": "#c9ced6",
}


def memory_svg(title: str, placements: Sequence[Placement]) -> str:
    """Return a stacked bar for each placement: what fills one device, and where it ends.

    Bars have one scale. What reaches beyond a device's end is more than it has.
    """
    widest = max(max(p.ledger.total_bytes, p.ledger.capacity_bytes) for p in placements)
    height = _TOP + _STEP * len(placements) + 48
    scale = (svg.WIDTH - _LEFT - _RIGHT) / widest
    parts = svg.heading(title, COLOURS)
    for i, placement in enumerate(placements):
        parts += _bar(placement, _TOP + _STEP * i, scale)
    parts += _axis(widest, scale, height - 40)
    return svg.picture(svg.WIDTH, height, parts)


def _bar(placement: Placement, y: float, scale: float) -> Iterator[str]:
    ledger, memory = placement.ledger, placement.memory
    count = placement.num_devices
    yield svg.text(_LEFT - 12, y + 20, _name(placement), anchor="end")
    x = float(_LEFT)
    for name, size in parts_of(ledger):
        width = size * scale
        yield svg.box(x, y, width, _BAR, COLOURS[name], f"{name}: {gib(size)}")
        x += width
    end = _LEFT + ledger.capacity_bytes * scale
    yield svg.line(end, y - 4, end, y + _BAR + 4, svg.INK, 2)
    spare = ledger.spare_bytes
    verdict = f"{gib(abs(spare))} {'to spare' if spare >= 0 else 'too much'}"
    each = f" on each of {count}" if count > 1 else ""
    colour = svg.INK if ledger.fits else "#cf222e"
    yield svg.text(max(x, end) + 10, y + 14, verdict, size=svg.SMALL, fill=colour)
    caption = f"{memory.concurrency:,} x {memory.context:,} tokens{each}"
    yield svg.text(max(x, end) + 10, y + 29, caption, size=svg.SMALL, fill=svg.FAINT)


def _name(placement: Placement) -> str:
    count = placement.num_devices
    return placement.device.id if count == 1 else f"{count} x {placement.device.id}"


def _axis(widest: int, scale: float, y: float) -> Iterator[str]:
    """Draw about five ticks of whole GiB (or parts of one for small models)."""
    for tick in svg.round_ticks(0, widest / 2**30):
        x = _LEFT + tick * 2**30 * scale
        yield svg.line(x, y - 6, x, y - 2, svg.FAINT, 1)
        yield svg.text(x, y + 14, f"{tick:,g}", size=svg.SMALL, anchor="middle", fill=svg.FAINT)
    yield svg.text(_LEFT - 12, y + 14, "GiB", size=svg.SMALL, anchor="end", fill=svg.FAINT)
