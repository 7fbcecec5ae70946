"""Calibrations on the disk: a file is whole or not there, and a write that fails leaves nothing."""

from __future__ import annotations

import resource
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.engine.calibration import (
    calibration_path,
    save_calibration,
    save_quietly,
    stored_calibrations,
)
from ridgeline.engine.setup.home import sweep
from ridgeline.foresight.step_time.features import Measured, of_items
from ridgeline.foresight.step_time.fit import fit
from tests.foresight.step_time.test_prediction_monitor import known as calibration


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_full_disk_leaves_the_file_that_was_there_and_nothing_else(tmp_path: Path) -> None:
    found = calibration()
    path = save_calibration(tmp_path, found)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_calibration(tmp_path, found)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(path.parent) == [path.name]
    assert path.read_bytes() == before
    assert list(stored_calibrations(tmp_path)) == [found]


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    wrong = replace(calibration(), measured_at=-1.0)
    with pytest.raises(ValueError, match="no time since 1970"):
        save_calibration(tmp_path, wrong)
    save_quietly(tmp_path, wrong)  # a server goes on
    assert not calibration_path(tmp_path, wrong).exists()


def test_steps_whose_time_lies_in_their_positions_give_what_can_be_kept(tmp_path: Path) -> None:
    """A busy machine may teach that, and then the step itself would take no time."""
    steps = [Measured(of_items([(p, 1, 1)]), 1e-5 * p) for p in range(1, 40)]
    times = fit(steps, (), (1,))
    assert times.table_s[0] < 1e-7
    found = replace(calibration(), times=times)
    save_calibration(tmp_path, found)
    assert list(stored_calibrations(tmp_path)) == [found]


def test_a_name_that_cannot_be_given_leaves_nothing(tmp_path: Path) -> None:
    path = calibration_path(tmp_path, calibration())
    path.mkdir(parents=True)
    with pytest.raises(OSError, match=path.name):
        save_calibration(tmp_path, calibration())
    assert names(path.parent) == [path.name]


@pytest.mark.parametrize("folder", ["calibration", "roof"])
def test_what_a_killed_process_left_is_swept(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "kept.json").touch()
    (tmp_path / folder / f"{tempfile.gettempprefix()}half").touch()
    sweep(tmp_path)
    assert names(tmp_path / folder) == ["kept.json"]
