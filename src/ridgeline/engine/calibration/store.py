"""What was measured here, as it is kept on the disk: calibrations, and the roof of this machine.

A file is written whole or not at all, and passes the reader's check first. One that is damaged, or
of another version, is passed over, and replaced when the model is measured again; ``doctor`` says
so. The roof is measured with the CPU backend's own kernels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ridgeline.foresight.step_time.calibration import Calibration, parse_calibration
from ridgeline.foresight.step_time.roof import KeptRoof, parse_roof, roof_file_name
from ridgeline.system.machine import processor_name, usable_cpus, write_whole

Report = Callable[[int, int], None]


def calibration_path(home: Path, calibration: Calibration) -> Path:
    """Return the file that a calibration lies in."""
    return home / "calibration" / calibration.file_name


def save_calibration(home: Path, calibration: Calibration) -> Path:
    """Keep a calibration; return its path.

    Raises OSError, and ValueError for one that could not be read again.
    """
    path = calibration_path(home, calibration)
    text = json.dumps(calibration.to_json(), separators=(",", ":"))
    parse_calibration(text.encode())
    _write(path, text)
    return path


def try_to_keep(home: Path | None, calibration: Calibration) -> None:
    """Keep a calibration; where there is no home that can be written, it is learnt again."""
    if home is not None:
        with suppress(OSError, ValueError):
            save_calibration(home, calibration)


def read_calibration(path: Path) -> Calibration:
    """Read a file. Raises ValueError if it is not one of this version, and OSError."""
    try:
        return parse_calibration(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a calibration of this version: {error}") from None


def kept_calibration(path: Path) -> Calibration | None:
    """Return the calibration of a file; None if it is not there, or is none of this version."""
    try:
        return read_calibration(path)
    except (ValueError, OSError):
        return None


def all_of(home: Path) -> Iterator[Calibration]:
    """Yield the calibrations that are kept; a file that is none of this version is passed over."""
    for path in _files(home):
        if (calibration := kept_calibration(path)) is not None:
            yield calibration


def unreadable(home: Path) -> Iterator[str]:
    """Yield why each file that is passed over is none, in a line."""
    for path in _files(home):
        try:
            read_calibration(path)
        except (ValueError, OSError) as error:
            yield str(error)


def save_roof(home: Path, roof: KeptRoof) -> Path:
    """Keep a roof; return its path. Raises OSError."""
    path = home / "roof" / roof_file_name(roof.processor, roof.threads)
    _write(path, json.dumps(asdict(roof)))
    return path


def kept_roof(home: Path) -> KeptRoof | None:
    """Return the roof that was measured here; None where none was, or its file is damaged."""
    processor, threads = processor_name(), usable_cpus()
    try:
        roof = parse_roof((home / "roof" / roof_file_name(processor, threads)).read_bytes())
    except (OSError, ValueError):
        return None
    return roof if (roof.processor, roof.threads) == (processor, threads) else None


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))


def _files(home: Path) -> list[Path]:
    return sorted((home / "calibration").glob("*.json"))


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
