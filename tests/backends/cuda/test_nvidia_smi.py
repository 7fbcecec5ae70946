"""What doctor says of GPUs, by what nvidia-smi answers: here a script of that name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.backends.cuda import gpu_models as cards
from ridgeline.backends.cuda.device import DeviceFacts
from ridgeline.cli.commands import doctor
from ridgeline.planner.catalogue import find_devices

GPU = "NVIDIA H100 80GB HBM3, 580.159, 81559, 80000, "
SCRIPT = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo "{gpu}";;
  *) {others};;
esac
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, others: str = "true") -> None:
    program = folder / "nvidia-smi"
    program.write_text(SCRIPT.format(gpu=gpu, others=others))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_card_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, GPU + "Enabled")
    known = dict(doctor.facts(tmp_path))
    card = "NVIDIA H100 80GB HBM3, 78.1 GiB usable of 79.6 GiB, driver 580.159"
    assert known["gpu"] == card
    assert "torch" in known
    monkeypatch.setattr(cards, "facts", lambda: DeviceFacts(driver=(13, 0)))
    assert dict(cards.lines())["gpu"] == f"{card}, CUDA 13.0"
    assert not [line for line in cards.problems() if "persistence" in line or "other" in line]


def test_what_keeps_a_card_from_being_used_well_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, GPU + "Disabled", "echo 4711, 1024; echo 4712, [N/A]")
    found = list(doctor.problems(tmp_path))
    assert any("persistence mode is off" in line and "nvidia-smi -pm 1" in line for line in found)
    assert any("2 other processes use 1.00 GiB" in line for line in found)
    assert any(line.startswith("the GPU cannot be used: ") for line in found)


@pytest.mark.parametrize("answer", ["exit 9", "echo no devices were found"])
def test_a_machine_without_a_gpu_hears_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not [*cards.lines(), *cards.problems(), *doctor.gpu_roof_facts(tmp_path)]
    install(tmp_path, monkeypatch, "", answer)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    assert not [*cards.lines(), *cards.problems()]


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("NVIDIA H100 80GB HBM3, 580.159, 81559, 80000", "h100-sxm"),
        ("NVIDIA H200, 580.159, 143771, 140000", "h200-sxm"),
        ("NVIDIA A100-SXM4-40GB, 550.54, 40960, 40000", "a100-40-sxm"),
        ("NVIDIA GeForce RTX 4090, 550.54, 24564, 20000", "rtx4090"),
        ("NVIDIA L4, 550.54, 23034, 20000", "l4"),
    ],
)
def test_a_plan_for_here_knows_the_card(
    gpu: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, f"{gpu}, Enabled")
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    machine, card = find_devices("here").devices
    assert machine.id == "here"
    assert card.usable_bytes == int(gpu.rpartition(",")[2]) << 20
    assert card.id == device
    assert card.max_ranks == 1
    assert not card.has_passed


def test_a_card_that_the_catalogue_lacks_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "NVIDIA Quadro X, 550.54, 9000, 900, Enabled")
    assert [one.id for one in find_devices("here").devices] == ["here"]
