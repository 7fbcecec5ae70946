"""The published figures of docs/benchmarks.md: each command is typed, and says what stands there.

Memory lies within 1 % of what others measured, times and speeds within the range that the plan
states itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from ridgeline.cli.main import app
from tests.model.cost.published_configs import PUBLISHED

ROOT = Path(__file__).parents[2]
MODELS = json.loads((ROOT / "tests" / "data" / "known_speed.json").read_text())["models"]
MODELS |= {name: one["config"] for name, one in PUBLISHED.items()}
ROUNDED = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
MODELS["phi-4-autoround"] = MODELS["phi-4"] | {"quantization_config": ROUNDED}
UNITS = {"GB": 1e9, "GiB": 2**30}  # other units are those of the document
PER_CENT = 0.01
NUM = 33


class Known(NamedTuple):
    """A row: what is asked, where the answer stands, and the three figures as printed."""

    question: str
    command: str
    answer: str
    published: str
    here: str
    tolerance: str


def rows() -> list[Known]:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = text.partition("## What others measured, and what a plan says\n")[2]
    lines = (line for line in section.partition("\n## ")[0].splitlines() if "`ridgeline " in line)
    cells = ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines)
    return [Known(one[0], one[1].strip("`"), one[2].strip("`"), *one[3:6]) for one in cells]


def at(document: Any, path: str) -> float:
    for name in path.split("."):
        document = document[int(name) if name.isdigit() else name]
    return float(document)


def stated(document: Any, path: str) -> tuple[float, float]:
    """Return the range of nine in ten; of the engine's part of a first token as of the whole."""
    if path.startswith("memory."):
        middle = at(document, path)
        return (1 - PER_CENT) * middle, (1 + PER_CENT) * middle
    if path == "time.ttft_parts_ms.engine":
        part = at(document, path) / at(document, "time.ttft_ms")
        return part * at(document, "time.ttft_ms_low"), part * at(document, "time.ttft_ms_high")
    return at(document, f"{path}_low"), at(document, f"{path}_high")


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def answered(known: Known) -> tuple[tuple[float, float], str, str]:
    """Type a command; return its range, its answer and its tolerance in the row's unit."""
    program, *arguments = shlex.split(known.command)
    assert program == "ridgeline"
    result = CliRunner().invoke(app, [*arguments, "--format", "json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    unit = known.published.partition(" ")[2]
    scale = UNITS.get(unit, 1.0)
    low, high = (end / scale for end in stated(document, known.answer))
    tolerance = "1 %" if known.answer.startswith("memory.") else f"{short(low)} to {short(high)}"
    return (low, high), short(at(document, known.answer) / scale), tolerance


def marked() -> Iterator[Any]:
    """Yield all rows; long answers of many clients take seconds."""
    for one in rows():
        is_long = "--new-tokens 2048 " in one.command
        yield pytest.param(one, id=one.question, marks=[pytest.mark.full] if is_long else [])


@pytest.fixture(autouse=True)
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay the models' configs where the commands are typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "home"))
    for name, config in MODELS.items():
        Path(f"{name}.json").write_text(json.dumps(config), encoding="utf-8")


def test_the_table_has_all_of_them() -> None:
    assert len({(one.command, one.answer) for one in rows()}) == NUM


@pytest.mark.parametrize("known", list(marked()))
def test_what_is_typed_says_what_others_measured(known: Known) -> None:
    (low, high), here, tolerance = answered(known)
    assert (here, tolerance) == (known.here, known.tolerance)
    assert low <= float(known.published.partition(" ")[0].replace(",", "")) <= high
