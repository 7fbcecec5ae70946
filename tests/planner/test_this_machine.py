"""This machine as a device: its measured roof, and what is said without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.engine.calibration import newest_calibration, save_roof
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import resolve
from ridgeline.foresight.step_time.calibration import MEMORY_SHARE, KeptRoof
from ridgeline.model.cost.costs import Features, weight_params
from ridgeline.planner.catalogue import this_machine
from ridgeline.system.machine import processor_name, usable_cpus
from tests.planner.capacity.test_search import planned
from tests.tiny import ARCHS, checkpoint

ONE = Features(1, 1, 1, 0, 0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    return tmp_path


def keep(home: Path, read_per_s: float, ops_per_s: float) -> None:
    rates = {"read_bytes_per_s": read_per_s, "int8_ops_per_s": ops_per_s,
             "bf16_ops_per_s": ops_per_s / 2, "f32_ops_per_s": ops_per_s / 4}  # fmt: skip
    save_roof(home, KeptRoof(processor_name(), usable_cpus(), 0.0, rates, rates))


def test_a_config_with_a_load_needs_the_roof_of_this_machine(home: Path) -> None:
    wishes = {"on": "here", "engine": "ridgeline", "weights_memory": "1MiB", "context": 600,
              "activation_memory": "1MiB", "kv_cache_memory": "400MiB"}  # fmt: skip
    assert this_machine().read_bytes_per_s == 0
    with pytest.raises(ValueError, match=r"doctor --roof` once, or `ridgeline calibrate") as caught:
        planned(**wishes)
    assert "\n" not in str(caught.value)
    keep(home, 100e9, 4e12)
    assert this_machine().read_bytes_per_s == 100e9
    assert this_machine().ops_per_s("bf16") == 2e12
    slow = planned(**wishes, request_rate=0.01)
    assert slow.as_dict()["time"]["source"] == "assumed"
    assert any("of this machine's memory roof" in note for note in slow.assumptions)
    (choice,) = slow.choices
    assert choice.latencies is not None
    weights_s = 2 * 8030261248 / (MEMORY_SHARE * 100e9)
    assert choice.latencies.ms["tpot"]["mean"] == pytest.approx(1e3 * weights_s, rel=0.1)
    keep(home, 200e9, 8e12)
    (faster,) = planned(**wishes, request_rate=0.01).choices
    assert faster.latencies is not None
    assert faster.latencies.ms["tpot"]["mean"] < 0.6 * choice.latencies.ms["tpot"]["mean"]


def test_what_was_not_calibrated_starts_from_the_roof(home: Path) -> None:
    model = checkpoint(ARCHS["plain"])
    config = resolve(Options(), model)
    assumed = newest_calibration(home, model.path, model.arch, config)
    keep(home, 1e6, 1e15)  # a memory so slow that reading is all
    by_roof = newest_calibration(home, model.path, model.arch, config)
    assert (assumed.source, by_roof.source) == ("assumed", "assumed")
    assert by_roof.is_of(assumed)
    read_s = by_roof.times.seconds(ONE)
    assert read_s > 10 * assumed.times.seconds(ONE)
    assert read_s > weight_params(model.arch) / 2 / (MEMORY_SHARE * 1e6)  # at least four bits each
    keep(home, 2e6, 1e15)
    assert newest_calibration(home, model.path, model.arch, config).times.seconds(ONE) < read_s
