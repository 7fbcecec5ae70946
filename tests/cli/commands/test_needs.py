"""What a model needs in memory is one figure: in each command, in a server and in README."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.model.hub.short_names import SHORT_NAMES
from ridgeline.system.report import gb
from tests.engine.test_llm import write_model
from tests.real_models import real_model
from tests.serve.serving import serving

README = (Path(__file__).parents[3] / "README.md").read_text()
RIDGELINE = Path(sys.executable).parent / "ridgeline"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    path = folder / "models/o/n"
    path.parent.mkdir(parents=True)
    write_model(path)
    return folder


def printed(home: Path, *arguments: str) -> str:
    environ = os.environ | {"RIDGELINE_HOME": str(home), "HOME": str(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(RIDGELINE), *arguments], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_and_a_server_say_the_same(home: Path) -> None:
    path = home / "models/o/n"
    shown = json.loads(printed(home, "show", "o/n", "--json"))["needs"]
    (listed,) = json.loads(printed(home, "list", "--json"))["models"]
    plan = json.loads(printed(home, "plan", "o/n", "--on", "here", "--format", "json"))["memory"]
    with serving(path, {"threads": None}) as served:
        said = served.call("/v1/memory")[1]
    assert sum(shown["parts"].values()) == shown["bytes"]
    assert listed["needs"] == shown == said["needs"]
    assert plan["context_tokens"] == shown["context_tokens"]
    one = plan["per_device"]
    assert one["needed_bytes"] == shown["bytes"]
    *lines, margin = plan["lines"]
    assert sum(line["bytes"] for line in lines) == shown["bytes"] < one["total_bytes"]
    assert margin["name"].startswith("margin")
    figure = gb(shown["bytes"])
    for text, pattern in (
        (printed(home, "show", "o/n"), rf"^needs +{figure} for a text of "),
        (printed(home, "list"), rf"^o/n .*B +{figure} +ridgeline "),
        (printed(home, "plan", "o/n", "--on", "here"), rf"^  needs .* {figure} *$"),
        (printed(home, "pull", "o/n"), rf"^It needs {figure} for a text of "),
        (said["notes"][0], rf"^The model needs {figure} for a text of "),
    ):
        assert re.search(pattern, text, re.MULTILINE), text


def test_a_server_says_what_its_own_options_need(home: Path) -> None:
    path = home / "models/o/n"
    usual = json.loads(printed(home, "show", "o/n", "--json"))["needs"]
    options = {"max_model_len": 32, "max_num_batched_tokens": 64, "dtype": "f32", "threads": None}
    with serving(path, options) as served:
        said = served.call("/v1/memory")[1]["needs"]
    flags = "--context", "32", "--max-num-batched-tokens", "64", "--dtype", "f32"
    plan = json.loads(
        printed(home, "plan", "o/n", "--on", "here", *flags, "--format", "json"),
    )["memory"]
    assert said["context_tokens"] == 32
    assert said["bytes"] == plan["per_device"]["needed_bytes"] != usual["bytes"]


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_readme_says_what_is_known_of_a_short_name(name: str) -> None:
    (figure,) = re.findall(rf"^\| (.*) \| `{name}` \|", README, re.MULTILINE)
    assert figure == gb(SHORT_NAMES[name].needed_bytes)


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5-coder:0.5b", "all-minilm"])
def test_what_is_known_of_a_short_name_is_what_two_cores_need(name: str) -> None:
    real_model(name)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("the figures are of two cores, and this process may use one")
    command = f"import os; os.sched_setaffinity(0, {cores}); from ridgeline.cli.main import main; "
    done = subprocess.run(
        [sys.executable, "-c", command + "main()", "show", name, "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Processors differ in how much a thread works on at once.
    known = SHORT_NAMES[name].needed_bytes
    assert json.loads(done.stdout)["needs"]["bytes"] == pytest.approx(known, rel=0.05)
