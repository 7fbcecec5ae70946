"""Fit the formula of ``model/cost/device_time.py`` to measured serving points; print its errors.

    python -m peers.serving_fit silicon_sample.csv --configs model_configs

The table and the configs are those of ``peers.serving_points``. For each engine and generation of
devices five constants and a power are fitted to the time of an answer's token, each pulled towards
what is usual, as few models hardly tell them apart; and for each engine two to the time of its
first: what a server takes for a request, and which share of all clients' prompts it waits for.
Errors are of the formula that plans compare devices with, for a model that was left out with all
that are built like it. Rows are printed as physics/data/efficiency.csv has
them, with the factor that 95 % of these errors stay below: of a further model it held nine in ten.
Then comes the table of ``serving_points`` for models that were left out of constants and of factors
alike. Nothing is written.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from peers.serving_points import (
    Point,
    Predicted,
    asked_of,
    candidate_of,
    intervals_of,
    read_points,
    table,
)
from peers.static_batch import batch_steps
from ridgeline.model.cost.device_time import DeviceTime, Efficiency
from ridgeline.planner.capacity.latency_model import queue_s
from ridgeline.planner.capacity.option import Candidate
from ridgeline.planner.capacity.search import settled_of

POWERS = (1.0, 1.5, 2.0, 3.0, 6.0)
# Of a layer, of memory, products and attention, and of a sequence: "Efficiency" in this order.
USUAL = np.log([3e-5, 0.8, 0.8, 0.4, 3e-5])
LOWEST, HIGHEST = np.log([1e-7, 0.05, 0.05, 0.02, 1e-7]), np.log([1e-3, 1.0, 1.0, 1.0, 1e-3])
PULL = np.array([20.0, 60.0, 30.0, 20.0, 14.0])  # a case's error of 1 for each is so far from usual
FIRST_LOWEST, FIRST_HIGHEST = np.log([1e-4, 1e-3]), np.log([10.0, 3.0])
FIRST_START = np.log([5e-2, 0.4])
QUANTILE = 0.95  # of errors; nine in ten of a model must be below that was in no error
_LEAST = 0.05  # errors below this weigh no more than it
_MOST_STEPS = 9  # of batch_steps
HEAD = (
    "engine,generation,o_us,e_m,e_c,e_a,seq_us,p,request_ms,queue_share,num_points,loo_error,"
    "factor_90,first_factor_90,source"
)
SOURCE = "AIConfigurator 0.12.0, silicon_sample.csv; 2025 and 2026"
Floats = npt.NDArray[np.float64]
# With constants of 1, DeviceTime.parts() says what the constants multiply.
_ONES = Efficiency("", "", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0, 0.0, 1.0, 1.0, "")
_PARTS = ("overhead", "weights", "cache", "compute", "attention", "sequences", "link")


class Case(NamedTuple):
    """A point, as the fit sees it.

    Attributes:
        point: what was measured.
        candidate: what a plan makes of it.
        engine, generation: which constants it belongs to.
        built: width and number of layers: models of the same are left out together.
        steps: [_MOST_STEPS, 8]: how many, and what ``_PARTS`` take with constants of 1.
        answer_s: of the answer, measured; meanwhile each other client's request is computed.
    """

    point: Point
    candidate: Candidate
    engine: str
    generation: str
    built: tuple[int, int]
    steps: Floats
    answer_s: float


class Left(NamedTuple):
    """Cases under constants that were fitted without them.

    Attributes:
        constants: of each case.
        first_s, queue_s, token_s: [n]: what a plan says by them of a first token without anything
            besides steps, of all clients' prompts, and of a token.
    """

    constants: list[Efficiency]
    first_s: Floats
    queue_s: Floats
    token_s: Floats


def case_of(point: Point, configs: Path) -> Case | None:
    """Return a point as the fit sees it; None if a plan refuses it, or has no room."""
    row = point.row
    try:
        candidate = candidate_of(asked_of(point, configs))
    except ValueError:
        return None
    if candidate is None:
        return None
    times = candidate.latency_model.times
    assert isinstance(times, DeviceTime)
    ones = replace(times, efficiency=_ONES)
    new, steps = int(row["osl"]), np.zeros((_MOST_STEPS, 1 + len(_PARTS)))
    for i, (num, counts) in enumerate(batch_steps(point.clients, int(row["isl"]), new)):
        parts = ones.parts(counts)
        steps[i] = num, *(parts[name] for name in _PARTS)
    built = times.work.hidden_size, times.work.num_layers
    generation = candidate.placement.device.generation
    answer_s = point.measured_ms["tpot"] / 1e3 * new
    return Case(point, candidate, row["backend"], generation, built, steps, answer_s)


def with_constants(candidate: Candidate, constants: Efficiency) -> Candidate:
    """Return the candidate with these constants and their errors."""
    latency_model = candidate.latency_model
    assert isinstance(latency_model.times, DeviceTime)
    factor, first = constants.factor_90, constants.first_factor_90
    latency_model = replace(
        latency_model,
        times=replace(latency_model.times, efficiency=constants),
        low=1 / factor,
        high=factor,
        first_low=1 / first,
        first_high=first,
        request_s=constants.request_s,
        queue_share=constants.queue_share,
    )
    return replace(candidate, latency_model=latency_model, knees={})


def errors(steps: Floats, answers_s: Floats, logs: Floats, *, power: float) -> Floats:
    """Return log(measured / predicted) of each case [n]; ``steps`` is [n, _MOST_STEPS, 8]."""
    layer_s, memory, compute, attention, seq_s = np.exp(logs)
    num, layers, weights, cache, products, pairs, seqs, link = np.moveaxis(steps, -1, 0)
    of_products = (products / compute) ** power + (weights / memory) ** power
    of_attention = (pairs / attention) ** power + (cache / memory) ** power
    roofs = of_products ** (1 / power) + of_attention ** (1 / power)
    predicted_s = (num * (layer_s * layers + seq_s * seqs + link + roofs)).sum(axis=1)
    logged: Floats = np.log(answers_s / predicted_s)
    return logged


def pulled(steps: Floats, answers_s: Floats, logs: Floats, *, power: float) -> Floats:
    """Return the errors of all cases [n], and behind them how far constants are from usual [5]."""
    return np.append(errors(steps, answers_s, logs, power=power), PULL * (logs - USUAL))


def least(
    errors_of: Callable[[Floats], Floats], start: Floats, lowest: Floats, highest: Floats
) -> tuple[float, Floats]:
    """Return the least sum of absolute errors, and where it is.

    Some points are plainly wrong, so it is a sum of absolute values: least squares, weighted anew
    in each round by 1 / error (Schlossmacher, 1973), with damping (Levenberg, 1944).
    """
    logs, damping, unit = start.copy(), 1e-2, np.eye(len(start))
    residuals = errors_of(logs)
    for _ in range(30):
        slopes = (np.array([errors_of(logs + 1e-4 * one) for one in unit]) - residuals).T / 1e-4
        weighted = slopes.T / np.maximum(np.abs(residuals), _LEAST)
        change = np.linalg.solve(weighted @ slopes + damping * unit, -weighted @ residuals)
        tried = np.clip(logs + np.clip(change, -0.5, 0.5), lowest, highest)
        new = errors_of(tried)
        if np.abs(new).sum() < np.abs(residuals).sum():
            logs, residuals, damping = tried, new, max(1e-6, damping / 3)
        else:
            damping *= 5
    return float(np.abs(residuals).sum()), logs


def fit(cases: Sequence[Case]) -> Efficiency:
    """Return the constants with the least mean error of an answer's token, and near the usual."""
    steps = np.array([case.steps for case in cases])
    answers_s = np.array([case.answer_s for case in cases])
    best: tuple[float, Floats, float] | None = None
    for power in POWERS:
        errors_of = partial(pulled, steps, answers_s, power=power)
        total, logs = least(errors_of, USUAL, LOWEST, HIGHEST)
        if best is None or total < best[0]:
            best = total, logs, power
    assert best is not None
    layer_s, memory, compute, attention, seq_s = map(float, np.exp(best[1]))
    found = replace(_ONES, layer_s=layer_s, memory=memory, compute=compute, power=best[2])
    return replace(found, attention=attention, seq_s=seq_s)


def fit_first(first_s: Floats, queued_s: Floats, firsts_s: Floats) -> tuple[float, float]:
    """Return seconds of a request and its share of the queue, with the least mean error."""
    _, logs = least(
        lambda logs: np.log(firsts_s / (first_s + np.exp(logs[0]) + np.exp(logs[1]) * queued_s)),
        FIRST_START, FIRST_LOWEST, FIRST_HIGHEST,
    )  # fmt: skip
    request_s, share = (float(value) for value in np.exp(logs))
    return request_s, share


def measured_s(cases: Sequence[Case]) -> tuple[Floats, Floats]:
    """Return what was measured [n] of a first token, and of a token."""
    first_s, token_s = (
        np.array([case.point.measured_ms[name] / 1e3 for case in cases])
        for name in ("ttft", "tpot")
    )
    return first_s, token_s


def served(cases: Sequence[Case], constants: Sequence[Efficiency]) -> Left:
    """Return what a plan says of each case by the constants beside it."""
    rows = []
    for case, of_case in zip(cases, constants, strict=True):
        candidate = with_constants(case.candidate, of_case)
        settled, clients = settled_of(candidate, candidate.load, 1), float(case.point.clients)
        queued_s = queue_s(
            candidate.latency_model.times, candidate.load, candidate.settings, clients
        )
        assert settled is not None
        rows.append((settled.ttft_s, queued_s, settled.tpot_s))
    return Left(list(constants), *np.array(rows).T)


def without_own(cases: Sequence[Case], *, is_of_new_generation: bool) -> Left | None:
    """Return cases under constants without the models built like them; None if all are.

    Those of a new generation are without all cases of theirs too.
    """
    found: dict[tuple[object, ...], Efficiency] = {}
    keys = [(case.built, case.generation if is_of_new_generation else None) for case in cases]
    for built, generation in dict.fromkeys(keys):
        others = [c for c in cases if c.built != built and c.generation != generation]
        if not others:
            return None
        found[built, generation] = fit(others)
    return served(cases, [found[key] for key in keys])


def first_errors(
    left: Left, firsts_s: Floats, groups: Sequence[object]
) -> tuple[Floats, list[tuple[float, float]]]:
    """Return errors [n] of first tokens, each by constants fitted without its group, and those."""
    out, used = np.zeros(len(groups)), [(0.0, 0.0)] * len(groups)
    for group in dict.fromkeys(groups):
        is_out = np.array([one == group for one in groups])
        request_s, share = fit_first(
            left.first_s[~is_out], left.queue_s[~is_out], firsts_s[~is_out]
        )
        predicted_s = left.first_s + request_s + share * left.queue_s
        out[is_out] = np.log(firsts_s / predicted_s)[is_out]
        for i in np.flatnonzero(is_out):
            used[i] = request_s, share
    return out, used


def factor_of(logged: Floats) -> float:
    """Return the factor that errors stay below, with a probability of QUANTILE."""
    return math.ceil(100 * math.exp(float(np.quantile(np.abs(logged), QUANTILE)))) / 100


def row(
    engine: str, generation: str, constants: Efficiency, first: tuple[float, float],
    of_token: Floats, of_first: Floats, source: str,
) -> str:  # fmt: skip
    """Return a line of the table."""
    return (
        f"{engine},{generation},{constants.layer_s * 1e6:.1f},{constants.memory:.3f},"
        f"{constants.compute:.3f},{constants.attention:.3f},{constants.seq_s * 1e6:.1f},"
        f"{constants.power:g},{first[0] * 1e3:.0f},{first[1]:.2f},"
        f"{len(of_token)},{np.abs(of_token).mean():.3f},{factor_of(of_token):.2f},"
        f'{factor_of(of_first):.2f},"{source}"'
    )


def of_engine(cases: Sequence[Case], source: str) -> Iterator[Predicted]:
    """Print an engine's rows; yield its points as a plan foresees them that never saw the model."""
    engine = cases[0].engine
    parts = {
        name: [case for case in cases if case.generation == name]
        for name in sorted({case.generation for case in cases})
    }
    lefts = {name: without_own(part, is_of_new_generation=False) for name, part in parts.items()}
    for name in [name for name, left in lefts.items() if left is None]:
        print(f"{engine}, {name}: all {len(parts[name])} points are of models built alike")
        del parts[name], lefts[name]
    if not parts:
        return
    cases = [case for part in parts.values() for case in part]
    known = [left for left in lefts.values() if left is not None]
    left = Left(
        [one for part in known for one in part.constants],
        *(np.concatenate([part[i] for part in known]) for i in (1, 2, 3)),
    )
    firsts_s, tokens_s = measured_s(cases)
    builts = [case.built for case in cases]
    of_token = np.log(tokens_s / left.token_s)
    of_first, used = first_errors(left, firsts_s, builts)
    first = fit_first(left.first_s, left.queue_s, firsts_s)
    for name, part in parts.items():
        its = np.array([case.generation == name for case in cases])
        print(row(engine, name, fit(part), first, of_token[its], of_first[its], source))
    new = without_own(cases, is_of_new_generation=True)
    if new is not None:
        new_first, _ = first_errors(new, firsts_s, [(c.built, c.generation) for c in cases])
        new_token = np.log(tokens_s / new.token_s)
        print(row(engine, "all", fit(cases), first, new_token, new_first, source))
    for i, case in enumerate(cases):
        others = np.array(
            [c.generation == case.generation and c.built != case.built for c in cases]
        )
        constants = replace(
            left.constants[i],
            request_s=used[i][0],
            queue_share=used[i][1],
            factor_90=factor_of(of_token[others]),
            first_factor_90=factor_of(of_first[others]),
        )
        intervals = intervals_of(with_constants(case.candidate, constants))
        yield Predicted(case.point, {n: ms for n, ms in intervals.items() if ms is not None})


def unfitted(cases: Sequence[Case], source: str) -> str:
    """Return the row of engines without points: fitted to all others, an engine left out."""
    engines = [case.engine for case in cases]
    found = {
        engine: fit([case for case in cases if case.engine != engine])
        for engine in dict.fromkeys(engines)
    }
    left = served(cases, [found[engine] for engine in engines])
    firsts_s, tokens_s = measured_s(cases)
    of_first, _ = first_errors(left, firsts_s, engines)
    first = fit_first(left.first_s, left.queue_s, firsts_s)
    of_token = np.log(tokens_s / left.token_s)
    return row("other", "all", fit(cases), first, of_token, of_first, source)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit each engine on each generation; print rows, and errors of models that were left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", type=Path, help="silicon_sample.csv")
    parser.add_argument("--configs", type=Path, required=True, help="folder of config.json files")
    parser.add_argument("--by", default="backend,system", help="columns, with commas between")
    parser.add_argument("--source", default=SOURCE, help="of the points, for the rows")
    asked = parser.parse_args(arguments)
    points, _ = read_points(asked.table)
    cases = [case for point in points if (case := case_of(point, asked.configs)) is not None]
    print(HEAD)
    predicted: list[Predicted] = []
    engines = sorted({case.engine for case in cases})
    for engine in engines:
        predicted += of_engine([case for case in cases if case.engine == engine], asked.source)
    if len(engines) > 1:
        print(unfitted(cases, asked.source))
    if predicted:
        print(table(predicted, asked.by.split(",")))


if __name__ == "__main__":
    main()
