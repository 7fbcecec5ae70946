"""The picture of a run as SVG: which share of requests had its latencies within which time.

A curve that rises late or slowly shows what a percentile hides. Plain text out; it measures
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ridgeline.bench.load.stats import Outcome
from ridgeline.svg import COLOURS, GRID, SMALL, circle, line, log_ticks, picture, text

_WIDTH, _HEIGHT = 900, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 40, 96, 70
_SHOWN = {
    "ttft_from_send": "time to first token",
    "tpot_excl_first": "time per output token",
    "e2e": "end to end",
}


def latencies_svg(outcomes: Sequence[Outcome], title: str) -> str:
    """Return the curves of the requests that succeeded: milliseconds to the right, share upwards.

    Time is logarithmic, from a tenth of a millisecond on. Failed requests are in the title only.
    """
    rows = [outcome.latencies_s() for outcome in outcomes if outcome.error is None]
    curves = {
        label: sorted(max(1e3 * row[name], 0.1) for row in rows if name in row)
        for name, label in _SHOWN.items()
    }
    curves = {label: values for label, values in curves.items() if values}
    every = [value for values in curves.values() for value in values] or [1.0]
    low, high = min(every) / 1.2, max(every) * 1.2
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def x(ms: float) -> float:
        return _LEFT + math.log(ms / low) / math.log(high / low) * (right - _LEFT)

    def y(share: float) -> float:
        return bottom - share * (bottom - _TOP)

    num_failed = len(outcomes) - len(rows)
    failed = f", {num_failed} failed" if num_failed else ""
    parts = [
        text(_LEFT, 34, f"{title}: {len(rows)} requests{failed}", size=18, weight=600),
        text((_LEFT + right) / 2, _HEIGHT - 22, "milliseconds", anchor="middle"),
        text(24, (_TOP + bottom) / 2, "share of requests", anchor="middle", turn=-90),
    ]
    for tick in log_ticks(low, high):
        parts.append(line(x(tick), _TOP, x(tick), bottom, GRID, 1))
        parts.append(text(x(tick), bottom + 20, f"{tick:,g}", size=SMALL, anchor="middle"))
    for percent in (0, 25, 50, 75, 90, 100):
        parts.append(line(_LEFT, y(percent / 100), right, y(percent / 100), GRID, 1))
        label = f"{percent} %"
        parts.append(text(_LEFT - 8, y(percent / 100) + 4, label, size=SMALL, anchor="end"))
    at = float(_LEFT + 6)
    for colour, (label, values) in zip(COLOURS, curves.items(), strict=False):
        parts += [circle(at, 59, colour), text(at + 12, 64, label)]
        at += 44 + 7.2 * len(label)
        points = [f"{x(values[0]):.1f},{y(0):.1f}"]
        for i, value in enumerate(values):
            points += [f"{x(value):.1f},{y(share / len(values)):.1f}" for share in (i, i + 1)]
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" '
            f'stroke-width="2" stroke-linejoin="round"/>'
        )
    return picture(_WIDTH, _HEIGHT, parts)
