"""``ridgeline simulate``: what ``bench serve`` would measure, without a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from ridgeline.bench.load.stats import parse_limits
from ridgeline.bench.simulate import Question, like, simulate_load
from ridgeline.bench.sweep import sweep_loads
from ridgeline.cli.flags import UsageError, flags
from ridgeline.cli.models import Model
from ridgeline.engine_setup.options import Options
from ridgeline.simulator.workload import Workload, parse_length


@flags("options", Options, fixed={"seed": None})  # that of the load decides all
@flags("load", Workload, unless="like_result")
def simulate_command(
    model: Model,
    endpoint: Annotated[
        Literal["chat", "completions"], typer.Option(help="Whether prompts are in a template.")
    ] = "chat",
    prompt_tokens: Annotated[
        str | None, typer.Option(help="Random tokens of a prompt: 128, or 128:0.5 to vary.")
    ] = None,
    new_tokens: Annotated[
        str | None, typer.Option(help="Tokens of an answer, as above. The same as --max-tokens.")
    ] = None,
    goodput: Annotated[
        list[str] | None, typer.Option(help="ttft:MS, tpot:MS, e2el:MS; repeat.")
    ] = None,
    like_result: Annotated[
        Path | None, typer.Option("--like", help="The load of a result of bench serve, as JSON.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="NAME=a,b,c: try values of an option or of the load; repeat."),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="Of --sweep: throughput, goodput, or as ttft:p95.")
    ] = "throughput",
    csv: Annotated[Path | None, typer.Option(help="Of --sweep: a file for its table.")] = None,
    *,
    options: Options,
    load: Workload | None,
) -> None:
    """What bench serve would measure here, without a server: a prediction, with its interval.

    The scheduler is the server's; how long steps take was measured by calibrate or by a server.
    Answers are as long as --max-tokens allows, and drafts are not modelled. The last line is one
    JSON document. Status 1 if no request could be served.
    """
    try:
        limits = tuple(goodput or ())
        parse_limits(limits)
        for name, text in (("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens)):
            if text is not None:
                parse_length(text, name)
        if load is None:
            assert like_result is not None
            load, others = like(like_result)
            endpoint = others.get("endpoint", endpoint)
            limits = limits or tuple(others.get("goodput") or ())
        if new_tokens is not None:
            load = replace(load, max_tokens=new_tokens)
        if prompt_tokens is not None and (load.prompts or load.trace_file or load.lengths_from):
            raise ValueError("--prompt-tokens makes prompts itself: give no file of others")
    except ValueError as error:
        raise UsageError(error) from error
    question = Question(
        model=model, load=load, endpoint=endpoint, prompt_tokens=prompt_tokens, goodput=limits
    )
    if sweep:
        sweep_loads(question, options, sweep, objective, csv)
    elif not simulate_load(question, replace(options, trace=None), _path(options.trace)):
        raise typer.Exit(1)


def _path(trace: str | Path | None) -> Path | None:
    return Path(trace) if trace else None
