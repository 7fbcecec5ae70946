"""``ridgeline replay`` decides a trace again, or serves it with other settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ridgeline.bench.load.stats import DEFINITIONS, summarise
from ridgeline.bench.simulate.main import date_of
from ridgeline.bench.simulate.predicted import outcomes_of
from ridgeline.cli.flags import UsageError, flags
from ridgeline.core.records import EngineRecord, Record, RequestRecord
from ridgeline.engine.calibration import newest_calibration
from ridgeline.engine.setup.home import default_home, locate
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import resolve
from ridgeline.foresight import explain as compare
from ridgeline.foresight.explain_report import as_file, timeline
from ridgeline.foresight.simulator import what_if
from ridgeline.foresight.simulator.replay import CONTRADICTIONS, replay
from ridgeline.foresight.simulator.replay_times import ReplayResult, settings_of
from ridgeline.foresight.step_time.calibration import Calibration
from ridgeline.foresight.step_time.features import Reach, StepTime, as_text, reach_of, reach_of_run
from ridgeline.foresight.structure import to_json
from ridgeline.foresight.suggestions import DRAFTS_WARNING, Served, served_again
from ridgeline.foresight.trace import Json, read_whole, request_of, step_of
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.system.machine import write_text
from ridgeline.system.report import Table, counted, figure
from ridgeline.system.terminal import console, drawn

_SHOWN = 60  # characters of a decision
_LISTED = 10  # requests that gained most, and that lost most
_OF_CALIBRATIONS = ("backend", "dtype", "kv_cache_dtype", "threads")  # what tells them apart


@flags("options", Options, only=_OF_CALIBRATIONS)
def replay_command(
    trace: Annotated[Path, typer.Argument(help="A file written by --trace.")],
    model: Annotated[
        str | None,
        typer.Option(help="Model whose calibration is the clock. Default: the times of the trace."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Another setting; repeatable."),
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="The first other decision, and each request.")
    ] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="A file with both runs, for ui.perfetto.dev.")
    ] = None,
    *,
    options: Options,
) -> None:
    """Repeat every decision of a recorded run, and say whether all are equal.

    With any flag its requests are served again: they arrive as in the trace, once with its own
    settings and once with those of --set. Steps take as long as those of the trace usually did, or
    with --model as long as its calibration says. Without --set it says how many steps are decided
    as they were, if each takes as long as it did. The last line is then one JSON document.
    """
    given = [f"--{name.replace('_', '-')}" for name in _OF_CALIBRATIONS if _is_given(options, name)]
    if given and model is None:
        raise UsageError(f"{given[0]} chooses among the calibrations of a model: give --model")
    if changes or diff or timeline or model is not None:
        serve_again(trace, model, changes or [], options, diff=diff, timeline_file=timeline)
    elif not decide_again(trace):
        raise typer.Exit(1)


def _is_given(options: Options, name: str) -> bool:
    return bool(getattr(options, name) != getattr(Options(), name))


def decide_again(trace: Path) -> bool:
    """Print whether every decision of a recorded run is made again; return it."""
    terminal, outcome = console(160, markup=True), replay(read_whole(trace))
    of = f"{outcome.num_steps:,} steps, {counted(outcome.num_requests, 'request')}"
    if outcome.difference is None:
        terminal.print(f"[green]equal[/]  {of}: all decisions are the same")
    else:
        number, recorded, decided = outcome.difference
        terminal.print(f"[red]different[/]  {of} were equal; then step {number}:")
        rows = [
            (name, _short(then), _short(decided[name]))
            for name, then in recorded.items()
            if then != decided[name]
        ]
        terminal.print(drawn(Table(("", "recorded", "decided now"), rows, "lll")))
        terminal.print("Was the trace written by another version? A trace only works with its own.")
    if outcome.unfinished is not None:
        terminal.print(
            f"step {outcome.unfinished:,} and later ones are left out: a request starts there "
            "that had not finished at the end of the trace"
        )
    return outcome.difference is None


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


# --- with other settings -------------------------------------------------------------------------


def serve_again(
    trace: Path,
    model: str | None,
    changes: list[str],
    options: Options,
    *,
    diff: bool,
    timeline_file: Path | None,
) -> None:
    """Serve the requests of a trace with its settings and with ``changes``; print what differs.

    The clock is the calibration of ``model`` with ``options``, or is fitted to the trace. Without
    changes and a model it is the trace's own: what was recorded is compared with what is decided
    now. Raises ValueError if there is no calibration, or the trace is too short.
    """
    records = read_whole(trace)
    settings = settings_of(records)
    if not any(record.get("type") == "request" for record in records):
        raise ValueError(f"{trace} has no finished request")
    wanted = what_if.changed(settings, changes)
    calibration = None if model is None else _calibrated(model, options)
    try:
        again = None if changes else what_if.run_as_recorded(records)
        served: Served | None = None
        if again is not None and calibration is None:
            source, before, after = "recorded", _recorded(records), again.records
        else:
            source = "fitted" if calibration is None else "calibrated"
            served = served_again(records, None if calibration is None else _usual_of(calibration))
            before, after = served.serve(settings), served.serve(wanted)
    except CONTRADICTIONS as error:
        raise ValueError(f"{trace} is not a trace of this version: {error!r:.200}") from None
    if timeline_file:
        _write_timeline(timeline_file, settings, before, after)
    flags = {"replay": str(trace), "model": model, "set": changes}
    document = {"flags": flags} | _document(records, before, after)
    document["prediction"] = _prediction(source, calibration) | _trust(document, served, after)
    document["replay"] = _compared(before, after) if again is None else _decided(again)
    _print(console(160, markup=True), document, changes, diff=diff)
    if timeline_file:
        print(f"written: {timeline_file}: open it in ui.perfetto.dev", file=sys.stderr)
    print(json.dumps(document))


def _recorded(records: list[Json]) -> list[Record]:
    """Return the records of a trace, without what describes it."""
    return [
        step_of(record) if record["type"] == "step" else request_of(record)
        for record in records
        if record["type"] in ("step", "request")
    ]


def _usual_of(calibration: Calibration) -> tuple[StepTime, Reach | None]:
    times = calibration.times.scaled(calibration.interval().middle)
    return times, reach_of(sample.features for sample in calibration.samples)


def _trust(document: dict[str, Any], served: Served | None, after: list[Record]) -> dict[str, Any]:
    """Return how far to trust a simulation; None where nothing is simulated, or it is not known.

    That is the largest steps that the clock was fitted to and that were simulated, and by how much
    the simulation misses the recording where nothing is changed.
    """
    if served is None:
        return dict.fromkeys(("fitted_up_to", "steps_up_to", "beyond", "errors", "within_error"))
    steps, errors, within = reach_of_run(after), dict[str, float](), list[str]()
    for name, recorded in document["recorded"].items():
        simulated, now = document["before"].get(name), document["after"].get(name)
        if recorded and simulated:
            errors[name] = simulated / recorded - 1
            if now is not None and 0 < abs(now / simulated - 1) <= abs(errors[name]):
                within.append(name)
    return {
        "fitted_up_to": served.reach and served.reach._asdict(),
        "steps_up_to": steps and steps._asdict(),
        "beyond": [*served.excess(after)] if served.reach else None,
        "errors": errors,
        "within_error": within,
    }


def _prediction(source: str, calibration: Calibration | None = None) -> dict[str, Any]:
    """Return by which clock it was simulated, by the names of ``ridgeline simulate``."""
    measured_at = calibration and calibration.measured_at
    return {
        "source": source,
        "calibrated_at": date_of(measured_at) if measured_at else None,
        "utilisation": None,
        "output_tokens_per_s_interval": None,
        "speed": calibration and round(1 / calibration.interval().middle, 3),
        "step_error": calibration and calibration.step_error,
    }


def _calibrated(model: str, options: Options) -> Calibration:
    checkpoint = load_checkpoint(locate(model).path)
    config = resolve(options, checkpoint)
    calibration = newest_calibration(default_home(), checkpoint.path, checkpoint.arch, config)
    if calibration.source == "assumed":
        raise ValueError(
            f"{model} was not calibrated here in this form: run ridgeline calibrate {model}, or "
            "leave --model out to take the times of the trace"
        )
    return calibration


def _document(records: list[Json], before: list[Record], after: list[Record]) -> dict[str, Any]:
    """Return what ``bench serve`` says of the second run, and the comparison, as plain values."""
    request_changes = compare.changes(before, after)
    recorded, has_drafts = compare.totals(_recorded(records)), what_if.has_drafts(records)
    arrivals_s = {r.name: r.arrival_s for r in after if isinstance(r, RequestRecord)}
    begin_s = min(arrivals_s.values(), default=0.0)
    planned_s = {name: at_s - begin_s for name, at_s in arrivals_s.items()}
    return summarise(outcomes_of(after, begin_s, planned_s), {}) | {
        "warnings": [
            "the client's side is not in these numbers: HTTP, templates, tokenising",
            *([DRAFTS_WARNING] if has_drafts else []),
        ],
        "has_drafts": has_drafts,
        "definitions": DEFINITIONS,
        "recorded_mean_e2el_ms": recorded.get("mean_e2el_ms"),
        "recorded": recorded,
        "before": compare.totals(before),
        "after": compare.totals(after),
        "requests": [compare.as_dict(change) for change in request_changes],
    }


def _compared(before: list[Record], after: list[Record]) -> dict[str, Any]:
    """Return how many steps of two simulations are equal until the first that is not."""
    difference = what_if.first_difference(before, after)
    num_steps = compare.totals(before).get("num_steps", 0)
    return {
        "num_steps": num_steps,
        "num_equal_steps": difference.number if difference else num_steps,
        "first_difference": difference and difference._asdict(),
    }


def _decided(again: ReplayResult) -> dict[str, Any]:
    """Return how many steps of a trace are decided again as they were, with their durations."""
    first = None
    if again.difference is not None:
        number, recorded, decided = again.difference
        reasons = [
            f"{name}: {_short(decided[name])}; recorded, {_short(then)}"
            for name, then in recorded.items()
            if then != decided[name]
        ]
        first = {"number": number, "reasons": reasons}
    return {
        "num_steps": again.num_steps,
        "num_equal_steps": again.num_equal,
        "first_difference": first,
    }


def _print(console: Console, document: dict[str, Any], changes: list[str], *, diff: bool) -> None:
    before, after = document["before"], document["after"]
    requests = counted(document["num_requests"], "request")
    console.print(f"{requests} served again with {', '.join(changes) or 'no change'}.")
    is_recorded = document["prediction"]["source"] == "recorded"
    if not changes:
        num_steps, num_equal = (document["replay"][n] for n in ("num_steps", "num_equal_steps"))
        console.print(
            f"With recorded durations, {num_equal:,} of {num_steps:,} steps are decided the same."
        )
    if document["has_drafts"]:
        console.print(f"{DRAFTS_WARNING.capitalize()}.")
    prediction = document["prediction"]
    if not is_recorded:
        _print_trust(console, document)
    console.print()
    sides = ("recorded", "now") if is_recorded else ("before", "after")
    rows = []
    for name, value in before.items():
        now = after.get(name)
        cells = [f"{now / value - 1:+.1%}" if value and now is not None else ""]
        if not is_recorded:
            error = prediction["errors"].get(name)
            cells.append("" if error is None else f"{error:+.1%}")
        rows.append((_spelled(name), _number(value), _number(now), *cells))
    heads = ("", *sides, "change", *([] if is_recorded else ["error"]))
    console.print(drawn(Table(heads, rows)))
    if not is_recorded and prediction["within_error"]:
        names = ", ".join(map(_spelled, prediction["within_error"]))
        console.print(f"Too small to be told from the simulation's error: {names}.")
    if diff:
        _print_difference(console, document)


def _print_trust(console: Console, document: dict[str, Any]) -> None:
    """Print how far the simulation misses the recording, and whether it went beyond it."""
    prediction = document["prediction"]
    if (error := prediction["errors"].get("mean_e2el_ms")) is not None:
        console.print(
            f"With the recorded settings, the simulation takes {abs(error):.1%} "
            f"{'longer' if error > 0 else 'less'} than the recording (mean end-to-end time)."
        )
    if beyond := prediction["beyond"]:
        most, fitted = prediction["steps_up_to"], prediction["fitted_up_to"]
        sizes = as_text({name: (most[name], fitted[name]) for name in beyond})
        console.print(
            f"[yellow]Outside of what was measured[/]: steps have {sizes}. Nothing says how long "
            "such steps take,"
        )
        console.print("so the change may even have the other sign.")


def _spelled(name: str) -> str:
    name = name.removeprefix("num_").replace("_per_", "/")
    words = [word.upper() if word in compare.METRICS else word for word in name.split("_")]
    unit = f", {words.pop()}" if words[-1] in ("ms", "s") else ""
    return " ".join(words) + unit


def _number(value: float | None) -> str:
    return figure(value, "," if isinstance(value, int) else ",.1f")


def _print_difference(console: Console, document: dict[str, Any]) -> None:
    first = document["replay"]["first_difference"]
    console.print()
    if first is None:
        console.print("All steps are decided as before.")
        return
    console.print(f"The first step with another decision is step {first['number']:,}:")
    for reason in first["reasons"][:_LISTED]:
        console.print(f"  {reason}")
    if (left := len(first["reasons"]) - _LISTED) > 0:
        console.print(f"  and {left:,} more")
    requests = document["requests"]
    gained = [one for one in requests if one["gain_ms"] > 0][:_LISTED]
    lost = [one for one in reversed(requests) if one["gain_ms"] < 0][:_LISTED]
    for title, listed in (("gained most", gained), ("lost most", lost)):
        if listed:
            console.print()
            console.print(drawn(_requests(title, listed)))


def _requests(title: str, listed: list[dict[str, Any]]) -> Table:
    heads = (title, "TTFT, ms", "", "TPOT, ms", "", "E2EL, ms", "", "sooner by")
    rows = []
    for one in listed:
        cells = []
        for name in compare.IN_MS:
            before, after = (figure(one[side][name], ",.0f") for side in ("before", "after"))
            cells += [before, f"-> {after}"]
        rows.append((f"request {one['request']}", *cells, f"{one['gain_ms']:,.0f} ms"))
    return Table(heads, rows)


def _write_timeline(
    file: Path, settings: EngineRecord, before: list[Record], after: list[Record]
) -> None:
    engine, events = to_json(settings), list[Mapping[str, Any]]()
    for process, (name, side) in enumerate((("before", before), ("after", after)), start=1):
        plain = [to_json(record) for record in side]
        steps = [record for record in plain if record["type"] == "step"]
        requests = [record for record in plain if record["type"] == "request"]
        for one in requests:
            one["num_prompt_tokens"] = len(one["prompt_token_ids"])
        events += timeline(engine, steps, requests, process=process, name=name)
    write_text(file, as_file(events))
