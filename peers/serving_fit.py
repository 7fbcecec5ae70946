"""Fit the formula of ``physics/device_time.py`` to measured serving points; print what it errs by.

    python -m peers.serving_fit silicon_sample.csv --configs model_configs

The table and the configs are those of ``peers.serving_points``. This asks how good the formula
could be: its constants are fitted anew, for each engine and generation of devices, to the time of
an answer's token. Errors are of a model that was left out with all that are built like it. Rows are
printed in the form of physics/data/efficiency.csv, and nothing is written.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from peers.serving_points import Point, config_of, dtype_of, read_points
from ridgeline.physics.config_shape import shape_of_config
from ridgeline.physics.device_time import Efficiency, batch_steps, device_time
from ridgeline.physics.format_bytes import storage_of_config, storage_of_dtype
from ridgeline.planner.catalogue import devices

POWERS = (1.0, 1.5, 2.0, 3.0, 6.0)
LOWEST, HIGHEST = np.log([1e-7, 0.05, 0.05]), np.log([1e-3, 1.0, 1.0])
START = np.log([3e-5, 0.8, 0.7])
# With constants of 1, DeviceTime.parts() says what the constants multiply.
_ONES = Efficiency("", "", 1.0, 1.0, 1.0, 1.0, 0, 0.0, 1.0, "")
_LEAST = 0.05  # errors below this weigh no more than it
_MOST_STEPS = 9  # of batch_steps
Floats = npt.NDArray[np.float64]


class Case(NamedTuple):
    """The time of an answer's tokens, by what is computed in it.

    Attributes:
        engine, generation: which constants it belongs to.
        built: width and number of layers: models of the same are left out together.
        steps: [_MOST_STEPS, 5]: how many, layers, and seconds of bandwidth, compute and link.
        measured_s: of the answer; meanwhile each other client's prompt and answer are computed.
    """

    engine: str
    generation: str
    built: tuple[int, int]
    steps: Floats
    measured_s: float


def case_of(point: Point, configs: Path) -> Case | None:
    """Return a point as the fit sees it; None if its model or device is not understood."""
    row, config = point.row, config_of(configs, point.row["model_path"])
    device = devices().get(row["system"].replace("_", "-"))
    if config is None or device is None:
        return None
    try:
        shape, dtype = shape_of_config(config), dtype_of(config, row["precision"])
        storage = storage_of_config(config) if dtype == "auto" else storage_of_dtype(dtype)
        times = device_time(shape, storage, 2.0, device, _ONES, int(row["tp_size"]))
    except ValueError:
        return None
    new, steps = int(row["osl"]), np.zeros((_MOST_STEPS, 5))
    for i, (num, counts) in enumerate(batch_steps(point.clients, int(row["isl"]), new)):
        parts = times.parts(counts)
        steps[i] = num, *(parts[name] for name in ("overhead", "bandwidth", "compute", "link"))
    built = shape.hidden_size, len(shape.layers)
    measured_s = point.measured_ms["tpot"] / 1e3 * new
    return Case(row["backend"], device.generation, built, steps, measured_s)


def errors(steps: Floats, measured_s: Floats, logs: Floats, power: float) -> Floats:
    """Return log(measured / predicted) of each case [n]; ``steps`` is [n, _MOST_STEPS, 5]."""
    layer_s, memory, compute = np.exp(logs)
    num, layers, bandwidth, ops, link = np.moveaxis(steps, -1, 0)
    roof = ((ops / compute) ** power + (bandwidth / memory) ** power) ** (1 / power)
    predicted_s = (num * (layer_s * layers + link + roof)).sum(axis=1)
    logged: Floats = np.log(measured_s / predicted_s)
    return logged


def fit(steps: Floats, measured_s: Floats) -> tuple[Floats, float]:
    """Return the logarithms of three constants, and the power, with the least mean error.

    Some points are plainly wrong, so it is a mean of absolute values: least squares, weighted anew
    in each round by 1 / error (Schlossmacher, 1973), with damping (Levenberg, 1944).
    """
    best: tuple[float, Floats, float] | None = None
    for power in POWERS:
        logs, damping = START.copy(), 1e-2
        residuals = errors(steps, measured_s, logs, power)
        for _ in range(30):
            moved = [errors(steps, measured_s, logs + 1e-4 * unit, power) for unit in np.eye(3)]
            slopes = (np.array(moved) - residuals).T / 1e-4
            weighted = slopes.T / np.maximum(np.abs(residuals), _LEAST)
            change = np.linalg.solve(weighted @ slopes + damping * np.eye(3), -weighted @ residuals)
            tried = np.clip(logs + np.clip(change, -0.5, 0.5), LOWEST, HIGHEST)
            new = errors(steps, measured_s, tried, power)
            if np.abs(new).sum() < np.abs(residuals).sum():
                logs, residuals, damping = tried, new, damping / 3
            else:
                damping *= 5
        total = float(np.abs(residuals).sum())
        if best is None or total < best[0]:
            best = total, logs, power
    assert best is not None
    return best[1:]


def left_out(steps: Floats, measured_s: Floats, built: Sequence[tuple[int, int]]) -> Floats:
    """Return the error [n] of each case under constants fitted without the models built like it.

    Empty where all are built alike: nothing says what another model would take.
    """
    names = sorted(set(built))
    if len(names) == 1:
        return np.zeros(0)
    out = np.zeros(len(built))
    for name in names:
        is_out = np.array([one == name for one in built])
        constants = fit(steps[~is_out], measured_s[~is_out])
        out[is_out] = errors(steps[is_out], measured_s[is_out], *constants)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit each engine on each generation; print rows and errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", type=Path, help="silicon_sample.csv")
    parser.add_argument("--configs", type=Path, required=True, help="folder of config.json files")
    asked = parser.parse_args(arguments)
    points, _ = read_points(asked.table)
    every = [case for point in points if (case := case_of(point, asked.configs)) is not None]
    print("engine,generation,o_us,e_m,e_c,p,num_points,loo_error,factor_90")
    for engine, generation in sorted({case[:2] for case in every}):
        cases = [case for case in every if case[:2] == (engine, generation)]
        steps = np.array([case.steps for case in cases])
        measured_s = np.array([case.measured_s for case in cases])
        out = left_out(steps, measured_s, [case.built for case in cases])
        if not out.size:
            print(f"{engine}, {generation}: all {len(cases)} points are of models built alike")
            continue
        logs, power = fit(steps, measured_s)
        layer_s, memory, compute = np.exp(logs)
        factor = math.exp(float(np.quantile(np.abs(out), 0.9)))
        print(
            f"{engine},{generation},{layer_s * 1e6:.1f},{memory:.3f},{compute:.3f},{power:g},"
            f"{len(cases)},{np.abs(out).mean():.3f},{factor:.2f}"
        )
        off = np.abs(np.expm1(-out))
        print(f"    |predicted / measured - 1|: mean {off.mean():.1%}, median {np.median(off):.1%}")


if __name__ == "__main__":
    main()
