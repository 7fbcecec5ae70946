"""How long steps take on a device, and how far that may be off: measured here, or published.

On this machine a calibration is used, or an assumed roofline that says so. Of other devices the
time is a formula whose constants were fitted to published figures (``model.cost.device_time``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ridgeline.core.records import EngineRecord
from ridgeline.engine.calibration import LAYER_S, newest_calibration
from ridgeline.engine.setup.home import default_home
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import resolve
from ridgeline.foresight.simulator.run import TimeModel
from ridgeline.foresight.step_time.calibration import ASSUMED_FACTORS, COMPUTE_SHARE, MEMORY_SHARE
from ridgeline.foresight.step_time.features import StepTime, in_the_mean, of_items
from ridgeline.model.cost.costs import Features
from ridgeline.model.cost.device_time import (
    DeviceTime,
    Efficiency,
    device_time,
    efficiency_of,
    parse_efficiencies,
)
from ridgeline.planner.capacity.load import OfferedLoad
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
    memory, device = placement.memory, placement.device
    efficiency = efficiency_of(device, memory.engine.name, efficiencies())
    times = device_time(
        spec.shape, placement.storage, memory.kv_value_bytes, device, efficiency,
        tp=memory.tp, pp=memory.pp,
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
    checkpoint, config = spec.checkpoint, resolve(Options(), spec.checkpoint)
    calibration = newest_calibration(default_home(), checkpoint.path, checkpoint.arch, config)
    low, _, high = calibration.interval()
    if calibration.source == "assumed":
        note = "times of this machine are assumed: `ridgeline calibrate` measures them in a minute"
        return LatencyModel(calibration.times, low, high, "assumed", note)
    return LatencyModel(
        calibration.times, low, high, "calibrated", "times of this machine were measured"
    )


def _by_roof(spec: ModelSpec, placement: Placement) -> LatencyModel:
    """Return times of a model that is not here, or does not run here, by this machine's roof."""
    device, memory = placement.device, placement.memory
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
        spec.shape, placement.storage, memory.kv_value_bytes, device, reached
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


_ROUNDS = 200
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True)
class Steady:
    """Where a replica settles.

    Attributes:
        rate_per_s: requests that it answers per second.
        ttft_s, tpot_s: means.
        num_seqs: sequences that it holds, in the mean.
        step: what a step computes, in the mean.
    """

    rate_per_s: float
    ttft_s: float
    tpot_s: float
    num_seqs: float
    step: Features


def most_seqs(settings: EngineRecord, load: OfferedLoad) -> float:
    """Return how many sequences of a load fit into a replica at once, half answered in the mean."""
    seq_tokens = load.mean_prompt + load.mean_new / 2 + settings.block_size / 2
    return min(settings.max_num_seqs, settings.num_blocks * settings.block_size / seq_tokens)


def steady(
    times: TimeModel, load: OfferedLoad, settings: EngineRecord, rate_per_s: float
) -> Steady | None:
    """Return where a replica settles that gets this many requests per second; None if nowhere."""
    prompt, new, most = load.mean_prompt, load.mean_new, most_seqs(settings, load)
    reading = _reading(load, times)
    answering = of_items([(max(0, round(prompt + new / 2) - 1), 1, 1)], times.windows)

    def step_of(seqs: float, arriving: float) -> Features:
        return in_the_mean([(seqs, answering), (arriving, reading)])

    def seconds(step: Features) -> float:
        return times.seconds(step) + times.after(step.num_rows, 0)

    step_s = seconds(step_of(0.0, 0.0))
    for _ in range(_ROUNDS):
        arriving, seqs = rate_per_s * step_s, rate_per_s * new * step_s
        room = settings.max_num_batched_tokens - seqs
        if seqs > most or arriving * prompt > room:
            return None
        # A step either has a prompt, or as much of one as there is room for, or it has none.
        piece = min(1.0, room / prompt)
        share = min(1.0, arriving / piece)
        with_one = step_of(seqs, max(piece, arriving))
        longer_s = (1 - share) * seconds(step_of(seqs, 0.0)) + share * seconds(with_one)
        if longer_s - step_s < _CLOSE * step_s:
            more_s = (seconds(with_one) - seconds(step_of(seqs, 0.0))) / max(piece, arriving)
            first_s = longer_s * min(1.0, seqs) / 2 + seconds(with_one) / piece
            # Prompts queue as in an M/G/1 (Pollaczek, 1930; Khinchine, 1932).
            busy = min(0.99, rate_per_s * more_s)
            spread = 1 + load.prompt_variation**2
            wait_s = busy * more_s * spread / (2 * (1 - busy))
            step = step_of(seqs, arriving)
            return Steady(rate_per_s, first_s + wait_s, longer_s, seqs, step)
        step_s = longer_s
    return None


def knee(times: TimeModel, load: OfferedLoad, settings: EngineRecord) -> float:
    """Return the most requests per second that a replica bears."""
    if most_seqs(settings, load) < 1:
        return 0.0
    low, high = 0.0, 1e-3
    while steady(times, load, settings, high) is not None and high < 1e6:
        low, high = high, 2 * high
    while high - low > 0.01 * high and high > 1e-9:
        middle = (low + high) / 2
        low, high = (
            (low, middle) if steady(times, load, settings, middle) is None else (middle, high)
        )
    return low


def steady_closed(
    times: TimeModel, load: OfferedLoad, settings: EngineRecord, num_clients: float
) -> Steady | None:
    """Return where a replica settles with this many clients; None if fewer than one fits."""
    low, high = 0.0, knee(times, load, settings)
    settled = steady(times, load, settings, high) if high else None
    if settled is None or _concurrency(settled, load) <= num_clients:
        return settled
    while high - low > 0.002 * high:
        middle = (low + high) / 2
        tried = steady(times, load, settings, middle)
        if tried is not None and _concurrency(tried, load) <= num_clients:
            low = middle
        else:
            high = middle
        settled = tried or settled
    return settled


def queue_s(
    times: TimeModel, load: OfferedLoad, settings: EngineRecord, num_clients: float
) -> float:
    """Return the seconds that a prompt waits, in the mean, if all clients begin at once."""
    together = min(num_clients, max(1.0, settings.max_num_batched_tokens / load.mean_prompt))
    step_s = times.seconds(in_the_mean([(together, _reading(load, times))]))
    return max(0.0, num_clients - 1) / 2 * step_s / together


def _reading(load: OfferedLoad, times: TimeModel) -> Features:
    """Return what it takes to read a prompt of the mean length."""
    return of_items([(0, max(1, round(load.mean_prompt)), 1)], times.windows)


def _concurrency(settled: Steady, load: OfferedLoad) -> float:
    """Return the clients that wait for an answer, in the mean."""
    return settled.rate_per_s * (settled.ttft_s + load.mean_new * settled.tpot_s)
