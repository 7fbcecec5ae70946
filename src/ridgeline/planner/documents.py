"""A plan as text for other programs and for people: its tables and pictures, CSV, markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ridgeline.model.cost.shapes import active_params, weight_params
from ridgeline.planner.capacity.load import PERCENTILES, OfferedLoad, Slo
from ridgeline.planner.capacity.option import CapacityOption
from ridgeline.planner.capacity.report import bought_name, choices_svg, name_of, span_ms
from ridgeline.planner.catalogue import devices, offers
from ridgeline.planner.memory.pictures import memory_svg
from ridgeline.planner.memory.placement import Placement, length
from ridgeline.planner.offload import Offload, layers_in_words
from ridgeline.planner.plan import Plan
from ridgeline.system import report
from ridgeline.system.report import Cell, Row, Table, bold, figure, gb, gib


def as_csv(plan: Plan) -> str:
    """Return a row for each line of each device; of a plan for a load, for each choice."""
    if plan.load is not None:
        return report.as_csv([_flat(choice.as_dict()) for choice in plan.choices])
    if plan.offload is not None and plan.offload.is_asked:
        return report.as_csv(
            [
                {
                    "device": one.device,
                    "line": line.name,
                    "bytes": line.num_bytes,
                    "how": line.how,
                    "token_ms": round(1e3 * one.token_s, 3),
                }
                for one in plan.offload.uses
                for line in one.lines
            ]
        )
    return report.as_csv(
        [
            {
                "device": placement.device.id,
                "num_devices": placement.num_devices,
                "tp": placement.memory.tp,
                "pp": placement.memory.pp,
                "fits": placement.ledger.fits,
                "line": line.name,
                "bytes": line.num_bytes,
                "how": line.how,
            }
            for placement in plan.placements
            for line in placement.ledger.lines
        ]
    )


def as_svg(plan: Plan) -> str:
    """Return the picture: what fills one device; of a plan for a load, the choices.

    Raises ValueError if there is nothing to draw, as no choice can serve the load.
    """
    if plan.load is not None:
        return choices_svg(f"Choices for {plan.spec.name}", plan.answer, plan.choices)
    return memory_svg(f"Memory of {plan.spec.name} on one device", plan.placements)


def _flat(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice with one level: latencies become a column for each percentile."""
    row: dict[str, Any] = {}
    for name, value in choice.items():
        if name.endswith("_ms"):
            ends = ("mean", *PERCENTILES)
            columns = [f"{end}{side}" for end in ends for side in ("_low", "", "_high")]
            row |= {f"{name}_{column}": (value or {}).get(column) for column in columns}
        elif name == "spot":
            row["spot_replicas"] = value and value["replicas"]
            row["spot_usd_per_hour"] = value and value["usd_per_hour"]
        else:
            row[name] = value
    return row


def choices_table(
    choices: Sequence[CapacityOption],
    load: OfferedLoad,
    slos: Sequence[Slo],
    *,
    with_tokens: bool = True,
) -> Table:
    """Return a row for each choice, with the latencies that are bound.

    ``with_tokens`` adds what a million tokens cost.
    """
    bounds = list(dict.fromkeys((slo.metric, slo.percentile) for slo in slos))
    bounds = bounds or [("ttft", "p95"), ("tpot", "mean")]
    has_bounds = bool(slos) or load.rate_per_s is not None
    rows: list[Row] = [
        (
            name_of(choice),
            figure(choice.usd_per_hour, ",.2f"),
            *([figure(choice.usd_per_million_tokens, ",.2f")] if with_tokens else []),
            figure(choice.utilisation, ".0%"),
            *(span_ms(choice, metric, percentile) for metric, percentile in bounds),
            _holds(choice, has_bounds=has_bounds),
            choice.limited_by,
        )
        for choice in choices
    ]
    figures = ["USD/h", *(["USD/Mtok"] if with_tokens else []), "busy"]
    figures += [f"{metric} {percentile}, ms" for metric, percentile in bounds]
    return Table(("choice", *figures, "holds", "limited by"), rows, f"l{'r' * len(figures)}ll")


def purchases_table(choices: Sequence[CapacityOption]) -> Table:
    """Return a row for each thing to buy."""
    rows: list[Row] = [
        (
            bought_name(choice),
            f"{choice.bill.usd:,.0f}",
            f"{choice.bill.watts:,.0f}",
            figure(choice.usd_per_million_tokens, ",.2f"),
            figure(choice.power_usd_per_million_tokens, ",.2f"),
            figure(choice.per_user, ",.0f"),
            span_ms(choice, "ttft", "p95"),
            _holds(choice, has_bounds=True),
        )
        for choice in choices
        if choice.bill is not None
    ]
    figures = ("USD", "most W", "USD/Mtok", "of it power", "tokens/s each", "first token, ms")
    return Table(("what to buy", *figures, "holds"), rows, "lrrrrrrl")


def _holds(choice: CapacityOption, *, has_bounds: bool) -> Cell:
    if not has_bounds:
        return Cell("-")  # a closed loop asks for no rate: without a bound there is no question
    if not choice.meets_slo:
        return Cell("no", "red")
    by = "" if choice.latencies is not None and choice.latencies.is_simulated else " ~"
    return Cell(f"surely{by}", "green") if choice.surely else Cell(f"likely{by}", "yellow")


def _choices(plan: Plan, load: OfferedLoad) -> Iterator[str]:
    """Yield the answer and a row for each choice."""
    yield f"# Choices for {plan.spec.name}\n"
    yield f"{model_line(plan)}. {plan.answer}.\n"
    if any(choice.owned is not None for choice in plan.choices):
        yield from purchases_table(plan.choices).markdown()
    elif plan.choices:
        yield from choices_table(plan.choices, load, plan.slos).markdown()


def as_markdown(plan: Plan) -> Iterator[str]:
    """Yield a document: the answer, the devices, the lines."""
    yield from _memory(plan) if plan.load is None else _choices(plan, plan.load)
    notes = [*(f"assumed: {note}" for note in plan.assumptions), *plan.warnings]
    yield from ["", *(f"- {note}" for note in notes)]


def _memory(plan: Plan) -> Iterator[str]:
    yield f"# Memory of {plan.spec.name}\n"
    yield f"{model_line(plan)}. It {plan.answer}.\n"
    if not plan.asks_offload:
        if len(plan.placements) > 1:
            yield from devices_table(plan.placements).markdown()
            yield ""
        heads = (f"on {plan.best.device.id}", "size", "how")
        yield from Table(heads, ledger_rows(plan.best), "lrl").markdown()
    if plan.offload is not None:
        yield f"\n## {offload_heading(plan.offload)}\n"
        yield from offload_table(plan.offload).markdown()
        yield f"\n    {plan.offload.command}"
    if plan.published is not None:
        yield f"\nA well-known formula says {plan.published.in_words}.\n"
        yield from (f"- {reason}" for reason in plan.published.why_wrong)


def devices_table(placements: Sequence[Placement]) -> Table:
    """Return a row for each device: its memory, and what it leaves for contexts."""
    rows = [
        (
            p.device.id,
            str(p.num_devices),
            gib(p.ledger.capacity_bytes),
            gib(p.ledger.spare_bytes) if p.ledger.fits else "does not fit",
            length(p.max_context),
            f"{p.max_concurrency:,}",
        )
        for p in placements
    ]
    return Table(("device", "devices", "memory", "to spare", "longest", "sequences"), rows)


def ledger_rows(placement: Placement) -> list[Row]:
    """Return what takes the memory of a device: names, sizes, and how they are known."""
    *lines, margin = placement.ledger.lines
    needed = placement.ledger.needed_bytes
    return [
        *((line.name, gib(line.num_bytes), line.how) for line in lines),
        (*bold("needs", gib(needed)), gb(needed)),
        (margin.name, gib(margin.num_bytes), "stays free"),
    ]


def offload_heading(offload: Offload) -> str:
    """Return what its table is of: where the layers are."""
    return f"Over cards and RAM, by llama.cpp: {layers_in_words(offload.spread)}"


def offload_table(offload: Offload) -> Table:
    """Return what is on each device of a machine, and how long a token takes there."""
    rows: list[Row] = []
    for one in offload.uses:
        for number, line in enumerate(one.lines):
            rows.append(
                (one.device if number == 0 else "", line.name, gib(line.num_bytes), line.how)
            )
        of = "" if one.capacity_bytes is None else f" of {gib(one.capacity_bytes)}"
        together = bold("together", gib(one.total_bytes))
        rows.append(("", *together, f"{1e3 * one.token_s:.1f} ms a token{of}"))
    return Table(("on", "what", "size", "how"), rows, "llrl")


def model_line(plan: Plan) -> str:
    """Return the model's facts in a line: parameters, kinds of layers, format."""
    shape, best = plan.spec.shape, plan.best
    total, active = weight_params(shape), active_params(shape)
    params = f"{total / 1e9:,.2f} B parameters"
    if active < total:
        params += f", {active / 1e9:,.2f} B active"
    return f"{params}; {', '.join(shape.kinds)}; {best.storage.name}"


def catalogue_table() -> Table:
    """Return the catalogue: every whole device, and what is known of it."""
    heads = ("id", "name", "memory, GB", "GB/s", "16-bit TFLOPS", "W", "to buy, USD", "sure")
    rows = []
    for device in (one for one in devices().values() if not one.parent):
        peaks = device.peak_ops_per_s
        peak = peaks.get("bf16", peaks.get("f16"))
        offer = offers().get(device.id)
        f16_alone = "" if "bf16" in peaks else " (f16 alone)"
        rows.append(
            (
                f"`{device.id}`",
                device.name,
                f"{device.usable_bytes / 1e9:,.4g}",
                f"{device.read_bytes_per_s / 1e9:,.0f}",
                "" if peak is None else f"{peak / 1e12:,.4g}{f16_alone}",
                f"{device.watts:,.0f}" if device.watts else "",
                "" if offer is None else f"{offer.usd:,.0f} ({offer.kind}, {offer.date})",
                device.confidence,
            )
        )
    return Table(heads, rows, "llrrrrrl")
