"""``ridgeline bench gpu`` where there is no GPU, and which parts it knows."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.backends import cuda
from ridgeline.bench.gpu import PARTS, bench_gpu, chosen_parts


def test_parts_are_run_in_our_order() -> None:
    assert chosen_parts(None) == list(PARTS)
    assert chosen_parts("roof, smoke") == ["smoke", "roof"]
    with pytest.raises(ValueError, match="--parts speed is not one of smoke, correct"):
        chosen_parts("smoke,speed")


def test_each_part_has_a_module_that_measures_it() -> None:
    folder = Path(cuda.__file__).parent / "measure" / "parts"
    assert {file.stem for file in folder.glob("[!_]*.py")} == set(PARTS)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is here")
@pytest.mark.parametrize("is_tiny", [True, False])
def test_without_torch_one_line_says_so_and_nothing_more_is_tried(
    is_tiny: bool, tmp_path: Path
) -> None:
    out = tmp_path / "found.jsonl"
    with pytest.raises(ValueError, match=r"torch is not installed: pip install 'ridgeline\[gpu\]'"):
        bench_gpu(["smoke", "correct"], 60.0, is_tiny=is_tiny, out=out)
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [(one["part"], one["what"]) for one in found] == [("all", "machine"), ("smoke", "end")]


def test_parts_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    assert bench_gpu(["smoke", "peer"], 1.0, is_tiny=False, out=out)
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [one["part"] for one in found if one["what"] == "left out"] == ["smoke", "peer"]


def test_it_runs_where_the_command_line_cannot_be_imported() -> None:
    """Machines that are lent for minutes have torch, NumPy and little else."""
    code = (
        "import sys, ridgeline.bench.gpu\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    others = {name for name in done.stdout.split() if not name.startswith("_")}
    assert others <= {"numpy", "ridgeline", "safetensors"}


def test_flags_are_those_of_the_command_line() -> None:
    command = [sys.executable, "-m", "ridgeline.bench.gpu", "--parts", "speed", "--seconds", "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("--parts speed is not one of smoke")
