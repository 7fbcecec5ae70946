"""``ridgeline bench gpu --tiny``: every line of it but a GPU's own runs here, on twins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

import torch

from ridgeline.backends.cuda import twins
from ridgeline.backends.cuda.measure.part import Part
from ridgeline.backends.cuda.measure.parts import correct
from ridgeline.bench.gpu.parts import PARTS
from ridgeline.machine import DeviceLost


def test_all_parts_run_in_small_and_nothing_is_wrong(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    command = [sys.executable, "-m", "ridgeline", "bench", "gpu", "--tiny", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing is wrong\n")
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    ends = {one["part"]: one["code"] for one in found if one["what"] == "end"}
    assert ends == dict.fromkeys(PARTS, 0)
    told = {part: {one["what"] for one in found if one["part"] == part} for part in PARTS}
    assert "tokens, graphs True, ahead True" in told["smoke"]
    assert "experts 40, second" in told["correct"]
    assert "tiny attention, tokens 1299 to 1300 alone" in told["bits"]
    assert "tiny int4 decode 4 x 32, graphs and ahead" in told["engine"]
    assert "qkv 192 x 128, 3 rows, int4" in told["products"]
    assert "decode tiny 2 x 64" in told["attention"]
    assert "token back" in told["roof"]
    assert "skipped" in told["peer"] or any("warm" in what for what in told["peer"])


def test_a_kernel_that_is_wrong_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    part = Part("correct", 60)
    part.ops = SimpleNamespace(**vars(twins))
    part.ops.gate = lambda inner, *given: twins.gate(inner, *given) * 1.001
    correct.measure(part)
    wrong = {one["what"].split()[0] for one in findings(capsys) if not one.get("ok", True)}
    assert wrong == {"gate"}


def test_a_case_that_fails_ends_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("no kernel image")

    part = Part("products", 60)
    part.run([("first", fail), ("second", lambda: part.say("second", us=1.0))])
    part.run([("others", fail)], are_ours=False)
    first, second, others = findings(capsys)
    assert (first["failed"], first["ok"]) == ("RuntimeError: no kernel image", False)
    assert second["us"] == 1.0
    assert "ok" not in others
    assert part.peer_seconds(fail) is None


def test_a_device_that_is_lost_ends_the_part(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    part = Part("products", 60)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        part.run([("first", fail), ("second", lambda: part.say("second"))])
    (first,) = findings(capsys)
    assert not first["ok"]


def findings(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]
