"""The table of what was measured: its rows are whole, its page is current, its commands exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
HEAD = "date,area,what,result,command,verdict"
ROW = '2026-11-30,memory,"A start, before and now","0.5, 0.4 s",ridgeline run smollm2,kept'


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "results.py"))


def rows_of_the_table(tool: dict[str, Any]) -> list[dict[str, str]]:
    with (ROOT / "docs" / "results.csv").open(newline="") as lines:
        rows, faults = tool["rows_of"](lines)
    assert faults == []
    return list(rows)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (ROW.replace("2026-11-30", "2026-11-31"), "'2026-11-31' is no date"),
        (ROW.replace("2026-11-30", "20261130"), "'20261130' is no date"),
        (ROW.replace("memory", "memoria"), "'memoria' is none of kernels"),
        (ROW.replace('"A start, before and now"', ""), "what is empty"),
        (ROW.replace('"0.5, 0.4 s"', ""), "result is empty"),
        (ROW.replace(",kept", ","), "verdict is empty"),
        (ROW.replace(",kept", ""), "it has 5 fields"),
        (ROW.replace('"0.5, 0.4 s"', "0.5, 0.4 s"), "it has 7 fields"),
        (ROW.replace("kept", "kept "), "verdict has a line break, or a space at an end"),
    ],
)
def test_a_row_with_a_fault_is_named_by_its_line(
    tool: dict[str, Any], row: str, fault: str
) -> None:
    rows, (said,) = tool["rows_of"]([HEAD, ROW, row])
    assert [found["what"] for found in rows] == ["A start, before and now"]
    assert said.startswith(f"results.csv:3: {fault}")


def test_a_table_without_its_head_is_refused(tool: dict[str, Any]) -> None:
    rows, faults = tool["rows_of"]([ROW])
    assert (rows, faults) == ([], [f"results.csv: its first line has to be {HEAD}"])


def test_a_new_row_makes_the_page_stale_until_it_is_written(
    tool: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "results.csv"
    table.write_text(f"{HEAD}\n{ROW}\n")
    assert tool["main"](tmp_path, ["--check"]) == 1
    assert tool["main"](tmp_path, []) == 0
    assert tool["main"](tmp_path, ["--check"]) == 0
    with table.open("a") as rows:
        rows.write(ROW.replace("2026-11-30", "2026-12-01").replace("run", "a | b") + "\n")
    assert tool["main"](tmp_path, ["--check"]) == 1
    assert "run python tools/results.py" in capsys.readouterr().err
    assert tool["main"](tmp_path, []) == 0
    page = (tmp_path / "results.md").read_text()
    assert page.index("| 2026-12-01 | A start") < page.index("| 2026-11-30 | A start")
    assert r"`ridgeline a \| b smollm2`" in page
    table.write_text(f"{HEAD}\n{ROW.replace('2026', '2026-')}\n")
    assert tool["main"](tmp_path, []) == 1
    assert (tmp_path / "results.md").read_text() == page


def test_each_row_stands_once_and_every_area_has_some(tool: dict[str, Any]) -> None:
    rows = rows_of_the_table(tool)
    asked = [(row["date"], row["area"], row["what"]) for row in rows]
    assert [row for row in asked if asked.count(row) > 1] == []
    assert {row["area"] for row in rows} == set(tool["AREAS"])


def test_modules_and_targets_that_commands_name_exist(tool: dict[str, Any]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for row in rows_of_the_table(tool):
        for name in re.findall(r"python -m ([\w.]+)", row["command"]):
            path = ROOT.joinpath(*name.split("."))
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name
        for target in re.findall(r"^make ([a-z-]+)", row["command"]):
            assert target in targets
        for name in re.findall(r"\btests(?:/\w+)+(?!\.py|\w)", row["command"]):
            assert (ROOT / name).is_dir(), name


def test_references_to_the_page_name_an_area(tool: dict[str, Any]) -> None:
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    files += [path for top in ("src", "tests") for path in (ROOT / top).rglob("*.py")]
    named = {
        (path.name, area)
        for path in files
        for area in re.findall(r"results\.md#(\w+)", path.read_text())
    }
    assert len(named) > 20
    assert {area for _, area in named} <= set(tool["AREAS"])
