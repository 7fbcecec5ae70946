"""What ``ridgeline doctor`` says of a model that was calibrated here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ridgeline.cli.commands.doctor import facts, foreseen
from ridgeline.engine.calibration import newest_calibration, roofline_calibration, save_calibration
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import resolve
from ridgeline.foresight.step_time.calibration import ONE_STREAM
from ridgeline.model.files.checkpoint import load_checkpoint
from tests.engine.test_llm import write_model
from tests.foresight.simulator.test_run import TIMES
from tests.foresight.step_time.test_prediction_monitor import known as measured


def test_rates_are_said_in_units_that_people_know() -> None:
    step_s = TIMES.seconds(ONE_STREAM)
    calibration = replace(measured(), weights_bytes=round(3e9 * step_s), kv_bytes_per_token=2500)
    assert TIMES.per_position_s == 1e-6
    assert "it reads weights at 3.0 GB/s or more and the KV cache at 2.5 GB/s" in foreseen(
        calibration
    )
    free = replace(calibration, times=replace(TIMES, per_position_s=0.0))
    assert "it reads weights at " in foreseen(free)
    assert "KV cache" not in foreseen(free)
    assert "GB/s" not in foreseen(measured())


def test_what_is_known_of_speed_is_a_sentence() -> None:
    calibration = replace(
        measured(), source="learnt", factors=(1.0, 1.25), step_error=0.32, total_error=-0.014
    )
    said = foreseen(calibration)
    assert ": step times learnt while serving, " in said
    assert "; it last ran at 80% of that speed; predictions miss one step by 32% and a" in said
    assert said.endswith("a thousand steps together by 1%")


def test_a_speed_that_no_machine_drifts_to_is_to_be_measured_again() -> None:
    """Steps that were learnt while the process stood still seem as slow as that."""
    known = replace(measured(), factors=(1 / 60,))
    said = foreseen(known)
    assert f"it last ran at 60.0 times that speed: ridgeline calibrate {known.model}" in said
    assert "80% of that speed: ridgeline" not in foreseen(replace(known, factors=(1.25,)))


def test_the_sizes_lie_in_the_file_and_older_files_get_them(tmp_path: Path) -> None:
    home, checkpoint = tmp_path / "home", load_checkpoint(write_model(tmp_path / "tiny"))
    config = resolve(Options(), checkpoint)
    new = replace(
        roofline_calibration(checkpoint.path, checkpoint.arch, config),
        source="measured",
        measured_at=1.0,
    )
    path = save_calibration(home, new)
    assert any("KV cache at" in value for name, value in facts(home) if name == "foresight")
    content = json.loads(path.read_text())
    del content["weights_bytes"], content["kv_bytes_per_token"]
    path.write_text(json.dumps(content))
    assert newest_calibration(home, checkpoint.path, checkpoint.arch, config) == new
    assert not any("KV cache at" in value for name, value in facts(home) if name == "foresight")
