"""How long steps take on a device, and how far that may be off: measured here, or published.

On this machine a calibration is used, or an assumed roofline that says so. Of other devices the
time is a formula whose constants were fitted to published figures (``model.cost.device_time``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ridgeline.engine.calibration.load import LAYER_S, known
from ridgeline.engine.setup.home import default_home
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import resolve
from ridgeline.foresight.step_time.calibration import ASSUMED_FACTORS
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.foresight.step_time.roof import COMPUTE_SHARE, MEMORY_SHARE
from ridgeline.model.cost.device_time import (
    DeviceTime,
    Efficiency,
    device_time,
    efficiency_of,
    parse_efficiencies,
)
from ridgeline.planner.catalogue import HERE
from ridgeline.planner.memory.model_spec import ModelSpec
from ridgeline.planner.memory.placement import Placement


@dataclass(frozen=True, eq=False, slots=True)
class LatencyModel:
    """A model of time.

    Attributes:
        times: seconds of steps.
        low, high: nine in ten times lie between these multiples of what it says.
        first_low, first_high: the same of times to the first token, whatever steps take.
        request_s: what a server takes for a request, before its first token, besides its steps.
        queue_share: the part of what all clients' prompts take that a first token waits for.
        source: "calibrated", "published" or "assumed".
        note: where it comes from, a sentence.
    """

    times: DeviceTime | StepTime
    low: float
    high: float
    source: str
    note: str
    first_low: float = 1.0
    first_high: float = 1.0
    request_s: float = 0.0
    queue_share: float = 0.0

    def at(self, factor: float) -> DeviceTime | StepTime:
        """Return the model of time with all times multiplied."""
        return self.times.scaled(factor)


def latency_model_of(spec: ModelSpec, placement: Placement) -> LatencyModel:
    """Return the model of time of a placement.

    Raises ValueError where nothing is known of the device's arithmetic, or of this machine's.
    """
    if placement.device.id == HERE:
        return _here(spec, placement)
    setting, device = placement.setting, placement.device
    efficiency = efficiency_of(device, setting.engine.name, efficiencies())
    times = device_time(
        spec.shape, placement.storage, setting.kv_value_bytes, device, efficiency,
        tp=setting.tp, pp=setting.pp,
    )  # fmt: skip
    factor, first = efficiency.factor_90, efficiency.first_factor_90
    return LatencyModel(
        times,
        1 / factor,
        factor,
        "published",
        f"times of {device.id} come from a formula fitted to {efficiency.num_points} figures "
        f"({efficiency.source}); nine in ten of models that were left out are within "
        f"{_per_cent(factor)} of it, first tokens within {_per_cent(first)}",
        first_low=1 / first,
        first_high=first,
        request_s=efficiency.request_s,
        queue_share=efficiency.queue_share,
    )


def _per_cent(factor: float) -> str:
    return f"{factor - 1:.0%}" if factor < 2 else f"a factor of {factor:.1f}"


def _here(spec: ModelSpec, placement: Placement) -> LatencyModel:
    if spec.checkpoint is None:
        return _by_roof(spec, placement)
    config = resolve(Options(), spec.checkpoint)
    calibration = known(default_home(), spec.checkpoint.path, spec.checkpoint.arch, config)
    low, _, high = calibration.interval()
    if calibration.source == "assumed":
        note = "times of this machine are assumed: `ridgeline calibrate` measures them in a minute"
        return LatencyModel(calibration.times, low, high, "assumed", note)
    return LatencyModel(
        calibration.times, low, high, "calibrated", "times of this machine were measured"
    )


def _by_roof(spec: ModelSpec, placement: Placement) -> LatencyModel:
    """Return times of a model that is not here, or does not run here, by this machine's roof."""
    device, setting = placement.device, placement.setting
    if not device.read_bytes_per_s:
        raise ValueError(
            f"{spec.name}: the speed of this machine is not known yet: run `ridgeline "
            "doctor --roof` once, or `ridgeline calibrate MODEL`; or name other devices with "
            "--on"
        )
    low, high = ASSUMED_FACTORS
    reached = Efficiency(
        "ridgeline",
        "cpu",
        layer_s=LAYER_S,
        memory=MEMORY_SHARE,
        compute=COMPUTE_SHARE,
        attention=COMPUTE_SHARE,
        seq_s=0.0,
        power=2,
        request_s=0.0,
        queue_share=0.0,
        num_points=0,
        error=0.0,
        factor_90=high,
        first_factor_90=high,
        source="assumed",
    )
    times = device_time(
        spec.shape, placement.storage, setting.kv_value_bytes, device, reached
    )  # fmt: skip
    note = (
        f"steps reach {MEMORY_SHARE:.0%} of this machine's memory roof and {COMPUTE_SHARE:.0%} of "
        f"its arithmetic: `ridgeline calibrate` measures a model that runs here"
    )
    return LatencyModel(times, low, high, "assumed", note)


@cache
def efficiencies() -> tuple[Efficiency, ...]:
    """Return the constants of all generations."""
    text = (files("ridgeline.model.cost") / "data" / "efficiency.csv").read_text(encoding="utf-8")
    return parse_efficiencies(text)
