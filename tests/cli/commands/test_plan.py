"""``ridgeline plan`` as people use it: a process, its outputs, its status."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ridgeline.cli.main import app
from ridgeline.engine.setup.home import stores
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.memory.published_formula import published_formula
from tests.cli.test_main import RIDGELINE, ridgeline
from tests.model.cost.published_configs import PUBLISHED
from tests.waiting import PATIENCE_S, connected, started


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("phi") / "phi-4.json"
    path.write_text(json.dumps(PUBLISHED["phi-4"]["config"]))
    return str(path)


def test_the_table_fits_a_terminal_and_ends_with_the_answer(config: str, tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    done = ridgeline(
        "plan", config, "--on", "a100-80-sxm", "--context", "16384", "--compare-published",
        "--out", str(picture), COLUMNS="80",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert lines[0].startswith("phi-4  14.66 B parameters; gqa; bf16")
    assert " ".join(lines[-2:]).split(" with ")[0] == "fits on one NVIDIA A100 80GB SXM4"
    assert "13 sequences of 16,384 tokens" in " ".join(" ".join(lines[-2:]).split())
    for how in ("computed", "assumed", "it errs"):
        assert how in done.stdout
    assert "2.5 times too low" in done.stdout
    formula = published_formula(read_model_spec(config, stores()), 16384, 1)
    assert formula.plain_total_gb > formula.total_gb
    assert f"without flash attention {formula.plain_total_gb:.2f} GB" in (
        " ".join(done.stdout.split())
    )
    ElementTree.fromstring(picture.read_text())
    assert str(picture) in done.stderr


def test_over_all_devices_those_that_are_too_small_are_named(config: str) -> None:
    done = ridgeline("plan", config, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert "It does not fit on: t4" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("h100-sxm ")]
    assert rows[0][1] == "1"


def test_programs_get_json_csv_and_markdown(config: str) -> None:
    done = ridgeline("plan", config, "--on", "l4,h100-sxm", "--format", "json")
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["memory"]["device"] == "l4"  # two of them fit, and are less than one H100
    assert [row["tp"] for row in document["devices"]] == [2, 1]

    done = ridgeline("plan", config, "--on", "l4,h100-sxm", "--format", "csv")
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert {row["device"] for row in rows} == {"l4", "h100-sxm"}
    of_h100 = [int(row["bytes"]) for row in rows if row["device"] == "h100-sxm"]
    assert sum(of_h100) < 81559 << 20

    done = ridgeline("plan", config, "--on", "l4,h100-sxm", "--format", "markdown")
    assert done.stdout.startswith("# Memory of phi-4\n")
    assert "| weights, MLP |" in done.stdout
    assert "| h100-sxm | 1 |" in done.stdout

    done = ridgeline("plan", config, "--on", "l4", "--compare-published", "--format", "markdown")
    formula = published_formula(read_model_spec(config, stores()), 4096, 1)
    said = f"A well-known formula says {formula.total_gb:.2f} GB: "
    plain = f"without flash attention {formula.plain_total_gb:.2f} GB"
    assert any(said in line and plain in line for line in done.stdout.splitlines())


def test_a_context_without_an_end_is_shown_as_one(tmp_path: Path) -> None:
    path = tmp_path / "mamba.json"
    path.write_text(json.dumps(PUBLISHED["mamba-2.8b"]["config"]))
    for form in ("table", "markdown"):
        done = ridgeline("plan", str(path), "--on", "l4,h100-sxm", "--format", form)
        assert done.returncode == 0, done.stderr
        assert "or one sequence of any length" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "model"),
        (["--on", "l5"], 1, "did you mean l4"),
        (["--context", "0"], 2, "--context is 0"),
        (["--engine", "tgi"], 2, "--engine is 'tgi'"),
        (["--dtype", "fp8", "--weights-memory", "1GiB"], 2, "both say how large"),
        (["--out", "picture.png"], 2, "ends in .svg"),
        (["--format", "xml"], 2, "markdown"),
        (["--tensor-parallel-size", "7", "--on", "l4"], 1, "7 does not divide 40 heads"),
    ],
)
def test_errors_are_one_line_and_have_a_status(
    arguments: list[str], status: int, words: str, config: str
) -> None:
    done = ridgeline("plan", *([config] if arguments else []), *arguments, COLUMNS="200")
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_the_page_is_served_without_a_model(config: str) -> None:
    """``--web``: the page, its two routes, and a clean end."""
    own = ridgeline("plan", config, "--on", "l4", "--format", "json").stdout
    command = [str(RIDGELINE), "plan", "--web", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, **pipes) as process:
        assert process.stdout is not None
        found = re.search(r"http://127.0.0.1:(\d+)/plan", process.stdout.readline())
        assert found
        port = int(found[1])

        def call(path: str, body: str | None = None) -> tuple[int, str]:
            headers = {"content-type": "application/json"} if body else {}
            with connected(port) as connection:
                connection.request("POST" if body else "GET", path, body, headers)
                response = connection.getresponse()
                return response.status, response.read().decode()

        assert "<title>Plan" in call("/plan")[1]
        assert call("/")[0] == 307
        choices = json.loads(call("/v1/plan/devices")[1])
        assert (choices["models"], choices["chat"]) == ([], False)
        asked = {"model": json.loads(Path(config).read_text()), "on": "l4"}
        status, text = call("/v1/plan", json.dumps(asked))
        assert status == 200
        assert json.loads(text)["memory"] == json.loads(own)["memory"]
        assert call("/v1/plan", json.dumps({"model": config}))[0] == 404, "it reads no files"
        assert call("/v1/models")[0] == 404
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    assert "name a model" in ridgeline("plan").stderr


def test_a_plan_for_a_load_answers_in_a_sentence_and_draws(config: str, tmp_path: Path) -> None:
    picture = tmp_path / "choices.svg"
    done = ridgeline(
        "plan", config, "--on", "a100-80-sxm", "--prompt-tokens", "300", "--new-tokens", "40",
        "--request-rate", "2", "--slo", "ttft:p95:1500", "--slo", "tpot:mean:80", "--spot",
        "--out", str(picture), COLUMNS="80",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "2 requests/s; prompts of 300 tokens, answers of 40, in the mean" in lines
    answer = " ".join(" ".join(lines[-3:]).split())
    assert re.search(r"1 x a100-80-sxm holds it for \d\.\d\d USD an hour \(\d+% busy; ", answer)
    assert "on spot machines" in done.stdout
    ElementTree.fromstring(picture.read_text())


def test_where_nothing_can_be_drawn_the_answer_is_printed_all_the_same(
    config: str, tmp_path: Path
) -> None:
    picture = tmp_path / "choices.svg"
    done = ridgeline(
        "plan", config, "--on", "a100-80-sxm", "--prompt-tokens", "300", "--new-tokens", "40",
        "--request-rate", "1000", "--replicas", "1", "--out", str(picture), COLUMNS="160",
    )  # fmt: skip
    assert "1,000 requests/s; prompts of 300 tokens" in done.stdout
    assert re.search(r" hold up to [\d.]+ requests/s; you ask for 1,000$", done.stdout.rstrip())
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("nothing to draw: no choice can serve the load")
    assert not picture.exists()


def test_a_load_that_makes_no_sense_is_one_line(config: str, tmp_path: Path) -> None:
    load = ("--prompt-tokens", "300", "--new-tokens", "40", "--on", "l40s")
    done = ridgeline("plan", config, *load, "--slo", "ttft:p97:100")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "'p97' is not one of p50, p90, p95, p99, mean" in done.stderr
    prices = tmp_path / "mine.csv"
    prices.write_text(
        "device,provider,region,kind,usd_per_hour,date,source,confidence\n"
        "l40s,me,,on_demand,1.0,tomorrow,a quote,high\n"
    )
    done = ridgeline("plan", config, *load, "--prices", str(prices))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "'tomorrow'" in done.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--port", "9000"), "give --web"),
        (("--web", "--context", "100"), "beside --web give no others"),
        (("--web", "--list-devices"), "beside --web give no others"),
        (("--list-devices", "--format", "json"), "give nothing else"),
        (("--list-devices", "config.json"), "give nothing else"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(flags: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(app, ["plan", *flags])
    assert done.exit_code
    assert reason in str(done.exception)
