"""A plan as text for other programs and for people: CSV, and markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.model.cost.shapes import active_params, weight_params
from ridgeline.planner.capacity.load import PERCENTILES
from ridgeline.planner.capacity.report import name_of, span_ms
from ridgeline.planner.catalogue import devices, offers
from ridgeline.planner.memory.placement import length, sentence
from ridgeline.planner.plan import Plan
from ridgeline.system import report as tables
from ridgeline.system.report import decimal_size, gib


def as_csv(plan: Plan) -> str:
    """Return a row for each line of each device; of a plan for a load, for each choice."""
    if plan.load is not None:
        return tables.as_csv([_flat(choice.as_dict()) for choice in plan.choices])
    return tables.as_csv(
        [
            {
                "device": placement.device.id,
                "num_devices": placement.num_devices,
                "tp": placement.memory.tp,
                "pp": placement.memory.pp,
                "fits": str(placement.ledger.fits).lower(),
                "line": line.name,
                "bytes": line.num_bytes,
                "how": line.how,
            }
            for placement in plan.placements
            for line in placement.ledger.lines
        ]
    )


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
            row[name] = str(value).lower() if isinstance(value, bool) else value
    return row


def _choices(plan: Plan) -> Iterator[str]:
    """Yield the answer and a row for each choice."""
    yield f"# Choices for {plan.spec.name}\n"
    yield f"{model_line(plan)}. {plan.answer}.\n"
    yield "| choice | USD/h | busy | ttft p95, ms | tpot p95, ms | holds | limited by |"
    yield "|---|--:|--:|--:|--:|---|---|"
    for choice in plan.choices:
        cost = "" if choice.usd_per_hour is None else f"{choice.usd_per_hour:,.2f}"
        busy = "" if choice.utilisation is None else f"{choice.utilisation:.0%}"
        holds = "surely" if choice.surely else "likely" if choice.meets_slo else "no"
        times = " | ".join(span_ms(choice, metric, "p95") for metric in ("ttft", "tpot"))
        yield f"| {name_of(choice)} | {cost} | {busy} | {times} | {holds} | {choice.limited_by} |"


def as_markdown(plan: Plan) -> Iterator[str]:
    """Yield a document: the answer, the devices, the lines."""
    yield from _choices(plan) if plan.load is not None else _memory(plan)
    notes = [*(f"assumed: {note}" for note in plan.assumptions), *plan.warnings]
    yield from ["", *(f"- {note}" for note in notes)]


def _memory(plan: Plan) -> Iterator[str]:
    yield f"# Memory of {plan.spec.name}\n"
    yield f"{model_line(plan)}. It {sentence(plan.best)}.\n"
    if len(plan.placements) > 1:
        yield "| device | devices | memory | to spare | longest context | sequences |"
        yield "|---|--:|--:|--:|--:|--:|"
        for p in plan.placements:
            spare = gib(p.ledger.spare_bytes) if p.ledger.fits else "does not fit"
            yield (
                f"| {p.device.id} | {p.num_devices} | {gib(p.ledger.capacity_bytes)} | {spare} | "
                f"{length(p.max_context)} | {p.max_concurrency:,} |"
            )
        yield ""
    yield f"| on {plan.best.device.id} | size | how |"
    yield "|---|--:|---|"
    *lines, margin = plan.best.ledger.lines
    for line in lines:
        yield f"| {line.name} | {gib(line.num_bytes)} | {line.how} |"
    needed = plan.best.ledger.needed_bytes
    yield f"| **needs** | **{gib(needed)}** | {decimal_size(needed)} |"
    yield f"| {margin.name} | {gib(margin.num_bytes)} | stays free |"
    if plan.published is not None:
        said = plan.published
        yield (
            f"\nA well-known formula says {said.total_gb:.2f} GB: weights {said.weights_gb:.2f}, "
            f"KV {said.kv_gb:.2f}, activations {said.activations_gb:.2f}; without flash attention "
            f"{said.plain_total_gb:.2f} GB, of which activations {said.plain_activations_gb:.2f}.\n"
        )
        yield from (f"- {reason}" for reason in plan.published.why_wrong)


def model_line(plan: Plan) -> str:
    """Return the model's facts in a line: parameters, kinds of layers, format."""
    shape, best = plan.spec.shape, plan.best
    total, active = weight_params(shape), active_params(shape)
    params = f"{total / 1e9:,.2f} B parameters"
    if active < total:
        params += f", {active / 1e9:,.2f} B active"
    return f"{params}; {', '.join(shape.kinds)}; {best.storage.name}"


def devices_table() -> str:
    """Return a markdown table of the catalogue: every whole device, and what is known of it."""
    heads = ("id", "name", "memory, GB", "GB/s", "16-bit TFLOPS", "W", "to buy, USD", "sure")
    rows = [f"| {' | '.join(heads)} |", "|---|---|--:|--:|--:|--:|--:|---|"]
    for device in (one for one in devices().values() if not one.parent):
        peaks = device.peak_ops_per_s
        peak = peaks.get("bf16", peaks.get("f16"))
        offer = offers().get(device.id)
        cells = (
            f"`{device.id}`",
            device.name,
            f"{device.usable_bytes / 1e9:,.4g}",
            f"{device.read_bytes_per_s / 1e9:,.0f}",
            ""
            if peak is None
            else f"{peak / 1e12:,.4g}{'' if 'bf16' in peaks else ' (f16 alone)'}",
            f"{device.watts:,.0f}" if device.watts else "",
            "" if offer is None else f"{offer.usd:,.0f} ({offer.kind}, {offer.date})",
            device.confidence,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
