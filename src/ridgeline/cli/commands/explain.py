"""``ridgeline explain``: why a request of a trace was slow, in words, numbers and a picture."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding

from ridgeline.cli.flags import UsageError
from ridgeline.foresight.explain import (
    METRICS,
    Explanation,
    Predict,
    explain,
    overtakers_of,
    usual_steps,
)
from ridgeline.foresight.explain_report import (
    as_dict,
    as_file,
    explain_svg,
    markdown,
    paragraphs,
    sentences,
    table,
    timeline,
)
from ridgeline.foresight.suggestions import MOST_TOKENS, Suggestions, would_help
from ridgeline.foresight.trace import Json, Recorded, read_trace
from ridgeline.system.machine import write_text
from ridgeline.system.terminal import console, drawn


class OutputFormat(StrEnum):
    """How an explanation is printed."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


def explain_command(
    trace: Annotated[Path, typer.Argument(help="A file written by --trace.")],
    request: Annotated[
        list[str] | None,
        typer.Option(help="Number, x-request-id or id of the answer; repeatable."),
    ] = None,
    slowest: Annotated[
        int | None, typer.Option(min=1, help="Explain the N slowest requests. Default: 1.")
    ] = None,
    above: Annotated[
        str | None,
        typer.Option(
            help="Explain all requests with ttft, tpot or e2el above MS, such as ttft:500."
        ),
    ] = None,
    format: Annotated[OutputFormat, typer.Option(help="Output format.")] = OutputFormat.TEXT,
    out: Annotated[Path | None, typer.Option(help="Draw one request to this .svg file.")] = None,
    timeline_file: Annotated[
        Path | None,
        typer.Option("--timeline", help="Write a timeline for ui.perfetto.dev to this file."),
    ] = None,
) -> None:
    """Say where the time of a request went. The pieces sum to the total exactly."""
    if sum(one is not None for one in (request, slowest, above)) > 1:
        raise UsageError("give one of --request, --slowest and --above")
    with read_trace(trace) as recorded:
        chosen = _chosen(recorded, request, slowest, above)
        if out and len(chosen) != 1:
            raise UsageError(f"--out draws one request, but {len(chosen)} are chosen")
        usual = usual_steps(recorded)
        explanations = [
            explain(
                recorded.engine,
                one,
                recorded.of(one),
                usual,
                overtakers=overtakers_of(one, recorded.requests),
            )
            for one in chosen
        ]
        beside = recorded.around(chosen[0], MOST_TOKENS) if len(chosen) == 1 else []
        if timeline_file:
            _write_timeline(timeline_file, recorded, chosen, usual)
    if out:
        write_text(out, explain_svg(explanations[0]))
    for i, one in enumerate(explanations):
        if i and format is not OutputFormat.JSON:
            print()
        _print(one, would_help(one, beside), format)
    for file in (out, timeline_file):
        if file:
            print(f"written: {file}", file=sys.stderr)


def _chosen(
    recorded: Recorded, names: list[str] | None, slowest: int | None, above: str | None
) -> list[Json]:
    if names:
        return [recorded.get(name) for name in names]
    metric, limit_ms = _limit(above) if above is not None else ("e2el", None)
    measured = [(_measure_ms(one, metric), one) for one in recorded.requests]
    ranking = [(value, one) for value, one in measured if value is not None]
    ranking.sort(key=lambda pair: -pair[0])
    if limit_ms is None:
        if not ranking:
            raise ValueError("the trace has no finished request")
        return [one for _, one in ranking[: slowest or 1]]
    above_limit = [one for value, one in ranking if value > limit_ms]
    if not above_limit:
        reason = f"the highest is {ranking[0][0]:,.1f} ms" if ranking else "none ended"
        raise ValueError(f"no request has a {metric} above {limit_ms:g} ms: {reason}")
    return above_limit


def _limit(above: str) -> tuple[str, float]:
    metric, _, limit = above.partition(":")
    try:
        if metric not in METRICS:
            raise ValueError
        return metric, float(limit)
    except ValueError:
        raise UsageError(
            f"--above is {above!r}: write a metric ({', '.join(METRICS)}) and milliseconds, such "
            "as ttft:500"
        ) from None


def _measure_ms(request: Json, metric: str) -> float | None:
    """Return a metric of a request; None if it has no first token, or no second."""
    first_s, finish_s = request["first_token_s"], request["finish_s"]
    if metric == "e2el":
        return float(1e3 * (finish_s - request["arrival_s"]))
    if first_s is None:
        return None
    if metric == "ttft":
        return float(1e3 * (first_s - request["arrival_s"]))
    num_gaps = max(request["num_generated"]) - 1
    return 1e3 * (finish_s - first_s) / num_gaps if num_gaps > 0 else None


def _write_timeline(
    file: Path, recorded: Recorded, chosen: list[Json], usual: Predict | None
) -> None:
    """Write the time from the first arrival of some requests to the last end."""
    start_s = min(one["arrival_s"] for one in chosen)
    end_s = max(one["finish_s"] for one in chosen)
    steps = recorded.during(start_s, end_s)
    events = timeline(recorded.engine, steps, recorded.requests, predict=usual)
    write_text(file, as_file(events))


def _print(explanation: Explanation, suggestions: Suggestions, format: OutputFormat) -> None:
    if format is OutputFormat.JSON:
        print(json.dumps(as_dict(explanation, *suggestions)))
    elif format is OutputFormat.MARKDOWN:
        print(markdown(explanation, *suggestions))
    else:
        _print_text(explanation, suggestions)


def _print_text(explanation: Explanation, suggestions: Suggestions) -> None:
    out = console(100, markup=True)
    out.print(" ".join(sentences(explanation)))
    out.print()
    out.print(drawn(table(explanation)))
    for heading, points in paragraphs(*suggestions):
        out.print(f"\n{heading}")
        for point in points:
            out.print(Padding(f"- {point}", (0, 0, 0, 2)))
