"""The part of ``ridgeline bench gpu`` that transformers is measured in, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="parity tests need their own environment")


def test_transformers_batching_is_measured_with_the_same_requests(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    command = [sys.executable, "-m", "ridgeline.bench.gpu", "--tiny", "--parts", "peer"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    told = [one for one in found if one["part"] == "peer"]
    assert [one["peer"] for one in told if "peer" in one] == ["cold", "warm"]
    assert all(one["tok_per_s"] > 0 for one in told if "peer" in one)
    assert [one for one in told if "failed" in one] == []
    assert told[-1]["code"] == 0
