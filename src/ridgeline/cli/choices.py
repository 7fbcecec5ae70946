"""Choices for people: a table, the cheapest that holds the load first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.planner.capacity.load import OfferedLoad, Slo
from ridgeline.planner.capacity.option import SHOWN, CapacityOption
from ridgeline.planner.capacity.report import bought_name, name_of, per_second, span_ms
from ridgeline.system.terminal import table_of_numbers

_MOST_ROWS = 12
_PER_MILLION = "USD/Mtok: of a million tokens of answers. "
_WIDE = 120  # columns of a terminal


def show_choices(
    choices: Sequence[CapacityOption], load: OfferedLoad, slos: Sequence[Slo], console: Console
) -> None:
    """Print the load, and a row for each of the best choices."""
    console.print(f"{_load_line(load)}\n")
    columns = list(dict.fromkeys((slo.metric, slo.percentile) for slo in slos)) or [
        ("ttft", "p95"),
        ("tpot", "mean"),
    ]
    is_wide = console.width >= _WIDE
    table = Table(box=None, pad_edge=False)
    table.add_column("choice", no_wrap=is_wide)
    for name in ("USD/h", *(["USD/Mtok"] if is_wide else []), "busy"):
        table.add_column(name, justify="right")
    for metric, percentile in columns:
        table.add_column(
            f"{metric} {percentile}, ms", justify="right", no_wrap=is_wide, min_width=11
        )
    table.add_column("holds", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    for choice in choices[:_MOST_ROWS]:
        cost, per_million = choice.usd_per_hour, choice.usd_per_million_tokens
        table.add_row(
            escape(name_of(choice)),
            "-" if cost is None else f"{cost:,.2f}",
            *(["-" if per_million is None else f"{per_million:,.2f}"] if is_wide else []),
            "-" if choice.utilisation is None else f"{choice.utilisation:.0%}",
            *(span_ms(choice, metric, percentile) for metric, percentile in columns),
            _holds(choice, has_bounds=bool(slos) or load.rate_per_s is not None),
            choice.limited_by,
        )
    console.print(table)
    num_hidden = len(choices) - _MOST_ROWS
    hint = f"{num_hidden} more: --format json. " if num_hidden > 0 else ""
    console.print(
        f"[dim]{hint}In brackets: the range of nine in ten times; ? if the slow end cannot serve "
        f"the load. {_PER_MILLION if is_wide else ''}Rows with ~ are by formula, the others "
        f"simulated.[/]\n"
    )


def show_purchases(choices: Sequence[CapacityOption], load: OfferedLoad, console: Console) -> None:
    """Print the load, and a row for each of the best things to buy."""
    console.print(f"{_load_line(load)}\n")
    names = ("USD", "most W", "USD/Mtok", "of it power", "tokens/s each", "first token, ms")
    table = table_of_numbers("what to buy", *names)
    table.add_column("holds", no_wrap=True)
    for choice in choices[:_MOST_ROWS]:
        bill, million = choice.bill, choice.usd_per_million_tokens
        power, speed = choice.power_usd_per_million_tokens, choice.per_user
        assert bill is not None
        table.add_row(
            escape(bought_name(choice)),
            f"{bill.usd:,.0f}",
            f"{bill.watts:,.0f}",
            "-" if million is None else f"{million:,.2f}",
            "-" if power is None else f"{power:,.2f}",
            "-" if speed is None else f"{speed:,.0f}",
            span_ms(choice, "ttft", "p95"),
            _holds(choice, has_bounds=True),
        )
    console.print(table)
    console.print(
        "[dim]Lowest total cost first: the price, spread over the hours of use, and power. "
        "USD/Mtok: per million tokens of answers. Rows with ~ are by formula.[/]\n"
    )


def _holds(choice: CapacityOption, *, has_bounds: bool) -> str:
    if not has_bounds:
        return "-"  # clients of a closed loop ask for no rate: without a bound there is no question
    if not choice.meets_slo:
        return "[red]no[/]"
    by = "" if choice.seen is not None and choice.seen.is_simulated else " ~"
    return ("[green]surely[/]" if choice.surely else "[yellow]likely[/]") + by


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
    table = table_of_numbers(
        "on spot machines", "replicas", "enough up", "USD/h", "on demand", "goodput/s", "again",
        "lost",
    )  # fmt: skip
    for choice, spot in rows:
        table.add_row(
            escape(name_of(choice)),
            f"{spot.replicas} for {spot.needed}",
            f"{spot.availability:.2%}",
            "-" if spot.usd_per_hour is None else f"{spot.usd_per_hour:,.2f}",
            "-" if spot.usd_per_hour_on_demand is None else f"{spot.usd_per_hour_on_demand:,.2f}",
            "-" if spot.goodput_per_s is None else f"{spot.goodput_per_s:,.4g}",
            "-" if spot.share_again is None else f"{100 * spot.share_again:.2g} %",
            "-" if spot.tokens_lost is None else f"{spot.tokens_lost:,}",
        )
    console.print(table)
    first = rows[0][1]
    console.print(
        f"[dim]For the first choice: {first.evictions_per_hour:g} evictions per machine and hour, "
        f"{first.notice_s:g} s of notice, {first.start_s:,.0f} s until a new one is ready. "
        f"Again: the share of all work that is computed again because of evictions, if replicas "
        f"drain; lost: tokens of answers per eviction, if they do not; - if none was simulated."
        f"[/]\n"
    )
