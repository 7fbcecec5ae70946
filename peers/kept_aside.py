"""Ask plans for published speeds that no constant was fitted to, and print what they err by.

    python -m peers.kept_aside

It reads tests/data/kept_aside.json. Whoever fits constants again runs it before and after.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from peers.fit_device_time import KNOWN
from peers.static_batch import batch_seconds
from ridgeline.engine.setup.home import stores
from ridgeline.planner import LoadFlags, PlanFlags
from ridgeline.planner.capacity.latency_model import latency_model_of, steady_closed
from ridgeline.planner.capacity.load import load_of
from ridgeline.planner.capacity.option import engine_record
from ridgeline.planner.catalogue import devices
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.memory.placement import place

DATA = KNOWN.parent
ASIDE = DATA / "kept_aside.json"
MAX_NUM_SEQS = 2048


class Miss(NamedTuple):
    """A published figure, and what the plan said.

    Attributes:
        point: its row of the file.
        error: log(published / foreseen) of its time.
        factor: what nine in ten are within, as the plan states.
    """

    point: dict[str, Any]
    error: float
    factor: float


def configs() -> dict[str, Any]:
    """Return the values of config.json of every model that has a figure."""
    named: dict[str, Any] = dict(_read(KNOWN)["models"])
    for name in ("configs.json", "family_configs.json"):
        named |= {model: one["config"] for model, one in _read(DATA / name).items()}
    for name, changes in _read(ASIDE)["models"].items():
        named[name] = named[changes["like"]] | changes
    return named


def misses() -> Iterator[Miss]:
    """Yield what the plan misses each figure by."""
    known = configs()
    for point in _read(ASIDE)["points"]:
        yield _miss(point, known[point["model"]])


def _miss(point: dict[str, Any], config: dict[str, Any]) -> Miss:
    spec, prompt, new = read_model_spec(config, stores()), point["prompt"], point["new"]
    flags = PlanFlags(
        dtype=point["dtype"],
        kv_cache_dtype=point["kv"],
        engine=point["engine"],
        tensor_parallel_size=str(point["tp"]),
        max_num_seqs=MAX_NUM_SEQS,
        context=prompt + new,
    )
    placement = place(spec, devices()[point["device"]], flags, default_ranks="1")
    latency_model = latency_model_of(spec, placement)
    if "batch" in point:
        foreseen_s = batch_seconds(latency_model.times, point["batch"], prompt, new)
        published_s = point.get("seconds") or point["batch"] * new / point["tokens_per_s"]
        return Miss(point, math.log(published_s / foreseen_s), latency_model.high)
    wanted = LoadFlags(
        prompt_tokens=str(prompt), new_tokens=str(new), max_concurrency=point["clients"]
    )
    settings = engine_record(placement, latency_model.times)
    settled = steady_closed(latency_model.times, load_of(wanted), settings, float(point["clients"]))
    assert settled is not None, point
    per_s = settled.rate_per_s * new
    return Miss(point, math.log(per_s / point["tokens_per_s"]), latency_model.high)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def table(found: list[Miss]) -> str:
    """Return a line for each group of figures, and one for all throughputs."""
    groups: dict[str, list[Miss]] = {}
    for one in found:
        groups.setdefault(one.point["group"], []).append(one)
    groups["all throughputs"] = [one for one in found if "tokens_per_s" in one.point]
    lines = [f"{'':30}{'figures':>8}{'mean |log|':>12}{'worst':>8}{'inside':>8}"]
    for name, of in groups.items():
        errors = [abs(one.error) for one in of]
        inside = sum(abs(one.error) <= math.log(one.factor) for one in of)
        mean = sum(errors) / len(of)
        lines.append(f"{name:30}{len(of):8}{mean:12.3f}{max(errors):8.2f}{inside:8}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(list(misses())))
