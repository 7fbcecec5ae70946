"""The picture of a run as SVG: which share of requests had its latencies within which time.

A curve that rises late or slowly shows what a percentile hides. Plain text out; it measures
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.bench.load.stats import Outcome
from ridgeline.system.svg import COLOURS, Axis, Chart

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
    percents = (0, 25, 50, 75, 90, 100)
    chart = Chart(
        Axis("milliseconds", min(every) / 1.2, max(every) * 1.2),
        Axis("share of requests", 0, 100, is_log=False, tick="{} %", ticks=percents),
    )
    colours = dict(zip(curves, COLOURS, strict=False))
    for label, values in curves.items():
        step = 100 / len(values)
        stairs = [(ms, step * num) for i, ms in enumerate(values) for num in (i, i + 1)]
        chart.curve(stairs, colours[label])
    num_failed = len(outcomes) - len(rows)
    failed = f", {num_failed} failed" if num_failed else ""
    return chart.picture(f"{title}: {len(rows)} requests{failed}", colours)
