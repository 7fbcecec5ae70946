"""``ridgeline batch``: killed and gone on with, it answers as in one run; errors come early."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.waiting import PATIENCE_S

RIDGELINE = Path(sys.executable).parent / "ridgeline"
ENGINE = ["--kv-cache-memory", "1MiB", "--threads", "1", "--max-num-seqs", "4"]


def command(*arguments: object) -> list[str]:
    return [str(RIDGELINE), "batch", *map(str, arguments), *ENGINE]


def batch(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def write_requests(path: Path, model: Path, num: int, max_tokens: int = 40) -> None:  # noqa: F811
    """Write requests of three routes, most of them with chance in them, and lines that are none."""
    lines: list[str] = []
    for i in range(num):
        url, content = "/v1/completions", {"prompt": f"Once {i}", "max_tokens": max_tokens}
        if i % 7 == 3:
            messages = [{"role": "user", "content": f"Hello {i}"}]
            url, content = "/v1/chat/completions", {"messages": messages, "max_tokens": 9}
        if i % 7 == 5:
            url, content = "/v1/embeddings", {"input": f"text {i}"}
        if i % 11 == 10:
            content["top_k"] = "many"
        body = {"model": str(model), **content}
        lines.append(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body}))
        if i % 13 == 12:
            lines.append("nonsense")
    path.write_text("\n".join(lines))


def plain(path: Path) -> list[dict[str, Any]]:
    """Return what a file says, without when it was computed and what the cache had."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        body = (line["response"] or {}).get("body", {})
        body.pop("created", None)
        body.get("usage", {}).pop("prompt_tokens_details", None)
    return lines


KILLED = """
import os, signal, sys
from ridgeline.serve.batch_files.run import BatchProgress
from ridgeline.cli.main import main
num, write = int(sys.argv.pop(1)), BatchProgress.write
def write_and_end(progress, *arguments, **options):
    write(progress, *arguments, **options)
    if len(progress) == num:
        os.kill(os.getpid(), signal.SIGKILL)
BatchProgress.write = write_and_end
main()
"""


def kill_after(num: int, *arguments: object) -> None:
    """Begin or go on, in a process that is killed as soon as so many answers are kept."""
    program = [sys.executable, "-c", KILLED, str(num)]
    done = subprocess.run(
        [*program, *command(*arguments)[1:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    "num", [60, pytest.param(10_000, marks=pytest.mark.full)], ids=["60", "10000"]
)
def test_a_batch_that_is_killed_three_times_answers_as_in_one_run(
    model: Path,  # noqa: F811
    tmp_path: Path,
    num: int,
) -> None:
    requests, once, often = (tmp_path / name for name in ("in.jsonl", "once.jsonl", "often.jsonl"))
    write_requests(requests, model, num)
    journal = tmp_path / "often.jsonl.part"
    for part in (1, 2, 3):
        kill_after(num * part // 4, requests, "-o", often)
        assert not often.exists()
    at_last = batch(requests, "-o", often)
    assert at_last.returncode == 0, at_last.stderr
    assert "resuming: " in at_last.stderr
    assert batch(requests, "-o", once).returncode == 0
    assert plain(often) == plain(once)
    errors = plain(tmp_path / "often.errors.jsonl")
    assert errors == plain(tmp_path / "once.errors.jsonl")
    ids = [line["custom_id"] for line in (*plain(often), *errors) if line["custom_id"]]
    assert sorted(ids) == sorted(f"r{i}" for i in range(num))  # none lost, none doubled
    assert [line["custom_id"] for line in plain(often)] == sorted(
        (line["custom_id"] for line in plain(often)), key=lambda name: int(name[1:])
    )
    assert {line["error"]["line"] for line in errors if line["error"]} == {
        14 + 14 * i for i in range(num // 13)
    }
    assert not journal.exists()
    assert not Path(f"{journal}.lock").exists()


def test_prompts_of_a_table_are_answered_as_they_end(model: Path, tmp_path: Path) -> None:  # noqa: F811
    table, output = tmp_path / "in.csv", tmp_path / "out.jsonl"
    table.write_text("name,text\n" + "".join(f"{i},word {i}\n" for i in range(9)) + "x,\n")
    done = batch(
        table, "-o", output, "--column", "text", "--model", model, "--as-completed",
        "--body", '{"max_tokens": 3, "model": "gpt-4o", "user": "me"}',
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = plain(output)
    assert {line["custom_id"] for line in lines} == {f"row-{i}" for i in range(1, 10)}
    assert all(line["response"]["body"]["model"] == str(model) for line in lines)
    assert all(line["response"]["body"]["usage"]["completion_tokens"] == 3 for line in lines)
    (error,) = plain(tmp_path / "out.errors.jsonl")
    assert error["error"] == {"code": "invalid_line", "message": "text is empty", "line": 11}
    assert f"9 of 10 lines are answered in {output}" in done.stderr
    assert f"1 are not: {tmp_path / 'out.errors.jsonl'} says why" in done.stderr


def test_a_model_that_is_not_the_batchs_answers_nothing(model: Path, tmp_path: Path) -> None:  # noqa: F811
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"model": name, "prompt": "a", "max_tokens": 2} for name in (str(model), "other")]
    requests.write_text(
        "\n".join(
            json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": body})
            for i, body in enumerate(bodies)
        )
    )
    assert batch(requests, "-o", output).returncode == 0
    (error,) = plain(tmp_path / "out.errors.jsonl")
    assert error["response"]["status_code"] == 404
    assert "there is no model 'other' here" in error["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("content", "arguments", "reason"),
    [
        (None, [], "in.jsonl does not exist"),
        ("", [], "in.jsonl has no requests"),
        ("nonsense", [], "no line is a request; line 1: it is not JSON"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}', [], "give --model"),
        ("{}", ["--body", "{"], "--body is '{': it is not JSON"),
        ("{}", ["--body", "[]"], "it must be a JSON object"),
        ("{}", ["--url", "/v1/x"], "there is no route '/v1/x'"),
        ("{}", ["-o", "nowhere/out.jsonl"], "there is no folder"),
        ("{}", ["-o", "in.jsonl"], "must be three different files"),
        ("{}", ["-o", "there.jsonl"], "there.jsonl already exists"),
    ],
)
def test_what_cannot_be_is_said_before_a_model_is_loaded(
    tmp_path: Path, content: str | None, arguments: list[str], reason: str
) -> None:
    if content is not None:
        (tmp_path / "in.jsonl").write_text(content)
    (tmp_path / "there.jsonl").write_text("{}")
    arguments = ["-o", "out.jsonl", *arguments]
    done = subprocess.run(
        command("in.jsonl", *arguments),
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("*.part*"))
