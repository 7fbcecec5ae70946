"""The picture of a search as SVG: what of each load was served within the limits.

Above the limit goodput falls although load grows, and the interval that answers is shaded.
Plain text out; it measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ridgeline.svg import COLOURS, FAINT, GRID, SMALL, circle, line, log_ticks, picture, text

_WIDTH, _HEIGHT = 900, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 40, 96, 70
_SHADE = "#ddf4ff"
_HELD, _FAILED = COLOURS[3], COLOURS[2]


def curve_svg(
    answer: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], is_open: bool, slos: list[str]
) -> str:
    """Return the curve: load to the right, logarithmic; goodput in requests per second upwards.

    Args:
        answer: ``low`` and ``high`` are shaded, where both are there.
        trials: each with ``load``, ``goodput_per_s`` and ``verdict``.
        is_open: loads are requests per second, else requests at a time.
        slos: the service levels, for the title.
    """
    loads: list[float] = [trial["load"] for trial in trials]
    low, high = min(loads) / 1.3, max(loads) * 1.3
    top: float = max([trial["goodput_per_s"] for trial in trials] + [1e-6]) * 1.15

    def x(load: float) -> float:
        return _LEFT + math.log(load / low) / math.log(high / low) * (_WIDTH - _LEFT - _RIGHT)

    def y(goodput: float) -> float:
        return _HEIGHT - _BOTTOM - goodput / top * (_HEIGHT - _TOP - _BOTTOM)

    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    unit = "requests per second sent" if is_open else "requests at a time"
    parts = [
        text(_LEFT, 34, f"Goodput within {' and '.join(slos)}", size=18, weight=600),
        circle(_LEFT + 6, 61, _HELD),
        text(_LEFT + 18, 66, "held"),
        circle(_LEFT + 76, 61, _FAILED),
        text(_LEFT + 88, 66, "failed"),
    ]
    if answer["low"] and answer["high"]:
        left, width = x(answer["low"]), x(answer["high"]) - x(answer["low"])
        parts.append(
            f'<rect x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{bottom - _TOP}" '
            f'fill="{_SHADE}"/>'
        )
        shown = f"{answer['low']:.3g} to {answer['high']:.3g}"
        parts.append(text(left, _TOP - 8, shown, size=SMALL, anchor="middle", fill=FAINT))
    marks = log_ticks(low, high)
    if len(marks) < 3:
        decade = 10 ** math.floor(math.log10(low))
        marks = [i * decade for i in range(1, 100) if low <= i * decade <= high]
    for tick in marks:
        parts.append(line(x(tick), _TOP, x(tick), bottom, GRID, 1))
        parts.append(text(x(tick), bottom + 20, f"{tick:,g}", size=SMALL, anchor="middle"))
    step = 10 ** math.floor(math.log10(top / 2))
    step *= 5 if top / step > 10 else 2 if top / step > 4 else 1
    for i in range(int(top / step) + 1):
        parts.append(line(_LEFT, y(i * step), right, y(i * step), GRID, 1))
        parts.append(text(_LEFT - 8, y(i * step) + 4, f"{i * step:,g}", size=SMALL, anchor="end"))
    middle, half = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(text(middle, _HEIGHT - 22, unit, anchor="middle"))
    parts.append(text(24, half, "goodput, requests/s", anchor="middle", turn=-90))
    dots = sorted((trial["load"], trial["goodput_per_s"], trial["verdict"]) for trial in trials)
    for one, two in pairwise(dots):
        parts.append(line(x(one[0]), y(one[1]), x(two[0]), y(two[1]), FAINT, 1.5))
    parts += [circle(x(a), y(b), _HELD if said == "held" else _FAILED) for a, b, said in dots]
    return picture(_WIDTH, _HEIGHT, parts)
