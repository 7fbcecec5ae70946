"""The picture of a sweep: a row for each combination, a column of bars for each figure: pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ridgeline.system import svg

_LEFT, _COLUMN, _BAR, _ROW, _TOP = 24, 190, 120, 26, 96
_PLAIN = "#9db8e8"
_BEST = "#2da44e"
_UNITS = {"tok/s": "tokens/s", "req/s": "requests/s", "goodput/s": "goodput, requests/s"}


def sweep_svg(
    names: Sequence[str],
    figures: Mapping[str, Sequence[float | None]],
    best: int,
    objective: str,
) -> str:
    """Return the picture.

    Args:
        names: of the combinations.
        figures: by their names: one for each combination, None where there is none; latencies in
            milliseconds. Those without any are left out.
        best: which combination is the best.
        objective: by what.
    """
    shown = {name: row for name, row in figures.items() if any(one is not None for one in row)}
    left = _LEFT + 16 + svg.CHARACTER * max(map(len, names))
    title = f"Predicted for {len(names)} settings; the best by {objective} in green"
    parts = [svg.text(_LEFT, 34, title, size=18, weight=600)]
    for i, name in enumerate(names):
        weight = 600 if i == best else 400
        parts.append(svg.text(_LEFT, _y(i) + 13, name, size=svg.SMALL, weight=weight))
    for column, (name, row) in enumerate(shown.items()):
        x = left + _COLUMN * column
        parts.append(svg.text(x, _TOP - 16, _UNITS.get(name, f"{name}, ms"), weight=600))
        parts += _bars(x, name, row, best)
    width = max(round(left + _COLUMN * len(shown)), 24 + 10 * len(title))
    return svg.picture(width, round(_y(len(names)) + 20), parts)


def _bars(x: float, name: str, row: Sequence[float | None], best: int) -> Iterator[str]:
    greatest = max((one for one in row if one is not None), default=0.0) or 1.0
    for i, value in enumerate(row):
        if value is None:
            yield svg.text(x, _y(i) + 13, "-", size=svg.SMALL, fill=svg.FAINT)
            continue
        width = _BAR * value / greatest
        said = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        yield svg.box(x, _y(i), width, 18, _BEST if i == best else _PLAIN, f"{name}: {said}")
        yield svg.text(x + width + 6, _y(i) + 13, said, size=svg.SMALL)


def _y(row: int) -> float:
    return _TOP + _ROW * row
