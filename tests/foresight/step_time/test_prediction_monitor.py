"""The score: speeds are followed, what was assumed is replaced, and what is rare is not forgotten.

Steps come from a simulation whose model of time is known, so it is known what must be learnt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.engine.calibration import (
    calibration_path,
    read_calibration,
    save_calibration,
    save_quietly,
    stored_calibrations,
    unreadable,
)
from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.foresight.step_time.calibration import (
    Calibration,
    Factors,
    Interval,
    interval_of,
)
from ridgeline.foresight.step_time.features import Measured, Samples, StepTime, Watcher, of_record
from ridgeline.foresight.step_time.fit import PredictionMonitor
from ridgeline.model.cost.costs import Features
from tests.foresight.simulator.test_run import SETTINGS
from tests.foresight.simulator.test_run import TIMES as TRUE

Refits = list[Callable[[], None]]


def known(times: StepTime = TRUE, source: str = "measured") -> Calibration:
    return Calibration(
        model="tiny.gguf", arch="x", dtype="auto", kv_cache_dtype="int8", backend="cpu", threads=1,
        processor="a processor", source=source, measured_at=1.0, version="0", times=times,
        step_error=None, total_error=None, factors=(), samples=(), after=(),
    )  # fmt: skip


def served(times: StepTime = TRUE, num: int = 60, seed: int = 1) -> list[Record]:
    """Return the records of a server in which time passes as ``times`` says."""
    dice = random.Random(seed)
    load = [
        SimRequest(
            prompt=tuple(dice.choices(range(3, 9), k=dice.randint(1, 40))),
            num_new=(dice.randint(2, 20),),
            arrival_s=dice.random() * num / 8,
        )
        for _ in range(num)
    ]
    return simulate(load, SETTINGS, times)


def heard(monitor: PredictionMonitor, records: list[Record]) -> PredictionMonitor:
    for record in records:
        monitor.on_record(record)
    return monitor


def test_where_the_model_is_right_nothing_is_off() -> None:
    monitor = heard(PredictionMonitor(known()), served())
    assert monitor.num_steps > 100
    assert monitor.factor == pytest.approx(1)
    assert monitor.predicted_s == pytest.approx(monitor.actual_s)
    assert monitor.errors["step"] == pytest.approx(0, abs=1e-9)
    # Between steps something is added for each end, which is not known before, and some come amid.
    assert monitor.errors["ttft"] < 0.03
    assert monitor.errors["tpot"] < 0.03
    assert sum(monitor.error_counts) == monitor.error_counts[0] == monitor.num_steps


def test_a_machine_that_becomes_slower_is_followed_within_seconds() -> None:
    monitor = heard(PredictionMonitor(known(), start=lambda work: None), served())
    before_s = monitor.predicted_s
    slow = served(TRUE.scaled(2.0), num=200, seed=2)
    heard(monitor, slow)
    assert monitor.speed == pytest.approx(0.5, abs=0.02)
    took_s = sum(r.execute_s for r in slow if isinstance(r, StepRecord))
    assert took_s > 4
    foreseen_s = monitor.predicted_s - before_s
    assert 0.85 * took_s < foreseen_s < took_s  # too little only in the first two seconds


def test_one_wild_step_is_not_a_slow_machine() -> None:
    records = served()
    i = next(i for i, r in enumerate(records) if isinstance(r, StepRecord) and r.number == 50)
    step = records[i]
    assert isinstance(step, StepRecord)
    records[i] = replace(step, execute_s=1.0)  # for fifty times as long something else ran
    monitor = PredictionMonitor(known())
    heard(monitor, records[: i + 1])
    assert monitor.factor < 1 + (1 - 0.6) * 2.01  # as if it had been three times as long
    heard(monitor, records[i + 1 :])
    assert monitor.factor < 1.4


def test_steps_that_are_held_up_now_and_then_do_not_bend_the_sum() -> None:
    """A mean of ratios by the time that steps took would foresee far too much."""
    dice, monitor = random.Random(6), PredictionMonitor(known(), start=lambda work: None)
    for record in served(num=400):
        if isinstance(record, StepRecord) and dice.random() < 0.3:
            record = replace(record, execute_s=2.9 * record.execute_s)
        monitor.on_record(record)
    assert monitor.actual_s > 15
    assert monitor.predicted_s == pytest.approx(monitor.actual_s, rel=0.05)


def test_what_was_assumed_is_replaced_after_two_hundred_steps() -> None:
    assumed = StepTime((1, 32), (1e-3, 4e-3), 1e-4, 0, 0, 0, 0)
    fits: Refits = []
    monitor = PredictionMonitor(known(assumed, "assumed"), start=fits.append)
    records = served(num=300)
    steps = [i for i, record in enumerate(records) if isinstance(record, StepRecord)]
    heard(monitor, records[: steps[198] + 1])
    assert (len(fits), monitor.is_calibrated) == (0, False)
    heard(monitor, records[steps[198] + 1 : steps[200]])
    assert (len(fits), monitor.is_calibrated) == (1, False)
    fits.pop()()
    heard(monitor, records[steps[200] : steps[-1]])
    assert (monitor.calibration.source, monitor.num_fits) == ("served", 1)
    fresh = [record for record in served(seed=9) if isinstance(record, StepRecord)]
    errors = [
        abs(monitor.calibration.times.seconds(of_record(step)) / step.execute_s - 1)
        for step in fresh
    ]
    assert sum(errors) / len(errors) < 0.05
    assert monitor.speed == pytest.approx(1, abs=0.05)


def test_what_a_server_learns_first_is_learnt_again_when_it_has_seen_more() -> None:
    """At each doubling of steps, though little time has passed and nothing is off."""
    counts: list[int] = []
    assumed = StepTime((1, 32), (1e-3, 4e-3), 1e-4, 0, 0, 0, 0)

    def fit(work: Callable[[], None]) -> None:
        counts.append(monitor.num_steps)
        work()

    monitor = PredictionMonitor(known(assumed, "assumed"), start=fit)
    heard(monitor, served(num=900))
    assert len(counts) >= 3
    steps = [0, *counts[:3]]
    assert all(before < 200 * 2**i <= at for i, (before, at) in enumerate(pairwise(steps)))
    assert counts[2] < 1600


def test_a_shape_that_errs_is_fitted_anew() -> None:
    """Prompts take three times as long as when it was measured, answers do not."""
    other = replace(TRUE, table_s=(0.01, 0.03, 0.15))
    fits: Refits = []
    monitor = heard(PredictionMonitor(known(), start=fits.append), served(other, num=3000))
    assert fits
    fits[0]()
    heard(monitor, served(other, num=100, seed=3))
    assert monitor.num_fits == 1
    assert monitor.errors["step"] < 0.2
    again = heard(PredictionMonitor(monitor.calibration), served(other, num=100, seed=4))
    assert again.errors["step"] < 0.05


def test_what_is_learnt_is_there_at_the_next_start(tmp_path: Path) -> None:
    assumed = known(StepTime((1, 32), (1e-3, 4e-3), 1e-4, 0, 0, 0, 0), "assumed")
    monitor = PredictionMonitor(assumed, keep=partial(save_calibration, tmp_path))
    heard(monitor, served(TRUE.scaled(1.0), num=400))
    heard(monitor, served(TRUE.scaled(1.5), num=200))
    monitor.close()
    (kept,) = stored_calibrations(tmp_path)
    assert kept == read_calibration(calibration_path(tmp_path, kept))
    assert kept.is_of(assumed)
    assert kept.source == "served"
    assert kept.samples
    again = PredictionMonitor(kept)
    assert again.factor == pytest.approx(kept.interval().middle)
    low, _, high = kept.interval()
    assert high / low > 1.3, "both speeds were seen"


def test_nothing_is_kept_of_what_was_only_assumed() -> None:
    kept = list[Calibration]()
    monitor = PredictionMonitor(known(source="assumed"), start=lambda work: None, keep=kept.append)
    heard(monitor, served(num=5)).close()
    assert not kept


def test_a_home_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "calibration").write_text("in the way")
    monitor = PredictionMonitor(known(source="assumed"), keep=partial(save_quietly, tmp_path))
    heard(monitor, served(num=100))
    monitor.close()
    assert monitor.is_calibrated


def test_what_is_rare_is_not_forgotten() -> None:
    samples = Samples()
    rare = Measured(Features(700, 1, 1, 700, 245_000), 0.5)
    samples.add(rare)
    for i in range(5000):
        samples.add(Measured(Features(1, 1, 1, 100, 100), 0.001 * i))
    kept = samples.steps()
    assert rare in kept
    assert len(kept) == 65
    assert kept[0].seconds == pytest.approx(0.001 * (5000 - 64))


def test_thinning_keeps_all_kinds_of_a_bin() -> None:
    samples = Samples(per_bin=1000)
    for i in range(500):
        samples.add(Measured(Features(1, 1, 1, 100, 100), float(i)))
    kept = [sample.seconds for sample in samples.thinned()]
    assert len(kept) == 64
    assert (kept[0], kept[-1] > 480) == (0.0, True)
    assert kept == sorted(set(kept))


def test_what_follows_a_step_is_measured_where_nothing_lay_between() -> None:
    records = served(num=100)
    watcher = Watcher(Samples(), ())
    for record in records:
        watcher.take(record)
    after = watcher.samples.after()
    assert {sample.num_ended > 0 for sample in after} == {True, False}
    for sample in after:
        assert sample.seconds == pytest.approx(TRUE.after(sample.num_rows, sample.num_ended))


def test_a_step_that_failed_says_nothing_of_time() -> None:
    step = next(record for record in served() if isinstance(record, StepRecord))
    for broken in (
        replace(step, errors=((step.work[0][0], "wrong"),)),
        replace(step, sampled=()),
    ):
        samples = Samples()
        assert Watcher(samples, ()).take(broken) is None
        assert samples.steps() == []


def test_a_request_that_was_given_up_is_not_compared() -> None:
    monitor = PredictionMonitor(known())
    for record in served(num=10):
        if isinstance(record, RequestRecord):
            record = replace(record, finish_reasons=("abort",))
        monitor.on_record(record)
    assert "ttft" not in monitor.errors


def test_factors_are_of_two_busy_seconds() -> None:
    factors = Factors()
    for _ in range(70 * 20):
        factors.add(0.101, 0.05)
    assert len(factors.past) == 60
    assert set(factors.past) == {2.02}
    assert interval_of([float(i) for i in range(101)]) == Interval(5, 50, 95)
    assert interval_of([]) == Interval(1, 1, 1)


def test_a_calibration_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    samples = Samples()
    watcher = Watcher(samples, ())
    for record in served():
        watcher.take(record)
    kept = replace(
        known(), factors=(1.0, 0.9), samples=tuple(samples.steps()), after=tuple(samples.after())
    )
    path = save_calibration(tmp_path, kept)
    assert path == calibration_path(tmp_path, kept)
    assert path.parent.name == "calibration"
    assert read_calibration(path) == kept
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threads": "1"}, "threads is '1'; expected a whole number"),
        ({"factors": [1.0, None]}, "factors.1 is null; expected a number"),
        ({"factors": [0.0]}, "factors are above 0"),
        ({"measured_at": 1e300}, "measured_at is 1e.300: no time"),
        ({"source": "dreamt"}, "source is 'dreamt': measured, served or assumed"),
        ({"samples": [[1, 1, 1, 2.0, 3.0]]}, "samples.0.features is a list; expected a list of 5"),
        ({"samples": [[1, 1, 1, 2.0, 3.0, "x"]]}, "samples.0.5 is 'x'; expected a number"),
        ({"samples": [[1.5, 1, 1, 2.0, 3.0, 1.0]]}, "samples.0.features.num_tokens is 1.5"),
        ({"times": asdict(TRUE) | {"knots": [True]}}, "times.knots.0 is True"),
        (
            {"times": asdict(TRUE) | {"per_row_s": 1 << 50}},
            r"times.per_row_s is \d+: more than any",
        ),
        ({"times": asdict(TRUE) | {"knots": [1, 2], "table_s": [0.1, 1e9]}}, "times.table_s is"),
        ({"times": asdict(TRUE) | {"windows": [[0, 0.5]]}}, "a window has at least one position"),
        ({"times": asdict(TRUE) | {"knots": [1], "table_s": [0.0]}}, "a step takes time"),
    ],
)
def test_a_calibration_with_one_wrong_value_is_passed_over_and_replaced(
    tmp_path: Path, change: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_calibration(tmp_path, known())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=words):
        read_calibration(path)
    assert [*stored_calibrations(tmp_path), *stored_calibrations(tmp_path)] == []
    (said,) = unreadable(tmp_path)
    assert said.startswith(f"{path} is not a calibration of this version: ")
    assert "\n" not in said
    assert not capsys.readouterr().err, "only doctor speaks of it"
    save_calibration(tmp_path, known())
    assert len([*stored_calibrations(tmp_path)]) == 1
    assert not [*unreadable(tmp_path)]


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"samples": 3})])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is not a calibration"):
        read_calibration(path)
