"""What n slices of a card would do, against the whole one, from what one or more of them did.

A slice, as of NVIDIA's MIG, is named by its part of the card's compute, such as 2/7. Making images
is bound by compute, so what was not measured is assumed to go with that part, from the nearest
slice that was measured; each row says which it is. It knows nothing of devices: how much memory a
slice has, and whether a model fits into it, is for ``ridgeline plan``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ridgeline.engine.setup.terminal import table_of_numbers

_MIG = (1, 2, 3, 4, 7)  # sevenths that profiles of MIG have


@dataclass(frozen=True, slots=True)
class Slice:
    """A measurement on ``part`` of ``whole`` parts of a card."""

    part: int
    whole: int
    images_per_s: float
    seconds_per_image: float


def parse_slice(text: str) -> tuple[int, int]:
    """Read a part of a card's compute, such as ``2/7``; ValueError if it is none."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match and 1 <= int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise ValueError(f"--slices {text} is not a part of a card such as 2/7, or 7/7 for all of it")


def plan_slices(measured: Sequence[Slice]) -> list[dict[str, Any]]:
    """Return a row for each slice: how many fit on a card, and what they do together.

    Args:
        measured: what was measured; the first is of the card that is planned. A run on the whole
            card may be 1/1.

    Raises:
        ValueError: if a run is of a card that is cut into another number of parts.
    """
    whole = measured[0].whole
    known: dict[int, Slice] = {}
    for run in measured:
        if run.part != run.whole and run.whole != whole:
            raise ValueError(
                f"one run was on {run.part}/{run.whole} of a card, another on "
                f"{measured[0].part}/{whole}: a plan is for one kind of card"
            )
        known.setdefault(whole if run.part == run.whole else run.part, run)
    parts = sorted({*known, whole, *(_MIG if whole == 7 else ())})
    rates = {part: _per_s(part, known) for part in parts}
    return [
        {
            "slice": f"{part}/{whole}",
            "per_card": whole // part,
            "images_per_s_of_each": round(rates[part], 4),
            "images_per_s_of_card": round(whole // part * rates[part], 4),
            "seconds_per_image": round(_seconds(part, known), 3),
            "ratio_to_whole_card": round(whole // part * rates[part] / rates[whole], 3),
            "source": "measured"
            if part in known
            else f"assumed from {_nearest(part, known)}/{whole}",
        }
        for part in parts
    ]


def _nearest(part: int, known: dict[int, Slice]) -> int:
    return min(known, key=lambda one: (abs(one - part), one))


def _per_s(part: int, known: dict[int, Slice]) -> float:
    near = _nearest(part, known)
    return known[near].images_per_s * part / near


def _seconds(part: int, known: dict[int, Slice]) -> float:
    near = _nearest(part, known)
    return known[near].seconds_per_image * near / part


def slices_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the plan as a table for the terminal."""
    table = table_of_numbers("slice", "a card", "images/s each", "a card's", "s/image", "to whole")
    table.add_column()
    for row in rows:
        table.add_row(
            row["slice"],
            str(row["per_card"]),
            f"{row['images_per_s_of_each']:.3g}",
            f"{row['images_per_s_of_card']:.3g}",
            f"{row['seconds_per_image']:.3g}",
            f"{row['ratio_to_whole_card']:.2f}",
            row["source"],
        )
    return table
