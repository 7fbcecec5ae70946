"""Kernels as the launchers launch them, compiled for GPUs: what no GPU is needed to know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")
pytest.importorskip("triton", reason="the kernels need Triton: make test-gpu")

from ridgeline.backends.cuda import kernels

# Loads and stores of spilled registers that are let pass, by kernel and warps.
SPILLED = {("attend_kernel", 2): 16, ("attend_kernel", 4): 4, ("expand_kernel", 8): 2}
# Heads of 256 channels, slopes, or seven query heads of a key head.
SPILLED_BY_RARE_HEADS = SPILLED | {
    ("attend_kernel", 2): 54,
    ("attend_kernel", 4): 12,
    ("attend_kernel", 8): 20,
}
PRODUCTS = {
    "attend_kernel", "product_kernel", "streamed_kernel", "packed_kernel", "grouped_kernel",
    "shrink_kernel", "expand_kernel",
}  # fmt: skip
# Tiles that have less than the 64 rows of a warpgroup.
NARROW = {
    ("attend_kernel", 2), ("product of 16 x 32 x 128", 4),
    ("latents DeepSeek-V3", 8), ("latents DeepSeek-V2-Lite", 8),
    ("attend heads of 512, as of Gemma 4, 16 rows", 8),
}  # fmt: skip
# "edit_kernel" has those of a division, which rounds correctly.
DRAWS = {
    "survey_kernel", "join_kernel", "tally_kernel", "limit_kernel", "weigh_kernel", "pick_kernel",
    "count_kernel", "mask_kernel",
}  # fmt: skip


def compiled(*flags: str) -> list[dict[str, Any]]:
    """Return what was measured of each kernel, in a process that interprets nothing."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.kernels.compiler", *flags],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def in_source() -> set[str]:
    """Return the names of all kernels."""
    texts = (path.read_text() for path in Path(kernels.__file__).parent.rglob("*.py"))
    return {name for text in texts for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)}


def complaints(found: dict[str, Any], spilled: dict[tuple[str, int], int]) -> list[str]:
    """Return what is wrong with a kernel."""
    kernel, case, which = found["kernel"], found["case"], (found["kernel"], found["warps"])
    said = []
    if found["LDL"] + found["STL"] > spilled.get(which, 0):
        said.append(f"{found['LDL']} + {found['STL']} spilled")
    if kernel in PRODUCTS:
        is_narrow = which in NARROW or (case, found["warps"]) in NARROW
        if not found["HMMA" if is_narrow else "HGMMA"] or (not is_narrow and found["HMMA"]):
            said.append(f"HGMMA {found['HGMMA']}, HMMA {found['HMMA']}")
        loads = "UTMALDG" if kernel == "streamed_kernel" else "LDGSTS"
        if not found[loads]:
            said.append(f"no {loads}: products wait for their loads")
    if kernel in DRAWS and found["DFMA"]:
        said.append("fused multiply-adds")
    return [f"{case}, {kernel}: {what}" for what in said]


def test_kernels_fit_a_hopper_and_use_its_matrix_units() -> None:
    found = compiled()
    assert found.pop() == {"fewer_stages": []}
    steps = [found.pop() for _ in range(4)]
    assert [step["anew"] for step in steps] == [[]] * 4, "compiled while answers wait"
    assert {one["kernel"] for one in found} == in_source() > PRODUCTS | DRAWS
    assert [what for one in found for what in complaints(one, SPILLED)] == []


@pytest.mark.full
def test_kernels_of_more_models_fit_a_hopper() -> None:
    found = compiled("--full")
    assert found.pop() == {"fewer_stages": []}
    assert len(found) > 40
    assert [what for one in found[:-4] for what in complaints(one, SPILLED_BY_RARE_HEADS)] == []


@pytest.mark.parametrize(
    ("capability", "is_small"),
    [
        ("89", True),
        pytest.param("80", False, marks=pytest.mark.full),
        pytest.param("120", True, marks=pytest.mark.full),
    ],
)
def test_kernels_fit_cards_with_less_shared_memory(capability: str, is_small: bool) -> None:
    """Ada's, as of an L4 or RTX 4090, an A100's, and Blackwell's for desktops."""
    found = compiled("--for", capability)
    fewer = found.pop()["fewer_stages"]
    assert "product_kernel" in fewer if is_small else not fewer
    found = found[:-4]
    assert {one["kernel"] for one in found} >= (PRODUCTS - {"streamed_kernel"}) | DRAWS
    for one in found:
        assert one["kernel"] not in PRODUCTS or one["HMMA"], one
        assert one["kernel"] not in DRAWS or not one["DFMA"], one
