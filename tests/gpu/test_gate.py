"""``--backend auto`` takes a GPU after ``ridgeline bench gpu`` found nothing wrong on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

from ridgeline import LLM, SamplingParams
from ridgeline.backends.cuda.approval import FILE, read, remember
from ridgeline.bench.gpu import bench_gpu
from ridgeline.cli.commands.doctor import facts
from ridgeline.planner import plan
from tests.backends.cuda.test_nvidia_smi import install
from tests.engine.test_llm import write_model
from tests.gpu.on_cpu import LONG_S, measure_in_small, say_there_is_a_gpu


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "home"))
    say_there_is_a_gpu(monkeypatch)
    return tmp_path / "home"


def test_auto_is_the_gpu_once_it_has_passed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_in_small(monkeypatch)
    model, params = write_model(tmp_path / "tiny"), SamplingParams(temperature=0, max_tokens=8)
    with LLM(model, dtype="f32") as llm:
        before = llm.generate("hello", params)[0].outputs[0].token_ids
        assert llm.config.backend == "cpu"
        assert llm.config.notes[0] == (
            "backend cpu: the GPU has not passed ridgeline bench gpu yet; --backend cuda takes "
            "the GPU anyway"
        )
    assert bench_gpu(["smoke", "correct", "bits"], LONG_S, is_tiny=False, out=None)
    with LLM(model, dtype="f32") as llm:
        assert llm.config.backend == "cuda"
        assert "passed ridgeline bench gpu on 20" in llm.config.notes[0]
        assert llm.generate("hello", params)[0].outputs[0].token_ids == before
    said = dict(facts(home))
    assert said["gpu gate"].endswith(": --backend auto takes it")
    assert said["backend"].startswith("cuda (NVIDIA H200, torch ")
    remember(home, "2026-11-28", is_right=False)
    with LLM(model) as llm:
        assert llm.config.backend == "cpu"


def test_a_plan_for_here_is_by_our_rules_once_the_gpu_has_passed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "NVIDIA L4, 580.159, 23034, 20000, Enabled")
    model = write_model(tmp_path / "tiny")
    for is_right, engine in ((False, "vllm"), (True, "ridgeline")):
        remember(home, "2026-11-28", is_right=is_right)
        of_machine, of_card = plan(model, on="here").placements
        assert (of_machine.device.id, of_machine.memory.engine.name) == ("here", "ridgeline")
        assert (of_card.device.id, of_card.memory.engine.name) == ("l4", engine)


def test_what_the_gpu_cannot_do_is_done_by_the_processor(home: Path, tmp_path: Path) -> None:
    remember(home, "2026-11-28", is_right=True)
    with LLM(write_model(tmp_path / "tiny"), dtype="int8-row") as llm:
        assert llm.config.backend == "cpu"
        assert llm.config.notes[0].startswith("backend cpu: --dtype int8-row: the cuda backend has")


def test_other_code_or_libraries_have_to_pass_again(home: Path) -> None:
    remember(home, "2026-11-28", is_right=True)
    (key,) = json.loads((home / FILE).read_bytes())
    assert ", torch " in key
    for known, is_open in ((key, True), (key.replace("code ", "code 0"), False)):
        (home / FILE).write_text(json.dumps({known: "2026-11-28"}))
        found = read(home)
        assert found is not None
        assert found.is_open is is_open
