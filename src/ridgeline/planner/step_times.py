"""How long steps take on a device, and how far that may be off: measured here, or published.

On this machine a calibration is used, or an assumed roofline that says so. Of other devices the
time is a formula whose constants were fitted to published figures (``physics.device_time``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from ridgeline.engine_setup.home import default_home
from ridgeline.engine_setup.options import Options
from ridgeline.engine_setup.resolve import resolve
from ridgeline.physics.device_time import (
    DeviceTime,
    Efficiency,
    device_time,
    efficiency_of,
    parse_efficiencies,
)
from ridgeline.planner.calibration import known
from ridgeline.planner.catalogue import HERE
from ridgeline.planner.place import Placement
from ridgeline.planner.subject import Subject
from ridgeline.simulator.steptime import StepTime


@dataclass(frozen=True, eq=False, slots=True)
class Clocked:
    """A model of time.

    Attributes:
        times: seconds of steps.
        low, high: nine in ten times lie between these multiples of what it says.
        source: "calibrated", "published" or "assumed".
        note: where it comes from, a sentence.
    """

    times: DeviceTime | StepTime
    low: float
    high: float
    source: str
    note: str

    def at(self, factor: float) -> DeviceTime | StepTime:
        """Return the model of time with all times multiplied."""
        if isinstance(self.times, StepTime):
            return self.times.scaled(factor)
        return replace(self.times, factor=factor)


def clock_of(subject: Subject, placement: Placement) -> Clocked:
    """Return the model of time of a placement.

    Raises ValueError where nothing is known of the device's arithmetic, or of this machine's.
    """
    if placement.device.id == HERE:
        return _here(subject)
    setting, device = placement.setting, placement.device
    efficiency = efficiency_of(device, setting.engine.name, efficiencies())
    times = device_time(
        *(subject.shape, placement.storage, setting.kv_value_bytes, device, efficiency),
        *(setting.tp, setting.pp),
    )
    factor = efficiency.factor_90
    return Clocked(
        times,
        1 / factor,
        factor,
        "published",
        f"times of {device.id} come from a formula fitted to {efficiency.num_points} figures "
        f"({efficiency.source}); nine in ten{_whose(efficiency, setting.engine.name)} are within "
        f"{_per_cent(factor)} of it",
    )


def _whose(efficiency: Efficiency, engine: str) -> str:
    return "" if efficiency.engine == engine else " of other engines"


def _per_cent(factor: float) -> str:
    return f"{factor - 1:.0%}" if factor < 2 else f"a factor of {factor:.1f}"


def _here(subject: Subject) -> Clocked:
    checkpoint = subject.checkpoint
    if checkpoint is None:
        raise ValueError(
            f"{subject.name}: times on this machine are known of models that run here: give a "
            f"model's files, or name other devices with --on"
        )
    config = resolve(Options(), checkpoint.arch)
    calibration = known(default_home(), checkpoint.path, checkpoint.arch, config)
    low, _, high = calibration.interval()
    if calibration.source == "assumed":
        note = "times of this machine are assumed: `ridgeline calibrate` measures them in a minute"
        return Clocked(calibration.times, low, high, "assumed", note)
    return Clocked(
        calibration.times, low, high, "calibrated", "times of this machine were measured"
    )


@cache
def efficiencies() -> tuple[Efficiency, ...]:
    """Return the constants of all generations."""
    text = (files("ridgeline.physics") / "data" / "efficiency.csv").read_text(encoding="utf-8")
    return parse_efficiencies(text)
