"""What is known of the time of steps here: a model of time, and where it comes from.

A calibration belongs to one model in one format, on one backend with a number of threads of one
kind of processor. Others of the same name are not believed. Where no model was measured, a roofline
stands in, and it says so: with the rates of this machine's roof, if that was, else with assumed
ones.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ridgeline.foresight.step_time.features import After, Measured, Samples, StepTime, of_items
from ridgeline.foresight.structure import parse, typed

# A step of one answer, of some length.
ONE_STREAM = of_items([(127, 1, 1)])
ASSUMED_FACTORS = (0.4, 2.5)  # how far it may be off: from its fastest to its slowest
_LAST_S = 1e11  # seconds since 1970; a date has four digits for its year
_LONGEST_S = 1e3  # of one thing more in a step
_SLOWEST = 1e6  # a machine that stood still for hours
_WINDOW_S = 2.0  # of busy time, for which a factor is kept
_MOST_FACTORS = 60


class Interval(NamedTuple):
    """Actual over predicted seconds: 5 % quantile, median, 95 % quantile."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A model of time, and how far to trust it.

    Attributes:
        model: the name of the model's file.
        arch: a digest of its shapes.
        dtype, kv_cache_dtype, backend, threads, processor: what it was measured with.
        source: "measured" by ``ridgeline calibrate``, "served" by a server, or "assumed".
        measured_at: seconds since 1970 of the last fit; 0 of an assumed one.
        version: of Ridgeline.
        times: the model.
        step_error: mean relative error of single steps, cross-validated; None if not known.
        total_error: predicted over actual seconds of the last thousand steps of a server, less 1,
            each predicted with the speed just before it; None if not known.
        factors: actual over predicted seconds, of two seconds each, the newest last.
        samples: steps that it was fitted to, and ``after`` what followed steps.
        weights_bytes: of all weights in memory; 0 if not known, as in older files.
        kv_bytes_per_token: in the cache; 0 if not known.
    """

    model: str
    arch: str
    dtype: str
    kv_cache_dtype: str
    backend: str
    threads: int
    processor: str
    source: str
    measured_at: float
    version: str
    times: StepTime
    step_error: float | None
    total_error: float | None
    factors: tuple[float, ...]
    samples: tuple[Measured, ...]
    after: tuple[After, ...]
    weights_bytes: int = 0
    kv_bytes_per_token: int = 0

    @property
    def weights_bytes_per_s(self) -> float:
        """How fast a step of one token reads weights, at least; 0 if not known."""
        step_s = self.times.seconds(ONE_STREAM)
        return self.weights_bytes / step_s if step_s else 0.0

    @property
    def kv_bytes_per_s(self) -> float:
        """How fast attention reads keys and values; 0 if not known, or too fast to be seen."""
        per_position_s = self.times.per_position_s
        return self.kv_bytes_per_token / per_position_s if per_position_s else 0.0

    def interval(self) -> Interval:
        """Return by how much the time of some seconds may differ from what is predicted."""
        if self.source == "assumed":
            return Interval(ASSUMED_FACTORS[0], 1.0, ASSUMED_FACTORS[1])
        return interval_of(self.factors)

    @property
    def file_name(self) -> str:
        """What the file is called that keeps it: what servers learnt has one of its own."""
        formats = f"{self.dtype}-{self.kv_cache_dtype}-{self.backend}-{self.threads}"
        stem = self.model.rpartition(".")[0] or self.model
        name = f"{stem}-{formats}-{self.processor}"
        learnt = ".served" if self.source == "served" else ""
        return re.sub(r"[^A-Za-z0-9.]+", "-", name) + learnt + ".json"

    def is_of(self, other: Calibration) -> bool:
        """Whether both are of the same model, format, backend, threads and processor."""
        names = ("model", "arch", "dtype", "kv_cache_dtype", "backend", "threads", "processor")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def reservoir(self) -> Samples:
        """Return its samples, to which more can be added."""
        return Samples(self.samples, self.after)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        rows = {
            "samples": [[*sample.features, sample.seconds] for sample in self.samples],
            "after": [list(sample) for sample in self.after],
        }
        return asdict(self) | rows


def interval_of(factors: Sequence[float]) -> Interval:
    """Return quantiles of factors; all 1 if there are none."""
    ordered = sorted(factors) or [1.0]
    last = len(ordered) - 1
    return Interval(*(ordered[round(share * last)] for share in (0.05, 0.5, 0.95)))


class Factors:
    """Actual over predicted seconds, of two busy seconds each; the last sixty."""

    def __init__(self, past: tuple[float, ...] = ()) -> None:
        """Begin with those of before."""
        self.past: deque[float] = deque(past, maxlen=_MOST_FACTORS)
        self._actual_s = self._predicted_s = 0.0

    def add(self, actual_s: float, predicted_s: float) -> bool:
        """Take a step; return whether two seconds are full."""
        self._actual_s += actual_s
        self._predicted_s += predicted_s
        if self._actual_s < _WINDOW_S:
            return False
        self.past.append(round(self._actual_s / self._predicted_s, 4))
        self._actual_s = self._predicted_s = 0.0
        return True


@dataclass(frozen=True, slots=True)
class _Rows:
    """The part of a file that is not written as it is declared: a row has features and seconds."""

    samples: tuple[tuple[float, ...], ...]


def parse_calibration(text: bytes) -> Calibration:
    """Read a calibration from JSON. Raises ValueError if it is not one of this version."""
    values = parse(text)
    rows = typed(values, _Rows).samples
    samples = [[row[:-1], *row[-1:]] for row in rows]
    calibration: Calibration = typed(values | {"samples": samples}, Calibration)
    _check(calibration)
    return calibration


def _check(calibration: Calibration) -> None:
    """Raise ValueError for what no measurement gives."""
    if calibration.source not in ("measured", "served", "assumed"):
        raise ValueError(f"source is {calibration.source!r:.40}: measured, served or assumed")
    if not 0 <= calibration.measured_at < _LAST_S:
        raise ValueError(f"measured_at is {calibration.measured_at}: no time since 1970")
    for name, value in asdict(calibration.times).items():
        of_field = value if name == "table_s" else (value,)
        if any(isinstance(one, int | float) and one > _LONGEST_S for one in of_field):
            raise ValueError(f"times.{name} is {value}: more than any machine takes")
    if not all(1 / _SLOWEST < factor < _SLOWEST for factor in calibration.factors):
        raise ValueError("factors are above 0, and each is about 1")
    if any(sample.seconds < 0 or min(sample.features) < 0 for sample in calibration.samples):
        raise ValueError("samples are of steps, whose counts and times are at least 0")


_READ = "read_bytes_per_s"
# Of what the roof allows, what steps of the CPU backend reach; assumed until a model is calibrated.
MEMORY_SHARE, COMPUTE_SHARE = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class KeptRoof:
    """What memory and arithmetic reach here.

    Attributes:
        processor: its name.
        threads: how many there were.
        measured_at: seconds since 1970.
        one_thread, all_threads: bytes or operations per second, by the names of ``cpu.Rates``; of
            products that the processor has no instruction for there is none.
    """

    processor: str
    threads: int
    measured_at: float
    one_thread: Mapping[str, float]
    all_threads: Mapping[str, float]

    def read_bytes_per_s(self, threads: int | None = None) -> float:
        """Return what this number of threads reads together; without one, all of them."""
        return self._rate(_READ, threads)

    def ops_per_s(self, form: str, threads: int | None = None) -> float:
        """Return what products of int8, bf16 or f32 reach; bf16 is widened where it must be."""
        name = f"{form}_ops_per_s"
        return self._rate(name if name in self.all_threads else "f32_ops_per_s", threads)

    def _rate(self, name: str, threads: int | None) -> float:
        most = self.all_threads[name]
        return most if threads is None else min(most, threads * self.one_thread[name])


def parse_roof(text: bytes) -> KeptRoof:
    """Read a roof from JSON. Raises ValueError if it is none."""
    roof: KeptRoof = typed(parse(text), KeptRoof)
    try:
        rates = [roof.read_bytes_per_s(1), roof.ops_per_s("int8", 1), roof.ops_per_s("f32", 1)]
    except KeyError as error:
        raise ValueError(f"{error} is missing") from None
    if min(rates) <= 0:
        raise ValueError("rates are above 0")
    return roof


def roof_file_name(processor: str, threads: int) -> str:
    """Return the name of the file that keeps the roof of this number of threads."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{processor}-{threads}") + ".json"
