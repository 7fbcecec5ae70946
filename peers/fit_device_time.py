"""Fit the constants of ``model/cost/device_time.py`` to published figures; print what they err by.

The figures are of one engine each, without a server around it: an old TensorRT-LLM and llama.cpp.

Run as ``python -m peers.fit_device_time``. It reads tests/data/known_speed.json and writes
src/ridgeline/model/cost/data/efficiency.csv. Errors are of figures that were left out: of each
generation one by one, of llama.cpp a device at a time, and for "all" a generation at a time, which
is what a device of a new one has to expect. Rows of other engines stay as they are:
``peers.serving_fit`` prints those.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peers.static_batch import batch_seconds
from ridgeline.model.cost.device_time import (
    DeviceTime,
    Efficiency,
    device_time,
)
from ridgeline.model.cost.format_bytes import storage_of_dtype
from ridgeline.model.files.counting import shape_of_config
from ridgeline.planner.catalogue import devices

ROOT = Path(__file__).parents[1]
KNOWN = ROOT / "tests" / "data" / "known_speed.json"
CONFIGS = ROOT / "tests" / "data" / "configs.json"
TABLE = ROOT / "src" / "ridgeline" / "model" / "cost" / "data" / "efficiency.csv"
POWERS = (1.0, 1.5, 2.0, 3.0, 6.0)
# Of a layer, of memory and products, and of llama.cpp of attention: of older figures it cannot be
# told apart.
LOWEST, HIGHEST = np.log([1e-6, 0.1, 0.1, 0.02]), np.log([1e-3, 1.0, 1.0, 1.0])
START = np.log([5e-5, 0.7, 0.7, 0.4])
OLDER = "trtllm-0.6.1"  # an engine of 2023, whose published figures are quoted most
LLAMACPP = "llamacpp"
NUM_CONSTANTS = {OLDER: 3, LLAMACPP: 4}
SOURCES = {
    OLDER: "TensorRT-LLM v0.6.1, performance.md",
    LLAMACPP: "XiongjieDai, GPU-Benchmarks-on-LLM-Inference; May 2024",
}
Floats = npt.NDArray[np.float64]
Case = tuple[dict[str, Any], DeviceTime]


def constants(logs: Floats, power: float) -> Efficiency:
    """Return constants from their logarithms."""
    layer_s, memory, compute, *rest = (float(value) for value in np.exp(logs))
    attention = rest[0] if rest else compute
    of_step = (layer_s, memory, compute, attention, 0.0, power)
    return Efficiency("", "", *of_step, 0.0, 0.0, 0, 0.0, 1.0, 1.0, "")


def cases(engine: str) -> list[Case]:
    """Return the published figures of an engine, each with the model of time of its devices."""
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    hub = json.loads(CONFIGS.read_text(encoding="utf-8"))
    configs = known["models"] | {name: model["config"] for name, model in hub.items()}
    pairs = []
    for point in known["points"]:
        if point["engine"] != engine:
            continue
        shape = shape_of_config(configs[point["model"]])
        kv_bytes = 1.0 if point["dtype"] == "fp8" else 2.0
        device, storage = devices()[point["device"]], storage_of_dtype(point["dtype"], shape)
        times = device_time(shape, storage, kv_bytes, device, constants(START, 2.0), point["tp"])
        pairs.append((point, times))
    return pairs


def error(case: Case, with_: Efficiency) -> float:
    """Return log(published time / predicted time)."""
    point, times = case
    batch, new = point["batch"], point["new"]
    seconds = batch_seconds(replace(times, efficiency=with_), batch, point["prompt"], new)
    if "ttft_ms" in point:
        return math.log(point["ttft_ms"] / 1e3 / seconds)
    return math.log(batch * new / point["tp"] / point["tokens_per_s_per_device"] / seconds)


def fit(known: list[Case]) -> Efficiency:
    """Return the constants with the least squared logarithm of errors (Levenberg, 1944)."""
    best: tuple[float, Efficiency] | None = None
    for power in POWERS:
        num = NUM_CONSTANTS[known[0][0]["engine"]]
        logs, damping = START[:num].copy(), 1e-2
        residuals = np.array([error(case, constants(logs, power)) for case in known])
        for _ in range(25):
            columns = []
            for i in range(num):
                moved = logs.copy()
                moved[i] += 1e-4
                columns.append([error(case, constants(moved, power)) for case in known])
            slopes = (np.array(columns).T - residuals[:, None]) / 1e-4
            step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(num), -slopes.T @ residuals)
            tried = np.clip(logs + np.clip(step, -0.5, 0.5), LOWEST[:num], HIGHEST[:num])
            new = np.array([error(case, constants(tried, power)) for case in known])
            if new @ new < residuals @ residuals:
                logs, residuals, damping = tried, new, damping / 3
            else:
                damping *= 5
        squared_error = float(residuals @ residuals)
        if best is None or squared_error < best[0]:
            best = squared_error, constants(logs, power)
    assert best is not None
    return best[1]


def quantile_90(errors: list[float]) -> float:
    """Return what nine in ten further errors stay below (split conformal; Vovk et al., 2005)."""
    ordered = sorted(map(abs, errors))
    return ordered[min(len(ordered), math.ceil(0.9 * (len(ordered) + 1))) - 1]


def left_out(known: list[Case], groups: list[str]) -> list[float]:
    """Return the error of each case under constants fitted without its group."""
    fitted = {
        group: fit([case for case, of in zip(known, groups, strict=True) if of != group])
        for group in dict.fromkeys(groups)
    }
    return [error(case, fitted[group]) for case, group in zip(known, groups, strict=True)]


def row(engine: str, name: str, efficiency: Efficiency, errors: list[float]) -> str:
    """Return a line of the table. The figures are an engine's own, without a server around it."""
    mean = float(np.mean(np.abs(errors)))
    factor = math.ceil(100 * math.exp(quantile_90(errors))) / 100
    return (
        f"{engine},{name},{efficiency.layer_s * 1e6:.1f},{efficiency.memory:.3f},"
        f"{efficiency.compute:.3f},{efficiency.attention:.3f},0,{efficiency.power:g},0,0,"
        f'{len(errors)},{mean:.3f},{factor:.2f},{factor:.2f},"{SOURCES[engine]}"'
    )


def show(line: str, errors: list[float], known: list[Case]) -> None:
    """Print a line of the table and its largest errors."""
    print(line, f"median {np.median(np.abs(errors)):.3f} worst {max(map(abs, errors)):.3f}")
    for miss, (point, _) in sorted(zip(errors, known, strict=True), key=lambda e: -abs(e[0]))[:8]:
        print(f"    {miss:+.2f}  {point['id']}")


def rows_of(engine: str) -> list[str]:
    """Return the lines of an engine: of each generation, and of all; print what they err by."""
    every = cases(engine)
    generation = {case[0]["id"]: devices()[case[0]["device"]].generation for case in every}
    parts = {
        name: [case for case in every if generation[case[0]["id"]] == name]
        for name in sorted(set(generation.values()))
    }
    rows = []
    for name, known in {**parts, "all": every}.items():
        own = "id" if engine == OLDER else "device"
        groups = [generation[c[0]["id"]] if name == "all" else c[0][own] for c in known]
        errors = left_out(known, groups)
        rows.append(row(engine, name, fit(known), errors))
        show(rows[-1], errors, known)
    return rows


def main(table: Path = TABLE) -> None:
    """Fit each generation and all of them, of each engine; write the table."""
    head, *kept = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [head, *rows_of(OLDER), *rows_of(LLAMACPP)]
    rows += [line for line in kept if not line.startswith(tuple(f"{e}," for e in SOURCES))]
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
