"""Which lines of a file are requests, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.serve.batch_files.lines import RequestFile, RequestLine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def request(custom_id: Any, url: str = TEXT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def read(path: Path, data: bytes | str, **how: Any) -> list[RequestLine]:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return list(RequestFile(path, **how).lines())


def problems(lines: list[RequestLine]) -> list[str]:
    return [line.problem for line in lines]


def test_a_line_that_is_no_request_says_why_and_costs_no_other_line_anything(
    tmp_path: Path,
) -> None:
    wrong: list[tuple[bytes | dict[str, Any], str]] = [
        (b"nonsense", "it is not JSON"),
        (b'{"custom_id": "c\xff"}', "it is not UTF-8"),
        (b"[1]", "must be a JSON object"),
        (b'"' + b"x" * (9 << 20) + b'"', "it is longer than 8 MiB"),
        (b"[" * 100_000, "nested too deeply"),
        (request(7), "custom_id must be text"),
        (request(""), "custom_id must be text"),
        (request("x" * 600), "of 1 to 512 characters"),
        (request("a"), "'a' is that of an earlier line"),
        (request("b", "/v1/audio/speech"), "must be one of /v1/chat/completions"),
        (request("c") | {"method": "GET"}, "method is 'GET': it must be POST"),
        (request("d") | {"body": []}, "body must be a JSON object"),
        (request("e", stream=True), "body.stream is not possible"),
    ]
    written = [one if isinstance(one, bytes) else json.dumps(one).encode() for one, _ in wrong]
    first, last = (json.dumps(request(one, prompt="hi")).encode() for one in ("a", "z"))
    lines = read(tmp_path / "in.jsonl", b"\n".join([first, *written, b" ", last]))
    assert [line.index for line in lines] == list(range(len(wrong) + 2))
    assert lines[0].problem == lines[-1].problem == ""
    assert lines[-1].number == len(wrong) + 3  # a blank line is no request, but a line
    for line, (_, reason) in zip(lines[1:-1], wrong, strict=True):
        assert reason in line.problem


def test_an_id_that_was_refused_is_taken_all_the_same(tmp_path: Path) -> None:
    """Else two lines of the output could have one id."""
    texts = [json.dumps(request("a", stream=True)), json.dumps(request("a"))]
    lines = read(tmp_path / "in.jsonl", "\n".join(texts))
    assert [bool(problem) for problem in problems(lines)] == [True, True]


def test_a_batch_of_one_route_takes_no_other(tmp_path: Path) -> None:
    lines = read(tmp_path / "in.jsonl", json.dumps(request("a")), url=CHAT)
    assert "all requests of this batch go to /v1/chat/completions" in lines[0].problem


def test_fields_for_all_give_way_to_a_requests_own(tmp_path: Path) -> None:
    texts = [json.dumps(request("a", max_tokens=3)), json.dumps(request("b"))]
    lines = read(tmp_path / "in.jsonl", "\n".join(texts), fields={"max_tokens": 9, "top_k": 1})
    assert [line.body["max_tokens"] for line in lines] == [3, 9]
    assert all(line.body["top_k"] == 1 for line in lines)


def test_each_line_of_a_plain_file_is_a_prompt(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbfone\r\n\n  \n two\ngr\xfcn\n"
    lines = read(tmp_path / "in.txt", data)
    assert [line.custom_id for line in lines] == ["line-1", "line-4", None]
    assert [line.body.get("messages") for line in lines[:2]] == [
        [{"role": "user", "content": text}] for text in ("one", " two")
    ]
    assert "it is not UTF-8" in lines[2].problem
    (plain,) = read(tmp_path / "in.txt", "one", url=TEXT)
    assert plain.body == {"prompt": "one"}


def test_a_column_of_a_table_has_the_prompts(tmp_path: Path) -> None:
    table = '\ufeffid,text\n1,"two\nlines, one cell"\n2,\n3\n4,last\n'
    lines = read(tmp_path / "in.csv", table, column="text", url=TEXT)
    assert [(line.custom_id, line.number) for line in lines] == [
        ("row-1", 3),
        (None, 4),
        (None, 5),
        ("row-4", 6),
    ]
    assert lines[0].body == {"prompt": "two\nlines, one cell"}
    assert problems(lines)[1:3] == ["text is empty", "text must be text, or a list of messages"]
    tabs = read(tmp_path / "in.tsv", "custom_id\ttext\nmine\tone, two\n", column="text", url=TEXT)
    assert [(line.custom_id, line.body) for line in tabs] == [("mine", {"prompt": "one, two"})]


def test_a_field_of_json_lines_has_the_prompts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"q": "one"}, {"q": messages, "custom_id": "mine"}, {"other": 1}, {"q": 3}]
    lines = read(tmp_path / "in.jsonl", "\n".join(map(json.dumps, rows)), column="q")
    assert [line.custom_id for line in lines] == ["line-1", "mine", None, None]
    assert lines[1].body == {"messages": messages}
    assert all("q must be text" in problem for problem in problems(lines)[2:])


@pytest.mark.parametrize(
    ("name", "how", "reason"),
    [
        ("in.csv", {}, "name the column"),
        ("in.txt", {"column": "x"}, "has one prompt per line"),
        ("in.txt", {"url": "/v1/rerank"}, "a plain prompt is not a request for /v1/rerank"),
        ("in.jsonl", {"url": "/v1/nothing"}, "there is no route '/v1/nothing'"),
    ],
)
def test_what_cannot_be_read_so_is_refused_before_a_line_is_read(
    tmp_path: Path, name: str, how: dict[str, str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        RequestFile(tmp_path / name, **how)


def test_a_column_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no column 'text'; it has 'id', 'prompt'"):
        read(tmp_path / "in.csv", "id,prompt\n1,x\n", column="text")


def test_the_digest_is_of_the_file_and_of_how_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("{}")
    ways: list[dict[str, Any]] = [{}, {"column": "a"}, {"url": CHAT}, {"fields": {"n": 1}}]
    digests = {RequestFile(path, **how).digest() for how in ways}
    assert len(digests) == 4
    assert RequestFile(path).digest() in digests
    path.write_text("{} ")
    assert RequestFile(path).digest() not in digests
