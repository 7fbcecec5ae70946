"""``ridgeline bench foresight``: how far predictions are off, beside what a repetition is off.

It calibrates, then predicts seven loads that the calibration has not seen, and runs each: through
admission and engine as in a server, with real arrivals, in this process. Then all run once more:
what one run says of the next is the best that anybody can foresee on this machine.
HTTP and the client's side are not in it, unless a server is named: then they are in what happens.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from ridgeline.bench.load.client_flags import ClientFlags
from ridgeline.bench.load.client_overhead import ClientOverhead
from ridgeline.bench.load.stats import summarise
from ridgeline.bench.search import first_model
from ridgeline.bench.simulate.predicted import CROWDED, SimulatedRun
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record
from ridgeline.core.request import Text
from ridgeline.engine.calibration import calibrate
from ridgeline.engine.llm import LLM
from ridgeline.engine.setup.progress import count_bar, say
from ridgeline.foresight.simulator.run import ClockHooks, Replica, SimRequest, serve
from ridgeline.foresight.simulator.workload import Planned, gamma_arrivals, lognormal_lengths
from ridgeline.foresight.step_time.calibration import Calibration
from ridgeline.foresight.step_time.features import Samples, Watcher
from ridgeline.foresight.step_time.fit import PredictionMonitor
from ridgeline.system import svg
from ridgeline.system.machine import write_text
from ridgeline.system.report import Table, figure

_MOST_REQUESTS = 400
_BAND = 10.0  # percent, of the picture
Pair = tuple[float, float]  # predicted, measured


class MeasuredLoad(NamedTuple):
    """A load by its shape: an open one asks for a share of what can be served."""

    name: str
    share: float | None
    clients: int | None
    prompt_tokens: str
    new_tokens: str
    burstiness: float = 1.0


LOADS = (
    MeasuredLoad("open, 25 %", 0.25, None, "160:0.8", "70:0.6"),
    MeasuredLoad("open, 50 %", 0.5, None, "160:0.8", "70:0.6"),
    MeasuredLoad("open, 75 %", 0.75, None, "160:0.8", "70:0.6"),
    MeasuredLoad("long prompts, 50 %", 0.5, None, "900:0.5", "40:0.5"),
    MeasuredLoad("bursts, 50 %", 0.5, None, "250:0.8", "60:0.6", 0.25),
    MeasuredLoad("4 clients", None, 4, "120:0.6", "90:0.5"),
    MeasuredLoad("16 clients", None, 16, "180:0.6", "65:0.5"),
)


class Run(NamedTuple):
    """What happened: a summary, and each step; no steps if it was a server that ran them."""

    summary: dict[str, Any]
    steps: tuple[StepErrors, ...] = ()

    @property
    def speed(self) -> float:
        """Actual over predicted seconds of all steps."""
        if not self.steps:
            return 1.0
        actual_s = math.fsum(step.actual_s for step in self.steps)
        return actual_s / math.fsum(step.predicted_s for step in self.steps)


def foresight(
    llm: LLM,
    calibration_s: float,
    load_s: float,
    keep: Callable[[Calibration], object],
    out: Path | None = None,
    base_url: str | None = None,
    overhead: ClientOverhead | None = None,
) -> None:
    """Calibrate, predict, run twice; print tables in markdown, then one line of JSON.

    Args:
        llm: without drafts, and with nothing else to do.
        calibration_s: seconds to measure.
        load_s: about how many seconds each load takes.
        keep: is given the calibration.
        out: gets a picture of what was predicted against what happened, an SVG.
        base_url: a server of this model and these options, to run the loads on instead.
        overhead: what its clients wait for besides the engine.
    """
    with count_bar("Measuring", note="seconds") as report:
        calibration = calibrate(llm, calibration_s, report)
    keep(calibration)
    say(
        f"calibrated: a step is off by {calibration.step_error or 0:.1%}; now {2 * len(LOADS)} runs"
    )
    cases = [make_case(llm, one, calibration, load_s, i, overhead) for i, one in enumerate(LOADS)]
    predicted = [case.summary({}) for case in cases]
    runs: list[list[Run]] = [[] for _ in LOADS]
    for turn in range(2):
        for i, (load, case) in enumerate(zip(LOADS, cases, strict=True)):
            say(f"run {turn * len(LOADS) + i + 1}: {load.name}, {predicted[i]['duration_s']:.0f} s")
            again = fresh(llm, case, turn)
            runs[i].append(run_on(base_url, again) if base_url else run(llm, again, calibration))
    errors, sums = compare_all(cases, predicted, runs)
    names = [load.name for load in LOADS]
    utilisations = [c.utilisation(p) for c, p in zip(cases, predicted, strict=True)]
    by_quantity = verdicts(errors, sums)
    for table in (
        table_of_runs(names, errors),
        table_of_sums(names, sums),
        table_of_loads(names, utilisations, by_quantity),
    ):
        print("\n" + "\n".join(table))
    measured = [[one.summary for one in pair] for pair in runs]
    if out is not None:
        write_text(out, picture(llm.path.name, predicted, measured))
        say(f"written: {out}")
    document = {
        "model": llm.path.name, "step_error": calibration.step_error, "load_s": load_s,
        "loads": [load._asdict() for load in LOADS], "utilisations": utilisations,
        "errors": errors, "sums": sums,
        "verdicts": {
            name: [v and v._asdict() | {"is_met": v.is_met} for v in column]
            for name, column in by_quantity.items()
        },
        "speeds": [[round(one.speed, 3) for one in pair if one.steps] for pair in runs],
        "predicted": predicted, "measured": measured,
    }  # fmt: skip
    print(json.dumps(document))


def compare_all(
    cases: Sequence[SimulatedRun],
    predicted: Sequence[Mapping[str, Any]],
    runs: Sequence[Sequence[Run]],
) -> tuple[dict[str, list[dict[str, float]]], list[dict[str, float]]]:
    """Return errors by kind, of each run, and those of sums of its steps."""
    errors: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    sums = []
    for case, foreseen, pair in zip(cases, predicted, runs, strict=True):
        for one, other in (pair, pair[::-1]):
            errors["foreseen"].append(compare(foreseen, one.summary))
            if one.steps:
                own = case.slower(one.speed).summary({})
                errors["own speed"].append(compare(own, one.summary))
            errors["once more"].append(compare(other.summary, one.summary))
            sums.append(sum_errors(one.steps, one.speed, other.speed))
    return errors, sums


def make_case(
    llm: LLM,
    load: MeasuredLoad,
    calibration: Calibration,
    load_s: float,
    seed: int,
    client_overhead: ClientOverhead | None = None,
) -> SimulatedRun:
    """Return a load of about ``load_s`` seconds, at its share of what is predicted to be served."""
    rng, room = Random(f"{seed} lengths"), llm.config.max_model_len
    pairs = zip(
        lognormal_lengths(load.prompt_tokens, "prompt_tokens", _MOST_REQUESTS, rng),
        lognormal_lengths(load.new_tokens, "new_tokens", _MOST_REQUESTS, rng),
        strict=True,
    )
    lengths = [(min(prompt, room * 3 // 4), min(new, room // 4 - 1)) for prompt, new in pairs]
    case = SimulatedRun(
        warmups=(),
        load=_requests(llm, lengths, [0.0] * len(lengths), Random(f"{seed} prompts")),
        refused={},
        concurrency=load.clients,
        settings=llm.config.settings(llm.engine.eos_ids),
        times=calibration.times,
        client_overhead=client_overhead,
    )
    rate_per_s = replace(case, load=case.load[:64]).summary({})["request_throughput_per_s"]
    rate_per_s *= load.share or 1.0
    num = max(8, min(_MOST_REQUESTS, math.ceil(rate_per_s * load_s)))
    arrivals: Sequence[float | None] = [None] * num
    if load.share is not None:
        arrivals = gamma_arrivals(num, rate_per_s, load.burstiness, Random(f"{seed} arrivals"))
    timed = zip(case.load, arrivals, strict=False)
    return replace(case, load=tuple(replace(request, arrival_s=at_s) for request, at_s in timed))


def fresh(llm: LLM, case: SimulatedRun, turn: int) -> SimulatedRun:
    """Return a case with other prompts of the same lengths, which no cache has seen."""
    dice, vocab = Random(f"{turn} fresh"), range(llm.arch.vocab_size)
    requests = (replace(a, prompt=tuple(dice.choices(vocab, k=len(a.prompt)))) for a in case.load)
    return replace(case, load=tuple(requests))


def run(llm: LLM, case: SimulatedRun, calibration: Calibration) -> Run:
    """Serve a load in real time."""
    records: list[Record] = []
    steps: list[StepErrors] = []
    watcher = Watcher(Samples(), calibration.times.windows)
    # It follows the speed, and is never fitted again.
    monitor = PredictionMonitor(calibration, start=lambda fit: None)

    def take(record: Record) -> None:
        records.append(record)
        factor = monitor.factor
        monitor.on_record(record)
        if sample := watcher.take(record):
            plain_s = calibration.times.seconds(sample.features)
            steps.append(StepErrors(sample.seconds, plain_s, factor * plain_s))

    def new_text(request: SimRequest) -> Callable[[], Text]:
        return partial(llm.text.new_text, request.prompt, request.sampling())

    llm.engine.listeners.append(take)
    replica = Replica(llm.engine, new_text=new_text)
    try:
        serve(replica, case.load, ClockHooks(time.monotonic, _wait), concurrency=case.concurrency)
    finally:
        replica.leave()
        llm.engine.listeners.remove(take)
    return Run(summarise(case.outcomes(records), {}), tuple(steps))


def run_on(base_url: str, case: SimulatedRun) -> Run:
    """Send a load to a server, with the sampling that it defaults to.

    Raises ValueError if the server fails the first request, OSError if it cannot be reached.
    """
    from ridgeline.bench.load.client import drive  # takes 80 ms

    client_flags = ClientFlags(
        base_url=base_url, model=first_model(base_url, None), endpoint="completions",
        ignore_eos=True, extra_body='{"temperature": null}',
    )  # fmt: skip
    planned = [
        Planned(i, request.prompt, request.num_new[0], request.arrival_s)
        for i, request in enumerate(case.load)
    ]
    warmup = replace(planned[0], index=-1, prompt=planned[0].prompt[::-1])
    outcomes, _ = asyncio.run(
        drive(client_flags.target(), [warmup], planned, case.concurrency, lambda done, total: None)
    )
    return Run(summarise(outcomes, {}))


def _wait(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))


def _requests(
    llm: LLM, lengths: Sequence[tuple[int, int]], arrivals: Sequence[float], dice: Random
) -> tuple[SimRequest, ...]:
    vocab = range(llm.arch.vocab_size)
    return tuple(
        SimRequest(
            prompt=tuple(dice.choices(vocab, k=prompt)),
            num_new=(new,),
            arrival_s=at_s,
            params=SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True),
            name=str(i),
        )
        for i, ((prompt, new), at_s) in enumerate(zip(lengths, arrivals, strict=True))
    )


def picture(
    name: str, predicted: Sequence[Mapping[str, Any]], runs: Sequence[Sequence[Mapping[str, Any]]]
) -> str:
    """Return the latencies of each run against what was predicted of it, as SVG."""
    figures: dict[str, list[tuple[float, float]]] = {}
    for column in ("TTFT mean", "TPOT mean", "E2E mean", "E2E p95"):
        key, statistic = COLUMNS[column]
        figures[column] = [
            (foreseen[key][statistic], measured[key][statistic])
            for foreseen, pair in zip(predicted, runs, strict=True)
            for measured in pair
        ]
    return foresight_svg(f"{name}: {len(LOADS)} loads, predicted and run twice", figures, "ms")


def compare(foreseen: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float]:
    """Return foreseen / measured - 1 of each number, in percent."""
    errors = {}
    for name, (key, column) in COLUMNS.items():
        one, other = (side[key][column] if column else side[key] for side in (foreseen, measured))
        errors[name] = round(100 * (one / other - 1), 2)
    return errors


def foresight_svg(title: str, figures: Mapping[str, Sequence[Pair]], unit: str) -> str:
    """Return the picture: a dot for each figure of each run, above or below the truth.

    To the right is what was measured, upwards by how much more was predicted: figures that differ
    by powers of ten, and errors of a few percent, are seen in one picture. The shaded band is 10 %
    to either side.

    Args:
        title: of what.
        figures: by their names, each with a colour: what was predicted and measured of each run.
            What is 0 is left out.
        unit: of all of them.

    Raises ValueError if there is nothing to draw.
    """
    positive = {name: [p for p in pairs if min(p) > 0] for name, pairs in figures.items()}
    pairs = [pair for of_name in positive.values() for pair in of_name]
    if not pairs:
        raise ValueError("there is nothing to draw: no load was both predicted and measured")
    measured = [actual for _, actual in pairs]
    most = 1.2 * max(_BAND, *(abs(_error(pair)) for pair in pairs))
    across = svg.Axis(f"measured, {unit}", min(measured) / 1.5, max(measured) * 1.5)
    up = svg.Axis("predicted, above what was measured", -most, most, is_log=False, tick="{:+,g} %")
    chart = svg.Chart(across, up)
    chart.shade(f"{_BAND:g} % to either side", up=(-_BAND, _BAND))
    chart.curve([(across.low, 0.0), (across.high, 0.0)], svg.FAINT, 1)
    colours = dict(zip(positive, svg.COLOURS, strict=False))
    for name, colour in colours.items():
        for pair in positive[name]:
            predicted, actual = pair
            said = f"{name}: {predicted:,.4g} predicted, {actual:,.4g} measured"
            chart.dot(actual, _error(pair), colour, said)
    return chart.picture(title, colours)


def _error(pair: Pair) -> float:
    """Return by how many percent more was predicted than measured."""
    predicted, measured = pair
    return 100 * (predicted / measured - 1)


COLUMNS = {  # what is compared, and where it stands in a summary
    "tok/s": ("output_tokens_per_s", ""),
    "TTFT mean": ("ttft_from_send", "mean_ms"),
    "TTFT p50": ("ttft_from_send", "p50_ms"),
    "TTFT p95": ("ttft_from_send", "p95_ms"),
    "TPOT mean": ("tpot_excl_first", "mean_ms"),
    "TPOT p95": ("tpot_excl_first", "p95_ms"),
    "E2E mean": ("e2e", "mean_ms"),
    "E2E p95": ("e2e", "p95_ms"),
}
KINDS = {
    "foreseen": "predicted from the calibration alone",
    "own speed": "predicted, times the run's own speed: what is left is the method's error",
    "once more": "the same load run once more: what a measurement says of the next",
}
SUM_S = 1.0
SUM_KINDS = {
    "foreseen": "predicted from the calibration alone",
    "followed": "predicted, times the speed of the last two seconds, as a server does",
    "own speed": "predicted, times the speed of the whole run",
    "once more": "predicted, times the speed of the other run of the same load",
}
SUMS = f"sums of {SUM_S:g} s"
BARS = {"tok/s": 5.0, "TPOT mean": 5.0, "E2E mean": 5.0, "TTFT mean": 10.0, SUMS: 5.0}  # percent
REPEATS = 1.5  # times what a repetition is off is met, too: the machine is no better
_UNSTEADY = 25.0  # percent that a repetition is off, from which it excuses nothing
Errors = Mapping[str, float]


class StepErrors(NamedTuple):
    """Seconds that a step took, that were predicted for it, and the same at the recent speed."""

    actual_s: float
    predicted_s: float
    followed_s: float


class ErrorVerdict(NamedTuple):
    """Errors of one quantity in percent, without signs: the prediction's, and a repetition's."""

    error: float
    repeat: float
    bar: float

    @property
    def is_met(self) -> bool:
        """Whether the error is within the bar, or what the machine itself allows."""
        is_steady = self.repeat <= _UNSTEADY
        return self.error <= max(self.bar, REPEATS * self.repeat if is_steady else 0.0)

    def __str__(self) -> str:
        said = f"{self.error:.1f} %, bar {self.bar:g} %, a repetition {self.repeat:.1f} %: "
        if not self.is_met:
            is_steady = self.repeat <= _UNSTEADY
            return said + ("missed" if is_steady else "the machine is too unsteady to say")
        return said + ("met" if self.error <= self.bar else f"within {REPEATS:g} repetitions")


def sum_errors(steps: Sequence[StepErrors], speed: float, other_speed: float) -> dict[str, float]:
    """Return how far sums of steps over one busy second are off, in percent, by ``SUM_KINDS``.

    Means without signs; nothing if the steps do not fill a second. What is left at the end counts
    nowhere.

    Args:
        steps: of one run, in order.
        speed: actual over predicted seconds of all these steps.
        other_speed: the same of another run of this load.
    """
    errors: dict[str, list[float]] = {kind: [] for kind in SUM_KINDS}
    actual_s = predicted_s = followed_s = 0.0
    for step in steps:
        actual_s += step.actual_s
        predicted_s += step.predicted_s
        followed_s += step.followed_s
        if actual_s >= SUM_S:
            sums = (predicted_s, followed_s, predicted_s * speed, predicted_s * other_speed)
            for of_kind, sum_s in zip(errors.values(), sums, strict=True):
                of_kind.append(100 * abs(sum_s / actual_s - 1))
            actual_s = predicted_s = followed_s = 0.0
    return {kind: round(fmean(values), 2) for kind, values in errors.items() if values}


def verdicts(
    errors: Mapping[str, Sequence[Errors]], sums: Sequence[Errors]
) -> dict[str, list[ErrorVerdict | None]]:
    """Return a verdict of each load for each quantity that has a bar, and of their median at last.

    None where a load says nothing: it was too short for sums.

    Args:
        errors: by kind, then two of each load: its runs.
        sums: errors of sums by their kinds, two of each load; some may be empty.
    """
    by_quantity: dict[str, list[ErrorVerdict | None]] = {}
    for name, bar in BARS.items():
        both = zip(errors["foreseen"], errors["once more"], strict=True)
        sides = [(run.get(name), other.get(name)) for run, other in both]
        if name == SUMS:
            sides = [(run.get("followed"), run.get("once more")) for run in sums]
        of_loads = [_verdict(sides[i : i + 2], bar) for i in range(0, len(sides), 2)]
        present = [one for one in of_loads if one]
        middle = None
        if present:
            middle = ErrorVerdict(
                median(o.error for o in present), median(o.repeat for o in present), bar
            )
        by_quantity[name] = [*of_loads, middle]
    return by_quantity


def _verdict(runs: Sequence[tuple[float | None, float | None]], bar: float) -> ErrorVerdict | None:
    errors = [abs(error) for error, _ in runs if error is not None]
    repeats = [abs(repeat) for _, repeat in runs if repeat is not None]
    return ErrorVerdict(fmean(errors), fmean(repeats), bar) if errors and repeats else None


def table_of_runs(names: Sequence[str], errors: Mapping[str, Sequence[Errors]]) -> Iterator[str]:
    """Yield a line for each run, and for the means and medians of all kinds, in markdown.

    Args:
        names: of the loads; each has two runs.
        errors: in percent by kind, of each run; kinds without any are left out.
    """
    rows = [
        (f"{names[i // 2]}, run {i % 2 + 1}", *(f"{row[column]:+.1f}" for column in COLUMNS))
        for i, row in enumerate(errors["foreseen"])
    ]
    rows += [
        (
            f"**{label} of {kind}**, without signs",
            *(f"{average(abs(row[c]) for row in of_kind):.1f}" for c in COLUMNS),
        )
        for label, average in (("mean", fmean), ("median", median))
        for kind, of_kind in errors.items()
        if of_kind
    ]
    yield from Table(("foreseen / measured - 1, %", *COLUMNS), rows).markdown()
    yield ""
    yield from (f"{kind}: {text}" for kind, text in KINDS.items() if errors[kind])


def table_of_loads(
    names: Sequence[str],
    utilisations: Sequence[float | None],
    by_quantity: Mapping[str, Sequence[ErrorVerdict | None]],
) -> Iterator[str]:
    """Yield a line for each load and for their median, in markdown, and then the verdicts.

    Args:
        names: of the loads.
        utilisations: each load as a share of what could be served.
        by_quantity: what ``verdicts`` returned.
    """
    shares = [figure(one, ".0%") for one in utilisations]
    rows = [
        (name, share, *(_cell(column[i]) for column in by_quantity.values()))
        for i, (name, share) in enumerate(zip([*names, "**median**"], [*shares, ""], strict=True))
    ]
    heads = ("error (of a repetition), %", "of what can be served", *by_quantity)
    yield from Table(heads, rows).markdown()
    yield ""
    yield f"!: more than its bar, and than {REPEATS:g} times a repetition's error."
    crowded = [n for n, u in zip(names, utilisations, strict=True) if u is not None and u > CROWDED]
    if crowded:
        yield f"Nobody can foresee waiting above {CROWDED:.0%}, as in: {', '.join(crowded)}."
    for name, column in by_quantity.items():
        if middle := column[-1]:
            yield f"{name}: median {middle}"


def _cell(verdict: ErrorVerdict | None) -> str:
    if verdict is None:
        return "-"
    return f"{verdict.error:.1f} ({verdict.repeat:.1f}){'' if verdict.is_met else ' !'}"


def table_of_sums(names: Sequence[str], sums: Sequence[Errors]) -> Iterator[str]:
    """Yield a line for each run: how far sums of its steps are off; nothing if there are none."""
    if not any(sums):
        return
    rows = [
        (f"{names[i // 2]}, run {i % 2 + 1}", *(f"{row[kind]:.1f}" for kind in SUM_KINDS))
        for i, row in enumerate(sums)
        if row
    ]
    medians = (f"{median(row[kind] for row in sums if row):.1f}" for kind in SUM_KINDS)
    rows.append(("**median**", *medians))
    yield from Table((f"{SUMS}, without signs, %", *SUM_KINDS), rows).markdown()
    yield ""
    yield from (f"{kind}: {text}" for kind, text in SUM_KINDS.items())
