"""``ridgeline simulate``: the load generator's result without a server, in a moment.

It reads what a model's file says of shapes and text, and never its weights. How long steps take is
what ``ridgeline calibrate`` or a server measured on this machine, else it is assumed, and said so;
on another device (``--on``) it is what plans say.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from ridgeline.bench.load.client_overhead import ClientOverhead
from ridgeline.bench.load.main import flags_of, print_result, read_plan, summarise_load
from ridgeline.bench.load.stats import DEFINITIONS, parse_limits, summarise
from ridgeline.bench.out_file import check_place
from ridgeline.bench.simulate.engines import EngineHere, EngineOnDevice, SimulatedEngine
from ridgeline.bench.simulate.predicted import (
    CROWDED,
    SimulatedRun,
    kills_a_minute,
    random_kills,
    sim_requests,
    tokens_of_sessions,
)
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record
from ridgeline.engine.setup.options import Options
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.foresight.simulator.drafts import parse_drafts
from ridgeline.foresight.simulator.fleet import ROUTERS, Evict
from ridgeline.foresight.simulator.run import SimRequest
from ridgeline.foresight.simulator.workload import Planned, Workload, lognormal_lengths
from ridgeline.foresight.step_time.calibration import ONE_STREAM, Calibration
from ridgeline.foresight.structure import to_json
from ridgeline.model.files.tensors import naming
from ridgeline.planner import PlanFlags
from ridgeline.planner.capacity.option import engine_record
from ridgeline.planner.single_device import DeviceReplica

_SOURCES = {
    "measured": "by ridgeline calibrate",
    "served": "by a server",
    "assumed": "uncalibrated",
    "calibrated": "measured here",
    "published": "a formula (planning.md)",
}
_MOST_REPLICAS = 1024
_MOST_FOR_INTERVAL = 8  # servers
_NUM_IDS = 1 << 15  # of a model whose vocabulary is not known
Prompts = list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is to be simulated, but for the options of the engine.

    Attributes:
        model: as people type it.
        load: which requests come.
        endpoint: "chat" puts prompts into the chat template, "completions" takes them as they are.
        prompt_tokens: exact lengths, ``N`` or ``N:CV``, of prompts of random tokens.
        goodput: limits, as of ``bench serve``.
        replicas: how many servers like this one share the load.
        router: which of them gets a request, a name of ``fleet.ROUTERS``.
        is_load_per_server: whether rate and number of requests are those of each server.
        kills_per_minute: how many of them end in a minute, or which part of them such as ``10%``,
            without notice; each has another one like it ``back_after_s`` seconds later.
        drafts: what is guessed, as in ``4:0.6``; empty for no speculation.
        client_overhead: what clients wait for besides the engine, if that was measured.
        answer_tokens: lengths of answers that end by themselves, as ``prompt_tokens``: clients and
            scheduler know only what the load allows. None for answers as long as that.
        calibration: which one is the model of time, where several are kept: "measured", "served",
            or "newest".
        plan_flags: the device, as ``ridgeline plan`` takes it; without one it is this machine.
    """

    model: str
    load: Workload
    endpoint: str = "chat"
    prompt_tokens: str | None = None
    goodput: tuple[str, ...] = ()
    replicas: int = 1
    router: str = "least-tokens"
    is_load_per_server: bool = False
    kills_per_minute: str = "0"
    back_after_s: float = 10.0
    drafts: str = ""
    client_overhead: ClientOverhead | None = None
    answer_tokens: str | None = None
    calibration: str = "newest"
    plan_flags: PlanFlags = field(default_factory=PlanFlags)


@dataclass(frozen=True)
class PreparedRun:
    """A case, and what it was made from."""

    case: SimulatedRun
    engine: SimulatedEngine
    planned: list[Planned]
    num_left_out: int


class Simulator:
    """A model's facts, read once, for one or many simulations."""

    def __init__(self, scenario: Scenario) -> None:
        """Read what the model's file says. Raises ValueError if there is no such model."""
        self._engine: EngineHere | EngineOnDevice
        is_here = not scenario.plan_flags.names_device
        self._engine = (EngineHere if is_here else EngineOnDevice)(scenario.model)
        self._prompts: dict[Any, Prompts] = {}

    def prepare(self, scenario: Scenario, options: Options) -> PreparedRun:
        """Return the case of a question with these options.

        Raises ValueError if options contradict the model, or a file is not what it should be.
        """
        scenario = _for_all_servers(scenario)
        planned, num_left_out = read_plan(scenario.load)
        key = (scenario.load, scenario.endpoint, scenario.prompt_tokens)
        if key not in self._prompts:
            self._prompts[key] = self._ids(scenario, planned)
        prompts = self._prompts[key]
        engine: SimulatedEngine
        if isinstance(self._engine, EngineHere):
            engine = self._engine.set_up(options, scenario.calibration)
        else:
            sessions = tokens_of_sessions(planned, prompts)
            engine = self._engine.set_up(options, scenario.plan_flags, sessions)
        max_model_len = engine.settings.max_model_len
        warmups, load, refused = sim_requests(planned, prompts, max_model_len)
        if not load:
            raise ValueError(f"nothing can be simulated: {next(iter(refused.values()))}")
        case = SimulatedRun(
            warmups=tuple(warmups),
            load=tuple(_ending_sooner(load, scenario)),
            refused=refused,
            concurrency=scenario.load.max_concurrency,
            settings=engine.settings,
            times=engine.latency_model.times,
            replicas=scenario.replicas,
            router=scenario.router,
            drafts=parse_drafts(scenario.drafts) if scenario.drafts else None,
            kills=_kills(scenario, load),
            client_overhead=scenario.client_overhead,
        )
        return PreparedRun(case, engine, planned, num_left_out)

    def _ids(self, scenario: Scenario, planned: Sequence[Planned]) -> Prompts:
        """Return the token ids of all prompts, as a server would see them."""
        load = scenario.load
        if scenario.prompt_tokens is not None:
            rng = Random(f"{load.seed} lengths")
            lengths = lognormal_lengths(scenario.prompt_tokens, "prompt_tokens", len(planned), rng)
            checkpoint = self._engine.checkpoint
            num_ids = checkpoint.arch.vocab_size if checkpoint else _NUM_IDS
            rng, vocab = Random(f"{load.seed} prompts"), range(num_ids)
            prefix = tuple(rng.choices(vocab, k=max(lengths)))
            shared = [
                0 if one.turn else round(load.prefix_share * num)
                for one, num in zip(planned, lengths, strict=True)
            ]
            return [
                prefix[:first] + tuple(rng.choices(vocab, k=num - first))
                for first, num in zip(shared, lengths, strict=True)
            ]
        if self._engine.checkpoint is None:
            raise ValueError(
                f"{scenario.model}: its tokenizer is not here, so give lengths in tokens: "
                "--prompt-tokens 800, or 800:0.5 to vary"
            )
        text = TextProcessor(self._engine.checkpoint, self._engine.card)
        try:
            encode = _encoder(text, scenario.endpoint)
            return [encode(request) for request in planned]
        finally:
            text.close()


def _for_all_servers(scenario: Scenario) -> Scenario:
    """Return a question whose load is that of all servers. Raises ValueError if it has no rate."""
    if not scenario.is_load_per_server:
        return scenario
    load, num = scenario.load, scenario.replicas
    if load.request_rate is None or load.trace_file is not None:
        raise ValueError("--load-per-server is about requests at a rate: give --request-rate")
    load = replace(load, request_rate=num * load.request_rate, num_prompts=num * load.num_prompts)
    return replace(scenario, load=load)


def _kills(scenario: Scenario, load: Sequence[SimRequest]) -> tuple[Evict, ...]:
    """Return which servers end, and when. Raises ValueError if that cannot be asked."""
    per_minute = kills_a_minute(scenario.kills_per_minute, scenario.replicas)
    if not per_minute:
        return ()
    if scenario.replicas < 2 or scenario.load.max_concurrency is not None:
        raise ValueError(
            "--kills-per-minute needs several servers and requests that come at a rate: give "
            "--replicas and --request-rate, and no --max-concurrency"
        )
    last_s = max(request.arrival_s or 0.0 for request in load)
    seed = scenario.load.seed or 0
    return random_kills(scenario.replicas, per_minute, last_s, scenario.back_after_s, seed)


def _ending_sooner(load: Sequence[SimRequest], scenario: Scenario) -> Sequence[SimRequest]:
    """Return a load whose answers end by themselves before what clients allow, if so asked."""
    if scenario.answer_tokens is None:
        return load
    rng = Random(f"{scenario.load.seed} answers")
    lengths = lognormal_lengths(scenario.answer_tokens, "answer_tokens", len(load), rng)
    return [
        replace(
            one,
            num_new=(min(length, one.num_new[0]),),
            params=SamplingParams(temperature=0.0, max_tokens=one.num_new[0]),
        )
        for one, length in zip(load, lengths, strict=True)
    ]


def _encoder(text: TextProcessor, endpoint: str) -> Callable[[Planned], tuple[int, ...]]:
    """Return what makes token ids of a planned prompt. In a later turn only what is new counts."""

    def render(prompt: str) -> list[int]:
        return text.chat_template.render_ids([{"role": "user", "content": prompt}])

    @cache
    def num_before() -> int:
        """Return the tokens that stand before any first message."""
        pair = zip(render("a"), render("b"), strict=False)
        return next((i for i, (one, other) in enumerate(pair) if one != other), 0)

    def encode(request: Planned) -> tuple[int, ...]:
        if not isinstance(request.prompt, str) or endpoint == "completions" or not text.can_chat:
            prompt = request.prompt
            return tuple(text.encode(prompt if isinstance(prompt, str) else list(prompt)))
        ids = render(request.prompt)
        return tuple(ids[num_before() :] if request.turn else ids)

    return encode


def check_fleet(
    replicas: int = 1,
    router: str = "least-tokens",
    drafts: str = "",
    kills_per_minute: str = "0",
    back_after_s: float = 10.0,
) -> None:
    """Raise ValueError unless these are valid."""
    kills_a_minute(kills_per_minute, replicas)
    if back_after_s < 0:
        raise ValueError(f"--back-after {back_after_s:g} cannot be below 0")
    if drafts:
        parse_drafts(drafts)
    if not 1 <= replicas <= _MOST_REPLICAS:
        raise ValueError(f"--replicas {replicas} is not from 1 to {_MOST_REPLICAS}")
    if router not in ROUTERS:
        raise ValueError(f"--router is {router!r}, not one of {', '.join(ROUTERS)}")


def seeded(scenario: Scenario) -> Scenario:
    """Return a question whose load has a seed: 0 unless one is given, so that flags say it all."""
    return replace(scenario, load=replace(scenario.load, seed=scenario.load.seed or 0))


def simulate_load(scenario: Scenario, options: Options, trace: Path | None) -> bool:
    """Simulate; print the block of ``bench serve`` and its document. False if nothing succeeded.

    ``trace`` is a file for the records. Raises ValueError if something asked for makes no sense,
    and OSError if a file cannot be read or written.
    """
    scenario, limits_ms = seeded(scenario), parse_limits(scenario.goodput)
    if trace is not None and scenario.replicas > 1:
        raise ValueError("--trace records one engine: give no --replicas")
    if trace is not None:
        check_place(trace)
    prepared = Simulator(scenario).prepare(scenario, options)
    if scenario.replicas > 1:
        summary, records = prepared.case.summary(limits_ms), []
    else:
        records = prepared.case.records()
        summary = summarise(prepared.case.outcomes(records), limits_ms)
    prediction = predict(prepared, summary)
    if trace is not None:
        write_trace(trace, records, prediction | {"seed": scenario.load.seed})
    said = warnings(scenario.model, prepared, prediction)
    print_result(summary, said, "Predicted Serving Result", lines(prepared, prediction, summary))
    load_summary = summarise_load(scenario.load, prepared.planned, prepared.num_left_out)
    if scenario.prompt_tokens is not None:
        load_summary |= {"prompt_length_unit": "tokens", "num_repeated_prompts": 0}
    further_flags: dict[str, Any] = {"model": scenario.model, "endpoint": scenario.endpoint}
    if scenario.replicas > 1:
        further_flags |= {"replicas": scenario.replicas, "router": scenario.router}
    if scenario.is_load_per_server:
        further_flags |= {"load_per_server": True}
    if prepared.case.kills:
        further_flags |= {"kills_per_minute": scenario.kills_per_minute}
        further_flags |= {"back_after": scenario.back_after_s}
    if scenario.drafts:
        further_flags |= {"drafts": scenario.drafts}
    if scenario.answer_tokens:
        further_flags |= {"answer_tokens": scenario.answer_tokens}
    if scenario.plan_flags.names_device:
        further_flags |= {
            name: value for name, value in asdict(scenario.plan_flags).items() if value
        }
    flags = flags_of(None, scenario.load, scenario.goodput) | further_flags
    notes = {"warnings": said, "definitions": DEFINITIONS, "prediction": prediction}
    print(json.dumps({"flags": flags, "asked": load_summary} | summary | notes, allow_nan=False))
    return bool(summary["num_successful"])


def predict(prepared: PreparedRun, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return how far to trust a summary: where it comes from, and its interval.

    Interval and utilisation take three simulations more, so large fleets have neither.
    """
    engine, calibration, latency_model = (
        prepared.engine,
        prepared.engine.calibration,
        prepared.engine.latency_model,
    )
    is_large = prepared.case.replicas > _MOST_FOR_INTERVAL
    ends = [
        prepared.case.slower(factor).summary({})["output_tokens_per_s"]
        for factor in (() if is_large else (latency_model.high, latency_model.low))
    ]
    at = calibration.measured_at if calibration else 0.0
    return {
        "source": latency_model.source,
        "calibrated_at": date_of(at) if at else None,
        "utilisation": None if is_large else prepared.case.utilisation(summary),
        "output_tokens_per_s_interval": ends or None,
        "speed": calibration and round(1 / calibration.interval().middle, 3),
        "step_error": calibration and calibration.step_error,
        "also_kept": [_beside(one, engine) for one in engine.others],
        "edge": prepared.case.client_overhead and prepared.case.client_overhead.as_dict(),
        "device": engine.replica and _device(engine.replica, prepared.case.settings),
    }


def _device(replica: DeviceReplica, settings: EngineRecord) -> dict[str, Any]:
    memory = replica.placement.memory
    whole = engine_record(replica.placement, replica.latency_model.times)
    return {
        "name": replica.name,
        "tp": memory.tp,
        "pp": memory.pp,
        "engine": memory.engine.name,
        "dtype": replica.placement.storage.name,
        "kv_tokens": whole.num_blocks * settings.block_size,
    }


def _beside(other: Calibration, engine: SimulatedEngine) -> dict[str, Any]:
    """Return what is said of a calibration that is kept beside the one that is used."""
    own, its = engine.latency_model.times, other.times.scaled(other.interval().middle)
    return {
        "source": other.source,
        "calibrated_at": date_of(other.measured_at),
        "step_time_ratio": round(its.seconds(ONE_STREAM) / own.seconds(ONE_STREAM), 3),
    }


def lines(
    prepared: PreparedRun, prediction: Mapping[str, Any], summary: Mapping[str, Any]
) -> dict[str, str | float | None]:
    """Return what is said of a prediction below the block."""
    fleet = summary.get("fleet")
    ends = prediction["output_tokens_per_s_interval"]
    at, overhead = prediction["calibrated_at"], prediction["edge"]
    utilisation = prediction["utilisation"]
    device = prediction["device"]
    return {
        **({"Device": f"{device['name']}, rules of {device['engine']}"} if device else {}),
        **({"Room in its KV cache (tokens)": f"{device['kv_tokens']:,}"} if device else {}),
        "Model of time": _SOURCES[prediction["source"]],
        **({"Measured at": at} if at else {}),
        **{
            f"Also kept: {_SOURCES[one['source']]}": (
                f"{one['calibrated_at']}, {one['step_time_ratio']:.2f} times as long a step"
            )
            for one in prediction["also_kept"]
        },
        "Output tok/s, 5 to 95 %": f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else "unknown",
        "Share of what can be served": "unknown" if utilisation is None else f"{utilisation:.0%}",
        **({"Prompt tokens found in a cache": f"{fleet['share_cached']:.1%}"} if fleet else {}),
        **(_of_kills(fleet) if fleet and prepared.case.kills else {}),
        **({"Edge of the server (ms)": overhead["base_ms"]} if overhead else {}),
        **({"Edge, each prompt token (us)": overhead["per_prompt_token_us"]} if overhead else {}),
    }


def _of_kills(fleet: Mapping[str, Any]) -> dict[str, str | float | None]:
    return {
        "Servers that end": fleet["kills"],
        "Requests that go on elsewhere": fleet["requests_moved"],
        "Tokens computed again": f"{fleet['share_again']:.2%}",
    }


def warnings(model: str, prepared: PreparedRun, prediction: Mapping[str, Any]) -> list[str]:
    """Return what makes a prediction mean less than it seems to."""
    utilisation = prediction["utilisation"] or 0.0
    latency_model, replica = prepared.engine.latency_model, prepared.engine.replica
    texts = dict.fromkeys(replica.notes if replica else (), True)
    texts |= {
        latency_model.note: latency_model.source == "published",
        "uncalibrated: these numbers are assumed of a processor that was not measured, and may be "
        f"off by a factor of two and more: ridgeline calibrate {model}": (
            prediction["source"] == "assumed"
        ),
        f"the load is {utilisation:.0%} of what can be served: latencies there depend on the "
        "smallest error of the prediction, so take them as a direction": (
            utilisation > CROWDED and prepared.case.concurrency is None
        ),
        "the client's side is not in these numbers: HTTP, templates, tokenising (--edge)": (
            prepared.case.client_overhead is None
        ),
        "guessing takes no time and no memory in these numbers, as looking tokens up takes next to "
        "none: steps and weights of a smaller model that guesses are not counted": (
            prepared.case.drafts is not None
        ),
    }
    return [text for text, applies in texts.items() if applies]


def write_trace(path: Path, records: Sequence[Record], header: Mapping[str, Any]) -> None:
    """Write records as ``--trace`` does, behind a line that says that they are simulated."""
    with naming(path), path.open("w", encoding="utf-8") as file:
        for line in ({"type": "simulated", **header}, *map(to_json, records)):
            print(json.dumps(line, separators=(",", ":")), file=file)


def like(path: Path) -> tuple[Workload, dict[str, Any]]:
    """Return the load of a result of ``bench serve``, and its other flags.

    Raises ValueError if it is not one, and OSError if it cannot be read.
    """
    try:
        flags = json.loads(path.read_text("utf-8").splitlines()[-1])["flags"]
        names = {field.name for field in fields(Workload)}
        values = {name: value for name, value in flags.items() if name in names}
        for name in ("request_rate", "burstiness"):
            values[name] = None if values[name] is None else float(values[name])
        return Workload(**values), flags
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a result of bench serve: {error}") from None


def date_of(at_s: float) -> str:
    """Return a moment, in seconds since 1970, as text with its time zone."""
    moment = datetime.datetime.fromtimestamp(at_s).astimezone()
    return moment.isoformat(timespec="seconds")
