"""A trace is read line by line, and parsed only where somebody asks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.foresight.structure import to_json
from ridgeline.foresight.trace import read_trace, read_whole
from tests.foresight.runs import recorded
from tests.foresight.simulator.test_run import SETTINGS, TIMES

Json = dict[str, Any]


def write(path: Path, records: list[Json], *, spaced: bool = False) -> Path:
    separators = None if spaced else (",", ":")
    path.write_text("".join(json.dumps(one, separators=separators) + "\n" for one in records))
    return path


@pytest.mark.parametrize("spaced", [False, True], ids=["as written", "by another tool"])
def test_requests_and_their_steps_are_found(tmp_path: Path, spaced: bool) -> None:
    records = recorded(3)
    steps = [one for one in records if one["type"] == "step"]
    with read_trace(write(tmp_path / "t", records, spaced=spaced)) as found:
        assert found.engine == records[0]
        wanted = {one["request_id"]: one for one in records if one["type"] == "request"}
        assert {one["request_id"] for one in found.requests} == wanted.keys()
        for one in found.requests:
            then = wanted[one["request_id"]]
            assert one["num_prompt_tokens"] == len(then["prompt_token_ids"])
            life = found.of(one)
            start, end = one["arrival_s"], one["finish_s"]
            inside = [step for step in steps if start <= step["start_s"] <= end]
            assert [step for step in life if start <= step["start_s"] <= end] == inside
            most = 3 * sum(then["num_generated"])
            around = found.around(one, most)
            assert then in around
            beside = [r for r in around if r["type"] == "request" and r != then]
            for is_before in (True, False):
                side = [r for r in beside if (r["arrival_s"] < start) == is_before]
                assert sum(sum(r["num_generated"]) for r in side) <= most
            assert around[0] == records[0]


def test_a_request_whose_type_stands_last_has_its_length_too(tmp_path: Path) -> None:
    records = recorded(3)
    place = next(i for i, one in enumerate(records) if one["type"] == "request")
    kind = records[place].pop("type")
    records[place]["type"] = kind
    with read_trace(write(tmp_path / "t", records)) as found:
        length = len(records[place]["prompt_token_ids"])
        assert found.requests[0]["num_prompt_tokens"] == length
        assert "prompt_token_ids" not in found.requests[0]


def test_a_request_is_known_by_its_number_its_name_and_its_answers_id(tmp_path: Path) -> None:
    records = recorded(3)
    last = next(one for one in reversed(records) if one["type"] == "request")
    last["name"] = "0"  # a client may choose it; names come before numbers
    with read_trace(write(tmp_path / "t", records)) as found:
        number = last["request_id"]
        assert {found.get(name)["request_id"] for name in ("0", "chatcmpl-0", str(number))} == {
            number
        }
        with pytest.raises(ValueError, match=r"no request 'nme-3' among the \d+ .* mean name-"):
            found.get("nme-3")
        with pytest.raises(ValueError, match=r"no request '999'.*they are 0 to"):
            found.get("999")


def test_a_writer_that_was_stopped_amid_a_line_leaves_a_good_trace(tmp_path: Path) -> None:
    records = recorded(3)
    path = write(tmp_path / "t", records)
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 40, whole.rindex(b'{"type":"step"') + 60):
        path.write_bytes(whole[:cut])
        with read_trace(path) as found:
            for one in found.requests:
                assert found.of(one)
        assert read_whole(path) == records[: len(read_whole(path))]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [], "empty"),
        (lambda lines: lines[1:], "first line does not describe an engine"),
        (lambda lines: [*lines[:4], "{broken\n", *lines[4:]], "line 5, is not JSON"),
        (lambda lines: [*lines[:4], "[]\n", *lines[4:]], "line 5 is not a JSON object"),
        (lambda lines: [*lines[:4], '{"type":"x"}\n', *lines[4:]], "line 5, is not a record"),
        (lambda lines: [*lines[:4], '{"type":"request"}\n'], "line 5, has no 'request_id'"),
        (lambda lines: [lines[0], lines[3], lines[2]], "line 3: this step begins before"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(tmp_path: Path, change: Any, words: str) -> None:
    records = [one for one in recorded(3) if one["type"] != "request"]
    path = write(tmp_path / "t", records)
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=words), read_trace(path):
        pass


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("engine", {"num_blocks": "16"}, "line 1: num_blocks is '16'; expected a whole number"),
        ("engine", {"num_blocks": 1 << 50}, "line 1: num_blocks is .*; expected 1 to 16,777,216"),
        ("engine", {"policy": "fifo"}, "line 1: policy is 'fifo'; expected one of static, orca"),
        ("step", {"work": [[[0, 0], 1, None]]}, r"line \d+: work.0.2 is null; expected a whole"),
        ("step", {"execute_s": float("nan")}, r"line \d+: execute_s is nan; expected a number"),
        ("step", {"waits": [[[1, 0], "llama"]]}, r"line \d+: sequence .* waits for 'llama'"),
        ("request", {"finish_s": True}, r"line \d+: finish_s is True; expected a number"),
        ("request", {"params": {"top_k": "x"}}, r"line \d+: top_k must be a whole number"),
        ("request", {"params": {"colour": 1}}, r"line \d+: .* keyword argument 'colour'"),
        ("request", {"prompt_token_ids": [1, 2.5]}, r"line \d+: prompt_token_ids.1 is 2.5"),
    ],
)
def test_a_wrong_type_is_named_by_line_and_field(
    tmp_path: Path, kind: str, change: Json, words: str
) -> None:
    records = recorded(3)
    place = next(i for i, one in enumerate(records) if one["type"] == kind)
    records[place] |= change
    path = write(tmp_path / "t", records)
    with pytest.raises(ValueError, match=words):
        read_whole(path)
    with pytest.raises(ValueError, match=words):
        _read_all(path)


def _read_all(path: Path) -> None:
    with read_trace(path) as found:
        found.around(found.requests[0], 1000)
        found.during(0, 1e9)


def test_a_damaged_step_is_named_when_it_is_needed(tmp_path: Path) -> None:
    records = recorded(3)
    path = write(tmp_path / "t", records)
    lines = path.read_text().splitlines(keepends=True)
    lines[6] = lines[6][:90] + "\n"
    path.write_text("".join(lines))
    with read_trace(path) as found, pytest.raises(ValueError, match="line 7, is not JSON"):
        found.during(0, 1e9)


def test_what_ended_before_nothing_was_left_to_do_is_not_around(tmp_path: Path) -> None:
    """It could not matter; and of those that share time with a request, the nearest stay."""
    bursts = [
        SimRequest(prompt=(3, 4, 5, i), num_new=(16,), arrival_s=start_s + i / 1000)
        for start_s in (0.0, 1000.0)
        for i in range(8)
    ]
    settings = replace(SETTINGS, max_num_seqs=2)
    records = [json.loads(json.dumps(to_json(one))) for one in simulate(bursts, settings, TIMES)]
    with read_trace(write(tmp_path / "t", records)) as found:

        def around(most_tokens: int) -> list[int]:
            some = found.around(found.get("15"), most_tokens)
            return [one["request_id"] for one in some if one["type"] == "request"]

        assert around(1000) == [8, 9, 10, 11, 12, 13, 14, 15]
        assert around(3 * 16) == [12, 13, 14, 15]
        assert around(0) == [15]
