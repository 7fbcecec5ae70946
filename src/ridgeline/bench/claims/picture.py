"""The picture of claims: a bar for each technique, and the paper's figure as a mark on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.bench.claims.techniques import Found
from ridgeline.system import svg

_LEFT, _RIGHT, _TOP, _ROW = 260, 560, 92, 30
_BAR, _MARK = svg.COLOURS[0], svg.COLOURS[2]
_WIDTH = 900


def claims_svg(title: str, found: Sequence[Found]) -> str:
    """Return the picture: factors on a logarithmic axis, with what was measured and claimed."""
    claims = [one.technique.claim for one in found]
    ends = [one.factor for one in found] + [c.high for c in claims if c] + [1.0]
    axis = svg.Axis("times as good as without", min(0.5, *ends), max(ends) * 1.1, tick="{:g}x")
    height = _TOP + _ROW * len(found) + 64
    bottom = _TOP + _ROW * len(found)

    def at(value: float) -> float:
        return _LEFT + axis.share(value) * (_RIGHT - _LEFT)

    parts = [
        svg.text(24, 34, title, size=18, weight=600),
        *svg.legend({"here": _BAR, "the paper's claim": _MARK}, 62),
    ]
    for mark, label in axis.labels():
        parts.append(svg.line(at(mark), _TOP - 6, at(mark), bottom, svg.GRID, 1))
        parts.append(svg.text(at(mark), bottom + 18, label, size=svg.SMALL, anchor="middle"))
    parts.append(svg.line(at(1), _TOP - 6, at(1), bottom, svg.FAINT, 1))
    middle = (_LEFT + _RIGHT) / 2
    parts.append(svg.text(middle, bottom + 42, axis.name, size=svg.SMALL, anchor="middle"))
    for i, one in enumerate(found):
        parts += _row(one, _TOP + i * _ROW, at)
    return svg.picture(_WIDTH, height, parts)


def _row(one: Found, y: float, at: Callable[[float], float]) -> list[str]:
    """Return a bar, its mark, and what is written beside them."""
    technique, claim = one.technique, one.technique.claim
    left, right = sorted((at(1), at(one.factor)))
    label = f"{technique.name}: {technique.off.name} to {technique.on.name}"
    said = f"{one.factor:.2g}x" + (f", claimed {claim.text}: {claim.paper}" if claim else "")
    parts = [
        svg.text(_LEFT - 10, y + 18, technique.name, anchor="end"),
        svg.box(left, y + 6, max(right - left, 1.5), 16, _BAR, f"{label}: {said}. {one.why}"),
    ]
    if claim:
        low, high = at(claim.low), at(claim.high)
        parts += [
            svg.line(low, y + 14, high, y + 14, _MARK, 2),
            *(svg.line(x, y + 5, x, y + 23, _MARK, 3) for x in {low, high}),
        ]
    parts.append(svg.text(_RIGHT + 14, y + 18, said, size=svg.SMALL, fill=svg.FAINT))
    return parts
