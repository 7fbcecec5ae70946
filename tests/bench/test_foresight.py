"""``ridgeline bench foresight``: seven loads, foreseen and run twice, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ridgeline import LLM
from ridgeline.bench.foresight import (
    BARS,
    COLUMNS,
    LOADS,
    ErrorVerdict,
    StepErrors,
    compare,
    foresight_svg,
    fresh,
    make_case,
    run,
    run_on,
    sum_errors,
    table_of_loads,
    table_of_runs,
    verdicts,
)
from ridgeline.bench.load.client_overhead import ClientOverhead
from ridgeline.cli.main import app
from ridgeline.core.records import Record, RequestRecord
from ridgeline.engine.calibration import roofline_calibration, stored_calibrations
from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.serve.serving import serving

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
    runs, loads = 2 + 14 + 6, 2 + 7 + 1
    sums = len(rows) - runs - loads  # a run without a busy second has no row among these
    assert sums == 0 or 2 + 1 + 1 <= sums <= 2 + 14 + 1
    assert len({row.count("|") for row in rows[:runs]}) == 1
    assert [row.split("|")[1].strip() for row in rows[-8:-1]] == [load.name for load in LOADS]
    verdict_lines = [line for line in done.stdout.splitlines() if ": median " in line]
    assert [line.partition(":")[0] for line in verdict_lines][:4] == list(BARS)[:4]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [len(found["errors"][kind]) for kind in found["errors"]] == [14, 14, 14]
    assert all(len(column) == 8 for column in found["verdicts"].values())
    assert len(found["utilisations"]) == 7
    for pair in found["measured"]:
        assert pair[0]["num_requests"] == pair[1]["num_requests"] >= 8
        assert pair[0]["num_successful"] > 0  # one of the tiny model's tokens breaks a request
    assert set(compare(pair[0], pair[0]).values()) == {0.0}
    assert [kept.source for kept in stored_calibrations(tmp_path)] == ["measured"]
    drawn = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    titles = [title.text for title in drawn.iter(f"{SVG}title")][1:]  # behind the band's
    assert len(titles) == 4 * 14
    first = found["predicted"][0]["ttft_from_send"]["mean_ms"]
    assert str(titles[0]).startswith(f"TTFT mean: {first:,.4g} predicted, ")


def test_loads_over_http_are_those_that_were_foreseen(model: Path) -> None:  # noqa: F811
    with (
        serving(model) as server,
        LLM(model, threads=1, kv_cache_memory="1MiB", speculative_config="off") as llm,
    ):
        calibration = roofline_calibration(llm.path, llm.arch, llm.config)
        closed = next(load for load in LOADS if load.clients == 4)
        case = make_case(llm, closed, calibration, 0.1, 1, ClientOverhead(0.5, 0.0))
        assert case.summary({})["ttft_from_send"]["min_ms"] >= 500
        records = list[Record]()
        server.llm.engine.listeners.append(records.append)
        ran = run_on(f"http://127.0.0.1:{server.port}", case)
    requests = [record for record in records if isinstance(record, RequestRecord)]
    assert len(requests) == len(case.load) + 1  # and a warm-up
    assert all(request.params["temperature"] > 0 for request in requests)  # the server's default
    assert ran.steps == ()
    assert ran.speed == 1.0
    assert ran.summary["num_requests"] == len(case.load)
    good = ran.summary["num_successful"]
    assert good > 0  # one of the tiny model's tokens breaks a request
    assert ran.summary["total_output_tokens"] > good


# --- tables --------------------------------------------------------------------------------------


def test_sums_are_over_busy_seconds() -> None:
    steps = [StepErrors(0.4, 0.3, 0.4)] * 3
    steps += [StepErrors(0.9, 0.9, 1.0), StepErrors(0.2, 0.2, 0.1), StepErrors(0.9, 9, 9)]
    errors = sum_errors(steps, 1.2, 2.0)
    assert errors["foreseen"] == pytest.approx((25.0 + 0.0) / 2)
    assert errors["followed"] == pytest.approx(0.0)
    assert errors["own speed"] == pytest.approx((10.0 + 20.0) / 2)
    assert errors["once more"] == pytest.approx((50.0 + 100.0) / 2)
    assert sum_errors(steps[:1], 1.0, 1.0) == {}


def test_a_verdict_is_against_its_bar_or_a_repetition() -> None:
    """The first load is within its bars; of the second TTFT misses, and TPOT is as a repetition."""
    one = dict.fromkeys(COLUMNS, 1.0)
    foreseen = [one, one, one | {"TTFT mean": -12.0, "TPOT mean": 6.0}]
    foreseen.append(one | {"TTFT mean": 14.0, "TPOT mean": -8.0})
    repeats = [one, one, one | {"TPOT mean": 5.0}, one | {"TPOT mean": -5.0}]
    errors = {"foreseen": foreseen, "own speed": [], "once more": repeats}
    sums = [{"followed": 4.0, "once more": 2.0}, {}, {}, {}]
    found = verdicts(errors, sums)
    assert list(found) == list(BARS)
    assert found["TTFT mean"][1] == ErrorVerdict(13.0, 1.0, 10.0)
    first, second, middle = found["TPOT mean"]
    assert first
    assert second
    assert middle
    assert (first.is_met, second.is_met, middle.is_met) == (True, True, True)
    assert "within 1.5 repetitions" in str(second)
    assert found["sums of 1 s"] == [ErrorVerdict(4.0, 2.0, 5.0), None, ErrorVerdict(4.0, 2.0, 5.0)]
    lines = list(table_of_loads(["a", "b"], [0.5, 0.9], found))
    assert "| b | 90% | 1.0 (1.0) | 7.0 (5.0) | 1.0 (1.0) | 13.0 (1.0) ! | - |" in lines
    assert any("above 85%, as in: b." in line for line in lines)
    assert "TTFT mean: median 7.0 %, bar 10 %, a repetition 1.0 %: met" in lines
    assert not any("own speed" in line for line in table_of_runs(["a", "b"], errors))
    missed = verdicts({"foreseen": foreseen[2:], "once more": [one, one]}, [{}, {}])["TTFT mean"]
    assert str(missed[-1]).endswith("missed")
    unsteady = ErrorVerdict(30.0, 40.0, 10.0)
    assert not unsteady.is_met
    assert str(unsteady).endswith("too unsteady to say")
    assert ErrorVerdict(9.0, 40.0, 10.0).is_met


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
        calibration = roofline_calibration(llm.path, llm.arch, llm.config)
        half = next(load for load in LOADS if load.share == 0.5)
        case = make_case(llm, half, calibration, 1.0, 1)
        assert case.utilisation(case.summary({})) == pytest.approx(0.5, abs=0.3)
        again = fresh(llm, case, 1)
        assert [len(a.prompt) for a in again.load] == [len(a.prompt) for a in case.load]
        assert again.load[0].prompt != case.load[0].prompt
        ran = run(llm, again, calibration)
        found = ran.summary
        assert ran.speed > 0
        assert sum(step.actual_s for step in ran.steps) < found["duration_s"]
        assert found["num_requests"] == len(case.load)
        assert 0 < found["total_output_tokens"] <= sum(a.num_new[0] for a in case.load)
        assert found["total_cached_input_tokens"] < 0.2 * found["total_input_tokens"]
        assert not llm.engine.has_work()
        assert llm.engine.listeners == listeners
