"""The roof of this machine, measured with the CPU backend's own kernels and kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ridgeline.engine.calibration.kept import save_roof
from ridgeline.foresight.step_time.roof import KeptRoof
from ridgeline.system.machine import processor_name, usable_cpus

Report = Callable[[int, int], None]


def measure_kept_roof(home: Path, report: Report = lambda done, total: None) -> KeptRoof:
    """Measure with all threads in about ten seconds, and keep it in ``home``. Raises OSError."""
    from ridgeline.backends.cpu import measure_roof  # compiles kernels

    roof = measure_roof(usable_cpus(), report)
    one, many = (
        {name: rate for name, rate in asdict(rates).items() if rate is not None}
        for rates in (roof.one_thread, roof.all_threads)
    )
    kept = KeptRoof(processor_name(), roof.num_threads, round(time.time(), 3), one, many)
    save_roof(home, kept)
    return kept
