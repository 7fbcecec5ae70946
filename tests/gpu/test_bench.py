"""``ridgeline bench gpu --tiny``: every line of it but a GPU's own runs here, on twins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

from ridgeline.bench.gpu.parts import PARTS


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


def test_a_kernel_that_is_wrong_is_found(tmp_path: Path) -> None:
    """One twin is broken, as a kernel might be; its part says which."""
    broken = (
        "from ridgeline.backends.cuda import device, twins\n"
        "from ridgeline.backends.cuda.measure.part import Part\n"
        "from ridgeline.backends.cuda.measure.parts import correct\n"
        "from types import SimpleNamespace\n"
        "part = Part('correct', 60)\n"
        "part.ops = SimpleNamespace(**vars(twins))\n"
        "part.ops.gate = lambda inner, *given: twins.gate(inner, *given) * 1.001\n"
        "correct.measure(part)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", broken], capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = {one["what"].split()[0] for one in found if not one.get("ok", True)}
    assert wrong == {"gate"}
