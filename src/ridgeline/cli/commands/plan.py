"""The command ``plan``: what a model needs in memory, and what fits on which device."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.cli.choices import show_choices, show_purchases, show_spot
from ridgeline.cli.flags import UsageError, flags
from ridgeline.engine.setup.home import stores
from ridgeline.engine.setup.progress import count_bar, say
from ridgeline.planner import LoadFlags, Plan, PlanFlags, plan
from ridgeline.planner.capacity.report import choices_svg
from ridgeline.planner.documents import as_csv, as_markdown, devices_table, model_line
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.memory.pictures import COLOURS, memory_svg
from ridgeline.planner.memory.placement import Placement, length, parts_of
from ridgeline.planner.memory.published_formula import Published
from ridgeline.system.machine import write_text
from ridgeline.system.report import decimal_size, gib
from ridgeline.system.terminal import console, table_of_numbers

_BAR_CELLS = 40
_PORT = 8000
# Shades tell the parts apart where there is no colour.
_SHADES = {
    "weights": "\u2588", "KV cache": "\u2593", "activations": "\u2592", "framework": "\u2591",
    "margin": "\u00b7",
}  # fmt: skip


class PlanFormat(StrEnum):
    """How a plan is printed."""

    table = "table"
    json = "json"
    csv = "csv"
    markdown = "markdown"


_LEGEND = "  ".join(f"[{COLOURS[name]}]{shade}[/] {name}" for name, shade in _SHADES.items())
Model = Annotated[
    str | None,
    typer.Argument(
        help="A config.json, a directory, a .gguf file, or a model's name, here or on the hub."
    ),
]


@flags("asked", LoadFlags)
@flags("plan_flags", PlanFlags)
def plan_command(
    model: Model = None,
    compare_published: Annotated[
        bool,
        typer.Option(
            "--compare-published",
            help="Also show what a well-known formula says, and where it errs.",
        ),
    ] = False,
    form: Annotated[PlanFormat, typer.Option("--format", help="Output format.")] = PlanFormat.table,
    out: Annotated[Path | None, typer.Option(help="Also draw the plan to this .svg file.")] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve a web page for plans instead.")] = False,
    port: Annotated[int, typer.Option(help="Port of that page; 0 chooses a free one.")] = _PORT,
    list_devices: Annotated[
        bool, typer.Option("--list-devices", help="List the known devices instead.")
    ] = False,
    *,
    plan_flags: PlanFlags,
    asked: LoadFlags,
) -> None:
    """Say how much memory a model needs and what fits; for a load, which devices and the cost.

    Any config.json will do: of models that this engine does not run as well. No weight is loaded.
    """
    is_asked = compare_published or out or form is not PlanFormat.table
    is_asked = is_asked or (plan_flags, asked) != (PlanFlags(), LoadFlags())
    if port != _PORT and not web:
        raise UsageError("--port is about the page for plans: give --web")
    if web:
        if is_asked or list_devices:
            raise UsageError("the page asks for a plan's flags itself: beside --web give no others")
        _serve(model, port)
        return
    if list_devices:
        if is_asked or model is not None:
            raise UsageError("--list-devices lists the catalogue: give nothing else")
        print(devices_table())
        return
    if model is None:
        raise UsageError("name a model or give a config.json, or open the page with --web")
    if out is not None and out.suffix.lower() != ".svg":
        raise UsageError(f"--out {out}: the picture is SVG, so its name ends in .svg")
    values = {f.name: getattr(of, f.name) for of in (plan_flags, asked) for f in fields(of)}
    with count_bar("Simulating", note="choices") as report:
        planned = plan(model, compare_published=compare_published, report=report, **values)
    match form:
        case PlanFormat.json:
            print(json.dumps(planned.as_dict()))
        case PlanFormat.csv:
            print(as_csv(planned), end="")
        case PlanFormat.markdown:
            print("\n".join(as_markdown(planned)))
        case PlanFormat.table:
            show(planned, console(160, markup=True))
    if out is not None:  # last: where there is nothing to draw, the answer stands above
        sys.stdout.flush()
        write_text(out, _drawn(planned))
        say(f"drawn into {out}")


def _drawn(planned: Plan) -> str:
    if planned.load is not None:
        title = f"Choices for {planned.spec.name}"
        return choices_svg(title, planned.answer, planned.choices)
    return memory_svg(f"Memory of {planned.spec.name} on one device", planned.placements)


def _serve(model: str | None, port: int) -> None:
    from ridgeline.serve.http.options import ServeOptions  # a web framework would slow the command
    from ridgeline.serve.routes.plans import serve_plans

    serve_plans(read_model_spec(model, stores()) if model else None, ServeOptions(port=port))


def show(planned: Plan, console: Console) -> None:
    """Print a plan for people: devices, bar, lines, and last the sentence that answers."""
    console.print(f"[bold]{escape(planned.spec.name)}[/]  {escape(model_line(planned))}\n")
    if planned.load is not None:
        if any(choice.owned is not None for choice in planned.choices):
            show_purchases(planned.choices, planned.load, console)
        else:
            show_choices(planned.choices, planned.load, planned.slos, console)
            show_spot(planned.choices, console)
    elif len(planned.placements) > 1:
        _show_devices(planned.placements, console)
    best = planned.best
    each = f", each of {best.num_devices}" if best.num_devices > 1 else ""
    console.print(
        f"[bold]{escape(best.device.id)}[/]{each}: {gib(best.ledger.capacity_bytes)}, rules of "
        f"{best.memory.engine.name}"
    )
    console.print(f"  {_bar(best)}\n  {_LEGEND}\n")
    if planned.load is None:
        console.print(_lines_table(best))
        console.print()
    if planned.published is not None:
        console.print(_published_line(planned.published))
    console.print(_notes_table(planned))
    is_good = best.ledger.fits and (not planned.choices or planned.choices[0].meets_slo)
    colour = "green" if is_good else "red"
    console.print(f"\n[{colour}]{escape(planned.answer)}[/]")


def _bar(placement: Placement) -> str:
    """Return a bar in one scale with the device, whose end is a line."""
    ledger = placement.ledger
    scale = _BAR_CELLS / max(ledger.capacity_bytes, ledger.total_bytes, 1)
    cells: list[str] = []
    done = 0
    for name, size in parts_of(ledger):
        done += size
        cells += [f"[{COLOURS[name]}]{_SHADES[name]}[/]"] * (round(done * scale) - len(cells))
    end = round(ledger.capacity_bytes * scale)
    cells += [" "] * (end - len(cells))
    return "".join([*cells[:end], "|", *cells[end:]])


def _lines_table(placement: Placement) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(min_width=34)
    table.add_column(justify="right", min_width=10)
    table.add_column(style="dim")
    *lines, margin = placement.ledger.lines
    for line in lines:
        table.add_row(f"  {escape(line.name)}", gib(line.num_bytes), line.how)
    needed = placement.ledger.needed_bytes
    table.add_row("  [bold]needs[/]", f"[bold]{gib(needed)}[/]", decimal_size(needed))
    table.add_row(f"  {escape(margin.name)}", gib(margin.num_bytes), "stays free")
    return table


def _show_devices(placements: tuple[Placement, ...], console: Console) -> None:
    """Print a row for each device on which it fits; the others are only named."""
    names = ("devices", "memory", "to spare", "longest", "sequences")
    table = table_of_numbers("device", *names)
    for placement in placements:
        if placement.ledger.fits:
            table.add_row(
                placement.device.id,
                str(placement.num_devices),
                gib(placement.ledger.capacity_bytes),
                gib(placement.ledger.spare_bytes),
                length(placement.max_context),
                f"{placement.max_concurrency:,}",
            )
    if table.row_count:
        memory = placements[0].memory
        console.print(table)
        console.print(
            f"[dim]Memory of one device; the longest context of {memory.concurrency:,}; how many "
            f"sequences of {memory.context:,} tokens.[/]"
        )
    if others := [p.device.id for p in placements if not p.ledger.fits]:
        console.print(f"It does not fit on: {escape(', '.join(others))}")
    console.print()


def _notes_table(planned: Plan) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column()
    if planned.published is not None:
        for reason in planned.published.why_wrong:
            table.add_row("[dim]it errs[/]", escape(reason))
    for note in planned.assumptions:
        table.add_row("[dim]assumed[/]", escape(note))
    for note in planned.warnings:
        table.add_row("[yellow]note[/]", escape(note))
    return table


def _published_line(p: Published) -> str:
    return (
        f"[bold]A well-known formula says[/]  {p.total_gb:.2f} GB: weights {p.weights_gb:.2f}, KV "
        f"{p.kv_gb:.2f}, activations {p.activations_gb:.2f}; without flash attention "
        f"{p.plain_total_gb:.2f} GB, of which activations {p.plain_activations_gb:.2f}"
    )
