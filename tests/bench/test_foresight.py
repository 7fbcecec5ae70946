"""``ridgeline bench foresight``: seven loads, foreseen and run twice, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ridgeline import LLM
from ridgeline.bench.foresight import LOADS, compare, fresh, make_case, run
from ridgeline.cli.main import app
from ridgeline.planner.calibration import all_of, assume
from tests.api.test_llm import model  # noqa: F401  (a fixture)


def test_it_prints_a_table_of_errors_and_a_document(
    model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    flags = ["--threads", "1", "--kv-cache-memory", "1MiB", "--load-seconds", "0.1"]
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
