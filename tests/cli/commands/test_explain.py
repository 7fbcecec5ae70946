"""``ridgeline explain`` and ``replay``: what they print, and how they refuse."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ridgeline.bench.simulate.main import write_trace
from ridgeline.cli.main import main
from ridgeline.engine.calibration import roofline_calibration, save_calibration
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import resolve
from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.foresight.structure import to_json
from ridgeline.model.files.checkpoint import load_checkpoint
from tests.engine.test_llm import write_model
from tests.foresight.simulator.test_run import SETTINGS, TIMES


def load_of_sixty() -> list[SimRequest]:
    return [
        SimRequest(
            prompt=(3, 4, 5, i) * (9 if i == 5 else 2),
            num_new=(1 + i % 13,),
            arrival_s=0.02 * i,
            name=f"name-{i}",
        )
        for i in range(60)
    ]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty requests, more than can run at a time; the sixth alone has a long prompt."""
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    records = map(to_json, simulate(load_of_sixty(), SETTINGS, TIMES))
    path.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in records))
    return path


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def ridgeline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Done]:
    """Run a command in this process."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["ridgeline", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return Done(int(end.value.code or 0), said.out, said.err)

    monkeypatch.setenv("COLUMNS", "100")
    return run


Run = Callable[..., Done]


def requests_of(trace: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    return [record for record in records if record["type"] == "request"]


def test_the_slowest_is_explained_with_picture_and_timeline(
    ridgeline: Run, trace: Path, tmp_path: Path
) -> None:
    picture, events = tmp_path / "a.svg", tmp_path / "a.json"
    done = ridgeline("explain", str(trace), "--out", str(picture), "--timeline", str(events))
    assert done.returncode == 0, done.stderr
    slowest = max(requests_of(trace), key=lambda one: one["finish_s"] - one["arrival_s"])
    number = slowest["request_id"]
    assert done.stdout.startswith(f"Request {number} took ")
    assert "where its time went" in done.stdout
    assert "Not known whether it would have helped:" in done.stdout
    assert "--max-num-seqs 12: its steps would have up to" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert f"Request {number} took" in picture.read_text()
    assert {"X", "C", "M"} <= {one["ph"] for one in json.loads(events.read_text())["traceEvents"]}


def test_a_simulated_trace_is_explained_as_a_real_one(
    ridgeline: Run, trace: Path, tmp_path: Path
) -> None:
    simulated, files = tmp_path / "s.jsonl", (tmp_path / "a.json", tmp_path / "b.json")
    records = simulate(load_of_sixty(), SETTINGS, TIMES)
    write_trace(simulated, records, {"source": "calibrated"})
    real, other = (
        ridgeline("explain", str(one), "--timeline", str(file))
        for one, file in zip((trace, simulated), files, strict=True)
    )
    assert (other.returncode, other.stdout) == (0, real.stdout), other.stderr
    assert files[0].read_text() == files[1].read_text()


def test_several_are_one_json_line_each(ridgeline: Run, trace: Path) -> None:
    done = ridgeline(
        "explain", str(trace), "--request", "name-5", "--request", "7", "--format", "json"
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["name"] for one in found] == ["name-5", "name-7"]
    for one, then in zip(found, [requests_of(trace)[0]] * 2, strict=True):
        assert set(one) == {
            "request", "name", "seconds", "pieces", "timeline", "sentences", "would_help",
            "not_foreseen",
        }  # fmt: skip
        assert round(sum(p["seconds"] for p in one["pieces"]), 9) == round(one["seconds"], 9)
        assert then["type"] == "request"


def test_those_above_a_limit_are_found(ridgeline: Run, trace: Path) -> None:
    slow = [
        r["request_id"] for r in requests_of(trace) if r["first_token_s"] - r["arrival_s"] > 0.2
    ]
    done = ridgeline("explain", str(trace), "--above", "ttft:200", "--format", "markdown")
    assert done.stdout.count("## Request ") == len(slow) > 1
    assert all(f"## Request {number}\n" in done.stdout for number in slow)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (
            ["--request", "name-555"],
            1,
            "no request 'name-555' among the 60 that ended: did you mean",
        ),
        (["--above", "ttft:9999"], 1, "no request has a ttft above 9999 ms: the highest is"),
        (["--above", "ttfb:1"], 2, "--above is 'ttfb:1': write a metric (ttft, tpot, e2el)"),
        (["--request", "1", "--slowest", "2"], 2, "give one of --request, --slowest and --above"),
        (["--slowest", "2", "--out", "x.svg"], 2, "--out draws one request"),
        (["--out", "/none/x.svg"], 1, "/none/x.svg"),
    ],
)
def test_what_cannot_be_explained_is_one_line(
    ridgeline: Run, trace: Path, arguments: list[str], status: int, words: str
) -> None:
    done = ridgeline("explain", str(trace), *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1)
    assert words in done.stderr


def test_a_trace_with_a_hole_is_one_line(ridgeline: Run, trace: Path, tmp_path: Path) -> None:
    lines = trace.read_text().splitlines(keepends=True)
    holed = tmp_path / "holed"
    number = next(i for i, line in enumerate(lines) if '"number":20,' in line)
    holed.write_text("".join([*lines[:number], *lines[number + 1 :]]))
    done = ridgeline("explain", str(holed), "--slowest", "60")
    assert (done.returncode, done.stdout) == (1, "")
    assert "hole in the life of request" in done.stderr
    assert "step 21 follows step 19" in done.stderr


def test_other_settings_are_compared(ridgeline: Run, trace: Path, tmp_path: Path) -> None:
    events = tmp_path / "both.json"
    done = ridgeline(
        "replay", str(trace), "--set", "max_num_seqs=12", "--diff",
        "--timeline", str(events),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "60 requests served again with max_num_seqs=12." in done.stdout
    assert "The first step with another decision is step" in done.stdout
    assert "gained most" in done.stdout
    *shown, last = done.stdout.splitlines()
    counts = [line.split() for line in shown if line.startswith(("steps ", "preemptions "))]
    assert len(counts) == 2
    assert not any("." in cell for _, before, after, *_ in counts for cell in (before, after))
    assert max(map(len, shown)) <= 100
    assert {one["pid"] for one in json.loads(events.read_text())["traceEvents"]} == {1, 2}
    found = json.loads(last)
    assert found["num_requests"] == len(found["requests"]) == 60
    assert found["after"]["mean_ttft_ms"] < 0.8 * found["before"]["mean_ttft_ms"]
    fitted_error = found["before"]["mean_e2el_ms"] / found["recorded_mean_e2el_ms"] - 1
    assert abs(fitted_error) < 0.05  # the trace's clock is a model of time itself
    assert 0 < found["replay"]["num_equal_steps"] < found["replay"]["num_steps"]
    prediction = found["prediction"]
    assert prediction["errors"]["mean_e2el_ms"] == pytest.approx(fitted_error)
    assert prediction["fitted_up_to"]["num_seqs"] == 6
    assert prediction["steps_up_to"]["num_seqs"] == 12
    assert {"num_seqs", "num_rows"} <= set(prediction["beyond"])
    assert "Outside of what was measured: steps have up to" in done.stdout
    assert "12 sequences (measured: 6)" in done.stdout
    heads = next(line.split() for line in shown if line.split()[:1] == ["before"])
    assert heads == ["before", "after", "change", "error"]
    assert any(line.startswith("mean E2EL, ms") and line.count("%") == 2 for line in shown)


def test_a_change_within_the_error_and_the_range_is_told_apart(
    ridgeline: Run, tmp_path: Path
) -> None:
    """Steps of this machine take turns in being slow, so the simulation misses the recording."""
    engine, *others = [to_json(one) for one in simulate(load_of_sixty(), SETTINGS, TIMES)]
    late_s = 0.0
    for one in sorted(others, key=lambda one: one.get("finish_s") or one["start_s"]):
        if one["type"] == "step":
            one["start_s"] += late_s
            late_s += 0.02 * (one["number"] > 40)
            one["execute_s"] += 0.02 * (one["number"] > 40)
        else:
            one["finish_s"] += late_s
    trace = tmp_path / "uneven.jsonl"
    trace.write_text("".join(json.dumps(one) + "\n" for one in (engine, *others)))
    done = ridgeline("replay", str(trace), "--set", "max_num_batched_tokens=31")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "Outside of what was measured" not in done.stdout
    assert found["prediction"]["beyond"] == []
    for name in found["prediction"]["within_error"]:
        change = found["after"][name] / found["before"][name] - 1
        assert abs(change) <= abs(found["before"][name] / found["recorded"][name] - 1)
    assert "mean_e2el_ms" in found["prediction"]["within_error"]
    assert "Too small to be told from the simulation's error: " in done.stdout


def test_without_a_change_every_step_is_as_then(ridgeline: Run, trace: Path) -> None:
    """With the durations of then: what was recorded is beside what is decided now."""
    done = ridgeline("replay", str(trace), "--diff")
    num_steps = sum('"type":"step"' in line for line in trace.read_text().splitlines())
    said = f"With recorded durations, {num_steps} of {num_steps} steps are decided the same."
    assert said in done.stdout
    assert "All steps are decided as before." in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["prediction"]["source"] == "recorded"
    assert found["prediction"]["beyond"] is None
    assert found["replay"] == {
        "num_steps": num_steps, "num_equal_steps": num_steps, "first_difference": None,
    }  # fmt: skip
    assert found["before"] == pytest.approx(found["after"])
    assert found["recorded_mean_e2el_ms"] == pytest.approx(found["after"]["mean_e2el_ms"])
    assert ridgeline("replay", str(trace)).stdout.startswith("equal")


def test_decisions_that_were_other_ones_are_counted(
    ridgeline: Run, trace: Path, tmp_path: Path
) -> None:
    """A trace that says of one step what no scheduler decides."""
    lines, changed = trace.read_text().splitlines(), tmp_path / "changed.jsonl"
    place = next(i for i, line in enumerate(lines) if '"type":"step","number":20,' in line)
    step = json.loads(lines[place])
    step["num_copies"] += 1
    lines[place] = json.dumps(step)
    changed.write_text("\n".join(lines) + "\n")
    done = ridgeline("replay", str(changed), "--diff")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["replay"]
    assert found["num_equal_steps"] == found["num_steps"] - 1
    reason = f"num_copies: {step['num_copies'] - 1}; recorded, {step['num_copies']}"
    assert found["first_difference"] == {"number": 20, "reasons": [reason]}
    assert reason in done.stdout


def test_that_drafts_are_not_simulated_is_said(ridgeline: Run, trace: Path, tmp_path: Path) -> None:
    lines, drafted = trace.read_text().splitlines(), tmp_path / "drafted.jsonl"
    place = next(i for i, line in enumerate(lines) if '"type":"step","number":20,' in line)
    step = json.loads(lines[place])
    step["drafts"] = [[step["work"][0][0], [7]]]
    lines[place] = json.dumps(step)
    drafted.write_text("\n".join(lines) + "\n")
    said = "rafts, which the recording has, are not simulated"
    for file, is_said in ((drafted, True), (trace, False)):
        done = ridgeline("replay", str(file), "--set", "max_num_seqs=5")
        assert done.returncode == 0, done.stderr
        *shown, last = done.stdout.splitlines()
        assert (f"D{said}." in shown) == is_said
        assert (f"d{said}" in json.loads(last)["warnings"]) == is_said


def test_the_last_line_is_a_result_as_of_bench_serve(
    ridgeline: Run, trace: Path, tmp_path: Path
) -> None:
    """Of the run with the other settings: bench compare reads it."""
    files = []
    for number, changes in enumerate((["--diff"], ["--set", "max_num_seqs=12"])):
        done = ridgeline("replay", str(trace), *changes)
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(done.stdout)
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["num_successful"] == 60
        assert found["ttft_from_send"]["mean_ms"] == pytest.approx(
            found["after"]["mean_ttft_ms"], abs=1e-3
        )
        assert found["e2e"]["mean_ms"] == pytest.approx(found["after"]["mean_e2el_ms"], abs=1e-3)
        assert set(found["prediction"]) == {
            "source", "calibrated_at", "utilisation", "output_tokens_per_s_interval", "speed",
            "step_error", "fitted_up_to", "steps_up_to", "beyond", "errors", "within_error",
        }  # fmt: skip
    done = ridgeline("bench", "compare", *map(str, files))
    assert "ttft_from_send" in done.stdout


def test_a_trace_without_a_request_is_one_line(ridgeline: Run, trace: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text(trace.read_text().splitlines()[0] + "\n")
    done = ridgeline("replay", str(short), "--diff")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"{short} has no finished request" in done.stderr


def test_a_trace_of_another_version_is_one_line(
    ridgeline: Run, trace: Path, tmp_path: Path
) -> None:
    lines, other = trace.read_text().splitlines(), tmp_path / "other.jsonl"
    other.write_text("\n".join(line.replace('"num_outside"', '"outside"') for line in lines))
    for changes in (["--diff"], ["--set", "max_num_seqs=12"]):
        done = ridgeline("replay", str(other), *changes)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "other.jsonl, line 2, has no 'num_outside': is it of another version?" in done.stderr


def test_a_trace_from_before_a_setting_is_read(ridgeline: Run, trace: Path, tmp_path: Path) -> None:
    """An engine that did not have it went without."""
    settings, *lines = trace.read_text().splitlines(keepends=True)
    older, now = tmp_path / "older.jsonl", tmp_path / "now.jsonl"
    older.write_text("".join([settings.replace('"looks_ahead":false,', ""), *lines]))
    assert "looks_ahead" in settings
    assert "looks_ahead" not in older.read_text()
    now.write_text(trace.read_text())
    for command, *flags in (["replay", "--diff"], ["explain"]):
        done, expected = (ridgeline(command, str(file), *flags) for file in (older, now))
        assert (done.returncode, done.stderr) == (0, expected.stderr)
        assert done.stdout.replace("older.jsonl", "now.jsonl") == expected.stdout


def test_a_calibration_gives_the_times_where_a_model_is_named(
    ridgeline: Run, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "home"))
    model = write_model(tmp_path / "tiny")
    refused = ridgeline("replay", str(trace), "--model", str(model))
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "was not calibrated here in this form: run ridgeline calibrate" in refused.stderr
    checkpoint = load_checkpoint(model)
    config = resolve(Options(), checkpoint)
    assumed = roofline_calibration(checkpoint.path, checkpoint.arch, config)
    measured = replace(assumed, source="measured", times=TIMES.scaled(3.0))
    save_calibration(tmp_path / "home", measured)
    done = ridgeline("replay", str(trace), "--model", str(model))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["prediction"]["source"] == "calibrated"
    assert found["prediction"]["calibrated_at"] is None  # the test's own
    assert found["replay"]["num_equal_steps"] == found["replay"]["num_steps"] > 50
    assert found["before"]["mean_e2el_ms"] > 2 * found["recorded_mean_e2el_ms"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--set", "max_seqs=4"], 1, "no setting 'max_seqs'; did you mean max_num_seqs?"),
        (["--set", "num_blocks=2"], 1, "the KV cache has 2"),
        (["--threads", "1"], 2, "--threads chooses among the calibrations of a model"),
    ],
)
def test_settings_that_cannot_be_are_one_line(
    ridgeline: Run, trace: Path, arguments: list[str], status: int, words: str
) -> None:
    done = ridgeline("replay", str(trace), *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1)
    assert words in done.stderr


@pytest.mark.parametrize(
    ("line", "now"),
    [
        ("--replay t.jsonl", "replay t.jsonl --diff"),
        ("--replay=t.jsonl --set policy=orca", "replay t.jsonl --set policy=orca"),
        ("tiny --replay t.jsonl --threads 1", "replay t.jsonl --model tiny --threads 1"),
        (
            "tiny --request-rate 2 --sweep max_num_seqs=1,8 --objective ttft:p95",
            "sweep tiny --request-rate 2 --set max_num_seqs=1,8 --objective ttft:p95",
        ),
    ],
)
def test_an_old_line_is_answered_with_the_new_one(ridgeline: Run, line: str, now: str) -> None:
    done = ridgeline("simulate", *line.split())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.endswith(f": write ridgeline {now}\n")
