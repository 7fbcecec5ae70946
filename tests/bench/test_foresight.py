"""``ridgeline bench foresight``: seven loads, foreseen and run twice, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ridgeline import LLM
from ridgeline.bench.foresight import LOADS, compare, fresh, make_case, run
from ridgeline.bench.foresight_svg import foresight_svg
from ridgeline.cli.main import app
from ridgeline.planner.calibration import all_of, assume
from tests.api.test_llm import model  # noqa: F401  (a fixture)

GOLDEN = Path(__file__).with_name("foresight.svg")
SVG = "{http://www.w3.org/2000/svg}"


def test_it_prints_a_table_of_errors_and_a_document(
    model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    flags = ["--threads", "1", "--kv-cache-memory", "1MiB", "--load-seconds", "0.1"]
    flags += ["--out", str(tmp_path / "a.svg")]
    arguments = ["bench", "foresight", str(model), "--seconds", "1", *flags]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 14 + 6
    assert len({row.count("|") for row in rows}) == 1
    found = json.loads(done.stdout.splitlines()[-1])
    assert [len(found["errors"][kind]) for kind in found["errors"]] == [14, 14, 14]
    for pair in found["measured"]:
        assert pair[0]["num_requests"] == pair[1]["num_requests"] >= 8
        assert pair[0]["num_successful"] > 0  # one of the tiny model's tokens breaks a request
    assert set(compare(pair[0], pair[0]).values()) == {0.0}
    assert [kept.source for kept in all_of(tmp_path)] == ["measured"]
    drawn = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    titles = [title.text for title in drawn.iter(f"{SVG}title")][1:]  # behind the band's
    assert len(titles) == 4 * 14
    first = found["predicted"][0]["ttft_from_send"]["mean_ms"]
    assert str(titles[0]).startswith(f"TTFT mean: {first:,.4g} predicted, ")


FIGURES = {"TTFT": [(110.0, 100.0), (40.0, 50.0)], "TPOT": [(10.0, 10.0), (0.0, 9.0)]}


def test_the_picture_is_the_one_that_was_looked_at() -> None:
    assert foresight_svg("A model", FIGURES, "ms") == GOLDEN.read_text(encoding="utf-8")


def test_what_was_foreseen_rightly_lies_on_the_line() -> None:
    drawn = ElementTree.fromstring(foresight_svg("A <model>", FIGURES, "ms"))
    dots = [
        (float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in drawn.iter(f"{SVG}circle")
    ][2:]  # behind the legend's
    assert len(dots) == 3  # nothing is drawn of what was not foreseen
    (more, less, right) = ((96 + 480 - 70) / 2 - down for _, down in dots)
    assert right == 0
    assert more == pytest.approx(-less / 2, abs=0.1)  # 10 % too much, 20 % too little
    assert dots[0][0] > dots[1][0] > dots[2][0]
    with pytest.raises(ValueError, match="nothing to draw"):
        foresight_svg("A model", {"TTFT": []}, "ms")


def test_a_load_asks_for_its_share_and_runs_as_planned(model: Path) -> None:  # noqa: F811
    with LLM(model, threads=1, kv_cache_memory="1MiB", speculative_config="off") as llm:
        listeners = list(llm.engine.listeners)
        calibration = assume(llm.path, llm.arch, llm.config)
        half = next(load for load in LOADS if load.share == 0.5)
        case = make_case(llm, half, calibration, 1.0, 1)
        assert case.utilisation(case.summary({})) == pytest.approx(0.5, abs=0.3)
        again = fresh(llm, case, 1)
        assert [len(a.prompt) for a in again.load] == [len(a.prompt) for a in case.load]
        assert again.load[0].prompt != case.load[0].prompt
        found, factor = run(llm, again, calibration)
        assert factor > 0
        assert found["num_requests"] == len(case.load)
        assert 0 < found["total_output_tokens"] <= sum(a.num_new[0] for a in case.load)
        assert found["total_cached_input_tokens"] < 0.2 * found["total_input_tokens"]
        assert not llm.engine.has_work()
        assert llm.engine.listeners == listeners
