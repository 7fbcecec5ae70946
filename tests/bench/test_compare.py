"""``ridgeline bench compare``: others' results under our names, and where they still differ."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.bench.compare import LATENCIES as NAMES
from ridgeline.bench.compare import (
    NOTES,
    Result,
    compare_rows,
    differences,
    read_results,
    unique_labels,
)
from ridgeline.bench.load.stats import DEFINITIONS, LATENCIES, Outcome, parse_limits, summarise
from tests.waiting import PATIENCE_S

DATA = Path(__file__).parents[1] / "data" / "results"


def results(tool: str) -> list[Result]:
    return read_results(json.loads((DATA / f"{tool}.json").read_text()), tool)


def own(path: Path) -> Path:
    """A result as ``bench serve`` prints it, block and all."""
    outcomes = [Outcome(i, None, 0.0, 2.0, [0.5, 2.0], 100, 0, 11) for i in range(4)]
    found = summarise(outcomes, parse_limits(["ttft:600"]))
    document = {"flags": {}, "asked": {}} | found | {"definitions": DEFINITIONS}
    path.write_text("==== Serving Benchmark Result ====\n" + json.dumps(document) + "\n")
    return path


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "ridgeline"), "bench", "compare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize(
    ("tool", "values"),
    [
        (
            "vllm",
            {
                "num_successful": 98, "num_failed": 2, "duration_s": 26,
                "total_input_tokens": 12544, "output_tokens_per_s": 376.9230769,
                "ttft_from_send_p50_ms": 55,
                "ttft_from_send_p99_ms": 140.25, "tpot_excl_first_mean_ms": 21,
                "itl_chunk_pooled_p50_ms": 19.75, "e2e_mean_ms": 2140.5,
            },
        ),
        (
            "guidellm",
            {
                "num_successful": 50, "num_failed": 4, "duration_s": 30,
                "request_throughput_per_s": 1.7, "output_tokens_per_s": 108,
                "total_input_tokens": 6400, "ttft_from_send_mean_ms": 70,
                "tpot_incl_first_mean_ms": 29.5, "tpot_excl_first_p95_ms": 36,
                "e2e_mean_ms": 1900, "e2e_p99_ms": 2600,
            },
        ),
        (
            "aiperf",
            {
                "num_successful": 90, "num_failed": 4, "duration_s": 25.714,
                "request_throughput_per_s": 3.5, "total_output_tokens": 9000,
                "ttft_from_send_p95_ms": 95, "tpot_excl_first_mean_ms": 20.25,
                "itl_chunk_pooled_mean_ms": 40.5, "e2e_p90_ms": 2300,
            },
        ),
        (
            "llmperf",
            {
                "num_successful": 78, "num_failed": 2, "request_throughput_per_s": 3.75,
                "output_tokens_per_s": 240, "ttft_from_send_p50_ms": 80,
                "tpot_incl_first_mean_ms": 30, "e2e_p95_ms": 2400,
            },
        ),
    ],
)  # fmt: skip
def test_others_words_become_ours(tool: str, values: dict[str, float]) -> None:
    found = results(tool)[0]
    assert found.tool == tool
    assert {name: found.values[name] for name in values} == pytest.approx(values)


def test_what_a_tool_does_not_measure_is_not_there() -> None:
    assert not any(name.startswith("tpot_excl_first") for name in results("llmperf")[0].values)
    assert not any(name.startswith("tpot_incl_first") for name in results("vllm")[0].values)
    assert "ttft_from_send_p95_ms" not in results("vllm")[0].values  # only what it was asked for
    assert "goodput_per_s" not in results("vllm")[0].values


def test_each_run_of_a_sweep_is_a_column() -> None:
    assert [r.label for r in results("guidellm")] == [
        "guidellm 1 constant 2",
        "guidellm 2 concurrent 8",
    ]
    rows = {row["measure"]: row for row in compare_rows(results("guidellm"))}
    assert rows["ttft_from_send_mean_ms"] == {
        "measure": "ttft_from_send_mean_ms",
        "guidellm 1 constant 2": 70,
        "guidellm 2 concurrent 8": 140,
    }


def test_older_files_are_read_too() -> None:
    vllm = json.loads((DATA / "vllm.json").read_text())
    del vllm["failed"]
    assert read_results(vllm, "v")[0].values["num_failed"] == 2
    guidellm = json.loads((DATA / "guidellm.json").read_text())
    run = guidellm["benchmarks"][0]
    run["request_totals"] = run["metrics"].pop("request_totals")
    run["scheduler"] = run.pop("config")
    found = read_results(guidellm, "g")[0]
    assert (found.values["num_successful"], found.label) == (50, "g 1 constant 2")
    aiperf = json.loads((DATA / "aiperf.json").read_text())
    del aiperf["error_request_count"]
    assert read_results(aiperf, "a")[0].values["num_failed"] == 4


def test_notes_are_of_the_measures_that_are_there() -> None:
    notes = differences([*results("vllm"), *results("llmperf")])
    assert [note.split(": ")[:2] for note in notes] == [
        ["vllm", "ttft_from_send"],
        ["vllm", "itl_chunk_pooled"],
        ["vllm", "total_output_tokens"],
        ["llmperf", "tpot_incl_first"],
        ["llmperf", "ttft_from_send"],
    ]
    assert differences([Result("x", "guidellm", {"num_failed": 1})]) == [
        f"guidellm: num_failed: {NOTES['guidellm']['num_failed']}"
    ]


def test_our_latencies_all_have_their_rows() -> None:
    assert set(NAMES) == set(LATENCIES)


def test_equal_labels_are_told_apart() -> None:
    assert unique_labels([Result("a", "vllm"), Result("a", "vllm")]) == ["a", "a (2)"]


# --- the command ---------------------------------------------------------------------------------


def test_ours_beside_vllms(tmp_path: Path) -> None:
    path, table = own(tmp_path / "ours.txt"), tmp_path / "both.md"
    done = compare(str(path), str(DATA / "vllm.json"), "--out", str(table))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[lines.index(["ttft_from_send,", "ms"]) + 1] == ["mean", "500", "61.50", "0.12"]
    assert lines[lines.index(["tpot_excl_first,", "ms"]) + 1] == ["mean", "150", "21", "0.14"]
    assert lines[lines.index(["tpot_incl_first,", "ms"]) + 1] == ["mean", "181.82", "-"]
    assert ["goodput_per_s", "2", "-"] in lines
    assert "What is not measured alike:" in done.stdout
    assert "vllm: ttft_from_send: with --max-concurrency" in done.stdout
    assert table.read_text().splitlines()[:2] == [
        "| measure | ours | vllm |",
        "|---|--:|--:|",
    ]
    assert max(map(len, done.stdout.split("What is not")[0].splitlines())) <= 80


def test_csv_markdown_and_json() -> None:
    files = [str(DATA / f"{tool}.json") for tool in ("aiperf", "guidellm", "llmperf")]
    rows = list(csv.DictReader(io.StringIO(compare(*files, "--format", "csv").stdout)))
    assert list(rows[0]) == [
        "measure", "aiperf", "guidellm 1 constant 2", "guidellm 2 concurrent 8", "llmperf",
    ]  # fmt: skip
    by_name = {row["measure"]: row for row in rows}
    assert by_name["tpot_excl_first_mean_ms"]["llmperf"] == ""
    assert float(by_name["tpot_incl_first_mean_ms"]["llmperf"]) == 30
    markdown = compare(*files, "--format", "markdown").stdout
    assert "- guidellm: tpot_excl_first: what it calls inter-token latency" in markdown
    found = json.loads(compare(*files, "--format", "json").stdout)
    assert [one["tool"] for one in found["results"]] == [
        "aiperf",
        "guidellm",
        "guidellm",
        "llmperf",
    ]
    assert len(found["differences"]) >= 6


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not a JSON document"),
        ("[1]", "not a JSON object"),
        ("{}", "not a known result. Expected the JSON of ridgeline bench serve"),
        ('{"hello": 1, "world": 2}', "it has hello, world"),
        ('{"benchmarks": []}', "has no benchmarks"),
        ('{"benchmarks": [{}]}', "looks like guidellm's result, but KeyError('metrics')"),
        ('{"request_latency": {"avg": 3}}', "looks like aiperf's result, but KeyError('unit')"),
        ('{"request_latency": {"avg": 3, "unit": "weeks"}}', "KeyError('weeks')"),
        ('{"completed": "x", "request_throughput": 1}', "looks like vllm's result, but TypeError"),
    ],
)
def test_what_is_no_result_is_named(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    done = compare(str(path))
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert f"{path}: " in done.stderr
    assert len(done.stderr.splitlines()) == 1
