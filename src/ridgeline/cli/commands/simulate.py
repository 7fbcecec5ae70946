"""``ridgeline simulate`` and ``sweep``: what ``bench serve`` would measure, without a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ridgeline.bench.load.client_overhead import EDGE_HELP, read_client_overhead
from ridgeline.bench.load.stats import parse_limits
from ridgeline.bench.simulate.engines import check_options
from ridgeline.bench.simulate.main import Scenario, check_fleet, like, simulate_load
from ridgeline.bench.simulate.sweep import sweep_loads
from ridgeline.cli.commands.models import MODEL_HELP
from ridgeline.cli.flags import UsageError, flags
from ridgeline.engine.setup.options import Options, flag_field
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
    str, typer.Argument(help=f"{MODEL_HELP} With --on, a config.json too.", show_default=False)
]
_LIKE = Annotated[
    Path | None, typer.Option("--like", help="Use the load of this bench serve result (JSON).")
]


@dataclass(frozen=True, kw_only=True)
class ScenarioFlags:
    """What is simulated beside the engine's options and the load; each field is a flag."""

    endpoint: Literal["chat", "completions"] = flag_field(
        "chat",
        "chat puts prompts into the chat template; completions sends them as they are.",
    )
    prompt_tokens: str | None = flag_field(
        None, "Random tokens of a prompt: 128, or 128:0.5 to vary."
    )
    new_tokens: str | None = flag_field(
        None, "Tokens of an answer, as above. The same as --max-tokens."
    )
    answer_tokens: str | None = flag_field(
        None,
        "Tokens of answers that end before --max-tokens: 128, or 128:0.5 to vary. The scheduler "
        "does not know them.",
    )
    goodput: list[str] | None = flag_field(None, "ttft:MS, tpot:MS, e2el:MS.")
    edge: list[str] | None = flag_field(None, f"RESULT,TRACE: {EDGE_HELP}")
    replicas: int = flag_field(1, "Number of servers that share the load.")
    router: str = flag_field(
        "least-tokens",
        "With --replicas: least-work (as serve), least-tokens, prefix or round-robin.",
    )
    load_per_server: bool = flag_field(
        False, "With --replicas: --request-rate and --num-prompts are those of each server."
    )
    kills_per_minute: str = flag_field(
        "0",
        "With --replicas: servers that fail per minute, such as 12, or 10% of them; their requests "
        "continue on others.",
    )
    back_after: float = flag_field(10.0, "Seconds until a failed server is back.")
    drafts: str = flag_field(
        "",
        "Speculative decoding: 4:0.6 means 4 draft tokens, each accepted with probability 0.6.",
    )
    calibration: Literal["newest", "measured", "served"] = flag_field(
        "newest", "Which step times: those that calibrate measured, or a server learnt."
    )


def _scenario_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags that say what is simulated: load, engine, device and servers."""
    of_device = flags(
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
    of_engine = flags(
        "options", Options, fixed={"seed": None, "tensor_parallel_size": 1} | _FORMATS
    )
    of_load = flags("load", Workload, unless=("like_result",))
    return of_device(of_engine(of_load(flags("scenario_flags", ScenarioFlags)(command))))


@_scenario_flags
def simulate_command(
    model: _MODEL,
    like_result: _LIKE = None,
    *,
    scenario_flags: ScenarioFlags,
    plan_flags: PlanFlags,
    options: Options,
    load: Workload | None,
) -> None:
    """Predict what bench serve would measure here, without a server, with an interval.

    The scheduler is the server's; how long steps take was measured by calibrate or by a server.
    With --on it is an engine on another device, with the step times of plan; a config.json is
    enough then. Answers are as long as --max-tokens allows, or as --answer-tokens. The last line
    is one JSON document. Status 1 if no request could be served.

    Other values of an option or of the load: ridgeline sweep. The requests of a trace: replay.
    """
    scenario = _scenario(model, scenario_flags, plan_flags, load, like_result)
    options = _checked(options, scenario)
    _check_alone(scenario)
    if not simulate_load(scenario, replace(options, trace=None), _path(options.trace)):
        raise typer.Exit(1)


@_scenario_flags
def sweep_command(
    model: _MODEL,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="NAME=a,b,c", help="Values of an option or of the load; repeatable."
        ),
    ],
    objective: Annotated[
        str, typer.Option(help="What is best: throughput, goodput, or a latency such as ttft:p95.")
    ] = "throughput",
    csv: Annotated[Path | None, typer.Option(help="A file for the table.")] = None,
    out: Annotated[Path | None, typer.Option(help="An .svg file to draw.")] = None,
    like_result: _LIKE = None,
    *,
    scenario_flags: ScenarioFlags,
    plan_flags: PlanFlags,
    options: Options,
    load: Workload | None,
) -> None:
    """Simulate a load under each combination of settings, and say which is best.

    Each is what ridgeline simulate would say of it, in a process of its own. The last line is one
    JSON document.
    """
    scenario = _scenario(model, scenario_flags, plan_flags, load, like_result)
    options = _checked(options, scenario)
    if out is not None and out.suffix.lower() != ".svg":
        raise UsageError(f"--out {out}: the picture is SVG, so its name ends in .svg")
    sweep_loads(scenario, options, settings, objective, csv, out)


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
    scenario_flags: ScenarioFlags,
    plan_flags: PlanFlags,
    load: Workload | None,
    like_result: Path | None,
) -> Scenario:
    """Return what is to be simulated. Raises UsageError for flags that make no sense together."""
    endpoint: str = scenario_flags.endpoint
    try:
        limits = tuple(scenario_flags.goodput or ())
        parse_limits(limits)
        for name in ("prompt_tokens", "answer_tokens", "new_tokens"):
            if (text := getattr(scenario_flags, name)) is not None:
                parse_length(text, name)
        if load is None:
            assert like_result is not None
            load, others = like(like_result)
            endpoint = others.get("endpoint", endpoint)
            limits = limits or tuple(others.get("goodput") or ())
        if scenario_flags.new_tokens is not None:
            if like_result is None and load.max_tokens not in (None, scenario_flags.new_tokens):
                raise ValueError("--new-tokens and --max-tokens both say how long answers are")
            load = replace(load, max_tokens=scenario_flags.new_tokens)
        if scenario_flags.prompt_tokens is not None:
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
        prompt_tokens=scenario_flags.prompt_tokens,
        answer_tokens=scenario_flags.answer_tokens,
        goodput=limits,
        replicas=scenario_flags.replicas,
        router=scenario_flags.router,
        is_load_per_server=scenario_flags.load_per_server,
        kills_per_minute=scenario_flags.kills_per_minute,
        back_after_s=scenario_flags.back_after,
        drafts=scenario_flags.drafts,
        client_overhead=read_client_overhead(scenario_flags.edge) if scenario_flags.edge else None,
        calibration=scenario_flags.calibration,
        plan_flags=plan_flags,
    )


def _checked(options: Options, scenario: Scenario) -> Options:
    """Return the options of the engine, with its formats. Raises UsageError for what is none."""
    options = _check_device(scenario.plan_flags, options, scenario.calibration)
    if options.speculative_config not in (None, "off"):
        raise UsageError("a simulation has no texts to guess from: say with --drafts what is right")
    try:
        check_fleet(
            scenario.replicas, scenario.router, scenario.drafts, scenario.kills_per_minute,
            scenario.back_after_s,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(error) from error
    return options


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
