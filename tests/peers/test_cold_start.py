"""How long an unloaded model takes: the table, and our own router in llama.cpp's place too."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from peers.cold_start import from_the_start, running, table, unloaded

from peers import cold_start, engines
from tests.engine.test_llm import model  # noqa: F401  (a fixture)


def test_the_table_has_medians_and_the_last_over_the_first() -> None:
    results = {"a, not loaded": {"ridgeline": [3.0, 1.0, 2.0], "llama.cpp": [4.0, 4.0, 5.0]}}
    assert table(results).splitlines() == [
        "| seconds | ridgeline | llama.cpp | ratio |",
        "|---|---|---|---|",
        "| a, not loaded | 2.00 (1.00 to 3.00) | 4.00 (4.00 to 5.00) | 2.00 |",
    ]


@pytest.mark.full
def test_both_ways_are_timed_and_the_model_is_unloaded_in_between(
    model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "HOME", tmp_path / "home")
    monkeypatch.setattr(cold_start, "_SETTLE_S", 0.0)
    shutil.copytree(model, tmp_path / "models" / "a")
    command = [sys.executable, "-m", "ridgeline", "serve", "--keep-alive", "0"]
    command += ["--models-dir", str(tmp_path / "models"), "--kv-cache-memory", "1MiB"]
    found = from_the_start(["a"], {"ridgeline": command}, 1)
    (ready_s,), (first_s,) = (
        found["until the router is ready"]["ridgeline"],
        found["a, first request"]["ridgeline"],
    )
    assert ready_s > 0
    assert first_s > 0
    assert len(unloaded(["a"], {"ridgeline": command}, 2)["a, not loaded"]["ridgeline"]) == 2
    log = (tmp_path / "home" / "logs" / "cold-start-ridgeline.txt").read_text()
    assert log.count("a is loaded") == 3, "the round that does not count, and two"


def test_a_router_that_does_not_start_is_named_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "HOME", tmp_path)
    with (
        pytest.raises(SystemExit, match=r"llama\.cpp ended at its start: see .*cold-start-llama"),
        running("llama.cpp", [sys.executable, "-c", "raise SystemExit(1)"]),
    ):
        pass
