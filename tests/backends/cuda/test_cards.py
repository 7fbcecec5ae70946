"""What doctor says of GPUs, by what nvidia-smi answers: here a script of that name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.backends.cuda import cards
from ridgeline.cli.commands import doctor

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
    assert known["gpu"] == "NVIDIA H100 80GB HBM3, 78.1 GiB usable of 79.6 GiB, driver 580.159"
    assert "torch" in known
    assert not [line for line in cards.problems() if "persistence" in line or "other" in line]


def test_what_keeps_a_card_from_being_used_well_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, GPU + "Disabled", "echo 4711, 1024; echo 4712, [N/A]")
    found = list(doctor.problems(tmp_path))
    assert any("persistence mode is off" in line and "nvidia-smi -pm 1" in line for line in found)
    assert any("2 other processes use 1.0 GiB" in line for line in found)
    assert any(line.startswith("the GPU cannot be used: ") for line in found)


@pytest.mark.parametrize("answer", ["exit 9", "echo no devices were found"])
def test_a_machine_without_a_gpu_hears_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not [*cards.lines(), *cards.problems()]
    install(tmp_path, monkeypatch, "", answer)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    assert not [*cards.lines(), *cards.problems()]
