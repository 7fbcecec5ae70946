"""``ridgeline sweep``: the same load under other options, each simulated, and the best.

Simulations run in processes of their own, one for each core. The picture of a sweep has a row for
each combination, and a column of bars for each figure.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ridgeline.bench.load.stats import LIMIT_NAMES, parse_limits
from ridgeline.bench.out_file import check_place
from ridgeline.bench.simulate.main import Scenario, Simulator, check_fleet, seeded
from ridgeline.bench.simulate.predicted import SimulatedRun
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.progress import count_bar
from ridgeline.foresight.simulator.workload import Workload
from ridgeline.planner import PlanFlags
from ridgeline.planner.memory.flags import OF_DEVICE
from ridgeline.system import svg
from ridgeline.system.machine import usable_cpus, write_text
from ridgeline.system.report import Cell, Table, as_csv, figure
from ridgeline.system.terminal import console, drawn

_COLUMNS = {  # of the table: what is shown, and where it stands in a summary
    "tok/s": ("output_tokens_per_s",),
    "req/s": ("request_throughput_per_s",),
    "TTFT p50": ("ttft_from_send", "p50_ms"),
    "TTFT p95": ("ttft_from_send", "p95_ms"),
    "TPOT p50": ("tpot_excl_first", "p50_ms"),
    "TPOT p95": ("tpot_excl_first", "p95_ms"),
    "E2E p95": ("e2e", "p95_ms"),
    "goodput/s": ("goodput", "requests_per_s"),
    "servers ended": ("fleet", "kills"),
    "moved": ("fleet", "requests_moved"),
    "cached share": ("fleet", "share_cached"),
    "again share": ("fleet", "share_again"),
}
_TRUTHS = {"true": True, "false": False}
_NOT_SWEPT = ("trace", "seed", "backend")
_OF_DEVICE = (*OF_DEVICE, "dtype", "kv_cache_dtype")  # where one is named
_OF_FLEET: dict[str, Any] = dict.fromkeys(("router", "drafts", "kills_per_minute"), str)
_OF_FLEET |= {"replicas": int}
# Of the picture.
_LEFT, _COLUMN, _BAR, _ROW, _TOP = 24, 190, 120, 26, 96
_PLAIN = "#9db8e8"
_BEST = "#2da44e"
_UNITS = {"tok/s": "tokens/s", "req/s": "requests/s", "goodput/s": "goodput, requests/s"}


def sweep_loads(
    scenario: Scenario,
    options: Options,
    sweeps: Sequence[str],
    objective: str,
    csv_file: Path | None,
    out: Path | None = None,
) -> None:
    """Simulate every combination of values; print a table, and a document in the last line.

    Args:
        question: what is the same in all.
        options: of the engine, likewise.
        sweeps: texts like ``max_num_seqs=16,64``.
        objective: what is best: ``throughput``, ``goodput``, or a latency such as ``ttft:p95``.
        csv_file: gets the table.
        out: gets a picture of it, an SVG.

    Raises ValueError if a name, a value or the objective is none.
    """
    for path in (csv_file, out):
        if path is not None:
            check_place(path)
    where, best = parse_objective(objective)
    if where[0] == "goodput" and not scenario.goodput:
        raise ValueError("--objective goodput needs limits: --goodput ttft:500 --goodput tpot:60")
    is_on_device = scenario.plan_flags.names_device
    values = dict(parse_sweep(text, is_on_device=is_on_device) for text in sweeps)
    scenario, simulator = seeded(scenario), Simulator(scenario)
    settings = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    cases = [_case(simulator, scenario, options, setting) for setting in settings]
    limits_ms = parse_limits(scenario.goodput)
    with count_bar("Simulating", note="combinations") as report:
        summaries = _run(cases, limits_ms, report)
    results = [{n: _at(one, place) for n, place in _COLUMNS.items()} for one in summaries]
    winner = best(range(len(summaries)), key=lambda i: _at(summaries[i], where) or 0.0)
    _print(settings, results, winner, objective)
    if csv_file is not None:
        rows = [setting | figures for setting, figures in zip(settings, results, strict=True)]
        write_text(csv_file, as_csv(rows))
    if out is not None:
        shown = [_short_of(setting) for setting in settings]
        columns = {name: [row[name] for row in results] for name in _COLUMNS}
        write_text(out, sweep_svg(shown, columns, winner, objective))
    document = [{"settings": setting} | row for setting, row in zip(settings, results, strict=True)]
    print(json.dumps({"objective": objective, "best": settings[winner], "sweep": document}))


def parse_objective(text: str) -> tuple[tuple[str, ...], Any]:
    """Return where an objective stands in a summary, and ``max`` or ``min``."""
    if text == "throughput":
        return ("output_tokens_per_s",), max
    if text == "goodput":
        return ("goodput", "requests_per_s"), max
    name, _, column = text.partition(":")
    if name in LIMIT_NAMES and column in ("mean", "p50", "p90", "p95", "p99"):
        return (LIMIT_NAMES[name], f"{column}_ms"), min
    raise ValueError(
        f"--objective {text} is not throughput, goodput, or a latency such as ttft:p95"
    )


def parse_sweep(text: str, *, is_on_device: bool = False) -> tuple[str, list[Any]]:
    """Read ``max_num_seqs=16,64``: a name and its values. Raises ValueError."""
    name, equals, listed = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    kinds = get_type_hints(Workload) | get_type_hints(Options) | _OF_FLEET
    names = [f.name for kind in (Options, Workload) for f in fields(kind)] + [*_OF_FLEET]
    if is_on_device:
        kinds |= {one: get_type_hints(PlanFlags)[one] for one in _OF_DEVICE}
        names += _OF_DEVICE
    if name not in names or name in _NOT_SWEPT:
        raise ValueError(f"--set {text}: {name!r} is not an option of the engine or of the load")
    if not equals or not all(listed.split(",")):
        raise ValueError(f"--set {text}: write NAME=a,b,c, such as max_num_seqs=16,64")
    try:
        values = [_value(kinds[name], part) for part in listed.split(",")]
        for value in values if name in _OF_FLEET else ():
            check_fleet(**{name: value})
        return name, values
    except (ValueError, KeyError):
        raise ValueError(
            f"--set {text}: some of these are not values for {name}: see ridgeline sweep -h"
        ) from None


def _value(kind: Any, text: str) -> Any:
    """Return a value of an option's type. Raises ValueError."""
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(text)
        return text
    kinds = get_args(kind) or (kind,)
    if bool in kinds:
        return _TRUTHS[text.lower()]
    if str in kinds:
        return text
    return int(text) if int in kinds else float(text)


def _case(
    simulator: Simulator, scenario: Scenario, options: Options, setting: Mapping[str, Any]
) -> SimulatedRun:
    of_device = {name: v for name, v in setting.items() if name in _OF_DEVICE}
    if not scenario.plan_flags.names_device:
        of_device = {}
    of_engine = {
        name: v for name, v in setting.items() if hasattr(options, name) and name not in of_device
    }
    of_fleet = {name: v for name, v in setting.items() if name in _OF_FLEET}
    others = of_device.keys() | of_engine.keys() | of_fleet.keys()
    of_load = {name: v for name, v in setting.items() if name not in others}
    plan_flags = replace(scenario.plan_flags, **of_device)
    changed = replace(
        scenario, load=replace(scenario.load, **of_load), plan_flags=plan_flags, **of_fleet
    )
    return simulator.prepare(changed, replace(options, trace=None, **of_engine)).case


def _run(
    cases: Sequence[SimulatedRun], limits_ms: Mapping[str, float], report: Any
) -> list[dict[str, Any]]:
    """Simulate all cases, in as many processes as there are cores."""
    num = min(usable_cpus(), len(cases))
    if num == 1:
        return [case.summary(limits_ms) for case in cases]
    summaries = []
    with ProcessPoolExecutor(num, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(SimulatedRun.summary, case, limits_ms) for case in cases]
        for done, future in enumerate(futures, 1):
            summaries.append(future.result())
            report(done, len(cases))
    return summaries


def _at(summary: Mapping[str, Any], place: Sequence[str]) -> float | None:
    value: Any = summary
    for name in place:
        value = None if value is None else value.get(name)
    return None if value is None else float(value)


def _print(
    settings: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, float | None]],
    winner: int,
    objective: str,
) -> None:
    out = console(160, markup=True)
    shown = [name for name in _COLUMNS if any(row[name] is not None for row in results)]
    rows = []
    for i, (setting, figures) in enumerate(zip(settings, results, strict=True)):
        texts = [*map(str, setting.values()), *(figure(figures[name]) for name in shown)]
        rows.append([Cell(text, "bold green" if i == winner else "") for text in texts])
    heads = (*settings[0], *(name.replace(" ", "\n") for name in shown))
    out.print(drawn(Table(heads, rows, "l" * len(settings[0]) + "r" * len(shown))))
    flags = " ".join(
        _flag(name, value)
        for name, value in settings[winner].items()
        if hasattr(Options, name) or name in (*_OF_FLEET, *_OF_DEVICE)
    )
    out.print("latencies in ms", style="dim")
    out.print(f"best by {objective}: {flags or settings[winner]}")


def _short_of(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


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
    parts = svg.heading(title, {})
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
        said = figure(value)
        yield svg.box(x, _y(i), width, 18, _BEST if i == best else _PLAIN, f"{name}: {said}")
        yield svg.text(x + width + 6, _y(i) + 13, said, size=svg.SMALL)


def _y(row: int) -> float:
    return _TOP + _ROW * row
