"""docs/python.md: its code runs, in order, and its options are those that are taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ridgeline.engine.vllm import taken
from tests.engine.test_llm import model  # noqa: F401  (a fixture)

TEXT = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)


def test_the_code_of_the_page_runs(
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ridgeline import LLM

    load, path = LLM.__init__, model

    def small(self: LLM, model: str, **options: Any) -> None:
        assert model == "smollm2"
        load(self, path, **{"kv_cache_memory": "1MiB", "threads": 1} | options)

    monkeypatch.setattr(LLM, "__init__", small)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, "docs/python.md", "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out
    assert "the prompt is empty: give at least one token" in printed
    assert len(BLOCKS) > 9


def test_the_options_of_the_page_are_taken() -> None:
    table = [
        line for line in TEXT.splitlines() if line.startswith("| `") and "Sampling" not in line
    ]
    names = {name for line in table for name in re.findall(r"`(\w+)[`=]", line.split("|")[1])}
    assert len(names) > 20
    for name in names:
        taken("smollm2", {name: None})
