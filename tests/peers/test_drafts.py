"""The comparison of drafts, without any peer: who is asked what, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peers.__main__ import Contest
from peers.drafts import Kind, engines, shapes_of
from peers.drivers.measure import measure
from peers.engines import LeftOut
from peers.shapes import Job

from peers import drafts, machine


def test_each_engine_meets_itself_with_drafts() -> None:
    assert [(e.name, [(f.name, f.drafts) for f in e.formats]) for e in engines(["openvino"])] == [
        ("ridgeline", [("file", False), ("file with drafts", True)]),
        ("llama.cpp", [("file", False), ("file with drafts", True)]),
        ("vllm", [("int8", False), ("int8 with drafts", True)]),
        ("transformers", [("f32", False), ("f32 with drafts", True)]),
    ]
    assert "transformers" not in [e.name for e in engines(["transformers"])]
    with pytest.raises(ValueError, match="--without torch: the peers are"):
        engines(["torch"])


def test_every_shape_asks_its_own_prompt() -> None:
    texts = {"code edit": [(1, 2), (3,)], "rag": [(4, 5, 6)]}
    shapes = shapes_of(texts, 2)
    assert list(shapes) == ["code edit, 1", "code edit, 2", "rag, 1"]
    job = Job("", 1, 10, 0, tuple(shapes.values()), texts=((1, 2), (3,), (4, 5, 6)))
    asked: list[Any] = []

    def generate(prompts: Any, new_tokens: int) -> list[list[int]]:
        asked.extend(prompts)
        return [[7] * new_tokens]

    for shape in job.shapes:
        assert measure(lambda _: generate, shape, job, None)[1] == [[7] * 3]  # type: ignore[arg-type]
    assert asked == [[1, 2]] * 3 + [[3]] * 3 + [[4, 5, 6]] * 3


def test_ratios_are_of_prompts_and_changed_answers_are_counted() -> None:
    kind = Kind()
    for off, on, answer in ((10.0, 20.0, 5), (20.0, 30.0, 6), (40.0, 40.0, 5)):
        kind.add(
            "a", {"samples": {"a": [off]}, "answers": {"a": [[5]]}},
            {"samples": {"a": [on]}, "answers": {"a": [[answer]]}},
        )  # fmt: skip
    spoilt = {"samples": {"a": []}, "answers": {"a": [[5]]}}
    kind.add("a", spoilt, spoilt)
    assert kind.summary() == {"off": 20.0, "on": 30.0, "ratio": 1.5, "answers": 4, "changed": 1}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Engines that only pretend; returns the label of every process."""
    labels: list[str] = []

    def process(contest: Contest, label: str, shapes: Any) -> tuple[float, Any]:
        labels.append(label)
        if label.startswith("vllm"):
            raise LeftOut("no such method")
        is_on = label.endswith("with drafts")
        samples = {s.name: [150.0 if is_on else 100.0] for s in shapes}
        answers = {s.name: [[is_on and label.startswith("openvino")]] for s in shapes}
        return 1.0, {"version": "1", "samples": samples, "answers": answers}

    monkeypatch.setattr("peers.__main__.install", lambda engine: False)
    monkeypatch.setattr("peers.__main__.prepare", lambda engine, form, source: source)
    monkeypatch.setattr(Contest, "process", process)
    monkeypatch.setattr(drafts, "model_file", lambda name: (Path("m.gguf"), 300))
    monkeypatch.setattr(
        drafts, "encoded", lambda source, kinds: {k: [(1,)] * len(v) for k, v in kinds.items()}
    )
    monkeypatch.setattr(machine, "sample_busy_cores", lambda: 0.0)
    return labels


def test_the_last_line_is_the_result(calls: list[str], tmp_path: Path, capsys: Any) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"category": "rag", "turns": ["Who?", "Why?"]}\n' * 3)
    drafts.main(["--prompts", str(prompts), "--rounds", "2", "--per-kind", "2"])
    output = capsys.readouterr().out.strip().splitlines()
    result = json.loads(output[-1])
    ours = {"off": 100.0, "on": 150.0, "ratio": 1.5, "answers": 4, "changed": 0}
    assert result["results"]["ridgeline file"] == {"code edit": ours, "rag": ours}
    assert output[3].startswith("| llama.cpp file | 100, 150: **1.50** |")
    assert output[4].endswith("| 8 of 8 |")  # OpenVINO's
    assert result["left_out"].keys() == {"vllm int8", "vllm int8 with drafts"}
    pairs = [(label, f"{label} with drafts") for label in ("ridgeline file", "llama.cpp file")]
    assert calls[:4] == [label for pair in pairs for label in pair]
    assert len(calls) == 2 * 8 + 1  # vLLM failed once


def test_what_cannot_be_asked_is_named(calls: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--kind poetry: the kinds are code edit"):
        drafts.main(["--kind", "poetry"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    with pytest.raises(SystemExit, match=r"bad\.jsonl, line 1"):
        drafts.main(["--prompts", str(bad)])
    assert not calls
