"""The comparison with the peers, without any peer: arithmetic, refusals, and what is printed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peers.drivers.measure import measure
from peers.engines import Engine, Format, LeftOut
from peers.shapes import NAMES, SHAPES, Job, Shape, prompts, quick_shapes

from peers import __main__ as peers
from peers import agreement, embeddings, engines, machine, report
from ridgeline.system.machine import tiles_refusal

# --- from samples to ratios --------------------------------------------------------------------


def test_a_ratio_is_our_median_over_the_best_peers_median() -> None:
    samples = {
        "ridgeline file": {"single_decode": [10.0, 300.0, 320.0]},
        "llama.cpp Q4_0": {"single_decode": [150.0, 100.0, 900.0]},
        "llama.cpp Q8_0": {"single_decode": [120.0, 121.0, 122.0]},
        "vllm bf16": {"single_decode": [40.0, 50.0, 60.0]},
    }
    summary = report.summarise(samples)
    assert summary["llama.cpp Q4_0"]["single_decode"] == {
        "median": 150.0,
        "min": 100.0,
        "max": 900.0,
        "n": 3,
    }
    assert report.best(summary, "single_decode", but="ridgeline") == "llama.cpp Q4_0"
    assert report.ratios(summary, "ridgeline")["single_decode"] == 2.0


def test_a_shorter_start_is_better_and_its_ratio_is_theirs_over_ours() -> None:
    samples = {
        "ridgeline file": {"start_warm": [0.5]},
        "llama.cpp Q4_0": {"start_warm": [0.25]},
        "openvino int8": {"start_warm": [4.0]},
    }
    summary = report.summarise(samples)
    assert report.best(summary, "start_warm", but="ridgeline") == "llama.cpp Q4_0"
    assert report.ratios(summary, "ridgeline")["start_warm"] == 0.5


def test_without_peers_or_samples_there_is_no_ratio() -> None:
    summary = report.summarise({"ridgeline file": {"single_decode": [1.0], "prefill_512": []}})
    assert report.ratios(summary, "ridgeline") == dict.fromkeys(NAMES)


def test_only_a_peers_format_that_is_far_behind_everywhere_is_hopeless() -> None:
    samples = {
        "ridgeline file": {"single_decode": [1.0], "prefill_512": [900.0], "start_warm": [0.1]},
        "llama.cpp file": {"single_decode": [84.0], "prefill_512": [8.0], "start_warm": [3.0]},
        "llama.cpp Q4_0": {"single_decode": [100.0], "prefill_512": [3.0], "start_warm": [1.5]},
        "llama.cpp Q8_0": {"single_decode": [86.0], "prefill_512": [2.0], "start_warm": [1.1]},
        "openvino int8": {"single_decode": [30.0], "prefill_512": [10.0], "start_warm": [4.0]},
        "openvino int4": {"single_decode": [84.0], "prefill_512": [8.4], "start_warm": [2.0]},
        "vllm bf16": {"single_decode": [10.0], "prefill_512": [1.0], "start_warm": [1.0]},
        "vllm int8": {"start_warm": [20.0]},
    }
    found = report.hopeless(report.summarise(samples), "ridgeline")
    assert found == {"llama.cpp file", "openvino int4"}


# --- measuring ---------------------------------------------------------------------------------

_PREFILL_S, _STEP_S = 2.0, 0.5
_JOB = Job("m.gguf", 2, 1000, 0, ())


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only moves when an engine works."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    return clock


def _engine(now: list[float], calls: list[Any], answer: int = 0) -> Callable[..., Any]:
    def generate(ids: list[list[int]], new_tokens: int) -> list[list[int]]:
        calls.append((ids, new_tokens))
        now[0] += _PREFILL_S + _STEP_S * (new_tokens - 1)
        return [[7] * (new_tokens - answer) for _ in ids]

    return lambda shape: generate


@pytest.mark.parametrize(
    ("shape", "rate"),
    [
        (Shape("d", "decode", 4, 16, 10), 4 * 10 / (10 * _STEP_S)),
        (Shape("p", "prefill", 4, 16, 1), 4 * 16 / _PREFILL_S),
        (Shape("e", "end_to_end", 4, 16, 10), 4 * 10 / (_PREFILL_S + 9 * _STEP_S)),
    ],
)
def test_each_kind_counts_its_tokens_over_its_time(
    shape: Shape, rate: float, now: list[float]
) -> None:
    rates, _ = measure(_engine(now, []), shape, _JOB, random.Random(0))
    assert rates == [pytest.approx(rate)]


def test_no_prompt_ever_comes_twice_and_the_first_call_is_not_counted(now: list[float]) -> None:
    calls: list[Any] = []
    shape = Shape("d", "decode", 4, 16, 10, samples=2)
    rates, answers = measure(_engine(now, calls), shape, _JOB, random.Random(0))
    assert answers == [[7] * 11] * 4
    assert len(rates) == 2
    assert [new_tokens for _, new_tokens in calls] == [4, 11, 1, 11, 1]
    seen = [tuple(prompt) for ids, _ in calls for prompt in ids]
    assert len(set(seen)) == len(seen) == 20


def test_prompts_of_text_are_given_as_they_are_and_beams_count(now: list[float]) -> None:
    calls: list[Any] = []
    shape = Shape("b", "decode", 1, 16, 10, beams=4)
    job = Job("m.gguf", 2, 1000, 0, (), texts=((1, 2), (3,)))
    rates, _ = measure(_engine(now, calls), shape, job, random.Random(0))
    assert rates == [pytest.approx(4 / _STEP_S)]
    assert [ids for ids, _ in calls] == [[[1, 2]]] * 3


def test_an_engine_that_stops_early_is_not_believed(now: list[float]) -> None:
    with pytest.raises(RuntimeError, match="an answer has not 4 tokens"):
        measure(_engine(now, [], answer=1), SHAPES[0], _JOB, random.Random(0))


def test_prompts_stay_in_the_vocabulary_and_a_job_survives_json() -> None:
    ids = [i for p in prompts(SHAPES[1], 300, random.Random(1)) for i in p]
    assert min(ids) >= 150
    assert max(ids) < 300
    job = Job("m.gguf", 2, 300, 7, quick_shapes(), drafts=True, texts=((1, 2), (3,)))
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job


# --- the machine -------------------------------------------------------------------------------


def _stat(user: int, idle: int, steal: int = 0) -> str:
    line = f"cpu  {user} 0 0 {idle} 0 0 0 {steal} 0 0"
    return f"{line}\ncpu0 1 1\ncpu1 1 1\nintr 5\n"


def test_busy_is_counted_in_cores_and_includes_stolen_time() -> None:
    assert machine.busy_cores(_stat(100, 1000), _stat(150, 1150)) == pytest.approx(0.5)
    assert machine.busy_cores(_stat(100, 1000), _stat(100, 1100, steal=100)) == pytest.approx(1.0)
    assert machine.busy_cores(_stat(1, 1), _stat(1, 1)) == 0


def test_stolen_time_is_a_share_of_the_time_asked_for() -> None:
    assert machine.stolen_share(_stat(100, 0, 7), _stat(160, 900, 47)) == pytest.approx(0.4)
    assert machine.stolen_share(_stat(1, 1, 1), _stat(1, 5, 1)) == 0


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "sample_busy_cores", lambda: 0.8)
    monkeypatch.setattr(peers, "model_file", lambda name: (Path("m.gguf"), 300))
    with pytest.raises(SystemExit, match=r"busy: 0\.80 cores .* --anyway"):
        peers.main([])
    assert machine.refusal(0.05) is None


# --- the whole, with engines that only pretend ---------------------------------------------------

PROCESS = peers.Contest.process
_SPEEDS = {
    "ridgeline file": 200.0,
    "ridgeline int8-row": 190.0,
    "good fast": 100.0,
    "good slow": 10.0,
}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two peers, one of which cannot be installed; returns the labels in the order they ran."""
    order: list[str] = []

    def process(contest: Any, label: str, shapes: tuple[Shape, ...]) -> tuple[float, Any]:
        if label == "good broken":
            raise LeftOut("it crashed")
        cold_s = 0 if order and order[-1] == label else 9
        order.append(label)
        speed = _SPEEDS[label]
        samples = {shape.name: [speed] for shape in shapes}
        result = {"version": "1", "first_token": 5, "has_tiles": label == "good fast"}
        return 50 / speed + cold_s, result | {"samples": samples}

    def install(engine: Engine) -> bool:
        if engine.name == "absent":
            raise LeftOut("cannot be installed: no such package")
        return False

    good = Engine("good", "good", tuple(map(Format, ("fast", "slow", "broken"))))
    monkeypatch.setattr(peers, "chosen", lambda without: [good, Engine("absent", "absent", ())])
    monkeypatch.setattr(peers, "install", install)
    monkeypatch.setattr(peers, "prepare", lambda engine, form, source: source)
    monkeypatch.setattr(peers, "model_file", lambda name: (Path("m.gguf"), 300))
    monkeypatch.setattr(peers.Contest, "process", process)
    monkeypatch.setattr(machine, "sample_busy_cores", lambda: 0.0)
    monkeypatch.setattr(machine, "read_stat", lambda: _stat(100 * len(order), 0))
    return order


def test_the_last_line_is_the_result(pretend: list[str], capsys: Any) -> None:
    peers.main(["--repeats", "3"])
    output = capsys.readouterr().out.strip().splitlines()
    result = json.loads(output[-1])
    assert result["ratios"] == dict.fromkeys(NAMES, 2.0)
    assert set(result["best_peer"].values()) == {"good fast"}
    assert result["results"]["good fast"]["prefill_512"]["n"] == 3
    assert result["results"]["good slow"]["prefill_512"]["n"] == 1
    assert result["left_out"] == {
        "absent": "cannot be installed: no such package",
        "good broken": "it crashed",
    }
    assert any(line.startswith("ridgeline file ") and "200 (200-200)" in line for line in output)
    assert any(line.startswith("good fast, AMX ") and "100 (100-100)" in line for line in output)
    assert "Left out: good broken: it crashed" in output


def test_time_that_the_host_kept_is_in_the_result(
    pretend: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def stat() -> str:
        return _stat(80 * len(pretend), 0, steal=20 * pretend.count("good fast"))

    monkeypatch.setattr(machine, "read_stat", stat)
    peers.main(["--repeats", "2"])
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["stolen"] == {
        "ridgeline file": [0, 0],
        "ridgeline int8-row": [0, 0],
        "good fast": [0.2, 0.2],
        "good slow": [0],
    }
    said = [note for note in result["notes"] if "host" in note]
    assert said == [f"round {n}, good fast: the host kept 20% of its time" for n in (1, 2)]


def test_engines_alternate(pretend: list[str]) -> None:
    peers.main(["--repeats", "2"])
    processes = pretend[::3]  # two starts and a measurement each
    assert processes == pretend[1::3] == pretend[2::3]
    everyone, leaders = list(_SPEEDS), [label for label in _SPEEDS if label != "good slow"]
    assert processes == [*everyone, *everyone, *leaders]  # the first round only warms caches


@pytest.mark.parametrize(
    ("only", "running"),
    [
        (["good fast"], ["ridgeline file", "ridgeline int8-row", "good fast"]),
        (["good fast", "ridgeline int8-row"], ["ridgeline int8-row", "good fast"]),
    ],
)
def test_only_names_who_takes_part(pretend: list[str], only: list[str], running: list[str]) -> None:
    peers.main(["--repeats", "1", *(word for label in only for word in ("--only", label))])
    assert pretend[: len(pretend) // 2 : 3] == running


def test_only_an_engine_that_there_is(pretend: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"there are ridgeline file, .*good fast"):
        peers.main(["--only", "good int8"])


def test_our_own_failure_ends_it(pretend: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(contest: Any, label: str, shapes: Any) -> Any:
        raise LeftOut("no such option")

    monkeypatch.setattr(peers.Contest, "process", fails)
    with pytest.raises(SystemExit, match="ridgeline file failed: no such option"):
        peers.main([])


def test_peers_are_left_out_by_name_and_an_unknown_name_is_an_error() -> None:
    assert [p.name for p in engines.chosen(["vllm", "llama.cpp"])] == ["openvino"]
    with pytest.raises(ValueError, match=r"--without ollama: the peers are llama\.cpp, openvino"):
        engines.chosen(["ollama"])


def test_a_command_that_fails_says_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ROOT", tmp_path)
    monkeypatch.setattr(engines, "HOME", tmp_path / "home")
    with pytest.raises(LeftOut, match=r"^no wheel \(more in home/logs/it\.txt\)"):
        engines.run(["sh", "-c", "echo begin; echo no wheel >&2; exit 3"], "it")


def test_a_signal_is_named_and_llama_cpp_is_compiled_without_tiles(
    pretend: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Its process ends itself as long as the build has tiles; another's failure stays one."""
    installed: list[Engine] = []
    monkeypatch.setattr(peers, "install", installed.append)
    monkeypatch.setattr(engines, "ROOT", tmp_path)
    monkeypatch.setattr(engines, "HOME", tmp_path)
    works, started = peers.Contest.process, PROCESS

    def process(contest: Any, label: str, shapes: tuple[Shape, ...]) -> tuple[float, Any]:
        engine, _, _ = contest.running[label]
        if engine.name == "ridgeline" or engine.build:
            return works(contest, label.replace("llama.cpp Q4_0", "good fast"), shapes)
        return started(contest, label, shapes)

    for name in ("llama.cpp", "other"):
        program = tmp_path / name / "bin" / "python"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho Illegal >&2\nkill -ILL $$\n")
        program.chmod(0o755)
    llama = Engine("llama.cpp", "llamacpp", (Format("Q4_0"),), ("it",))
    other = Engine("other", "other", (Format("f"),), ("it",))
    monkeypatch.setattr(peers, "chosen", lambda without: [llama, other])
    monkeypatch.setattr(peers.Contest, "process", process)
    peers.main(["--repeats", "1"])
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    why = "SIGILL ended its process: Illegal (more in logs/"
    assert result["left_out"] == {"other f": f"{why}other-f.txt)"}
    assert result["notes"] == [
        f"llama.cpp Q4_0: {why}llama.cpp-Q4_0.txt); compiled again without matrix tiles (AMX)"
    ]
    assert result["results"]["llama.cpp Q4_0"]["prefill_512"]["median"] == 100
    assert [bool(engine.build) for engine in installed if engine.name == "llama.cpp"] == [
        False,
        True,
    ]


def test_a_process_without_a_grant_has_no_tiles() -> None:
    granted = not tiles_refusal()
    ask = "from peers.drivers.measure import has_tiles; print(has_tiles())"
    own = "from ridgeline.system.machine import tiles_refusal; tiles_refusal()"
    for first, wanted in (("pass", False), (own, granted)):
        command = [sys.executable, "-c", f"{first}\n{ask}"]
        assert subprocess.check_output(command, cwd=engines.ROOT, text=True).strip() == str(wanted)


# --- the page ----------------------------------------------------------------------------------


def test_a_result_replaces_the_one_that_the_page_had(
    pretend: list[str], capsys: Any, tmp_path: Path
) -> None:
    peers.main(["--repeats", "1"])
    result, page = tmp_path / "out.txt", tmp_path / "page.md"
    result.write_text(capsys.readouterr().out)
    page.write_text("# Top\n<!-- result: begin -->\nold\n<!-- result: end -->\nBottom\n")
    report.main(result, page)
    once = page.read_text()
    report.main(result, page)
    assert page.read_text() == once
    assert once.startswith("# Top\n")
    assert once.endswith("<!-- result: end -->\nBottom\n")
    assert "old" not in once
    assert "| good fast, AMX | 100 (100-100) |" in once
    assert "- absent: cannot be installed: no such package" in once
    with pytest.raises(ValueError, match="the page needs"):
        report.insert("no marks", {})


def test_the_projects_page_has_the_marks_and_names_every_shape() -> None:
    page = (engines.ROOT / "docs" / "benchmarks.md").read_text()
    assert page.count("<!-- result: begin -->") == page.count("<!-- result: end -->") == 1
    assert all(f"`{name}`" in page for name in NAMES)


# --- another load generator ----------------------------------------------------------------------


def test_agreement_is_the_median_of_the_ratios_within_rounds() -> None:
    ours, theirs = [1.0, 20.0, 3.0], [2.0, 10.0, 3.0]
    rounds = [
        {"ours": dict.fromkeys(agreement.FIGURES, a), "theirs": dict.fromkeys(agreement.FIGURES, b)}
        for a, b in zip(ours, theirs, strict=True)
    ]
    assert agreement.summarise(rounds)["e2e"] == {
        "ours": 3.0,
        "theirs": 3.0,
        "ratio": 1.0,
        "min": 0.5,
        "max": 2.0,
    }


def test_a_server_of_fixed_times_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "guidellm"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    with (
        pytest.raises(SystemExit, match="guidellm mock-server does not start"),
        agreement.fixed_server(program, "m", 20.0, 5.0),
    ):
        raise AssertionError("it started")


# --- vectors of texts --------------------------------------------------------------------------


def test_a_table_of_vectors() -> None:
    rows = {
        "onnxruntime f32": {"seconds": [2.0, 1.0, 4.0], "vectors": [[1.0, 0.0], [0.0, 1.0]]},
        "ridgeline auto": {"seconds": [0.5], "vectors": [[1.0, 0.0], [0.6, 0.8]]},
    }
    shown, values = embeddings.table(rows, 8)
    assert values["onnxruntime f32"] == {"texts_per_s": 4.0, "least_cosine": 1.0}
    assert values["ridgeline auto"] == {"texts_per_s": 16.0, "least_cosine": pytest.approx(0.8)}
    assert "| ridgeline auto | 16.0 | 0.80000 |" in shown.splitlines()


def test_every_way_to_vectors_gets_the_same_texts_and_threads(tmp_path: Path) -> None:
    ways = embeddings.commands(tmp_path, tmp_path / "ids.json", 3, 5)
    assert [*ways][:2] == ["onnxruntime f32", "onnxruntime int8"]
    assert {tuple(command[-3:]) for command in ways.values()} == {
        (str(tmp_path / "ids.json"), "3", "5")
    }
