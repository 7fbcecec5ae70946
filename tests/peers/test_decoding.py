"""The comparison of schemas and beams, without any peer: what is asked, counted and printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from peers.__main__ import Contest
from peers.decoding import SCHEMA, Held, comparison, conversations, engines, num_objects

from peers import decoding, machine

_PERSON = {"name": "Ann", "age": 40, "trade": "baker", "languages": ["French"]}
_TEXT = json.dumps([_PERSON] * 40)


def test_no_answer_may_end_before_it_is_cut() -> None:
    jsonschema.validate(json.loads(_TEXT), SCHEMA)
    with pytest.raises(jsonschema.ValidationError, match="too short"):
        jsonschema.validate([_PERSON] * 39, SCHEMA)
    shortest = json.dumps([_PERSON | {"name": "A", "age": 1, "languages": ["B"]}] * 40)
    assert len(shortest) > 20 * comparison("schema", 60).pairs[0].plain.new_tokens


def test_pairs_are_measured_in_turn_and_differ_in_one_thing() -> None:
    asked = comparison("schema", 60)
    assert [s.name for s in asked.job_shapes] == [
        *["single_free", "single_schema"] * 3,
        "batch64_free",
        "batch64_schema",
    ]
    for _, plain, changed in asked.pairs:
        assert plain.num_streams == changed.num_streams
        assert not plain.schema
        assert json.loads(changed.schema) == SCHEMA
    batch, beams = comparison("beams", 60).job_shapes[:2]
    assert batch.num_sequences == beams.num_sequences == 4
    assert (batch.num_streams, beams.num_streams, beams.beams) == (4, 1, 4)
    assert len(set(conversations())) == len(conversations()) > 64


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", None),
        ("Here they are: [", None),
        ("[", 0),
        (" [\n {", 0),
        ("[7, ", None),
        ("[x", None),
        (_TEXT[:20], 0),
        (_TEXT[: len(json.dumps(_PERSON)) + 1], 1),
        (_TEXT[: len(json.dumps(_PERSON)) * 2 + 20], 2),
        (_TEXT, None),  # it ended
        (json.dumps([_PERSON | {"age": 121}])[:-1], None),
        (json.dumps([_PERSON])[:-1] + "; {", None),
    ],
)
def test_finished_objects_are_checked(text: str, count: int | None) -> None:
    if count is None:
        with pytest.raises(ValueError, match=r"^(no list|no object|object|after object)"):
            num_objects(text)
    else:
        assert num_objects(text) == count


def test_numbers_are_rates_or_steps_and_ratios_those_of_rounds() -> None:
    rounds = [
        {"single_free": [100.0, 300.0, 200.0], "single_schema": [100.0], "batch64_free": [5.0]},
        {"single_free": [100.0], "single_schema": [120.0]},
        {"single_free": [100.0], "single_schema": [90.0], "batch64_schema": [5.0]},
    ]
    asked = comparison("schema", 60)
    table = decoding.summarise(asked, {"a": rounds})
    assert table == {
        "a": {
            "1 stream": {
                "plain": 100.0, "changed": 100.0, "ratio": 0.9, "min": 0.5, "max": 1.2, "n": 3,
            }
        }
    }  # fmt: skip
    assert decoding.markdown(asked, table).splitlines()[2] == (
        "| a | 100.0 | 100.0 | **0.90** (0.50 to 1.20) | - | - | - |"
    )
    # 400 tokens per second of four sequences are 10 ms per step of all.
    found = decoding.summarise(comparison("beams", 60), {"a": [{"batch": [400.0], "beams": [320]}]})
    row = found["a"]["width 4"]
    assert (row["plain"], row["changed"], row["ratio"]) == (10.0, 12.5, 1.25)


def test_each_peer_runs_its_fastest_format_and_ours_with_drafts_and_without() -> None:
    assert [[f.name for f in e.formats] for e in engines("schema", ["openvino"])] == [
        ["file", "file without drafts"],
        ["Q4_0"],
        ["int8"],
    ]
    assert [f.drafts for f in engines("schema", [])[0].formats] == [True, False]
    assert [e.name for e in engines("beams", [])] == ["ridgeline", "openvino", "vllm"]


@pytest.fixture
def asked_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Engines that only pretend; returns the label and the prompts of every process."""
    calls: list[Any] = []

    def process(contest: Contest, label: str, shapes: Any) -> tuple[float, Any]:
        calls.append((label, contest.job.texts))
        good, bad = list(range(50)), [0, 1]
        is_bad = [made for made, _ in calls].count("vllm int8") == 2  # in its second round
        answers = {s.name: [bad if is_bad else good] for s in shapes}
        samples = {s.name: [50.0 if s.schema or s.beams > 1 else 100.0] for s in shapes}
        return 1.0, {"version": "1", "samples": samples, "answers": answers}

    ids = [(i, 1) for i in range(100)]
    decode = lambda tokens: _TEXT[:60] if len(tokens) > 2 else "Sure!"  # noqa: E731
    monkeypatch.setattr("peers.__main__.install", lambda engine: False)
    monkeypatch.setattr("peers.__main__.prepare", lambda engine, form, source: source)
    monkeypatch.setattr(Contest, "process", process)
    monkeypatch.setattr(decoding, "model_file", lambda name: (Path("m.gguf"), 300))
    monkeypatch.setattr(decoding, "prompts_of", lambda source: (ids, decode))
    monkeypatch.setattr(machine, "sample_busy_cores", lambda: 0.0)
    return calls


def test_the_last_line_is_the_result(asked_of: list[Any], capsys: Any) -> None:
    decoding.main(["schema", "--rounds", "2", "--without", "openvino"])
    output = capsys.readouterr().out.strip().splitlines()
    result = json.loads(output[-1])
    assert result["results"]["ridgeline file"]["64 streams"]["ratio"] == 0.5
    assert result["left_out"] == {"vllm int8": "no list: Sure!"}
    assert "vllm int8" not in result["results"].keys() | result["held"].keys()
    assert result["held"]["llama.cpp Q4_0"] == {"answers": 4, "objects": 0, "without_objects": 4}
    assert "Left out: vllm int8: no list: Sure!" in output
    ours = ["ridgeline file", "ridgeline file without drafts", "llama.cpp Q4_0"]
    assert [label for label, _ in asked_of] == [*ours, "vllm int8"] * 2
    first, second = ({texts for _, texts in part} for part in (asked_of[:4], asked_of[4:]))
    assert len(first) == len(second) == 1  # the same prompts for all, other ones in each round
    assert first != second
    assert all(len(set(texts)) == 64 for texts in first)


def test_beams_meet_a_batch_of_equal_prompts(asked_of: list[Any], capsys: Any) -> None:
    decoding.main(["beams", "--rounds", "1"])
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["results"]["openvino int4"]["width 4"]["ratio"] == 2.0
    assert result["held"] == {}
    assert all(len(texts) == 4 and len(set(texts)) == 1 for _, texts in asked_of)


def test_answers_are_counted() -> None:
    held = Held()
    held.check(["[", _TEXT[:120]])
    assert held == Held(answers=2, objects=1, without_objects=1)
