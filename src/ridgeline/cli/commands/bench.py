"""``ridgeline bench`` of servers, results, GPUs and techniques."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.bench.compare import Format, compare
from ridgeline.bench.gpu import SECONDS, bench_gpu, chosen_parts
from ridgeline.bench.images import Images, bench_images
from ridgeline.bench.load.client_flags import ClientFlags
from ridgeline.bench.out_file import check_out
from ridgeline.bench.search import SearchFlags, search
from ridgeline.cli.commands.models import MODEL_HELP, AsJson
from ridgeline.cli.commands.simulate import ON_HELPS, check_device
from ridgeline.cli.flags import UsageError, flags
from ridgeline.foresight.simulator.workload import Workload
from ridgeline.planner import PlanFlags
from ridgeline.planner.memory.flags import OF_DEVICE


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("search")(bench_search)
    app.command("images")(images)
    app.command("compare")(compare_results)
    app.command("gpu")(gpu)
    app.command("claims")(claims)


# What a search decides itself is no flag: which load, how many requests, whom it asks.
@flags("workload", Workload, fixed={"request_rate": 1.0, "max_concurrency": None, "num_prompts": 1})
@flags("client_flags", ClientFlags, fixed={"base_url": "http://127.0.0.1", "model": ""})
@flags("search_flags", SearchFlags)
def bench_search(
    *, search_flags: SearchFlags, client_flags: ClientFlags, workload: Workload
) -> None:
    """Find the highest load at which a server still meets latency limits.

    The load doubles until a trial fails; then the interval is narrowed to 5 %, and both its ends
    are tried again. A trial ends as soon as its failure is certain. The last line is one JSON
    document. Status 1 if no load holds.
    """
    if workload.trace_file and search_flags.over == "concurrency":
        raise UsageError(
            "--trace-file says when requests come: --lengths-from takes only its lengths"
        )
    if not search(search_flags, client_flags, workload):
        raise typer.Exit(1)


@flags(
    "load",
    Workload,
    fixed={
        "trace_file": None, "lengths_from": None, "prompt_words": "16", "prefix_share": 0.0,
        "turns": 1, "think_s": 0.0, "max_tokens": None,
    },
)  # fmt: skip
@flags("image_flags", Images)
def images(*, image_flags: Images, load: Workload) -> None:
    """Put the load of many users on an endpoint that generates images.

    Requests arrive at random times, or a fixed number run at once. Only complete images of the
    requested size count. The last line is one JSON document. Status 1 if no request succeeded.
    """
    if not bench_images(image_flags, load):
        raise typer.Exit(1)


def compare_results(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="JSON documents; the others are compared with the first."
        ),
    ],
    format: Annotated[Format, typer.Option(help="Output format.")] = "table",
    out: Annotated[
        Path | None, typer.Option(help="Also write the table to this .csv or .md file.")
    ] = None,
) -> None:
    """Compare the results of load generators, under the same names.

    It reads those of ridgeline bench serve, vLLM's bench serve, guidellm, AIPerf and LLMPerf, and
    says where their measurements differ.
    """
    check_out(out, (".csv", ".md"))
    compare(files, format, out)


def gpu(
    parts: Annotated[
        str | None,
        typer.Option(
            help="Parts to run, separated by commas: smoke, correct, bits, engine ... Default: all."
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=1, help="Time for all parts together; each also has a deadline of its own."
        ),
    ] = SECONDS,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Small shapes on the CPU, to check that all of the code runs."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the results to this file, one line of JSON each, as they come."),
    ] = None,
) -> None:
    """Check whether the cuda backend is right on this GPU, and measure how fast it is.

    Each part is a process of its own with a deadline. The last lines are a short table, what each
    result decides, and what is wrong. Status 1 if anything is.
    """
    if not bench_gpu(chosen_parts(parts), seconds, is_tiny=tiny, out=out):
        raise typer.Exit(1)


@flags("plan_flags", PlanFlags, only=OF_DEVICE, helps=ON_HELPS)
def claims(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"{MODEL_HELP} With --on, a config.json too. Default: smollm2, or Llama 2 13B."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this technique, by its name in the table, however long it takes; repeatable."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Time for all; what does not fit is named.")
    ] = 150,
    out: Annotated[
        Path | None, typer.Option(help="Write the picture (.svg), or a .json, .csv or .md file.")
    ] = None,
    as_json: AsJson = False,
    *,
    plan_flags: PlanFlags,
) -> None:
    """Compare what the field's techniques bring here with what their papers claim.

    Each technique is off and on in turn: on the real engine, or with --on by the scheduler under a
    virtual clock, with no model loaded. Then batch sizes, with latency and cost.
    """
    from ridgeline.bench.claims import bench_claims

    check_device(plan_flags)
    bench_claims(model, plan_flags, seconds, out, as_json=as_json, only=only or ())
