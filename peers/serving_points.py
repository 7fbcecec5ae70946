"""How far uncalibrated predictions are from measured servers, by engine and device.

    python -m peers.serving_points silicon_sample.csv --configs model_configs --points 500

Reads a table of measured serving points as AIConfigurator publishes it (ai-dynamo/aiconfigurator,
Apache-2.0; the package aiconfigurator-core has both the table and the folder of configs), and asks
``ridgeline plan`` for the same: the model of the config, the device, the engine, the ranks, and a
closed loop of as many clients. Printed are errors of means, by the formula that a plan compares
devices with (``--simulate``: by simulation, as for its best choices), and how often the stated
interval holds what was measured. Points that a plan cannot describe are counted by reason.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.engine.setup.home import stores
from ridgeline.model.cost.format_bytes import storage_of_config
from ridgeline.planner import plan
from ridgeline.planner.capacity.latency_model import latency_model_of, most_seqs
from ridgeline.planner.capacity.load import LoadFlags, load_of
from ridgeline.planner.capacity.option import Candidate
from ridgeline.planner.capacity.search import factors_of, settled_of
from ridgeline.planner.catalogue import devices
from ridgeline.planner.memory.flags import PlanFlags
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.memory.placement import place

METRICS = ("ttft", "tpot")
# Models that the table names otherwise than the folder of configs does.
_CONFIG_NAMES = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
_FORMATS = {"fp4": ("nvfp4", 4), "int4": ("int4", 4), "fp8": ("fp8", 8), "bf16": ("bf16", 16)}
_MOST_RANKS = 8
Interval = tuple[float, float, float | None]


@dataclass(frozen=True, slots=True)
class Point:
    """What a server was asked and what its clients saw, as the table says it.

    Attributes:
        row: the table's row.
        clients: of the closed loop.
        measured_ms: metric -> mean in milliseconds.
    """

    row: Mapping[str, str]
    clients: int
    measured_ms: Mapping[str, float]


class NotDescribedError(ValueError):
    """A plan cannot be asked for a point."""


class Asked(NamedTuple):
    """What a plan is asked: the model's config, flags of memory and of the load."""

    config: dict[str, Any]
    of_memory: dict[str, Any]
    of_load: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Predicted:
    """A point beside its prediction.

    Attributes:
        point: what was measured.
        interval_ms: metric -> low, middle and high in milliseconds; no high: it may be any.
    """

    point: Point
    interval_ms: Mapping[str, Interval]

    def error(self, metric: str) -> float:
        """Return predicted / measured - 1."""
        return self.interval_ms[metric][1] / self.point.measured_ms[metric] - 1

    def is_inside(self, metric: str) -> bool:
        """Whether the stated interval holds what was measured."""
        low, _, high = self.interval_ms[metric]
        measured_ms = self.point.measured_ms[metric]
        return low <= measured_ms and (high is None or measured_ms <= high)


def read_points(path: Path) -> tuple[list[Point], Counter[str]]:
    """Return the points that a plan can describe, and how many it cannot, by reason."""
    points, left_out = [], Counter[str]()
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            clients = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
            if row["mode"] != "agg":
                left_out["prompts and answers on devices of their own"] += 1
            elif row["attention_dp_size"] not in ("", "0", "1"):
                left_out["attention divided by sequences"] += 1
            elif int(row["tp_size"]) > _MOST_RANKS:
                left_out[f"more than {_MOST_RANKS} ranks"] += 1
            elif clients is None:
                left_out["clients not named"] += 1
            else:
                measured_ms = {name: float(row[f"silicon_{name}_ms"]) for name in METRICS}
                points.append(Point(row, int(clients[1]), measured_ms))
    return points, left_out


def predict(point: Point, configs: Path, *, is_simulated: bool) -> Predicted | str:
    """Return what a plan says of a point, or why it says nothing."""
    try:
        asked = asked_of(point, configs)
        if is_simulated:
            choices = plan(asked.config, **asked.of_memory, **asked.of_load, replicas="1").choices
            intervals = {n: c.interval_ms(n, "mean") for c in choices[:1] for n in METRICS}
        else:
            candidate = candidate_of(asked)
            intervals = {} if candidate is None else intervals_of(candidate)
    except NotDescribedError as error:
        return str(error)
    except ValueError as error:
        return f"{point.row['model_path']} is refused: {error}"
    if not intervals:
        return "does not fit, says the plan"
    if any(interval is None for interval in intervals.values()):
        return "no latency is given"
    return Predicted(point, {name: ms for name, ms in intervals.items() if ms is not None})


def asked_of(point: Point, configs: Path) -> Asked:
    """Return what a plan is asked for a point. Raises NotDescribedError where it cannot be."""
    row = point.row
    config = config_of(configs, row["model_path"])
    if config is None:
        raise NotDescribedError("no config of the model")
    device = row["system"].replace("_", "-")
    if device not in devices():
        raise NotDescribedError(f"no {device} in the catalogue")
    of_memory = {
        "on": device,
        "engine": row["backend"],
        "dtype": dtype_of(config, row["precision"]),
        "tensor_parallel_size": row["tp_size"],
    }
    of_load = {
        "prompt_tokens": row["isl"], "new_tokens": row["osl"], "max_concurrency": point.clients,
    }  # fmt: skip
    return Asked(config, of_memory, of_load)


def candidate_of(asked: Asked) -> Candidate | None:
    """Return the division that a plan compares by formula; None if it does not fit."""
    load = load_of(LoadFlags(**asked.of_load))
    wishes = PlanFlags(**asked.of_memory, context=load.longest)
    spec = read_model_spec(asked.config, stores())
    placement = place(spec, devices()[asked.of_memory["on"]], wishes, default_ranks="1")
    if not placement.ledger.fits:
        return None
    found = Candidate(placement, latency_model_of(spec, placement), None, load, lambda: None)
    return found if most_seqs(found.settings, load) >= 1 else None


def intervals_of(candidate: Candidate) -> dict[str, Interval | None]:
    """Return the intervals of the formula that a plan compares devices with."""
    load, latency_model = candidate.load, candidate.latency_model
    settled = {
        f: settled_of(candidate, load, 1, f) for f in (latency_model.low, 1.0, latency_model.high)
    }
    middle, factors = settled[1.0], factors_of(latency_model, load, settled)
    if middle is None:
        return dict.fromkeys(METRICS)
    intervals: dict[str, Interval | None] = {}
    for name, seconds in (("ttft", middle.ttft_s), ("tpot", middle.tpot_s)):
        low, high = factors[name]
        ms = 1e3 * seconds
        intervals[name] = ms * low, ms, None if high is None else ms * high
    return intervals


def config_of(configs: Path, model: str) -> dict[str, Any] | None:
    """Return the config of a model of the table; None if the folder has none."""
    name = _CONFIG_NAMES.get(model, model).replace("/", "--")
    path = configs / f"{name}_config.json"
    if not path.is_file():
        return None
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def dtype_of(config: Mapping[str, Any], precision: str) -> str:
    """Return the format of weights; "auto" where the config itself is of that width."""
    if precision not in _FORMATS:
        return "auto"
    name, bits = _FORMATS[precision]
    return "auto" if round(storage_of_config(config).linear.bits) == bits else name


def table(predicted: Iterable[Predicted], columns: Sequence[str]) -> str:
    """Return a markdown table, a row per value of the columns and one of all."""
    groups = defaultdict(list)
    for one in predicted:
        groups[", ".join(one.point.row[name] for name in columns)].append(one)
    names = "".join(f" {name} mean error | median | pred. / meas. | inside |" for name in METRICS)
    lines = [f"| {', '.join(columns)} | points |{names}", "|---" * (2 + 4 * len(METRICS)) + "|"]
    every = [one for group in groups.values() for one in group]
    for name, group in [*sorted(groups.items()), ("all", every)]:
        cells = [name, str(len(group))]
        for metric in METRICS:
            errors = [abs(one.error(metric)) for one in group]
            ratio = math.exp(statistics.fmean(math.log1p(one.error(metric)) for one in group))
            inside = statistics.fmean(one.is_inside(metric) for one in group)
            cells += [f"{statistics.fmean(errors):.0%}", f"{statistics.median(errors):.0%}"]
            cells += [f"{ratio:.2f}", f"{inside:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print errors by group, and what was left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", type=Path, help="silicon_sample.csv")
    parser.add_argument("--configs", type=Path, required=True, help="folder of config.json files")
    parser.add_argument("--points", type=int, default=0, help="so many, drawn; default: all")
    parser.add_argument("--by", default="backend,system", help="columns, with commas between")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--simulate", action="store_true", help="not by formula: slow")
    asked = parser.parse_args(arguments)
    points, left_out = read_points(asked.table)
    if 0 < asked.points < len(points):
        left_out["not drawn"] += len(points) - asked.points
        points = random.Random(0).sample(points, asked.points)
    ask = partial(predict, configs=asked.configs, is_simulated=asked.simulate)
    with ProcessPoolExecutor(asked.processes) as pool:
        answers = list(pool.map(ask, points, chunksize=4))
    predicted = [answer for answer in answers if isinstance(answer, Predicted)]
    left_out.update(answer for answer in answers if isinstance(answer, str))
    if predicted:
        print(table(predicted, asked.by.split(",")))
    for reason, num in left_out.most_common():
        print(f"left out: {num:,}  {reason}")


if __name__ == "__main__":
    main()
