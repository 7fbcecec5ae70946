"""The command ``plan``: what a model needs in memory, and what fits on which device."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from ridgeline.cli.flags import UsageError, flags
from ridgeline.engine.setup.home import stores
from ridgeline.engine.setup.progress import count_bar, say
from ridgeline.planner import LoadFlags, Plan, PlanFlags, plan
from ridgeline.planner.capacity.load import OfferedLoad, Slo
from ridgeline.planner.capacity.option import SHOWN, CapacityOption
from ridgeline.planner.capacity.report import name_of, per_second
from ridgeline.planner.documents import (
    as_csv,
    as_markdown,
    as_svg,
    catalogue_table,
    choices_table,
    devices_table,
    ledger_rows,
    model_line,
    offload_heading,
    offload_table,
    purchases_table,
)
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.memory.pictures import COLOURS
from ridgeline.planner.memory.placement import Placement, parts_of
from ridgeline.system.machine import write_text
from ridgeline.system.report import Cell, Table, figure, gib
from ridgeline.system.terminal import console, drawn

_BAR_CELLS = 40
_MOST_ROWS = 12  # of choices
_PER_MILLION = "USD/Mtok: of a million tokens of answers. "
_PORT = 8000
_WIDE = 120  # columns of a terminal
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


@flags("load_flags", LoadFlags)
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
    load_flags: LoadFlags,
) -> None:
    """Say how much memory a model needs and what fits; for a load, which devices and the cost.

    Any config.json will do: of models that this engine does not run as well. No weight is loaded.
    """
    is_asked = compare_published or out or form is not PlanFormat.table
    is_asked = is_asked or (plan_flags, load_flags) != (PlanFlags(), LoadFlags())
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
        print("\n".join(catalogue_table().markdown()))
        return
    if model is None:
        raise UsageError("name a model or give a config.json, or open the page with --web")
    if out is not None and out.suffix.lower() != ".svg":
        raise UsageError(f"--out {out}: the picture is SVG, so its name ends in .svg")
    values = {f.name: getattr(of, f.name) for of in (plan_flags, load_flags) for f in fields(of)}
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
        write_text(out, as_svg(planned))
        say(f"drawn into {out}")


def _serve(model: str | None, port: int) -> None:
    from ridgeline.serve.http.options import ServeOptions  # a web framework would slow the command
    from ridgeline.serve.routes.plans import serve_plans

    serve_plans(read_model_spec(model, stores()) if model else None, ServeOptions(port=port))


def show(planned: Plan, console: Console) -> None:
    """Print a plan for people: devices, bar, lines, and last the sentence that answers."""
    console.print(f"[bold]{escape(planned.spec.name)}[/]  {escape(model_line(planned))}\n")
    if planned.load is not None:
        if any(choice.owned is not None for choice in planned.choices):
            _show_purchases(planned.choices, planned.load, console)
        else:
            _show_choices(planned.choices, planned.load, planned.slos, console)
            show_spot(planned.choices, console)
    elif len(planned.placements) > 1 and not planned.asks_offload:
        _show_devices(planned.placements, console)
    if not planned.asks_offload:
        _show_one(planned, console)
    if planned.offload is not None:
        console.print(f"[bold]{offload_heading(planned.offload)}[/]")
        console.print(drawn(offload_table(planned.offload)))
        console.print()
    if planned.published is not None:
        console.print(f"[bold]A well-known formula says[/]  {planned.published.in_words}")
    console.print(drawn(Table((), _notes(planned), "ll")))
    is_good = planned.best.ledger.fits or planned.asks_offload
    is_good = is_good and (not planned.choices or planned.choices[0].meets_slo)
    colour = "green" if is_good else "red"
    console.print(f"\n[{colour}]{escape(planned.answer)}[/]")
    if planned.offload is not None:  # whole, however narrow the terminal is: it is copied
        console.print(f"\n    {escape(planned.offload.command)}", soft_wrap=True)


def _show_one(planned: Plan, console: Console) -> None:
    """Print the memory of one device: a bar and its lines."""
    best = planned.best
    each = f", each of {best.num_devices}" if best.num_devices > 1 else ""
    console.print(
        f"[bold]{escape(best.device.id)}[/]{each}: {gib(best.ledger.capacity_bytes)}, rules of "
        f"{best.memory.engine.name}"
    )
    console.print(f"  {_bar(best)}\n  {_LEGEND}\n")
    if planned.load is None:
        console.print(_ledger(best))
        console.print()


def _show_choices(
    choices: Sequence[CapacityOption], load: OfferedLoad, slos: Sequence[Slo], console: Console
) -> None:
    """Print the load, and a row for each of the best choices."""
    console.print(f"{_load_line(load)}\n")
    if not choices:  # then the answer below says why
        return
    is_wide = console.width >= _WIDE
    table = choices_table(choices[:_MOST_ROWS], load, slos, with_tokens=is_wide)
    num = len(table.heads)
    shown = drawn(table, whole=range(num) if is_wide else (num - 2, num - 1))
    for column in shown.columns[3 + is_wide : -2]:
        column.min_width = 11
    console.print(shown)
    num_hidden = len(choices) - _MOST_ROWS
    hint = f"{num_hidden} more: --format json. " if num_hidden > 0 else ""
    console.print(
        f"[dim]{hint}In brackets: the range of nine in ten times; ? if the slow end cannot serve "
        f"the load. {_PER_MILLION if is_wide else ''}Rows with ~ are by formula, the others "
        f"simulated.[/]\n"
    )


def _show_purchases(choices: Sequence[CapacityOption], load: OfferedLoad, console: Console) -> None:
    """Print the load, and a row for each of the best things to buy."""
    console.print(f"{_load_line(load)}\n")
    console.print(drawn(purchases_table(choices[:_MOST_ROWS]), whole=(7,)))
    console.print(
        "[dim]Lowest total cost first: the price, spread over the hours of use, and power. "
        "USD/Mtok: per million tokens of answers. Rows with ~ are by formula.[/]\n"
    )


def _load_line(load: OfferedLoad) -> str:
    lengths = f"prompts of {load.mean_prompt:,.0f} tokens, answers of {load.mean_new:,.0f}"
    if load.concurrency is not None:
        clients = "one client" if load.concurrency == 1 else f"{load.concurrency:,} clients"
        return f"{clients} at a time; {lengths}, in the mean"
    return f"{per_second(load.rate_per_s or 0)}; {lengths}, in the mean"


def show_spot(choices: Sequence[CapacityOption], console: Console) -> None:
    """Print what machines that can be taken away would do, of the best choices."""
    rows = [(choice, choice.spot) for choice in choices if choice.spot is not None][:SHOWN]
    if not rows:
        return
    heads = (
        "on spot machines", "replicas", "enough up", "USD/h", "on demand", "goodput/s", "again",
        "lost",
    )  # fmt: skip
    cells = [
        (
            name_of(choice),
            f"{spot.replicas} for {spot.needed}",
            f"{spot.availability:.2%}",
            figure(spot.usd_per_hour, ",.2f"),
            figure(spot.usd_per_hour_on_demand, ",.2f"),
            figure(spot.goodput_per_s, ",.4g"),
            "-" if spot.share_again is None else f"{100 * spot.share_again:.2g} %",
            figure(spot.tokens_lost, ","),
        )
        for choice, spot in rows
    ]
    console.print(drawn(Table(heads, cells)))
    first = rows[0][1]
    console.print(
        f"[dim]For the first choice: {first.evictions_per_hour:g} evictions per machine and hour, "
        f"{first.notice_s:g} s of notice, {first.start_s:,.0f} s until a new one is ready. "
        f"Again: the share of all work that is computed again because of evictions, if replicas "
        f"drain; lost: tokens of answers per eviction, if they do not; - if none was simulated."
        f"[/]\n"
    )


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


def _ledger(placement: Placement) -> Padding:
    table = drawn(Table((), ledger_rows(placement), "lrl"))
    names, sizes, how = table.columns
    names.min_width, sizes.min_width, how.style = 32, 10, "dim"
    return Padding(table, (0, 0, 0, 2), expand=False)


def _show_devices(placements: tuple[Placement, ...], console: Console) -> None:
    """Print a row for each device on which it fits; the others are only named."""
    if fitting := [placement for placement in placements if placement.ledger.fits]:
        memory = placements[0].memory
        console.print(drawn(devices_table(fitting)))
        console.print(
            f"[dim]Memory of one device; the longest context of {memory.concurrency:,}; how many "
            f"sequences of {memory.context:,} tokens.[/]"
        )
    if others := [p.device.id for p in placements if not p.ledger.fits]:
        console.print(f"It does not fit on: {escape(', '.join(others))}")
    console.print()


def _notes(planned: Plan) -> list[tuple[Cell, str]]:
    errors = planned.published.why_wrong if planned.published is not None else ()
    return [
        *((Cell("it errs", "dim"), reason) for reason in errors),
        *((Cell("assumed", "dim"), note) for note in planned.assumptions),
        *((Cell("note", "yellow"), note) for note in planned.warnings),
    ]
