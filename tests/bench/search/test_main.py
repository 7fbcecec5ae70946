"""``ridgeline bench search`` against real HTTP servers whose highest load is known."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.images.test_main import answer, png
from tests.bench.scripted import JSON, serving
from tests.bench.search.queueing_server import seats

ROOT = Path(__file__).parents[3]
SHORT = ("--prompt-words", "4", "--max-tokens", "2", "--seed", "3")


def bench_search(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "ridgeline"), "bench", "search", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.full
def test_the_highest_rate_of_a_server_whose_capacity_is_known(tmp_path: Path) -> None:
    """It takes 40 requests a second; at that, or soon below, they wait for longer than 250 ms.

    A busy machine takes fewer. So what held and what failed is asked of the trials themselves.
    """
    curve = tmp_path / "curve.svg"
    with serving(seats(4, 0.1)) as server:
        done = bench_search(
            *("--base-url", server.url, "--slo", "ttft:p90:300", "--slo", "e2el:p90:400"),
            *("--num-prompts", "60", "--out", str(curve), *SHORT),
        )
    assert done.returncode == 0, done.stderr
    found = document(done)
    answer, trials = found["answer"], found["trials"]
    assert answer["low"] in [trial["load"] for trial in trials if trial["verdict"] == "held"]
    assert answer["high"] in [trial["load"] for trial in trials if trial["verdict"] != "held"]
    assert 0 < answer["low"] < answer["high"] < 80  # short trials flatter, but not twice
    assert 0 < answer["likely"] < 80
    assert answer["high"] <= 1.05 * answer["low"] or not answer["is_confirmed"]
    assert found["flags"]["model"] == "scripted"
    assert {trial["verdict"] == "held" for trial in trials} == {True, False}
    assert trials[0]["slos"][0]["num"] > 0
    assert len({trial["seed"] for trial in trials}) == len(trials)  # no cache has seen its prompts
    assert "holds up to" in done.stdout
    assert curve.read_text().startswith("<svg")
    assert "Goodput within ttft:p90:300 and e2el:p90:400" in curve.read_text()


def test_it_starts_the_server_and_ends_it(tmp_path: Path) -> None:
    """Of n requests at a time on three seats, each taken for 0.1 s, one takes n / 30 s."""
    table = tmp_path / "trials.csv"
    seats = f"3 0.1000{os.getpid()}"  # of this run: others may run on this machine, too
    done = bench_search(
        *("--serve", f"{sys.executable} -m tests.bench.search.queueing_server {{port}} {seats}"),
        *("--slo", "e2el:p90:250", "--over", "concurrency", "--num-prompts", "40"),
        *("--num-warmups", "2", "--out", str(table), *SHORT),
    )
    assert done.returncode == 0, done.stderr
    answer = document(done)["answer"]
    assert 0 < answer["low"] <= 8  # 9 at a time need 300 ms; a busy machine holds less
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(document(done)["trials"])
    assert rows[0].keys() >= {"trial", "load", "goodput_per_s", "e2el:p90:250 (ms)", "verdict"}
    assert all(float(row["load"]).is_integer() for row in rows)
    processes = subprocess.run(["ps", "axo", "args"], capture_output=True, text=True, check=True)
    assert seats not in processes.stdout


@pytest.mark.full
def test_the_most_images_at_a_time(tmp_path: Path) -> None:
    """Of n at a time on four seats, each taken for 0.1 s, one takes n / 40 s."""
    free, picture = threading.Semaphore(4), png(32, 16)

    def script(number: int, body: JSON) -> Iterator[Any]:
        with free:
            time.sleep(0.1)
        yield answer(picture)

    with serving(script) as server:
        done = bench_search(
            *("--base-url", server.url, "--images", "32x16", "--slo", "e2el:p90:280"),
            *("--over", "concurrency", "--num-prompts", "20", "--num-warmups", "4", "--seed", "5"),
            *("--extra-body", '{"num_inference_steps": 4}'),
        )
    assert done.returncode == 0, done.stderr
    found = document(done)
    assert 3 <= found["answer"]["low"] <= 12  # 11 at a time need 275 ms, 12 need 300
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
    with serving(seats(2, 0.06)) as server:
        done = bench_search(
            *("--base-url", server.url, "--slo", "ttft:p90:10", "--over", "concurrency"),
            *("--num-prompts", "25", *SHORT),
        )
    assert done.returncode == 1
    answer = document(done)["answer"]
    assert (answer["low"], answer["high"]) == (None, 1)
    metric, percentile, limit_ms = answer["nearest"][0].split(":")
    assert (metric, percentile) == ("ttft", "p90")
    assert 30 <= float(limit_ms) < 400
    assert f"cannot be met: not even at 1 at a time. The nearest that can: --slo {metric}" in (
        done.stdout
    )


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
