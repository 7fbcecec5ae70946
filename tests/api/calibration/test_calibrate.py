"""Calibrating a real engine: it measures all kinds of steps, leaves no trace, and foresees others.

Speed is never asserted tightly: a busy machine must not fail these.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ridgeline import LLM, SamplingParams
from ridgeline.api.calibration.calibrate import calibrate, rates
from ridgeline.api.calibration.kept import all_of, kept_roof, save_calibration
from ridgeline.api.calibration.known import assume, known
from ridgeline.backends.cpu.measure import roofs
from ridgeline.cli.main import app
from ridgeline.core.records import Record
from ridgeline.foresight.step_time.monitor import PredictionMonitor
from ridgeline.foresight.step_time.sampler import Samples, Watcher
from tests.api.test_llm import model  # noqa: F401  (a fixture)


def test_a_tiny_model_is_measured_in_two_seconds(model: Path, tmp_path: Path) -> None:  # noqa: F811
    seen: list[tuple[int, int]] = []
    with LLM(model, threads=1, kv_cache_memory="1MiB") as llm:
        listeners, speculation = list(llm.engine.listeners), llm.engine.scheduler.speculation
        found = calibrate(llm, 2.0, lambda done, total: seen.append((done, total)))
        assert llm.engine.listeners == listeners
        assert llm.engine.scheduler.speculation is speculation
        assert not llm.engine.has_work()
        said = dict(rates(found, llm))
        assert assume(llm.path, llm.arch, llm.config).is_of(found)
        path = save_calibration(tmp_path, found)
        assert known(tmp_path, llm.path, llm.arch, llm.config) == found
        path.write_text(path.read_text().replace('"threads":1', '"threads":[]'))
        assert known(tmp_path, llm.path, llm.arch, llm.config).source == "assumed"
    assert seen[0] == (0, 2)
    assert seen[-1] == (2, 2)  # it looks at the clock before each shape, and begins none after that
    assert seen.count((2, 2)) < 0.9 * len(seen)
    assert found.source == "measured"
    assert found.step_error is not None
    tokens = {sample.features.num_tokens for sample in found.samples}
    seqs = {sample.features.num_seqs for sample in found.samples}
    assert min(tokens) == 1
    assert max(tokens) > 60
    assert min(seqs) == 1
    assert max(seqs) >= 16  # which of those between are left, a busy machine decides
    assert any(s.features.num_tokens > s.features.num_seqs > 1 for s in found.samples), "no mixture"
    assert found.after
    assert said["one stream"].endswith("ms")
    assert "tokens/s" in said["64 streams"]


def test_the_command_says_what_it_found_and_keeps_it(
    model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(roofs, "_ROUNDS", 2)
    flags = ["--threads", "1", "--kv-cache-memory", "1MiB", "--backend", "reference"]
    done = CliRunner().invoke(app, ["calibrate", str(model), "--seconds", "1", *flags])
    assert done.exit_code == 0, done.output
    (kept,) = all_of(tmp_path)
    assert (kept.backend, kept.threads, kept.source) == ("reference", 1, "measured")
    roof = kept_roof(tmp_path)
    assert roof is not None
    assert roof.read_bytes_per_s() > 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    words = ("one stream", "a prompt of", "reads weights", "between steps", "error", "kept in")
    assert all(word in done.stdout for word in words)
    assert "next: ridgeline simulate" in done.stdout


@pytest.mark.full
@pytest.mark.engine
def test_ten_seconds_of_measuring_foresee_another_load() -> None:
    """Loose, and after the speed of the moment: the machine may be busy."""
    with LLM("smollm2", speculative_config="off") as llm:
        score = PredictionMonitor(calibrate(llm, 10.0), start=lambda work: None)
        watcher = Watcher(Samples(), ())
        sums = [0.0, 0.0]

        def compare(record: Record) -> None:
            if sample := watcher.take(record):
                sums[0] += score.factor * score.calibration.times.seconds(sample.features)
                sums[1] += sample.seconds
            score.on_record(record)

        llm.engine.listeners.append(compare)
        prompts = [[7 + i] * (20 + 13 * i) for i in range(24)]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.generate(prompts, params, progress=False)
        assert sums[0] == pytest.approx(sums[1], rel=0.25)
