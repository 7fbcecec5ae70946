"""``ridgeline bench search``: against servers whose highest load is known, in virtual time, and
against real HTTP servers."""

from __future__ import annotations

import csv
import heapq
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ridgeline.cli.main import app
from tests.bench.script_server import JSON, Script, Server, serving
from tests.bench.search.queueing_server import two_tokens
from tests.bench.test_images import answer, png
from tests.bench.virtual_time import answering
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
SHORT = ("--prompt-words", "4", "--max-tokens", "2", "--seed", "3")


def bench_search(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "ridgeline"), "bench", "search", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=ROOT
    )


def document(done: subprocess.CompletedProcess[str] | Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def in_virtual_time(script: Script, *arguments: str) -> tuple[Result, Server]:
    """Search in this process against a script, whose latencies are exactly what it says."""
    with answering(script) as server:
        flags = ("--base-url", server.url, "--model", "scripted", *arguments)
        return CliRunner().invoke(app, ["bench", "search", *flags]), server


def waits(num: int, seconds: float) -> Callable[[], float]:
    """Return what says how long who comes now waits for a seat, each of which is so long taken."""
    free_s = [0.0] * num

    def wait_s() -> float:
        now_s = time.perf_counter()
        begin_s = max(now_s, heapq.heappop(free_s))
        heapq.heappush(free_s, begin_s + seconds)
        return begin_s - now_s

    return wait_s


def queue(num: int, seconds: float) -> Script:
    """Answer as ``seats`` does, in virtual time."""
    wait_s = waits(num, seconds)

    def script(number: int, body: JSON) -> Iterator[Any]:
        yield wait_s()
        yield from two_tokens(seconds)

    return script


def test_the_highest_rate_of_a_server_whose_capacity_is_known(tmp_path: Path) -> None:
    """It takes 40 requests a second; at that, or soon below, they wait for longer than 250 ms."""
    curve = tmp_path / "curve.svg"
    done, _ = in_virtual_time(
        queue(4, 0.1), "--slo", "ttft:p90:300", "--slo", "e2el:p90:400",
        *("--num-prompts", "60", "--out", str(curve), *SHORT),
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = document(done)
    answer, trials = found["answer"], found["trials"]
    assert answer["low"] in [trial["load"] for trial in trials if trial["verdict"] == "held"]
    assert answer["high"] in [trial["load"] for trial in trials if trial["verdict"] != "held"]
    assert 30 < answer["low"] < answer["high"] < 40
    assert 30 < answer["likely"] < 40
    assert answer["high"] <= 1.05 * answer["low"] or not answer["is_confirmed"]
    assert {trial["verdict"] == "held" for trial in trials} == {True, False}
    assert trials[0]["slos"][0]["num"] > 0
    assert len({trial["seed"] for trial in trials}) == len(trials)  # no cache has seen its prompts
    assert "holds up to" in done.stdout
    assert curve.read_text().startswith("<svg")
    assert "Goodput within ttft:p90:300 and e2el:p90:400" in curve.read_text()


def test_it_starts_the_server_and_ends_it(tmp_path: Path) -> None:
    """How much that takes is not asked here: it goes by the machine. Every load holds."""
    table = tmp_path / "trials.csv"
    seats = f"3 0.0100{os.getpid()}"  # of this run: others may run on this machine, too
    done = bench_search(
        *("--serve", f"{sys.executable} -m tests.bench.search.queueing_server {{port}} {seats}"),
        *("--slo", "e2el:p90:60000", "--over", "concurrency", "--num-prompts", "40"),
        *("--num-warmups", "2", "--max-trials", "3", "--out", str(table), *SHORT),
    )
    assert done.returncode == 0, done.stderr
    found = document(done)
    assert found["flags"]["model"] == "scripted"  # the first that it lists
    loads = [trial["load"] for trial in found["trials"]]
    assert (found["answer"]["low"], found["answer"]["high"]) == (max(loads), None)
    assert len(loads) == 3
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(loads)
    assert rows[0].keys() >= {"trial", "load", "goodput_per_s", "e2el:p90:60000 (ms)", "verdict"}
    assert all(float(row["load"]).is_integer() for row in rows)
    processes = subprocess.run(["ps", "axo", "args"], capture_output=True, text=True, check=True)
    assert seats not in processes.stdout


def test_the_most_images_at_a_time() -> None:
    """On four seats, each taken for 0.1 s, 8 at a time take 0.2 s; of 9 some take 0.3 s."""
    picture, wait_s = png(32, 16), waits(4, 0.1)

    def script(number: int, body: JSON) -> Iterator[Any]:
        yield wait_s() + 0.1
        yield answer(picture)

    done, server = in_virtual_time(
        script, "--images", "32x16", "--slo", "e2el:p90:280", "--over", "concurrency",
        *("--num-prompts", "20", "--num-warmups", "4", "--seed", "5"),
        *("--extra-body", '{"num_inference_steps": 4}'),
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = document(done)
    assert (found["answer"]["low"], found["answer"]["high"]) == (8, 9)
    assert found["trials"][0]["measured"]["num_successful"] > 0
    assert set(server.paths) == {"/v1/images/generations"}
    assert {body["size"] for body in server.bodies} == {"32x16"}
    assert {body["num_inference_steps"] for body in server.bodies} == {4}
    assert len({body["seed"] for body in server.bodies}) > 40


def test_broken_images_meet_no_service_level() -> None:
    def script(number: int, body: JSON) -> Iterator[Any]:
        yield answer(png(8, 8) if number < 4 else png(8, 8)[:-20])

    with serving(script) as server:
        done = bench_search(
            *("--base-url", server.url, "--images", "8x8", "--slo", "e2el:p90:5000"),
            *("--over", "concurrency", "--num-prompts", "20", "--num-warmups", "2", "--seed", "5"),
        )
    assert done.returncode == 1
    found = document(done)["answer"]
    assert found["low"] is None
    assert "Too many requests fail there: 0 of" in found["text"]


def test_what_cannot_be_met_says_what_can() -> None:
    done, _ = in_virtual_time(
        queue(2, 0.06), "--slo", "ttft:p90:10", "--over", "concurrency", "--num-prompts", "25",
        *SHORT,
    )  # fmt: skip
    assert done.exit_code == 1
    answer = document(done)["answer"]
    assert (answer["low"], answer["high"]) == (None, 1)
    assert answer["nearest"] == ["ttft:p90:30"]
    nearest = "The nearest that can: --slo ttft:p90:30"
    assert f"cannot be met: not even at 1 at a time. {nearest}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--base-url", "http://127.0.0.1:9"], 2, "give a latency limit"),
        (["--slo", "ttft:p95:9"], 2, "name the server"),
        (["--slo", "ttft:p95:9", "--images", "8x8"], 2, "an image comes in one piece"),
        (["--slo", "e2el:p95:9", "--images", "8"], 2, "--size 8 is not like 1024x1024"),
        (
            ["--slo", "e2el:p95:9", "--images", "8x8", "--top-k", "4", "--base-url", "http://x"],
            1,
            "--top-k is for text",
        ),
        (["--slo", "ttft:p95:9", "--base-url", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9"),
        (["--slo", "ttft:p95:9", "--serve", "false"], 1, "has no {port}"),
        (
            ["--slo", "ttft:p95:9", "--serve", "sh -c 'echo no memory; exit 3; {port}'"],
            1,
            "ended with status 3; it last said: no memory",
        ),
        (["--slo", "ttft:p95:9", "--serve", "no-such-command {port}"], 1, "no-such-command"),
        (
            ["--slo", "ttft:p95:9", "--serve", "sleep 60 {port}", "--serve-timeout-s", "0.5"],
            1,
            "is not ready after 0.5 s",
        ),
    ],
)
def test_errors_are_short(arguments: list[str], status: int, words: str) -> None:
    done = bench_search(*arguments)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
