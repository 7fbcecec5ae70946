"""The serving benchmark: the load of many users on any OpenAI-compatible server.

It knows a server only by its URL. Results go to standard output, vLLM's block first and one JSON
document last; warnings and failures also to standard error.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.bench.load.client_flags import ClientFlags
from ridgeline.bench.load.stats import DEFINITIONS, Outcome, parse_limits, summarise, warnings
from ridgeline.bench.out_file import write_out
from ridgeline.engine.setup.progress import count_bar, say
from ridgeline.foresight.simulator.workload import (
    Planned,
    Workload,
    make_plan,
    parse_prompts,
    parse_trace,
)
from ridgeline.system.report import flat
from ridgeline.system.svg import COLOURS, Axis, Chart

# The labels of vLLM's block.
_COUNTS = {
    "Successful requests": "num_successful",
    "Failed requests": "num_failed",
    "Benchmark duration (s)": "duration_s",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Request throughput (req/s)": "request_throughput_per_s",
    "Output token throughput (tok/s)": "output_tokens_per_s",
    "Total token throughput (tok/s)": "total_tokens_per_s",
}
_SECTIONS = {
    "ttft_from_send": ("Time to First Token", "TTFT"),
    "ttft_from_scheduled_arrival": ("Time to First Token from arrival", "TTFT"),
    "tpot_excl_first": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl_chunk_pooled": ("Inter-token Latency", "ITL"),
    "e2e": ("End-to-end Latency", "E2EL"),
}
# Curves of the picture.
_SHOWN = {
    "ttft_from_send": "time to first token",
    "tpot_excl_first": "time per output token",
    "e2e": "end to end",
}


def serve(
    client_flags: ClientFlags,
    load: Workload,
    goodput: Sequence[str],
    num_clients: int = 1,
    out: Path | None = None,
) -> bool:
    """Measure; print the result block and the JSON document. False if no request succeeded.

    ``out`` gets a picture or a table, by its ending. Raises ValueError if a limit of ``goodput`` or
    a file is not what it should be, or no warm-up request succeeds.
    """
    # Not imported above: it takes 80 ms, which no other command should pay.
    from ridgeline.bench.load.client import drive_many

    load = replace(load, seed=secrets.randbits(32) if load.seed is None else load.seed)
    limits_ms, (planned, num_left_out) = parse_limits(goodput), read_plan(load)
    client_flags.check(planned[0])
    warmups, measured = planned[: load.num_warmups], planned[load.num_warmups :]
    with count_bar("Asking", note="requests") as report:
        outcomes, client = drive_many(
            client_flags.target(), warmups, measured, load.max_concurrency, num_clients, report
        )
    summary = summarise(outcomes, limits_ms)
    load_summary = summarise_load(load, planned, num_left_out)
    said = warnings(summary, client, load_summary)
    print_result(summary, said)
    if out:
        write_out(out, [flat(summary)], latencies_svg(outcomes, client_flags.model))
        say(f"written: {out}")
    flags = flags_of(client_flags, load, goodput, clients=num_clients)
    notes = {"client": client, "warnings": said, "definitions": DEFINITIONS}
    print(json.dumps({"flags": flags, "asked": load_summary} | summary | notes, allow_nan=False))
    return bool(summary["num_successful"])


def summarise_load(load: Workload, planned: Sequence[Planned], num_left_out: int) -> dict[str, Any]:
    """Return what was asked for, for the document."""
    return {
        "num_warmups": load.num_warmups,
        "num_repeated_prompts": len(planned) - len({request.prompt for request in planned}),
        "num_left_out_of_trace": num_left_out,
        "prompt_length_unit": "lines of the file" if load.prompts else "words",
        "prefix_share": _prefix_share(load),
        "total_max_tokens": sum(request.max_tokens for request in planned[load.num_warmups :]),
    }


def flags_of(
    client_flags: ClientFlags | None, load: Workload, goodput: Sequence[str], **more: object
) -> dict[str, Any]:
    """Return the flags that repeat a run, for the document; without the key."""
    flags = asdict(client_flags) if client_flags else {}
    further_flags = {"goodput": list(goodput)} | more
    return {
        name: str(v) if isinstance(v, Path) or v == math.inf else v
        for name, v in (flags | asdict(load) | further_flags).items()
        if name != "api_key"
    }


def read_plan(load: Workload) -> tuple[list[Planned], int]:
    """Read the files that a workload names; return its plan, and what its trace leaves out.

    Raises ValueError if one is not what it should be, and OSError if it cannot be read.
    """
    of_trace = load.trace_file or load.lengths_from
    trace = parse_trace(_read(Path(of_trace)), str(of_trace)) if of_trace else None
    prompts = load.prompts and parse_prompts(_read(Path(load.prompts)), str(load.prompts))
    return make_plan(load, trace, prompts or None), trace.num_left_out if trace else 0


def _prefix_share(load: Workload) -> float | None:
    """Return how much of each prompt others have too; None if a trace or sessions decide."""
    if load.trace_file or load.lengths_from or load.turns > 1:
        return None
    return 0.0 if load.prompts else load.prefix_share


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text") from error


def print_result(
    summary: Mapping[str, Any],
    said: Sequence[str],
    title: str = "Serving Benchmark Result",
    further_rows: Mapping[str, str | float | None] | None = None,
) -> None:
    """Print vLLM's block, with ``further_rows`` at its end, and then what went wrong."""
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{f' {title} ':=^50}", style="bold")
    for label, key in _COUNTS.items():
        _print_row(out, label, summary[key])
    if summary["goodput"]:
        _print_row(out, "Request goodput (req/s)", summary["goodput"]["requests_per_s"])
    for key, (title, short) in _SECTIONS.items():
        if summary[key]:
            out.print(f"{title:-^50}", style="bold")
            for label, column in {"Mean": "mean", "Median": "p50", "P99": "p99"}.items():
                _print_row(out, f"{label} {short} (ms)", summary[key][f"{column}_ms"])
    if further_rows:
        out.print(f"{'Prediction':-^50}", style="bold")
        for label, value in further_rows.items():
            _print_row(out, label, value)
    out.print("=" * 50, style="bold")
    print_troubles(summary, said)


def print_troubles(summary: Mapping[str, Any], said: Sequence[str]) -> None:
    """Print what failed in a run, and warnings, on standard error."""
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    for failure in summary["failures"]:
        err.print(f"failed: {failure['num']} x {failure['error']}", style="red", markup=False)
    for line in said:
        err.print(f"warning: {line}", style="yellow", markup=False)


def _print_row(out: Console, label: str, value: str | float | None) -> None:
    text = "unknown" if value is None else f"{value:.2f}" if isinstance(value, float) else value
    out.print(f"{label + ':':<40} {text:<10}")


def latencies_svg(outcomes: Sequence[Outcome], title: str) -> str:
    """Return the curves of the requests that succeeded: milliseconds to the right, share upwards.

    A curve that rises late or slowly shows what a percentile hides. Time is logarithmic, from a
    tenth of a millisecond on. Failed requests are in the title only.
    """
    rows = [outcome.latencies_s() for outcome in outcomes if outcome.error is None]
    curves = {
        label: sorted(max(1e3 * row[name], 0.1) for row in rows if name in row)
        for name, label in _SHOWN.items()
    }
    curves = {label: values for label, values in curves.items() if values}
    every = [value for values in curves.values() for value in values] or [1.0]
    percents = (0, 25, 50, 75, 90, 100)
    chart = Chart(
        Axis("milliseconds", min(every) / 1.2, max(every) * 1.2),
        Axis("share of requests", 0, 100, is_log=False, tick="{} %", ticks=percents),
    )
    colours = dict(zip(curves, COLOURS, strict=False))
    for label, values in curves.items():
        step = 100 / len(values)
        stairs = [(ms, step * num) for i, ms in enumerate(values) for num in (i, i + 1)]
        chart.curve(stairs, colours[label])
    num_failed = len(outcomes) - len(rows)
    failed = f", {num_failed} failed" if num_failed else ""
    return chart.picture(f"{title}: {len(rows)} requests{failed}", colours)
