"""The picture of a search as SVG: what of each load was served within the limits.

Above the limit goodput falls although load grows, and the interval that answers is shaded.
Plain text out; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.system import svg

_COLOURS = {"held": svg.COLOURS[3], "failed": svg.COLOURS[2]}


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
    dots = sorted((trial["load"], trial["goodput_per_s"], trial["verdict"]) for trial in trials)
    unit = "requests per second sent" if is_open else "requests at a time"
    highest = max([goodput for _, goodput, _ in dots] + [1e-6])
    chart = svg.Chart(
        svg.Axis(unit, dots[0][0] / 1.3, dots[-1][0] * 1.3),
        svg.Axis("goodput, requests/s", 0, highest * 1.15, is_log=False),
    )
    if answer["low"] and answer["high"]:
        low, high = answer["low"], answer["high"]
        shown = f"{low:.3g} to {high:.3g}"
        chart.shade(shown, across=(low, high))
        chart.parts.append(
            svg.text(chart.x(low), chart.top - 8, shown, size=svg.SMALL, anchor="middle",
                     fill=svg.FAINT)
        )  # fmt: skip
    chart.curve([(load, goodput) for load, goodput, _ in dots], svg.FAINT, 1.5)
    for load, goodput, said in dots:
        chart.dot(load, goodput, _COLOURS["held" if said == "held" else "failed"])
    return chart.picture(f"Goodput within {' and '.join(slos)}", _COLOURS)
