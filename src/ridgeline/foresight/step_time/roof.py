"""The roof of this machine as it was last measured: how fast memory is read, how fast products go.

``ridgeline doctor --roof`` measures it, and ``ridgeline calibrate`` where it is not known yet. It
belongs to a processor and a number of threads, and not to a model.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ridgeline.foresight.typed import parse, typed
from ridgeline.machine import processor_name, usable_cpus

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

    def save(self, home: Path) -> Path:
        """Write the file, whole or not at all; return its path. Raises OSError."""
        path = _path(home, self.processor, self.threads)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".new", delete=False, encoding="utf-8"
        ) as file:
            json.dump(asdict(self), file)
        os.replace(file.name, path)
        return path


def kept_roof(home: Path) -> KeptRoof | None:
    """Return the roof that was measured here; None where none was, or its file is damaged."""
    processor, threads = processor_name(), usable_cpus()
    try:
        kept: KeptRoof = typed(parse(_path(home, processor, threads).read_bytes()), KeptRoof)
        rates = [kept.read_bytes_per_s(1), kept.ops_per_s("int8", 1), kept.ops_per_s("f32", 1)]
    except (OSError, ValueError, KeyError):
        return None
    is_of_here = (kept.processor, kept.threads) == (processor, threads)
    return kept if is_of_here and all(rate > 0 for rate in rates) else None


def _path(home: Path, processor: str, threads: int) -> Path:
    return home / "roof" / (re.sub(r"[^A-Za-z0-9.]+", "-", f"{processor}-{threads}") + ".json")
