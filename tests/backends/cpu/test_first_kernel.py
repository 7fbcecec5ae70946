"""The page that shows how a kernel is written: its code runs, in order, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.backends.arrays import address

PAGE = Path(__file__).parents[3] / "docs" / "first_kernel.md"


def test_the_code_of_the_page_runs() -> None:
    """All of it; the kernel that it leaves behind is right for other numbers too."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 5
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)  # noqa: S102
    x = np.float32([-3, -0.0, 0.5, 2] * 16)
    out = np.full(80, 7, np.float32)
    names["squared_relu"](address(x), address(out), 64)
    assert out.tolist() == [0, 0, 0.25, 4] * 16 + [7] * 16


def test_what_the_page_points_to_is_there() -> None:
    text = PAGE.read_text()
    linked = re.findall(r"\]\(([^)]+)\)", text)
    named = re.findall(r"`(tests/[\w/.]+)`", text)
    assert len(linked) >= 5
    assert len(named) == 2
    for target in [PAGE.parent / link for link in linked] + [PAGE.parents[1] / n for n in named]:
        assert target.is_file(), target
