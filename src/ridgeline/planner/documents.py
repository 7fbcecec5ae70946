"""A plan as text for other programs and for people: CSV, and markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from ridgeline.physics.shapes import active_params, weight_params
from ridgeline.planner.plan import Plan
from ridgeline.planner.words import gib, length, sentence


def as_csv(found: Plan) -> str:
    """Return a row for each line of each device."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["device", "num_devices", "tp", "pp", "fits", "line", "bytes", "how"])
    for placement in found.placements:
        setting = placement.setting
        head = [placement.device.id, placement.num_devices, setting.tp, setting.pp]
        fits = str(placement.ledger.fits).lower()
        for line in placement.ledger.lines:
            writer.writerow([*head, fits, line.name, line.num_bytes, line.how])
    return text.getvalue()


def as_markdown(found: Plan) -> Iterator[str]:
    """Yield a document: the answer, the devices, the lines."""
    yield f"# Memory of {found.subject.name}\n"
    yield f"{model_line(found)}. It {sentence(found.best)}.\n"
    if len(found.placements) > 1:
        yield "| device | devices | memory | to spare | longest context | sequences |"
        yield "|---|--:|--:|--:|--:|--:|"
        for p in found.placements:
            spare = gib(p.ledger.spare_bytes) if p.ledger.fits else "does not fit"
            yield (
                f"| {p.device.id} | {p.num_devices} | {gib(p.ledger.capacity_bytes)} | {spare} | "
                f"{length(p.max_context)} | {p.max_concurrency:,} |"
            )
        yield ""
    yield f"| on {found.best.device.id} | size | how |"
    yield "|---|--:|---|"
    for line in found.best.ledger.lines:
        yield f"| {line.name} | {gib(line.num_bytes)} | {line.how} |"
    yield f"| **total** | **{gib(found.best.ledger.total_bytes)}** | |"
    if found.published is not None:
        yield f"\nA well-known formula says {found.published.total_gb:.2f} GB.\n"
        yield from (f"- {reason}" for reason in found.published.why_wrong)
    notes = [*(f"assumed: {note}" for note in found.assumptions), *found.warnings]
    yield from ["", *(f"- {note}" for note in notes)]


def model_line(found: Plan) -> str:
    """Return the model's facts in a line: parameters, kinds of layers, format."""
    shape, best = found.subject.shape, found.best
    total, active = weight_params(shape), active_params(shape)
    params = f"{total / 1e9:,.2f} B parameters"
    if active < total:
        params += f", {active / 1e9:,.2f} B active"
    return f"{params}; {', '.join(shape.kinds)}; {best.storage.name}"
