"""``ridgeline bench compare``: results of load generators side by side, under the same names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.padding import Padding
from rich.text import Text

from ridgeline.bench.out_file import write_out
from ridgeline.system.report import Cell, Row, Table, as_csv, as_markdown, figure
from ridgeline.system.terminal import console, drawn

Format = Literal["table", "csv", "markdown", "json"]


def compare(files: Sequence[Path], form: Format, out: Path | None) -> None:
    """Print the results of files side by side, and in what their definitions differ.

    Raises ValueError if a file is not the result of a known tool, and OSError if it cannot be read.
    """
    results = [result for path in files for result in _read(path)]
    rows = compare_rows(results)
    notes = differences(results)
    if out is not None:
        write_out(out, rows, "")
    if form == "csv":
        print(as_csv(rows), end="")
    elif form == "markdown":
        print(as_markdown(rows))
        print("".join(f"- {note}\n" for note in notes), end="")
    elif form == "json":
        values = [{"label": r.label, "tool": r.tool} | r.values for r in results]
        print(json.dumps({"results": values, "differences": notes}, allow_nan=False))
    else:
        _print(results, rows, notes)


def _read(path: Path) -> list[Result]:
    text = path.read_text("utf-8")
    try:
        content = json.loads(text)
    except ValueError:  # what bench serve prints has a block above its last line
        lines = text.strip().splitlines() or [""]
        try:
            content = json.loads(lines[-1])
        except ValueError as error:
            raise ValueError(f"{path}: not a JSON document, nor is its last line") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object, which results are")
    try:
        return read_results(content, path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def compare_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each measure that one of the results has, with a column for each result."""
    latencies = [f"{key}_{statistic}_ms" for key in LATENCIES for statistic in STATISTICS]
    labels = unique_labels(results)
    return [
        {"measure": name}
        | {label: result.values.get(name) for label, result in zip(labels, results, strict=True)}
        for name in (*COUNTS, *latencies)
        if any(name in result.values for result in results)
    ]


def unique_labels(results: Sequence[Result]) -> list[str]:
    """Return the labels, numbered where two are the same."""
    counts: dict[str, int] = {}
    labels = []
    for result in results:
        counts[result.label] = counts.get(result.label, 0) + 1
        suffix = f" ({counts[result.label]})" if counts[result.label] > 1 else ""
        labels.append(result.label + suffix)
    return labels


def differences(results: Sequence[Result]) -> list[str]:
    """Return what the tools that are here mean by a measure, where it is not what we mean."""
    notes = []
    for tool in dict.fromkeys(result.tool for result in results):
        measured = {name for result in results if result.tool == tool for name in result.values}
        for name, note in NOTES[tool].items():
            if any(one == name or one.startswith(f"{name}_") for one in measured):
                notes.append(f"{tool}: {name}: {note}")
    return notes


def _print(results: Sequence[Result], rows: list[dict[str, Any]], notes: list[str]) -> None:
    labels, has_ratio = unique_labels(results), len(results) == 2
    lines: list[Row] = [("", *(Cell(result.tool, "dim") for result in results))]
    group = ""
    for row in rows:
        name = row["measure"]
        latency = next((key for key in LATENCIES if name.startswith(f"{key}_")), "")
        if latency and latency != group:
            lines.append((f"{latency}, ms",))
        group = latency
        values = [row[label] for label in labels]
        cells = [_shown(value) for value in values]
        if has_ratio:
            first, second = values
            cells.append(f"{second / first:.2f}" if first and second is not None else "")
        shown = f"  {name.removeprefix(f'{latency}_').removesuffix('_ms')}" if latency else name
        lines.append((shown, *cells))
    out = console(80)
    heads = ("", *labels, *(["ratio"] if has_ratio else []))
    out.print(drawn(Table(heads, lines), whole=(0,)))
    if notes:
        out.print("\nWhat is not measured alike:", style="bold")
    for note in notes:
        out.print(Padding(Text(note), (0, 0, 0, 2)))


def _shown(value: float | None) -> str:
    return figure(value, ",.0f" if value is not None and value.is_integer() else ",.2f")


Json = Mapping[str, Any]
Values = dict[str, float]

# How values are named: (our name, statistic); the order is that of tables.
LATENCIES = (
    "ttft_from_send", "ttft_from_scheduled_arrival", "tpot_excl_first", "tpot_incl_first",
    "itl_chunk_pooled", "e2e",
)  # fmt: skip
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
COUNTS = (
    "num_successful", "num_failed", "duration_s", "request_throughput_per_s", "goodput_per_s",
    "total_input_tokens", "total_output_tokens", "output_tokens_per_s", "total_tokens_per_s",
)  # fmt: skip

_IN_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3}


@dataclass(frozen=True, slots=True)
class Result:
    """One run.

    Attributes:
        label: what its column is called.
        tool: who measured.
        values: by names of ``COUNTS``, and of ``LATENCIES`` with ``_STATISTIC_ms``.
    """

    label: str
    tool: str
    values: Values = field(default_factory=dict)


# What each tool means by what is filed under our names, where it is not what we mean.
NOTES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "ttft_from_send": "with --max-concurrency the clock starts when a seat is free, so waiting "
        "in the client is not in it",
        "itl_chunk_pooled": "time between chunks, as ours; a chunk may carry several tokens",
        "total_output_tokens": "counted anew with the client's tokenizer where the server gives no "
        "usage",
    },
    "guidellm": {
        "tpot_incl_first": "what it calls time per output token: latency / tokens, with the first "
        "(its first versions left that out); each request weighs by its tokens",
        "tpot_excl_first": "what it calls inter-token latency: (last - first token) / (tokens - 1);"
        " each request weighs by its tokens",
        "request_throughput_per_s": "the mean over time of a rate, without the requests that were "
        "cut off",
        "num_failed": "with the requests that were cut off at its end",
    },
    "aiperf": {
        "ttft_from_send": "first chunk that is not empty; reasoning counts, as ours",
        "tpot_excl_first": "what it calls inter-token latency: (latency - ttft) / (tokens - 1)",
        "itl_chunk_pooled": "what it calls inter-chunk latency",
    },
    "llmperf": {
        "tpot_incl_first": "what it calls inter-token latency: the sum of all gaps, the first "
        "token's too, / tokens",
        "total_output_tokens": "counted anew with the client's tokenizer",
        "ttft_from_send": "a closed loop alone: it waits for answers before it sends",
    },
    "ridgeline": {},
}


def read_results(content: Json, name: str) -> list[Result]:
    """Return the runs in a document: one, or of guidellm as many as it has.

    Raises ValueError, without the name, if no tool is known that writes such a document, or a
    run has no request that succeeded.
    """
    for is_one, read in _READERS:
        if is_one(content):
            try:
                results = list(read(content, name))
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(
                    f"looks like {read.__name__[1:]}'s result, but {error!r} is wrong or missing"
                ) from error
            if not results:
                raise ValueError("has no benchmarks")
            return results
    keys = ", ".join(list(content)[:6]) or "nothing"
    raise ValueError(
        "not a known result. Expected the JSON of ridgeline bench serve, vLLM's bench serve "
        f"--save-result, guidellm, AIPerf or LLMPerf (its summary); it has {keys}"
    )


def _ridgeline(content: Json, name: str) -> Iterator[Result]:
    values: Values = {}
    for key in COUNTS:
        _set_value(values, key, content.get(key))
    if content.get("goodput"):
        _set_value(values, "goodput_per_s", content["goodput"]["requests_per_s"])
    for key in LATENCIES:
        for statistic in STATISTICS:
            _set_value(values, f"{key}_{statistic}_ms", (content[key] or {}).get(f"{statistic}_ms"))
    yield Result(name, "ridgeline", values)


def _vllm(content: Json, name: str) -> Iterator[Result]:
    values: Values = {}
    names = {
        "num_successful": "completed",
        "num_failed": "failed",
        "duration_s": "duration",
        "request_throughput_per_s": "request_throughput",
        "goodput_per_s": "request_goodput",
        "total_input_tokens": "total_input_tokens",
        "total_output_tokens": "total_output_tokens",
        "output_tokens_per_s": "output_throughput",
        "total_tokens_per_s": "total_token_throughput",
    }
    for key, theirs in names.items():
        _set_value(values, key, content.get(theirs))
    if "failed" not in content and "num_prompts" in content:  # as older ones wrote
        _set_value(values, "num_failed", content["num_prompts"] - content["completed"])
    metrics = {
        "ttft": "ttft_from_send", "tpot": "tpot_excl_first", "itl": "itl_chunk_pooled",
        "e2el": "e2e",
    }  # fmt: skip
    for theirs, key in metrics.items():
        for statistic in STATISTICS:
            word = "median" if statistic == "p50" else statistic
            value = content.get(f"{word}_{theirs}_ms", content.get(f"{statistic}_{theirs}_ms"))
            _set_value(values, f"{key}_{statistic}_ms", value)
    yield Result(name, "vllm", values)


def _guidellm(content: Json, name: str) -> Iterator[Result]:
    runs = content["benchmarks"]
    for number, run in enumerate(runs, 1):
        metrics, values = run["metrics"], Values()
        totals = metrics.get("request_totals") or run.get("request_totals") or {}
        _set_value(values, "num_successful", totals.get("successful"))
        if totals:
            failed = (totals.get("errored") or 0) + (totals.get("incomplete") or 0)
            _set_value(values, "num_failed", failed)
        _set_value(values, "duration_s", run.get("duration"))
        means = {
            "request_throughput_per_s": "requests_per_second",
            "output_tokens_per_s": "output_tokens_per_second",
            "total_tokens_per_s": "tokens_per_second",
        }
        for key, theirs in means.items():
            _set_value(values, key, _successful(metrics, theirs).get("mean"))
        sums = {
            "total_input_tokens": "prompt_token_count",
            "total_output_tokens": "output_token_count",
        }
        for key, theirs in sums.items():
            _set_value(values, key, _successful(metrics, theirs).get("total_sum"))
        latencies = {
            "ttft_from_send": ("time_to_first_token_ms", 1.0),
            "tpot_incl_first": ("time_per_output_token_ms", 1.0),
            "tpot_excl_first": ("inter_token_latency_ms", 1.0),
            "e2e": ("request_latency", 1e3),
        }
        for key, (theirs, in_ms) in latencies.items():
            latency = _successful(metrics, theirs)
            flat = {"mean": latency.get("mean"), **(latency.get("percentiles") or {})}
            _set_statistics(values, key, flat, in_ms)
        label = name if len(runs) == 1 else f"{name} {number}{_strategy(run)}"
        yield Result(label, "guidellm", values)


def _successful(metrics: Json, name: str) -> Json:
    successful: Json = (metrics.get(name) or {}).get("successful") or {}
    return successful


def _strategy(run: Json) -> str:
    """Return how a run of guidellm sent its requests, wherever its version says so."""
    holders = (run.get(place) or {} for place in ("config", "scheduler", "args"))
    strategy: Json = next((one["strategy"] for one in holders if "strategy" in one), {})
    rate = strategy.get("rate") or strategy.get("streams")
    kind = strategy.get("type_")
    return f" {kind}" + (f" {rate:g}" if rate else "") if kind else ""


def _aiperf(content: Json, name: str) -> Iterator[Result]:
    values: Values = {}
    averages = {
        "num_successful": "request_count",
        "num_failed": "error_request_count",
        "duration_s": "benchmark_duration",
        "request_throughput_per_s": "request_throughput",
        "goodput_per_s": "goodput",
        "total_input_tokens": "total_isl",
        "total_output_tokens": "total_osl",
        "output_tokens_per_s": "output_token_throughput",
        "total_tokens_per_s": "total_token_throughput",
    }
    for key, theirs in averages.items():
        _set_value(values, key, (content.get(theirs) or {}).get("avg"))
    if "error_request_count" not in content and "error_summary" in content:
        _set_value(values, "num_failed", sum(one["count"] for one in content["error_summary"]))
    metrics = {
        "ttft_from_send": "time_to_first_token",
        "tpot_excl_first": "inter_token_latency",
        "itl_chunk_pooled": "inter_chunk_latency",
        "e2e": "request_latency",
    }
    for key, theirs in metrics.items():
        if latency := content.get(theirs):
            flat = {"mean": latency.get("avg"), **latency}
            _set_statistics(values, key, flat, _IN_MS[latency["unit"]])
    yield Result(name, "aiperf", values)


def _llmperf(content: Json, name: str) -> Iterator[Result]:
    values: Values = {}
    names = {
        "num_successful": "num_completed_requests",
        "num_failed": "number_errors",
        "output_tokens_per_s": "mean_output_throughput_token_per_s",
    }
    for key, theirs in names.items():
        _set_value(values, key, content.get(f"results_{theirs}"))
    per_min = content["results_num_completed_requests_per_min"]
    _set_value(values, "request_throughput_per_s", per_min / 60)
    metrics = {
        "ttft_from_send": "ttft_s",
        "tpot_incl_first": "inter_token_latency_s",
        "e2e": "end_to_end_latency_s",
    }
    for key, theirs in metrics.items():
        flat = {s: content.get(f"results_{theirs}_quantiles_{s}") for s in STATISTICS[1:]}
        _set_statistics(values, key, {"mean": content.get(f"results_{theirs}_mean"), **flat}, 1e3)
    yield Result(name, "llmperf", values)


def _set_value(values: Values, key: str, value: float | None) -> None:
    """Put a number; one that is none, as of nothing that succeeded, is left out."""
    if value is not None and math.isfinite(value):
        values[key] = float(value)


def _set_statistics(values: Values, key: str, latency: Json, in_ms: float) -> None:
    """Put the statistics of a latency; ``in_ms`` milliseconds are its unit."""
    for statistic in STATISTICS:
        if latency.get(statistic) is not None:
            _set_value(values, f"{key}_{statistic}_ms", latency[statistic] * in_ms)


_READERS: tuple[tuple[Callable[[Json], bool], Callable[[Json, str], Iterator[Result]]], ...] = (
    (lambda content: "definitions" in content and "ttft_from_send" in content, _ridgeline),
    (lambda content: "completed" in content and "request_throughput" in content, _vllm),
    (lambda content: isinstance(content.get("benchmarks"), list), _guidellm),
    (lambda content: isinstance(content.get("request_latency"), Mapping), _aiperf),
    (lambda content: "results_num_completed_requests_per_min" in content, _llmperf),
)
