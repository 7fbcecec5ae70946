"""The picture of an explanation as SVG: a bar of the request's time, and what its colours mean.

Plain text out; it computes nothing that the pieces do not say.
"""

from __future__ import annotations

from collections import Counter

from ridgeline.foresight.explain.explain import CAUSES, Explanation
from ridgeline.foresight.explain.prose import seconds
from ridgeline.system import svg

_WIDTH, _LEFT, _BAR = 900, 24, 852  # pixels
_TOP, _HIGH, _ROW = 64, 44, 24
_COLOURS = {
    "step_under_way": "#e3b341",
    "queue_max_num_seqs": "#d9480f",
    "queue_token_budget": "#f08c4a",
    "queue_blocks": "#b45309",
    "queue_overtaken": "#a16207",
    "wait_max_num_seqs": "#c2410c",
    "wait_token_budget": "#fb923c",
    "wait_blocks": "#9a3412",
    "wait_policy": "#fdba74",
    "client": "#d6409f",
    "prompt": "#1f6feb",
    "prompt_alone": "#1f6feb",
    "prompt_shared": "#79b0ff",
    "decode": "#2da44e",
    "decode_alone": "#2da44e",
    "decode_shared": "#86d69a",
    "again": "#8250df",
    "slow_machine": "#cf222e",
    "between_steps": "#9aa4af",
}


def explain_svg(explanation: Explanation) -> str:
    """Return the picture of where a request's time went."""
    title = f"Request {explanation.request['request_id']} took {seconds(explanation.duration_ns)}"
    parts = [
        svg.text(_LEFT, 36, title, size=18, weight=600),
        *_bar(explanation),
        *_axis(explanation),
    ]
    y, total_ns = _TOP + _HIGH + 60, max(explanation.duration_ns, 1)
    for cause, num_ns in explanation.causes_ns().items():
        share, colour = num_ns / total_ns, _COLOURS[cause]
        parts += [
            svg.box(_LEFT, y - 12, 14, 14, colour, CAUSES[cause]),
            svg.text(_LEFT + 24, y, CAUSES[cause]),
            svg.text(_LEFT + 480, y, seconds(num_ns), anchor="end"),
            svg.text(_LEFT + 540, y, f"{share:.1%}", anchor="end"),
            svg.box(_LEFT + 560, y - 11, 292 * share, 12, colour, CAUSES[cause]),
        ]
        y += _ROW
    return svg.picture(_WIDTH, y, parts)


def _bar(explanation: Explanation) -> list[str]:
    """Return the bar; a column of one pixel has the colour of what took most of its time."""
    begin_ns = explanation.pieces[0].start_ns if explanation.pieces else 0
    scale = _BAR / max(explanation.duration_ns, 1)
    columns: list[Counter[str]] = [Counter() for _ in range(_BAR)]
    for piece in explanation.pieces:
        left, right = (scale * (one - begin_ns) for one in (piece.start_ns, piece.end_ns))
        cause = piece.cause.removesuffix("_alone").removesuffix("_shared")
        for column in range(int(left), min(int(right) + 1, _BAR)):
            columns[column][cause] += max(0.0, min(right, column + 1) - max(left, column))  # type: ignore[assignment]
    parts, first = [], 0
    greatest = [max(column, key=column.__getitem__, default="") for column in columns]
    for end in range(1, _BAR + 1):
        if end == _BAR or greatest[end] != greatest[first]:
            if greatest[first]:
                cause = greatest[first]
                width = end - first
                parts.append(
                    svg.box(_LEFT + first, _TOP, width, _HIGH, _COLOURS[cause], CAUSES[cause])
                )
            first = end
    return parts


def _axis(explanation: Explanation) -> list[str]:
    """Return five times below the bar, from the arrival to the end."""
    y, anchors = _TOP + _HIGH + 20, ("start", "middle", "middle", "middle", "end")
    parts = []
    for i, anchor in enumerate(anchors):
        label = seconds(explanation.duration_ns * i / 4) if i else "0"
        x = _LEFT + _BAR * i / 4
        parts.append(svg.text(x, y, label, size=svg.SMALL, anchor=anchor, fill=svg.FAINT))
    return parts
