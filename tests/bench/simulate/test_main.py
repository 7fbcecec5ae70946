"""``ridgeline simulate``: the load generator's document without a server."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from ridgeline.bench.load.stats import summarise
from ridgeline.bench.simulate.main import PreparedRun, Scenario, Simulator
from ridgeline.bench.simulate.predicted import SimulatedRun, sim_requests
from ridgeline.cli.main import app
from ridgeline.engine.calibration import calibration_path, roofline_calibration, save_calibration
from ridgeline.engine.setup.options import Options
from ridgeline.foresight.simulator.workload import Planned, Workload
from ridgeline.foresight.step_time.calibration import Calibration
from ridgeline.foresight.step_time.features import StepTime
from tests.engine.test_llm import model  # noqa: F401  (a fixture)

TIMES = StepTime((1, 64), (0.01, 0.05), 0.001, 0, 0, 0, 0)
ENGINE = ("--kv-cache-memory", "1MiB", "--threads", "1")
FEW = ("--num-prompts", "12", "--seed", "3", *ENGINE)
SHORT = ("--prompt-words", "8", "--max-tokens", "9")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def run(*arguments: str) -> Result:
    """Simulate; with ``--set`` sweep."""
    return CliRunner().invoke(app, ["sweep" if "--set" in arguments else "simulate", *arguments])


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def prepared(path: Path, **load: Any) -> tuple[Simulator, Scenario]:
    scenario = Scenario(model=str(path), load=Workload(**SIZES | load))
    return Simulator(scenario), scenario


def known_of(made: PreparedRun) -> Calibration:
    """Return where the model of time of this machine comes from."""
    assert made.engine.calibration is not None
    return made.engine.calibration


SIZES: dict[str, Any] = {"seed": 3, "num_prompts": 12, "prompt_words": "8"}
OPTIONS = Options(kv_cache_memory="1MiB", threads=1)


def test_it_prints_the_block_and_the_document_of_bench_serve(model: Path) -> None:  # noqa: F811
    result = run(str(model), "--request-rate", "5", *SHORT, *FEW)
    found = document(result)
    assert "Predicted Serving Result" in result.stdout.splitlines()[0]
    assert "Output tok/s, 5 to 95 %" in result.stdout
    assert (found["num_requests"], found["num_successful"]) == (12, 12)
    assert found["total_output_tokens"] == 12 * 9
    assert found["flags"]["request_rate"] == 5
    assert found.keys() >= {"asked", "definitions", "warnings", "ttft_from_send", "e2e"}
    prediction = found["prediction"]
    assert prediction.keys() == {
        *("source", "calibrated_at", "utilisation", "output_tokens_per_s_interval"),
        *("speed", "step_error", "edge", "also_kept", "device"),
    }
    assert (prediction["source"], prediction["calibrated_at"]) == ("assumed", None)
    assert "uncalibrated" in result.stdout
    assert any("ridgeline calibrate" in line for line in found["warnings"])
    low, high = prediction["output_tokens_per_s_interval"]
    assert low < found["output_tokens_per_s"] < high


def test_a_seed_repeats_it_all(model: Path) -> None:  # noqa: F811
    flags = (str(model), "--request-rate", "50", "--prompt-tokens", "20:0.7", "--new-tokens", "5:1")
    one, two = (document(run(*flags, *FEW)) for _ in range(2))
    assert one == two
    other = document(run(*flags, *FEW, "--seed", "4"))
    assert other["e2e"] != one["e2e"]
    assert one["total_input_tokens"] != 12 * 20
    assert one["asked"]["prompt_length_unit"] == "tokens"


def test_without_a_seed_it_is_a_function_of_its_flags(model: Path, tmp_path: Path) -> None:  # noqa: F811
    flags = (str(model), "--request-rate", "50", "--num-prompts", "12", *ENGINE, *SHORT)
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    for trace in (one, other):
        run(*flags, "--trace", str(trace))
    assert one.read_text() == other.read_text()
    assert document(run(*flags)) == document(run(*flags, "--seed", "0"))


def test_what_a_server_learnt_is_kept_beside_what_was_measured(
    model: Path,  # noqa: F811
    home: Path,
) -> None:
    simulator, scenario = prepared(model, max_concurrency=1, max_tokens="11")
    assumed = known_of(simulator.prepare(scenario, OPTIONS))
    measured = replace(assumed, source="measured", measured_at=1e9, times=TIMES)
    served = replace(measured, source="served", measured_at=1.1e9, times=TIMES.scaled(3))
    paths = {save_calibration(home, one) for one in (measured, served, measured)}
    assert len(paths) == 2
    flags = (str(model), "--max-concurrency", "1", *SHORT, *FEW)
    newest, chosen = document(run(*flags)), document(run(*flags, "--calibration", "measured"))
    assert newest == document(run(*flags, "--calibration", "served"))
    assert newest["tpot_excl_first"]["mean_ms"] == pytest.approx(30)
    assert chosen["tpot_excl_first"]["mean_ms"] == pytest.approx(10)
    (beside,) = newest["prediction"]["also_kept"]
    assert (beside["source"], beside["step_time_ratio"]) == ("measured", 0.333)
    assert "Also kept: by ridgeline calibrate" in run(*flags).stdout


def test_a_calibration_that_is_not_kept_is_an_error(model: Path) -> None:  # noqa: F811
    result = run(str(model), "--max-concurrency", "1", "--calibration", "measured", *FEW)
    assert "--calibration measured: none is kept" in str(result.exception)


def test_what_was_measured_is_used_and_its_speed_of_late(model: Path, home: Path) -> None:  # noqa: F811
    simulator, scenario = prepared(model, max_concurrency=1, max_tokens="11")
    made = simulator.prepare(scenario, OPTIONS)
    known = replace(
        known_of(made), source="measured", measured_at=1e9, times=TIMES, step_error=0.05,
        factors=(2.0,) * 20,
    )  # fmt: skip
    save_calibration(home, known)
    found = document(run(str(model), "--max-concurrency", "1", *SHORT, *FEW))
    assert found["prediction"]["source"] == "measured"
    assert found["prediction"]["calibrated_at"].startswith("2001-09-09")
    assert (found["prediction"]["speed"], found["prediction"]["step_error"]) == (0.5, 0.05)
    assert found["tpot_excl_first"]["mean_ms"] == pytest.approx(20, abs=0.01)  # 10 ms, half as fast
    assert "uncalibrated" not in json.dumps(found["warnings"])


def test_a_calibration_of_another_model_of_this_name_is_not_believed(
    model: Path,  # noqa: F811
    home: Path,
) -> None:
    simulator, scenario = prepared(model, max_concurrency=1)
    made = simulator.prepare(scenario, OPTIONS)
    save_calibration(home, replace(known_of(made), source="measured", arch="of another"))
    assert known_of(simulator.prepare(scenario, OPTIONS)).source == "assumed"
    calibration_path(home, known_of(made)).write_text("{")
    assert known_of(simulator.prepare(scenario, OPTIONS)).source == "assumed"


def test_prompts_are_the_tokens_that_a_server_would_see(model: Path) -> None:  # noqa: F811
    from ridgeline import LLM

    simulator, scenario = prepared(model, request_rate=5.0, prompt_words="9")
    made = simulator.prepare(scenario, OPTIONS)
    with LLM(model, kv_cache_memory="1MiB", threads=1) as llm:
        for asked, planned in zip(made.case.load, made.planned[4:], strict=True):
            message = {"role": "user", "content": planned.prompt}
            assert list(asked.prompt) == llm.text.chat_template.render_ids([message])
        plain = simulator.prepare(replace(scenario, endpoint="completions"), OPTIONS)
        for asked, planned in zip(plain.case.load, plain.planned[4:], strict=True):
            assert list(asked.prompt) == llm.tokenizer.encode(str(planned.prompt))
        assert made.case.settings.num_blocks == llm.config.num_blocks
        arch, config = llm.arch, llm.config
        assert roofline_calibration(llm.path, arch, config).is_of(known_of(made))


def test_latencies_are_those_of_the_virtual_clock(model: Path) -> None:  # noqa: F811
    """One request at a time: a step for its prompt, then one for each token."""
    simulator, scenario = prepared(model, max_concurrency=1, max_tokens="11")
    case = replace(simulator.prepare(scenario, OPTIONS).case, times=TIMES)
    found = case.summary({"ttft_from_send": 1e6})
    assert found["tpot_excl_first"]["mean_ms"] == pytest.approx(10, abs=0.001)
    assert found["itl_chunk_pooled"]["num"] == 12 * 10
    assert found["ttft_from_scheduled_arrival"] is None
    assert found["goodput"]["share_of_all_requests"] == 1
    twice = case.slower(2.0).summary({})
    assert twice["duration_s"] == pytest.approx(2 * found["duration_s"], rel=1e-3)


def test_the_share_of_what_can_be_served_grows_with_the_load(model: Path) -> None:  # noqa: F811
    shares = []
    for rate in (0.5, 2.0, 40.0):
        simulator, scenario = prepared(model, request_rate=rate, max_tokens="30", num_prompts=40)
        case = replace(simulator.prepare(scenario, OPTIONS).case, times=TIMES)
        shares.append(case.utilisation(case.summary({})) or 0)
    assert 0 < shares[0] < 0.5 < shares[2]
    assert shares == sorted(shares)


def test_what_a_server_would_refuse_fails_and_stops_nobody_else() -> None:
    planned = [Planned(i, "", 8, float(i)) for i in range(3)]
    warmups, load, refused = sim_requests(planned, [(1,) * 4, (1,) * 64, (1,) * 60], 64)
    assert (len(warmups), [asked.name for asked in load]) == (0, ["0", "2"])
    assert load[1].num_new == (4,)
    assert list(refused) == [1]
    assert "64" in refused[1]
    from tests.foresight.simulator.test_run import SETTINGS

    case = SimulatedRun(
        warmups=(), load=tuple(load), refused=refused, concurrency=None, settings=SETTINGS,
        times=TIMES,
    )  # fmt: skip
    found = case.summary({})
    assert (found["num_requests"], found["num_failed"]) == (3, 1)
    assert found["failures"][0]["request_indices"] == [1]


def test_a_result_of_bench_serve_says_the_load(model: Path, tmp_path: Path) -> None:  # noqa: F811
    first = document(run(str(model), "--request-rate", "inf", "--goodput", "ttft:9", *SHORT, *FEW))
    path = tmp_path / "result.json"
    path.write_text("a block\n" + json.dumps(first) + "\n")
    again = document(run(str(model), "--like", str(path), *ENGINE))
    assert again == first
    assert run(str(model), "--like", str(path), "--request-rate", "2", *ENGINE).exit_code


def test_a_trace_of_it_is_replayed(model: Path, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "trace.jsonl"
    document(run(str(model), "--request-rate", "20", "--trace", str(path), *SHORT, *FEW))
    header, engine, *_ = map(json.loads, path.read_text().splitlines())
    assert (header["type"], header["seed"], engine["type"]) == ("simulated", 3, "engine")
    assert CliRunner().invoke(app, ["replay", str(path)]).stdout.startswith("equal")


def test_a_sweep_finds_what_is_best_and_says_its_flags(model: Path, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "sweep.csv"
    flags = (str(model), "--request-rate", "inf", *SHORT, *FEW, "--set", "max_num_seqs=1,8")
    result = run(*flags, "--csv", str(path), "--set", "policy=orca,splitfuse")
    found = document(result)
    assert len(found["sweep"]) == 4
    rates = [row["tok/s"] for row in found["sweep"]]
    assert found["best"] == found["sweep"][rates.index(max(rates))]["settings"]
    assert found["best"]["max_num_seqs"] == 8
    assert "best by throughput: --max-num-seqs 8 --policy" in result.stdout
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["tok/s"]) for row in rows] == rates
    shortest = document(run(*flags, "--objective", "ttft:p95"))
    rows_ms = [row["TTFT p95"] for row in shortest["sweep"]]
    assert shortest["best"] == shortest["sweep"][rows_ms.index(min(rows_ms))]["settings"]


def test_several_replicas_share_a_load(model: Path) -> None:  # noqa: F811
    flags = (str(model), "--request-rate", "inf", *SHORT, *FEW, "--max-num-seqs", "1")
    one = document(run(*flags, "--num-warmups", "0"))
    four = document(run(*flags, "--replicas", "4", "--router", "round-robin"))
    assert (four["num_successful"], four["total_output_tokens"]) == (12, 12 * 9)
    assert four["flags"].items() >= {"replicas": 4, "router": "round-robin"}.items()
    assert four["e2e"]["p95_ms"] == pytest.approx(one["e2e"]["p95_ms"] / 4, rel=0.15)
    assert four["itl_chunk_pooled"]["num"] == 12 * 8
    assert four["output_tokens_per_s"] > 3 * one["output_tokens_per_s"]
    found = document(run(*flags, "--set", "replicas=1,2,4", "--set", "router=prefix"))
    assert found["best"] == {"replicas": 4, "router": "prefix"}


def test_one_of_a_fleet_says_what_one_alone_does(model: Path) -> None:  # noqa: F811
    simulator, scenario = prepared(model, request_rate=20.0, max_tokens="11", num_warmups=0)
    case = replace(simulator.prepare(scenario, OPTIONS).case, times=TIMES)
    alone = summarise(case.outcomes(case.records()), {})
    assert summarise(case.fleet_outcomes(case.fleet_ended()), {}) == alone
    closed = replace(case, concurrency=3, load=tuple(replace(a, arrival_s=None) for a in case.load))
    assert summarise(closed.fleet_outcomes(closed.fleet_ended()), {}) == summarise(
        closed.outcomes(closed.records()), {}
    )


def test_a_sweep_is_drawn(model: Path, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "sweep.svg"
    flags = ("--request-rate", "inf", *SHORT, *FEW, "--set", "max_num_seqs=1,8")
    found = document(run(str(model), *flags, "--out", str(path)))
    drawn = ElementTree.fromstring(path.read_text())
    words = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "max_num_seqs 8" in words
    rates = [row["tok/s"] for row in found["sweep"]]
    bars = [
        one
        for one in drawn.iter("{http://www.w3.org/2000/svg}rect")
        if any((title.text or "").startswith("tok/s") for title in one)
    ]
    widths = [float(one.attrib["width"]) for one in bars]
    assert widths[0] / widths[1] == pytest.approx(rates[0] / rates[1], rel=0.02)
    assert bars[1].attrib["fill"] != bars[0].attrib["fill"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--set", "replicas=0"), "not values for replicas"),
        (("--set", "router=best"), "not values for router"),
        (("--replicas", "0"), "--replicas 0 is not from 1 to 1024"),
        (
            ("--router", "best"),
            "--router is 'best', not one of least-work, round-robin, least-",
        ),
        (("--replicas", "2", "--trace", "t.jsonl"), "give no --replicas"),
        (("--out", "a.png", "--set", "max_num_seqs=1"), "its name ends in .svg"),
        (("--set", "colour=1"), "'colour' is not an option"),
        (("--set", "max_num_seqs"), "write NAME=a,b,c"),
        (("--set", "max_num_seqs=1,x"), "not values for max_num_seqs"),
        (("--set", "policy=fifo"), "not values for policy"),
        (("--set", "max_num_seqs=1", "--objective", "ttft"), "--objective ttft"),
        (("--set", "max_num_seqs=1", "--objective", "goodput"), "needs limits"),
        (("--prompt-tokens", "0"), "--prompt-tokens is 0"),
        (("--prompt-tokens", "9000"), "nothing can be simulated"),
        (("--goodput", "speed:1"), "not NAME:MILLISECONDS"),
        (("--prompts", "x.txt", "--prompt-tokens", "9"), "--prompt-tokens makes prompts itself"),
    ],
)
def test_errors_name_what_is_wrong(model: Path, flags: tuple[str, ...], words: str) -> None:  # noqa: F811
    result = run(str(model), "--request-rate", "1", *FEW, *flags)
    assert result.exit_code
    assert words in f"{result.exception} {' '.join(result.output.split())}"


def test_drafts_are_a_part_of_the_question(model: Path) -> None:  # noqa: F811
    flags = (str(model), "--max-concurrency", "1", *SHORT[:2], "--max-tokens", "40", *FEW)
    plain, drafted = document(run(*flags)), document(run(*flags, "--drafts", "4:1"))
    assert drafted["flags"]["drafts"] == "4:1"
    assert any("smaller model that guesses are not counted" in one for one in drafted["warnings"])
    assert not any("guesses" in one for one in plain["warnings"])
    assert drafted["total_output_tokens"] == plain["total_output_tokens"]
    assert drafted["duration_s"] < 0.5 * plain["duration_s"]
    wrong = run(*flags, "--drafts", "4")
    assert wrong.exit_code
    assert "--drafts 4: write NUMBER:SHARE" in str(wrong.exception)
