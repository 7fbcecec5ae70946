"""Calibrating a real engine: it measures all kinds of steps, leaves no trace, and foresees others.

What steps take is asserted by a clock that steps move: a busy machine must not fail these.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ridgeline import LLM, SamplingParams
from ridgeline.backends.cpu.measure import roofs
from ridgeline.cli.main import app
from ridgeline.core.records import Record
from ridgeline.core.step import Runner, Step, StepOutput
from ridgeline.engine import calibration as calibrating
from ridgeline.engine.calibration import (
    calibrate,
    newest_calibration,
    rates,
    roofline_calibration,
    save_calibration,
    stored_calibrations,
    stored_roof,
)
from ridgeline.foresight.step_time.features import Samples, StepTime, Watcher, of_step
from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.serve.serving import StepClock

# What steps take on a slow machine that is made up: first weights are the limit, then products.
TRUTH = StepTime((1, 16, 2048), (0.02, 0.025, 1.0), 5e-4, 1e-3, 5e-4, 5e-6, 5e-7)


class Machine:
    """A runner around the model's, whose steps take by the clock what ``truth`` says."""

    def __init__(self, runner: Runner, truth: StepTime, clock: StepClock) -> None:
        self._runner, self._truth, self._clock = runner, truth, clock

    def execute(self, step: Step) -> StepOutput:
        self._clock.pass_by(self._truth.seconds(of_step(step)))
        return self._runner.execute(step)


@contextmanager
def on_machine(model: Path, truth: StepTime) -> Iterator[tuple[LLM, StepClock]]:  # noqa: F811
    """Yield an engine on such a machine; calibrating goes by its clock, too."""
    clock = StepClock()
    # To choose a shape takes a moment: in none it would choose for ever at the end.
    choosing = SimpleNamespace(monotonic=lambda: clock.pass_by(0.01), time=time.time)
    config = {"threads": 1, "kv_cache_memory": "4MiB"}
    with LLM(model, **config) as llm, pytest.MonkeyPatch.context() as patch:
        llm.engine.clock, llm.engine.runner = clock, Machine(llm.engine.runner, truth, clock)
        patch.setattr(calibrating, "time", choosing)
        yield llm, clock


def test_a_tiny_model_is_measured_in_two_seconds(model: Path, tmp_path: Path) -> None:  # noqa: F811
    seen: list[tuple[int, int]] = []
    with on_machine(model, TRUTH.scaled(0.2)) as (llm, clock):
        begin_s = clock()
        listeners, speculation = list(llm.engine.listeners), llm.engine.scheduler.speculation
        found = calibrate(llm, 2.0, lambda done, total: seen.append((done, total)))
        assert 1.9 < clock() - begin_s < 2.6  # the last shape may take a quarter of what is left
        assert llm.engine.listeners == listeners
        assert llm.engine.scheduler.speculation is speculation
        assert not llm.engine.has_work()
        said = dict(rates(found, llm))
        assert roofline_calibration(llm.path, llm.arch, llm.config).is_of(found)
        path = save_calibration(tmp_path, found)
        assert newest_calibration(tmp_path, llm.path, llm.arch, llm.config) == found
        path.write_text(path.read_text().replace('"threads":1', '"threads":[]'))
        assert newest_calibration(tmp_path, llm.path, llm.arch, llm.config).source == "assumed"
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
    assert max(seqs) >= 16
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
    (kept,) = stored_calibrations(tmp_path)
    assert (kept.backend, kept.threads, kept.source) == ("reference", 1, "measured")
    roof = stored_roof(tmp_path)
    assert roof is not None
    assert roof.read_bytes_per_s() > 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    words = ("one stream", "a prompt of", "reads weights", "between steps", "error", "kept in")
    assert all(word in done.stdout for word in words)
    assert "next: ridgeline simulate" in done.stdout


def test_ten_seconds_of_measuring_foresee_another_load(
    model: Path,  # noqa: F811
) -> None:
    """By a clock that steps move: of real machines ``ridgeline bench foresight`` tells."""
    with on_machine(model, TRUTH) as (llm, _):
        found = calibrate(llm, 10.0)
        for sample in found.samples:
            assert sample.seconds == pytest.approx(TRUTH.seconds(sample.features), abs=1e-5)
        watcher, ratios, sums = Watcher(Samples(), ()), list[float](), [0.0, 0.0]

        def compare(record: Record) -> None:
            if sample := watcher.take(record):
                foreseen_s = found.times.seconds(sample.features)
                ratios.append(foreseen_s / sample.seconds)
                sums[0] += foreseen_s
                sums[1] += sample.seconds

        llm.engine.listeners.append(compare)
        prompts = [[7 + i] * (5 + 3 * i) for i in range(24)]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.engine.scheduler.speculation = None  # how many drafts there are goes by real times
        llm.generate(prompts, params, progress=False)
    assert len(ratios) == 40
    assert ratios == pytest.approx([1] * 40, rel=0.03)
    assert sums[0] == pytest.approx(sums[1], rel=0.01)
