"""Published speeds of offloaded models, and what a plan foresees of each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.engine.setup.home import stores
from ridgeline.model.cost.hardware import Device
from ridgeline.planner.catalogue import devices
from ridgeline.planner.memory.flags import PlanFlags
from ridgeline.planner.memory.model_spec import ModelSpec, read_model_spec
from ridgeline.planner.offload import Offload, host_of, offload
from tests.model.cost.published_configs import PUBLISHED

DATA = Path(__file__).parents[1] / "data"
KNOWN = json.loads((DATA / "offload_speed.json").read_text())
POINTS: list[dict[str, Any]] = KNOWN["points"]
HELD_OUT: list[dict[str, Any]] = KNOWN["held_out"]
PROMPTS: list[dict[str, Any]] = KNOWN["prompts"]


def config(name: str) -> Mapping[str, Any]:
    """Return the published config of a model; of some it is another's, changed."""
    if name in KNOWN["changed_configs"]:
        base, changes = KNOWN["changed_configs"][name]
        return {**config(base), **changes}
    if name in PUBLISHED:
        found: Mapping[str, Any] = PUBLISHED[name]["config"]
        return found
    families = json.loads((DATA / "family_configs.json").read_text())
    of_family: Mapping[str, Any] = families[name]["config"]
    return of_family


def spec(name: str) -> ModelSpec:
    """Return a model to plan for."""
    return read_model_spec(config(name), stores())


def card(name: str) -> Device:
    """Return a card by its id. One that figures are of is in no list of devices to choose from."""
    if name != "rtx2080":
        return devices()[name]
    return replace(
        devices()["rtx2080ti"],
        id=name,
        name="NVIDIA GeForce RTX 2080",
        usable_bytes=7_700 << 20,
        read_bytes_per_s=448e9,
        peak_ops_per_s={"f16": 80e12},
        measured_ops_per_s={},
    )


def flags_of(point: Mapping[str, Any]) -> PlanFlags:
    """Return what one would type for a figure."""
    return PlanFlags(
        dtype=point["dtype"],
        context=point.get("context", 4096),
        ram=f"{point['ram_gb']}GB",
        ram_bandwidth=point["ram_gb_per_s"],
        max_num_batched_tokens=point.get("batch"),
    )


def foreseen(point: Mapping[str, Any]) -> Offload:
    """Return the plan of a figure, with the layers on the card that its source has there.

    For this the card has as much of its memory as they take.
    """
    model, flags = spec(point["model"]), flags_of(point)
    cards = [card(name) for name in point["cards"]]

    def with_share(share: float) -> Offload:
        less = [replace(one, usable_bytes=int(one.usable_bytes * share)) for one in cards]
        return offload(model, flags, less, host_of(flags, None), is_asked=True)

    wanted = point.get("num_cpu_moe"), point.get("num_gpu_layers")
    if wanted == (None, None):
        return with_share(1.0)

    def too_much_in_ram(found: Offload) -> bool:
        if wanted[0] is not None:
            is_whole = found.spread.num_gpu_layers == found.spread.num_layers
            return found.spread.num_cpu_moe > wanted[0] or not is_whole
        return found.spread.num_gpu_layers < (wanted[1] or 0)

    low, high = 0.05, 3.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if too_much_in_ram(with_share(middle)) else (low, middle)
    return with_share(high)


def error(point: Mapping[str, Any]) -> float:
    """Return log(published / foreseen) of the speed, of a prompt where that is published."""
    found = foreseen(point)
    if "prompt_tokens_per_s" in point:
        return math.log(point["prompt_tokens_per_s"] / found.prompt_tokens_per_s)
    return math.log(point["tokens_per_s"] / found.tokens_per_s)
