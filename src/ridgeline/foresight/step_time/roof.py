"""The roof of this machine as it was last measured: how fast memory is read, how fast products go.

``ridgeline doctor --roof`` measures it, and ``ridgeline calibrate`` where it is not known yet. It
belongs to a processor and a number of threads, and not to a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.foresight.structure import parse, typed

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
