"""``ridgeline bench gpu --tiny``: every line of it but a GPU's own runs here, on twins."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

import torch

from ridgeline.backends import cuda
from ridgeline.backends.cuda import measure
from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.cases import CASES, EXACT
from ridgeline.backends.cuda.measure.part import Part
from ridgeline.backends.cuda.measure.parts import smoke
from ridgeline.backends.cuda.measure.parts.bits import CLAIMS
from ridgeline.backends.cuda.step import graphs as graphs_
from ridgeline.backends.cuda.step.graphs import Graphs, Variant
from ridgeline.bench import gpu as parts
from ridgeline.bench.gpu import LOST, PARTS
from ridgeline.cli.commands.doctor import gpu_roof_facts
from ridgeline.system.machine import DeviceLost
from tests.gpu.on_cpu import measure_in_small, say_there_is_a_gpu
from tests.gpu.statements import never_executed, traced
from tests.waiting import started

# Statements that ``--tiny`` never executes, by function. Those of the peer run where it is.
_ON_A_GPU = {
    "part.Part.__init__": 4, "part.Part.seconds": 10, "part.Part.synchronize": 1,
    "parts/smoke.measure": 1, "parts/smoke._memory": 7, "parts/engine.measure": 1,
    "parts/engine._model": 1, "cases/draws.picks": 3,
}  # fmt: skip
_WHERE_SOMETHING_FAILS = {
    "__main__.main": 4, "part.Part.run": 4, "part.Part._measure": 7, "part.Part.peer_seconds": 1,
    "parts/engine._steps.step": 1,
}  # fmt: skip
_IN_TESTS = {"inputs/attention.Texts.alone": 3}
_LEFT = _ON_A_GPU | _WHERE_SOMETHING_FAILS | _IN_TESTS


def test_doctor_measures_the_roof_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say_there_is_a_gpu(monkeypatch)
    measure_in_small(monkeypatch)
    known = dict(gpu_roof_facts(tmp_path))
    assert known.keys() == {"gpu memory roof", "gpu bf16 roof"}
    for name, unit in (("gpu memory roof", "TB/s"), ("gpu bf16 roof", "TFLOP/s")):
        rate, said = known[name].split()
        assert (float(rate) > 0, said) == (True, unit)


def test_doctor_says_why_a_roof_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say_there_is_a_gpu(monkeypatch)
    monkeypatch.setattr(parts, "_MODULE", "ridgeline.backends.cuda.no_such_module")
    assert {line.startswith("unknown: ") for _, line in gpu_roof_facts(tmp_path)} == {True}


def test_all_parts_run_in_small_and_nothing_is_wrong(tmp_path: Path) -> None:
    out, folder = tmp_path / "found.jsonl", Path(measure.__file__).parent
    command = [sys.executable, "-m", "ridgeline", "bench", "gpu", "--tiny", "--out", str(out)]
    env = traced(folder, tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing is wrong\n")
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    ends = {one["part"]: one["code"] for one in found if one["what"] == "end"}
    assert ends == dict.fromkeys(PARTS, 0)
    told = {part: {one["what"] for one in found if one["part"] == part} for part in PARTS}
    assert "tiny f32 tokens, graphs True, ahead True" in told["smoke"]
    assert "states f32 graphs" in told["smoke"]
    assert "experts 40, second" in told["correct"]
    for how in "window 33", "softcap 2.0", "has_sinks True window 70", "has_slopes True":
        assert f"attend 4/2 x 16 {how}, tokens 1299 to 1300 alone" in told["bits"]
    assert "tiny int4 decode 4 x 32, graphs and ahead" in told["engine"]
    assert "qkv 192 x 128, 3 rows, int4" in told["products"]
    assert "decode tiny 2 x 64" in told["attention"]
    assert "token back" in told["roof"]
    assert "skipped" in told["peer"] or any("warm" in what for what in told["peer"])
    left = never_executed(folder, tmp_path)
    assert {name: len(left[name]) for name in left if not name.startswith("parts/peer.")} == _LEFT


def test_the_table_so_far_is_printed_after_sigterm(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    command = [sys.executable, "-m", "ridgeline.bench.gpu", "--tiny", "--parts", "roof,peer"]
    with started([*command, "--out", str(out)], stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        assert json.loads(one.stdout.readline())["what"] == "machine"
        one.terminate()
        said = one.stdout.read()
    assert one.returncode == 1
    assert said.endswith("WRONG all: interrupted failed before its end\n1 wrong\n")
    *_, last = out.read_text("utf-8").splitlines()
    assert json.loads(last)["what"] == "interrupted"


def test_a_process_whose_device_is_lost_ends_with_a_status_of_its_own() -> None:
    lines = [
        "import sys",
        "from ridgeline.backends.cuda.measure import __main__ as part",
        "from ridgeline.backends.cuda.measure.parts import roof",
        "from ridgeline.system.machine import DeviceLost",
        "def measure(part): print('said'); raise DeviceLost('an illegal memory access')",
        "roof.measure = measure",
        "sys.argv = ['measure', 'roof', '--seconds', '60', '--tiny']",
        "part.main()",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (LOST, "said\n", "")


def test_cases_for_which_no_time_is_left_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    part = Part("products", 0, is_tiny=True)
    part.is_tiny = False  # on a CPU there is always time
    part.run([("first", lambda: part.say("first")), ("second", lambda: part.say("second"))])
    assert findings(capsys) == [
        {"part": "products", "what": "left out", "cases": ["first", "second"]}
    ]


def test_every_operation_is_asked_whether_it_is_right_and_keeps_its_bits() -> None:
    assert CASES.keys() == set(twins.__all__) == set(kernels_by_name())
    assert set(", ".join(CLAIMS).split(", ")) == CASES.keys() - EXACT


def kernels_by_name() -> list[str]:
    """Return the names of all kernels, without Triton."""
    tree = ast.parse(Path(cuda.__file__).with_name("kernels").joinpath("__init__.py").read_text())
    (names,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    found: list[str] = ast.literal_eval(names)
    return found


def test_the_smallest_models_need_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()

    def counted(name: str, op: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            called.add(name)
            return op(*given, **more)

        return call

    for name in twins.__all__:
        monkeypatch.setattr(twins, name, counted(name, getattr(twins, name)))
    smoke.measure(Part("smoke", 600, is_tiny=True))
    assert called == set(twins.__all__)


@pytest.mark.parametrize("name", twins.__all__)
def test_an_operation_that_is_wrong_is_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A result that is a little off, or what it writes."""

    def off(*given: Any, **more: Any) -> Any:
        made = getattr(twins, name)(*given, **more)
        if made is None:  # it writes into its first argument
            given[0][-1] += 1
            return None
        if isinstance(made, tuple):
            return (made[0] + 1, *made[1:])
        return made * 1.001

    part = Part("correct", 60, is_tiny=True)
    part.ops = SimpleNamespace(**vars(twins) | {name: off})
    part.run(CASES[name](part))
    assert any(not one.get("ok", True) for one in findings(capsys))


def test_a_case_that_fails_ends_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("no kernel image")

    part = Part("products", 60, is_tiny=True)
    part.run([("first", fail), ("second", lambda: part.say("second", us=1.0))])
    part.run([("others", fail)], are_ours=False)
    first, second, others = findings(capsys)
    assert (first["failed"], first["ok"]) == ("RuntimeError: no kernel image", False)
    assert second["us"] == 1.0
    assert "ok" not in others
    assert part.peer_seconds(fail) is None


def test_a_device_that_is_lost_ends_the_part(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    part = Part("products", 60, is_tiny=True)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        part.run([("first", fail), ("second", lambda: part.say("second"))])
    (first,) = findings(capsys)
    assert not first["ok"]


def test_a_launch_that_is_refused_loses_no_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: invalid configuration argument")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # it still answers
    part = Part("products", 60, is_tiny=True)
    part.run([("first", fail), ("second", lambda: part.say("second"))])
    first, second = findings(capsys)
    assert "invalid configuration" in first["failed"]
    assert second["what"] == "second"


def test_a_device_that_is_lost_within_a_case_of_a_case_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The outer case has not ended: a new process goes on within it."""

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    part = Part("engine", 60, is_tiny=True)
    with pytest.raises(DeviceLost):
        part.run([("outer", lambda: part.run([("inner", fail)]))])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one.get("ends") for one in lines if "ends" in one] == ["inner"]
    assert [one["what"] for one in lines if "what" in one] == ["inner"]
    again = Part("engine", 60, skip=["inner"], is_tiny=True)
    again.run([("outer", lambda: again.run([("inner", fail), ("next", lambda: None)]))])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["ends"] for one in lines if "ends" in one] == ["next", "outer"]


def test_workers_share_cases(capsys: pytest.CaptureFixture[str]) -> None:
    for worker in range(2):
        part = Part("correct", 60, worker=worker, workers=2, is_tiny=True)
        part.run([(f"{i}", lambda i=i, part=part: part.say(f"{i}")) for i in range(5)])
    assert [one["what"] for one in findings(capsys)] == ["0", "2", "4", "1", "3"]


class _Refusing:
    """Stands for a driver that captures graphs of some sizes alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(graphs_, "captured", self.captured)

    def captured(self, call: Any, pool: Any) -> Any:
        hidden = call()
        if len(hidden) > 2:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is ...")
        graph = SimpleNamespace(replay=lambda: None, pool=lambda: "pool")
        return graph, hidden


def test_what_cannot_be_captured_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line says so once; what can be captured is."""
    _Refusing(monkeypatch)
    runs, said = list[tuple[int, bool]](), list[str]()

    def run(size: int, variant: Variant, is_captured: bool) -> torch.Tensor:
        runs.append((size, is_captured))
        return torch.ones(size)

    graphs = Graphs(run, torch.device("cuda"), 8)
    graphs.say = said.append
    for size in (2, 4, 8, 4, 2):
        assert len(graphs.run(size, Variant(False, True))) == size
    captures = [(size, True) for size in (2, 2, 4, 4)]
    assert runs == [*captures, (4, False), (8, True), (8, True), (8, False), (4, False)]
    assert len(graphs.failures) == 2
    assert said == [graphs.failures[0]]
    assert said[0].startswith("a step of 4 tokens has no CUDA graph and is slower: CUDA error")


def findings(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    return [one for one in lines if "what" in one]
