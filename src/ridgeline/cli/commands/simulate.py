"""``ridgeline simulate``: what ``bench serve`` would measure, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ridgeline.bench.load.client_overhead import EDGE_HELP, read_edge
from ridgeline.bench.load.stats import parse_limits
from ridgeline.bench.simulate.engines import check_options
from ridgeline.bench.simulate.main import Scenario, check_fleet, like, simulate_load
from ridgeline.bench.simulate.sweep import sweep_loads
from ridgeline.cli.commands.models import MODEL_HELP
from ridgeline.cli.commands.replay import serve_again
from ridgeline.cli.flags import UsageError, flags
from ridgeline.engine.setup.options import Options
from ridgeline.foresight.simulator.workload import Workload, parse_length
from ridgeline.planner import PlanFlags
from ridgeline.planner.memory.flags import AUTO, OF_DEVICE

_FORMATS = {"dtype": "auto", "kv_cache_dtype": "auto"}  # plans know more of them than engines


ON_HELPS = {
    "on": "Simulate this device of `ridgeline plan` instead: 4090, h100, m4-max, a MIG slice such "
    "as h100-sxm/2g.20gb, or mine: the device that --memory, --bandwidth and --tflops describe.",
    "tensor_parallel_size": "With --on: number of devices that share each layer. Default: as few "
    "as hold the model.",
    "engine": "With --on: engine whose memory rules and times apply: ridgeline, vllm, sglang, "
    "trtllm or llamacpp. Default: as for plan.",
}


def check_device(plan_flags: PlanFlags) -> None:
    """Raise UsageError for a flag that says something of a device where none is named."""
    usual = PlanFlags()
    for name in OF_DEVICE:
        if not plan_flags.names_device and getattr(plan_flags, name) != getattr(usual, name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} is about a device: name one with --on")


_MODEL = Annotated[
    str | None,
    typer.Argument(
        help=f"{MODEL_HELP} With --on, a config.json too. With --replay: its calibration is the "
        "clock."
    ),
]
_EDGE = Annotated[
    list[str] | None,
    typer.Option(metavar="RESULT,TRACE", help=EDGE_HELP),
]
_DRAFTS = Annotated[
    str,
    typer.Option(
        help="Speculative decoding: 4:0.6 means 4 draft tokens, each accepted with probability 0.6."
    ),
]

_ROUTER = Annotated[
    str,
    typer.Option(
        help="With --replicas: least-work (as serve), least-tokens, prefix or round-robin."
    ),
]
_ENDPOINT = Annotated[
    Literal["chat", "completions"],
    typer.Option(
        help="chat puts prompts into the chat template; completions sends them as they are."
    ),
]
_PROMPT_TOKENS = Annotated[
    str | None, typer.Option(help="Random tokens of a prompt: 128, or 128:0.5 to vary.")
]
_NEW_TOKENS = Annotated[
    str | None, typer.Option(help="Tokens of an answer, as above. The same as --max-tokens.")
]
_OBJECTIVE = Annotated[
    str, typer.Option(help="With --sweep: throughput, goodput, or a latency such as ttft:p95.")
]
_REPLAY = Annotated[
    Path | None, typer.Option(help="Simulate the requests of a trace (serve --trace).")
]
_PER_SERVER = Annotated[
    bool,
    typer.Option(
        "--load-per-server",
        help="With --replicas: --request-rate and --num-prompts are those of each server.",
    ),
]
_KILLS = Annotated[
    str,
    typer.Option(
        help="With --replicas: servers that fail per minute, such as 12, or 10% of them; their "
        "requests continue on others."
    ),
]
_BACK = Annotated[
    float,
    typer.Option("--back-after", help="Seconds until a failed server is back."),
]
_ANSWER_TOKENS = Annotated[
    str | None,
    typer.Option(
        help="Tokens of answers that end before --max-tokens: 128, or 128:0.5 to vary. The "
        "scheduler does not know them."
    ),
]
_LIKE = Annotated[
    Path | None, typer.Option("--like", help="Use the load of this bench serve result (JSON).")
]
_SWEEP = Annotated[
    list[str] | None,
    typer.Option(help="NAME=a,b,c: try values of an option or of the load; repeatable."),
]
_CHANGES = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="With --replay: a setting; repeatable."),
]
_CALIBRATION = Annotated[
    Literal["newest", "measured", "served"],
    typer.Option(help="Which step times: those that calibrate measured, or a server learnt."),
]


@flags(
    "plan_flags",
    PlanFlags,
    only=(*OF_DEVICE, *_FORMATS),
    helps=ON_HELPS
    | {
        "dtype": "Format of the weights: as for serve; with --on, as for plan.",
        "kv_cache_dtype": "Format of keys and values: as for serve; with --on, as for plan.",
    },
)
# The seed of the load decides all; formats and ranks are among the plan_flags.
@flags("options", Options, fixed={"seed": None, "tensor_parallel_size": 1} | _FORMATS)
@flags("load", Workload, unless=("like_result", "replay"))
def simulate_command(
    model: _MODEL = None,
    endpoint: _ENDPOINT = "chat",
    prompt_tokens: _PROMPT_TOKENS = None,
    new_tokens: _NEW_TOKENS = None,
    answer_tokens: _ANSWER_TOKENS = None,
    goodput: Annotated[list[str] | None, typer.Option(help="ttft:MS, tpot:MS, e2el:MS.")] = None,
    like_result: _LIKE = None,
    sweep: _SWEEP = None,
    objective: _OBJECTIVE = "throughput",
    csv: Annotated[Path | None, typer.Option(help="With --sweep: a file for the table.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --sweep: an .svg file to draw.")] = None,
    replicas: Annotated[int, typer.Option(help="Number of servers that share the load.")] = 1,
    router: _ROUTER = "least-tokens",
    load_per_server: _PER_SERVER = False,
    kills_per_minute: _KILLS = "0",
    back_after: _BACK = 10.0,
    drafts: _DRAFTS = "",
    edge: _EDGE = None,
    calibration: _CALIBRATION = "newest",
    replay: _REPLAY = None,
    changes: _CHANGES = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="With --replay: first difference, each request.")
    ] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="With --replay: both runs, for ui.perfetto.dev.")
    ] = None,
    *,
    plan_flags: PlanFlags,
    options: Options,
    load: Workload | None,
) -> None:
    """Predict what bench serve would measure here, without a server, with an interval.

    The scheduler is the server's; how long steps take was measured by calibrate or by a server.
    With --on it is an engine on another device, with the step times of plan; a config.json is
    enough then. Answers are as long as --max-tokens allows, or as --answer-tokens. The last line
    is one JSON document. Status 1 if no request could be served.

    With --replay, requests arrive as in the trace, once with its own settings and once with
    those of --set. Steps take as long as those of the trace usually did, or with MODEL as long as
    its calibration says. Without --set it says how many steps are decided as they were, if each
    takes as long as it did.
    """
    options = _check_device(plan_flags, options, calibration)
    if replay is not None:
        if plan_flags.names_device:
            raise UsageError("--replay serves the requests of its trace here: give no --on")
        of_loads = (like_result, prompt_tokens, new_tokens, answer_tokens, goodput, sweep, csv, out)
        given = (endpoint, objective, router, load_per_server, back_after, calibration, replicas)
        usual = ("chat", "throughput", "least-tokens", False, 10.0, "newest", 1)
        if any((*of_loads, edge, drafts, kills_per_minute != "0", given != usual)):
            raise UsageError("--replay serves the requests of its trace: give no other load")
        serve_again(replay, model, changes or [], options, diff=diff, timeline_file=timeline)
        return
    if changes or diff or timeline:
        raise UsageError("--set, --diff and --timeline are about a trace: give --replay")
    if model is None:
        raise UsageError("name a model; only --replay does without")
    lengths = {"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens}
    scenario = _scenario(model, endpoint, load, like_result, lengths, new_tokens, goodput)
    scenario = replace(scenario, replicas=replicas, router=router, drafts=drafts)
    scenario = replace(scenario, kills_per_minute=kills_per_minute, back_after_s=back_after)
    scenario = replace(scenario, is_load_per_server=load_per_server)
    edges = read_edge(edge) if edge else None
    scenario = replace(scenario, edge=edges, calibration=calibration, plan_flags=plan_flags)
    _check(scenario, options, objective, csv, out, is_sweep=bool(sweep))
    if sweep:
        sweep_loads(scenario, options, sweep, objective, csv, out)
    elif not simulate_load(scenario, replace(options, trace=None), _path(options.trace)):
        raise typer.Exit(1)


def _check_device(plan_flags: PlanFlags, options: Options, calibration: str) -> Options:
    """Return the options of the engine, which have the formats that were asked for.

    Raises UsageError for flags that make no sense with a device, or without one.
    """
    formats: dict[str, Any] = {name: getattr(plan_flags, name) for name in _FORMATS}
    ranks = plan_flags.tensor_parallel_size or "1"
    try:
        if plan_flags.names_device:
            check_options(options)
            if calibration != "newest":
                raise ValueError("--calibration is about this machine: give no --on")
            return options
        if ranks == AUTO:
            raise ValueError("--tensor-parallel-size auto is about a device: name one with --on")
        check_device(replace(plan_flags, tensor_parallel_size=None))
        return replace(options, tensor_parallel_size=int(ranks), **formats)
    except ValueError as error:
        raise UsageError(error) from error


def _scenario(
    model: str,
    endpoint: str,
    load: Workload | None,
    like_result: Path | None,
    lengths: Mapping[str, str | None],
    new_tokens: str | None,
    goodput: list[str] | None,
) -> Scenario:
    """Return what is to be simulated. Raises UsageError for flags that make no sense together."""
    try:
        limits = tuple(goodput or ())
        parse_limits(limits)
        for name, text in {**lengths, "new_tokens": new_tokens}.items():
            if text is not None:
                parse_length(text, name)
        if load is None:
            assert like_result is not None
            load, others = like(like_result)
            endpoint = others.get("endpoint", endpoint)
            limits = limits or tuple(others.get("goodput") or ())
        if new_tokens is not None:
            if like_result is None and load.max_tokens not in (None, new_tokens):
                raise ValueError("--new-tokens and --max-tokens both say how long answers are")
            load = replace(load, max_tokens=new_tokens)
        if lengths["prompt_tokens"] is not None:
            if load.prompts or load.trace_file or load.lengths_from:
                raise ValueError("--prompt-tokens makes prompts itself: give no file of others")
            if like_result is None and load.prompt_words is not None:
                raise ValueError("--prompt-tokens and --prompt-words both say how long prompts are")
    except ValueError as error:
        raise UsageError(error) from error
    return Scenario(
        model=model,
        load=load,
        endpoint=endpoint,
        prompt_tokens=lengths["prompt_tokens"],
        answer_tokens=lengths["answer_tokens"],
        goodput=limits,
    )


def _check(
    scenario: Scenario,
    options: Options,
    objective: str,
    csv: Path | None,
    out: Path | None,
    *,
    is_sweep: bool,
) -> None:
    """Raise UsageError for what makes no sense, or would say nothing without another flag."""
    if options.speculative_config not in (None, "off"):
        raise UsageError("a simulation has no texts to guess from: say with --drafts what is right")
    try:
        check_fleet(
            scenario.replicas, scenario.router, scenario.drafts, scenario.kills_per_minute,
            scenario.back_after_s,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(error) from error
    if not is_sweep:
        if csv or out:
            raise UsageError("--csv and --out are about a table: give --sweep")
        if objective != "throughput":
            raise UsageError("--objective chooses among the rows of a table: give --sweep")
        _check_alone(scenario)
    if out is not None and out.suffix.lower() != ".svg":
        raise UsageError(f"--out {out}: the picture is SVG, so its name ends in .svg")


def _check_alone(scenario: Scenario) -> None:
    """Raise UsageError for what says nothing of one simulation, without another flag."""
    usual = Scenario(model=scenario.model, load=scenario.load)
    if scenario.replicas == 1 and scenario.router != usual.router:
        raise UsageError("--router chooses among servers: give --replicas")
    if scenario.replicas == 1 and scenario.is_load_per_server:
        raise UsageError("--load-per-server is about several: give --replicas")
    never_fail = scenario.kills_per_minute == usual.kills_per_minute
    if never_fail and scenario.back_after_s != usual.back_after_s:
        raise UsageError("--back-after is about servers that fail: give --kills-per-minute")
    if scenario.load.think_s and scenario.load.turns == 1:
        raise UsageError("--think-s stands between the turns of a session: give --turns")


def _path(trace: str | Path | None) -> Path | None:
    return Path(trace) if trace else None
