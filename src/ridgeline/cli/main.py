"""The command line. Every command is a few lines: parse, call, print.

What only measures is imported by its command, so that the others start sooner.

Exit status: 0 on success, 2 for a usage error, 1 for anything else. Errors are one or two lines on
standard error; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ridgeline import LLM
from ridgeline.bench.load.client_flags import ClientFlags, check_base_url
from ridgeline.bench.load.client_overhead import EDGE_HELP, read_client_overhead
from ridgeline.bench.load.main import serve
from ridgeline.bench.load.stats import parse_limits
from ridgeline.bench.out_file import check_out
from ridgeline.cli import settings
from ridgeline.cli.commands import bench as bench_commands
from ridgeline.cli.commands import checks, models
from ridgeline.cli.commands.batch import batch_command
from ridgeline.cli.commands.calibrate import calibrate_command
from ridgeline.cli.commands.doctor import document, report
from ridgeline.cli.commands.explain import explain_command
from ridgeline.cli.commands.fleet import fleet
from ridgeline.cli.commands.models import load_guard, load_model, loaded, seeded
from ridgeline.cli.commands.plan import plan_command
from ridgeline.cli.commands.ps import ps
from ridgeline.cli.commands.quantize import quantize
from ridgeline.cli.commands.repl import answer, chat
from ridgeline.cli.commands.replay import replay_command
from ridgeline.cli.commands.simulate import simulate_command, sweep_command
from ridgeline.cli.commands.stage import stage
from ridgeline.cli.flags import UsageError, as_text, flags, reason_of, with_stdin
from ridgeline.cli.help import App
from ridgeline.engine.calibration import save_calibration
from ridgeline.engine.setup.home import default_home
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.progress import say
from ridgeline.foresight.simulator.workload import Workload
from ridgeline.serve.http.options import ServeOptions
from ridgeline.system.terminal import console
from ridgeline.version import __version__

# What fingers type after other programs, and what does it here.
_ELSEWHERE = {
    "version": "ridgeline --version",
    "help": "ridgeline -h",
    "chat": "ridgeline run MODEL",
    "stop": "Ctrl-C, or SIGTERM, where ridgeline serve runs; --keep-alive unloads models",
}


class _Group(TyperGroup):
    """Typer's commands, with words about a wrong value that name it and are not pydantic's."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, as typer does; of another program's, say what there is instead."""
        if instead := _ELSEWHERE.get(args[0]):
            raise UsageError(f"there is no command {args[0]!r}: {instead}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, as typer does."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = reason_of(error)
            raise


app = App(
    name="ridgeline",
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="An LLM inference engine for the machine you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = App(help="Measure speed, latency and accuracy.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
models.add_to(app)
checks.add_to(app)
app.command("batch")(batch_command)
app.command("config")(settings.config)
app.command("ps")(ps)
app.command("fleet")(fleet)
app.command("stage")(stage)
app.command("explain")(explain_command)
app.command("replay")(replay_command)
app.command("calibrate")(calibrate_command)
app.command("plan")(plan_command)
app.command("quantize")(quantize)
app.command("simulate")(simulate_command)
app.command("sweep")(sweep_command)

Model = models.Model
Models = Annotated[list[str] | None, typer.Argument(metavar="MODEL", help=models.MODEL_HELP)]


def main() -> None:
    """Run the command line, and turn exceptions into one line and a status."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    _open_what_is_closed()
    _bear_any_locale()
    try:
        command = typer.main.get_command(app)
        settings.name_variables(command)
        arguments, file = settings.take_config(arguments, os.environ)
        defaults = settings.read_config(file, command) if file else None
        command(arguments, default_map=defaults)
    except KeyboardInterrupt:
        sys.exit(130)
    except UsageError as error:
        _fail(error, 2, debug)
    except (ValueError, OSError, MemoryError) as error:
        _fail(error, 1, debug)


def _fail(error: Exception, status: int, debug: bool) -> None:
    if debug:
        raise error
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        text = (
            f"not enough memory ({text}): give a smaller --max-model-len or --kv-cache-memory, or "
            "another model; ridgeline plan MODEL says what one needs"
        )
    print(f"ridgeline: {text}", file=sys.stderr)
    sys.exit(status)


def _open_what_is_closed() -> None:
    """Let no other file get the number of a standard stream: words to that would go into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _bear_any_locale() -> None:
    """Show what the locale cannot show as "?", and read UTF-8 where it would read only ASCII."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, TextIOWrapper) and codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8")


engine_options = flags("options", Options, fixed={"is_shared": False})


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; may be given anywhere.")
    ] = False,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="TOML file with values of flags; may be given anywhere.",
        ),
    ] = None,
) -> None:
    """An LLM inference engine for the machine you have."""
    if version:
        print(f"ridgeline {__version__}")
        raise typer.Exit


@app.command()
@engine_options
def run(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Prompt; piped input is added after it. Without both: a chat."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt without the chat template.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Default: the model's, or 0.7.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample only from the k likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample only from the likeliest tokens that make up this probability."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens below this share of the likeliest token's probability."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: fewer repetitions.")
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="-2 to 2.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="-2 to 2.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum length of the answer, in tokens.")] = 512,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; repeatable.")
    ] = None,
    *,
    options: Options,
) -> None:
    """Answer one prompt, or chat."""
    from_flags: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "max_tokens": max_tokens,
        "stop": [as_text(end) for end in stop or ()],
    }
    sampling = {name: value for name, value in from_flags.items() if value is not None}
    prompt = with_stdin(None if prompt is None else as_text(prompt))
    with load_model(model, seeded(options), sampling) as (llm, params):
        if prompt is None:
            chat(llm, params)
        else:
            answer(llm, prompt, params, raw=raw)


@app.command("serve")
@engine_options
@flags("serving", ServeOptions)
def serve_command(model: Models = None, *, serving: ServeOptions, options: Options) -> None:
    """Serve a model over HTTP, with OpenAI's API and others; or several, loaded on demand.

    With --replicas each model has several servers here, and streams outlive each of them.
    """
    names = model or []
    _check_fleet(names, serving)
    options = replace(options, enable_lora=options.enable_lora or bool(serving.allow_lora_loading))
    if len(names) != 1 or serving.models_dir or serving.is_router:
        _serve_several(names, serving, options)
        return
    (name,) = names
    from ridgeline.serve.main import serve  # its web framework would slow every other command
    from ridgeline.trust.stages import server_stages

    @contextmanager
    def load(is_shared: bool) -> Iterator[LLM]:
        with loaded(name, replace(seeded(options), is_shared=is_shared)) as llm:
            say(f"seed {llm.config.seed} for requests without one")
            yield llm

    new_guard = partial(load_guard, options=options)
    serve(name, load, serving, partial(server_stages, serving, new_guard))


def _check_fleet(names: list[str], serving: ServeOptions) -> None:
    """Check what goes with servers of other machines."""
    is_one = len(names) == 1 and not serving.models_dir
    if serving.join and (not is_one or serving.num_replicas > 1):
        raise UsageError("--join is for one server of one model: leave out --replicas")
    if serving.join and (serving.uds or serving.grpc_port is not None):
        raise UsageError("a server with --join does not listen: leave out --uds and --grpc-port")
    if serving.fleet_key_file and (not is_one or serving.keep_alive_s is not None):
        raise UsageError(
            "--fleet-key-file works with one model that stays loaded: leave out --keep-alive"
        )


def _serve_several(names: list[str], serving: ServeOptions, options: Options) -> None:
    """Check what goes with several models or servers, and serve them."""
    if not names and not serving.models_dir:
        raise UsageError("name a model, or several, or a folder of them with --models-dir")
    is_one = len(names) == 1 and not serving.models_dir
    for flag, value in (
        ("--served-model-name", serving.served_model_name),
        ("--lora", options.lora),
        ("--allow-lora-loading", serving.allow_lora_loading),
    ):
        if value and not is_one:
            raise UsageError(f"{flag} works with one model only: serve that model alone")
    if serving.num_replicas > 1 and options.backend == "cuda" and serving.place == "here":
        raise UsageError("--replicas divides the processor's cores: a GPU has one server")
    from ridgeline.fleet.main import route

    route(names, options, serving)


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="Load this model, and show what takes memory."),
    ] = None,
    roof: Annotated[
        bool,
        typer.Option("--roof", help="Measure what memory and arithmetic reach, a GPU's too."),
    ] = False,
    as_json: models.AsJson = False,
) -> None:
    """Describe this machine and what Ridgeline will use of it, and list problems."""
    if as_json:
        print(json.dumps(document(default_home(), model=model, with_roof=roof)))
        return
    report(console(markup=True), default_home(), model=model, with_roof=roof)


@bench_app.command("offline")
@engine_options
def bench_offline(
    model: Model,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Show where a step's time goes, and the roofline, instead."),
    ] = False,
    profile_out: Annotated[Path, typer.Option(help="The picture that --profile draws.")] = Path(
        "roofline.svg"
    ),
    *,
    options: Options,
) -> None:
    """Measure fixed shapes: prefill, one stream, many streams. The last line is one JSON document.

    Prompts are random, so drafts would be wrong: speculative decoding is off unless
    --speculative-config asks for it.
    """
    shape = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    options = replace(options, speculative_config=options.speculative_config or "off")
    with load_model(model, options, {}) as (llm, _):
        if profile:
            from ridgeline.bench.offline import profile as print_profile

            print_profile(llm, picture=profile_out, **shape)
        else:
            from ridgeline.bench.offline import bench

            bench(llm, **shape)


@bench_app.command("foresight")
@engine_options
def bench_foresight(
    model: Model,
    seconds: Annotated[float, typer.Option(min=1, help="About how long to calibrate.")] = 60.0,
    load_seconds: Annotated[
        float, typer.Option(min=0.1, help="About how long each run is.")
    ] = 50.0,
    out: Annotated[
        Path | None, typer.Option(help="Draw predicted against actual latencies to this .svg file.")
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="Run the loads on this server, which serves the same model."),
    ] = None,
    edge: Annotated[
        list[str] | None,
        typer.Option(help=EDGE_HELP),
    ] = None,
    *,
    options: Options,
) -> None:
    """Measure the error of predictions: calibrate, then predict and run seven other loads, twice.

    About 15 minutes, on a machine that does nothing else; --seconds 15 --load-seconds 8 takes
    three. The table compares the errors of the predictions with those of a second run. The last
    line is one JSON document.
    """
    from ridgeline.bench.foresight import foresight

    check_out(out, (".svg",))
    if edge and not base_url:
        raise UsageError("--edge needs a server: give --base-url")
    if base_url:
        try:
            check_base_url(base_url)
        except ValueError as error:
            raise UsageError(error) from error
    client_overhead = read_client_overhead(edge) if edge else None
    with load_model(model, replace(options, speculative_config="off"), {}) as (llm, _):
        foresight(
            llm, seconds, load_seconds, partial(save_calibration, default_home()), out, base_url,
            client_overhead,
        )  # fmt: skip


@bench_app.command("speculation")
@engine_options
def bench_drafts(
    model: Model,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with category and turns, as in Spec-Bench."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each category.")] = 10,
    new_tokens: Annotated[
        int, typer.Option(min=2, help="Maximum number of tokens of an answer.")
    ] = 128,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of concurrent prompts; repeatable.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature of all answers.")
    ] = 0.0,
    *,
    options: Options,
) -> None:
    """Run with and without speculative decoding, in turn. The last line is one JSON document.

    Code edits are always measured; --prompts adds categories.
    """
    from ridgeline.bench.speculation import bench_speculation

    with load_model(model, options, {}) as (llm, _):
        bench_speculation(
            llm,
            prompts=prompts,
            num_prompts=num_prompts,
            new_tokens=new_tokens,
            streams=streams or [1],
            temperature=temperature,
        )


@bench_app.command("quality")
@engine_options
def bench_quality(
    model: Model,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text. Default: four kinds of text.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text to use.")] = 1024,
    against: Annotated[
        str | None, typer.Option(help="Compare with this model in f32. Default: with the same.")
    ] = None,
    *,
    options: Options,
) -> None:
    """KL divergence, top-1 agreement and perplexity of each format against f32.

    Measured on prose, code, other scripts and text that repeats itself, or on --text alone.
    --backend, --dtype and --kv-cache-dtype narrow the list of formats; --max-model-len is the
    length of the windows that the text is cut into. --against names the model that a quantised one
    was made of, so that what its files lost counts too. The last line is one JSON document.
    """
    from ridgeline.bench.quality import quality

    quality(model, text_file=text, num_tokens=tokens, options=options, against=against)


@bench_app.command("serve")
@flags("load", Workload)
@flags("client_flags", ClientFlags)
def bench_serve(
    goodput: Annotated[
        list[str] | None, typer.Option(help="ttft:MS, tpot:MS, e2el:MS; repeat.")
    ] = None,
    clients: Annotated[
        int, typer.Option(min=1, help="Processes that send, where one cannot keep up.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="The latencies as a picture, .svg; a table, .csv or .md.")
    ] = None,
    *,
    client_flags: ClientFlags,
    load: Workload,
) -> None:
    """The load of many users on any OpenAI-compatible server, and what they see.

    Requests arrive at random times, at the times of a trace, or a fixed number run at once. The
    last line is one JSON document. Status 1 if no request succeeded.
    """
    try:
        parse_limits(goodput or ())
        check_out(out)
    except ValueError as error:
        raise UsageError(error) from error
    if not serve(client_flags, load, goodput or (), clients, out):
        raise typer.Exit(1)


bench_commands.add_to(bench_app)
