"""Predicted against actual as SVG: a dot for each figure of each run, above or below the truth.

To the right is what was measured, upwards by how much more was predicted: figures that differ by
powers of ten, and errors of a few percent, are seen in one picture. The shaded band is 10 % to
either side. Plain text out; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.system import svg

_BAND = 10.0  # percent
Pair = tuple[float, float]  # predicted, measured


def foresight_svg(title: str, figures: Mapping[str, Sequence[Pair]], unit: str) -> str:
    """Return the picture.

    Args:
        title: of what.
        figures: by their names, each with a colour: what was predicted and measured of each run.
            What is 0 is left out.
        unit: of all of them.

    Raises ValueError if there is nothing to draw.
    """
    known = {name: [p for p in pairs if min(p) > 0] for name, pairs in figures.items()}
    pairs = [pair for of_name in known.values() for pair in of_name]
    if not pairs:
        raise ValueError("there is nothing to draw: no load was both predicted and measured")
    measured = [actual for _, actual in pairs]
    most = 1.2 * max(_BAND, *(abs(_error(pair)) for pair in pairs))
    across = svg.Axis(f"measured, {unit}", min(measured) / 1.5, max(measured) * 1.5)
    up = svg.Axis("predicted, above what was measured", -most, most, is_log=False, tick="{:+,g} %")
    chart = svg.Chart(across, up)
    chart.shade(f"{_BAND:g} % to either side", up=(-_BAND, _BAND))
    chart.curve([(across.low, 0.0), (across.high, 0.0)], svg.FAINT, 1)
    colours = dict(zip(known, svg.COLOURS, strict=False))
    for name, colour in colours.items():
        for pair in known[name]:
            predicted, actual = pair
            said = f"{name}: {predicted:,.4g} predicted, {actual:,.4g} measured"
            chart.dot(actual, _error(pair), colour, said)
    return chart.picture(title, colours)


def _error(pair: Pair) -> float:
    """Return by how many percent more was predicted than measured."""
    predicted, measured = pair
    return 100 * (predicted / measured - 1)
