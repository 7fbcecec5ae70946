"""``ridgeline bench foresight``: how far predictions are off, beside what a repetition is off.

It calibrates, then predicts seven loads that the calibration has not seen, and runs each: through
admission and engine as in a server, with real arrivals, in this process. Then all run once more:
what one run says of the next is the best that anybody can foresee on this machine.
HTTP and the client's side are not in it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from ridgeline.api.llm import LLM
from ridgeline.bench.foresight_svg import foresight_svg
from ridgeline.bench.load.stats import summarise
from ridgeline.bench.predicted import Case
from ridgeline.bench.simulate import settings_of
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record
from ridgeline.core.request import Text
from ridgeline.engine_setup.progress import count_bar, say
from ridgeline.planner.calibrate import calibrate
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.samples import Samples, Watcher
from ridgeline.simulator.run import Asked, Course, Replica, serve
from ridgeline.simulator.workload import gamma_arrivals, lognormal_lengths

_MOST_REQUESTS = 400
_COLUMNS = {  # what is compared, and where it stands in a summary
    "tok/s": ("output_tokens_per_s", ""),
    "TTFT mean": ("ttft_from_send", "mean_ms"),
    "TTFT p50": ("ttft_from_send", "p50_ms"),
    "TTFT p95": ("ttft_from_send", "p95_ms"),
    "TPOT mean": ("tpot_excl_first", "mean_ms"),
    "TPOT p95": ("tpot_excl_first", "p95_ms"),
    "E2E mean": ("e2e", "mean_ms"),
    "E2E p95": ("e2e", "p95_ms"),
}
_KINDS = {
    "foreseen": "predicted from the calibration alone",
    "own speed": "predicted, times the run's own speed: what is left is the method's error",
    "once more": "the same load run once more: what a measurement says of the next",
}


class Load(NamedTuple):
    """A load by its shape: an open one asks for a share of what can be served."""

    name: str
    share: float | None
    clients: int | None
    prompt_tokens: str
    new_tokens: str
    burstiness: float = 1.0


LOADS = (
    Load("open, 25 %", 0.25, None, "160:0.8", "70:0.6"),
    Load("open, 50 %", 0.5, None, "160:0.8", "70:0.6"),
    Load("open, 75 %", 0.75, None, "160:0.8", "70:0.6"),
    Load("long prompts, 50 %", 0.5, None, "900:0.5", "40:0.5"),
    Load("bursts, 50 %", 0.5, None, "250:0.8", "60:0.6", 0.25),
    Load("4 clients", None, 4, "120:0.6", "90:0.5"),
    Load("16 clients", None, 16, "180:0.6", "65:0.5"),
)
Errors = dict[str, float]


def foresight(
    llm: LLM,
    calibration_s: float,
    load_s: float,
    keep: Callable[[Calibration], object],
    out: Path | None = None,
) -> None:
    """Calibrate, predict, run twice; print a table in markdown, then one line of JSON.

    Args:
        llm: without drafts, and with nothing else to do.
        calibration_s: seconds to measure.
        load_s: about how many seconds each load takes.
        keep: is given the calibration.
        out: gets a picture of what was predicted against what happened, an SVG.
    """
    with count_bar("Measuring", note="seconds") as report:
        calibration = calibrate(llm, calibration_s, report)
    keep(calibration)
    say(
        f"calibrated: a step is off by {calibration.step_error or 0:.1%}; now {2 * len(LOADS)} runs"
    )
    cases = [make_case(llm, load, calibration, load_s, i) for i, load in enumerate(LOADS)]
    predicted = [case.summary({}) for case in cases]
    runs: list[list[tuple[dict[str, Any], float]]] = [[] for _ in LOADS]
    for turn in range(2):
        for i, (load, case) in enumerate(zip(LOADS, cases, strict=True)):
            say(f"run {turn * len(LOADS) + i + 1}: {load.name}, {predicted[i]['duration_s']:.0f} s")
            runs[i].append(run(llm, fresh(llm, case, turn), calibration))
    errors: dict[str, list[Errors]] = {kind: [] for kind in _KINDS}
    for case, foreseen, (first, second) in zip(cases, predicted, runs, strict=True):
        for measured, speed in (first, second):
            errors["foreseen"].append(compare(foreseen, measured))
            errors["own speed"].append(compare(case.slower(speed).summary({}), measured))
        errors["once more"] += [compare(first[0], second[0]), compare(second[0], first[0])]
    print_table(errors)
    if out is not None:
        measured_runs = [[measured for measured, _ in pair] for pair in runs]
        out.write_text(picture(llm.path.name, predicted, measured_runs), encoding="utf-8")
        say(f"written: {out}")
    document = {
        "model": llm.path.name, "step_error": calibration.step_error, "load_s": load_s,
        "loads": [load._asdict() for load in LOADS], "errors": errors,
        "speeds": [[round(speed, 3) for _, speed in pair] for pair in runs],
        "predicted": predicted, "measured": [[measured for measured, _ in pair] for pair in runs],
    }  # fmt: skip
    print(json.dumps(document))


def make_case(llm: LLM, load: Load, calibration: Calibration, load_s: float, seed: int) -> Case:
    """Return a load of about ``load_s`` seconds, at its share of what is foreseen to be served."""
    rng, room = Random(f"{seed} lengths"), llm.config.max_model_len
    pairs = zip(
        lognormal_lengths(load.prompt_tokens, "prompt_tokens", _MOST_REQUESTS, rng),
        lognormal_lengths(load.new_tokens, "new_tokens", _MOST_REQUESTS, rng),
        strict=True,
    )
    lengths = [(min(prompt, room * 3 // 4), min(new, room // 4 - 1)) for prompt, new in pairs]
    case = Case(
        warmups=(),
        load=_asked(llm, lengths, [0.0] * len(lengths), Random(f"{seed} prompts")),
        refused={},
        concurrency=load.clients,
        settings=settings_of(llm.config, llm.engine.eos_ids),
        times=calibration.times,
    )
    rate_per_s = replace(case, load=case.load[:64]).summary({})["request_throughput_per_s"]
    rate_per_s *= load.share or 1.0
    num = max(8, min(_MOST_REQUESTS, math.ceil(rate_per_s * load_s)))
    arrivals: Sequence[float | None] = [None] * num
    if load.share is not None:
        arrivals = gamma_arrivals(num, rate_per_s, load.burstiness, Random(f"{seed} arrivals"))
    timed = zip(case.load, arrivals, strict=False)
    return replace(case, load=tuple(replace(asked, arrival_s=at_s) for asked, at_s in timed))


def fresh(llm: LLM, case: Case, turn: int) -> Case:
    """Return a case with other prompts of the same lengths, which no cache has seen."""
    dice, vocab = Random(f"{turn} fresh"), range(llm.arch.vocab_size)
    asked = (replace(a, prompt=tuple(dice.choices(vocab, k=len(a.prompt)))) for a in case.load)
    return replace(case, load=tuple(asked))


def run(llm: LLM, case: Case, calibration: Calibration) -> tuple[dict[str, Any], float]:
    """Serve a load in real time; return what was measured, and the factor of its steps' times."""
    records: list[Record] = []
    watcher = Watcher(Samples(), calibration.times.windows)
    sums = [0.0, 0.0]

    def take(record: Record) -> None:
        records.append(record)
        if sample := watcher.take(record):
            sums[0] += sample.seconds
            sums[1] += calibration.times.seconds(sample.features)

    def new_text(asked: Asked) -> Callable[[], Text]:
        return partial(llm.text.new_text, asked.prompt, asked.sampling())

    llm.engine.listeners.append(take)
    replica = Replica(llm.engine, new_text=new_text)
    try:
        serve(replica, case.load, Course(time.monotonic, _wait), concurrency=case.concurrency)
    finally:
        replica.leave()
        llm.engine.listeners.remove(take)
    return summarise(case.outcomes(records), {}), sums[0] / sums[1]


def _wait(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))


def _asked(
    llm: LLM, lengths: Sequence[tuple[int, int]], arrivals: Sequence[float], dice: Random
) -> tuple[Asked, ...]:
    vocab = range(llm.arch.vocab_size)
    return tuple(
        Asked(
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
        key, statistic = _COLUMNS[column]
        figures[column] = [
            (foreseen[key][statistic], measured[key][statistic])
            for foreseen, pair in zip(predicted, runs, strict=True)
            for measured in pair
        ]
    return foresight_svg(f"{name}: {len(LOADS)} loads, predicted and run twice", figures, "ms")


def compare(foreseen: Mapping[str, Any], measured: Mapping[str, Any]) -> Errors:
    """Return foreseen / measured - 1 of each number, in percent."""
    errors = {}
    for name, (key, column) in _COLUMNS.items():
        one, other = (side[key][column] if column else side[key] for side in (foreseen, measured))
        errors[name] = round(100 * (one / other - 1), 2)
    return errors


def print_table(errors: Mapping[str, Sequence[Errors]]) -> None:
    """Print all errors of the first kind, and the means and medians of all kinds, in markdown."""
    print(f"\n| foreseen / measured - 1, % | {' | '.join(_COLUMNS)} |")
    print("|---" * (len(_COLUMNS) + 1) + "|")
    for i, row in enumerate(errors["foreseen"]):
        name = f"{LOADS[i // 2].name}, run {i % 2 + 1}"
        print(f"| {name} | {' | '.join(f'{row[column]:+.1f}' for column in _COLUMNS)} |")
    for label, average in (("mean", fmean), ("median", median)):
        for kind, rows in errors.items():
            cells = (f"{average(abs(row[c]) for row in rows):.1f}" for c in _COLUMNS)
            print(f"| **{label} of {kind}**, without signs | {' | '.join(cells)} |")
    print()
    for kind, text in _KINDS.items():
        print(f"{kind}: {text}")
