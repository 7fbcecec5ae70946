"""pull, list, show, rm, clean: what people see, and what programs read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.files.tiny import CONFIG, gguf_metadata, gguf_weights, vocabulary, write_gguf


def ridgeline(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name[:3] not in ("HF_", "OLL")}
    environ |= {"RIDGELINE_HOME": str(home / "ridgeline"), "HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [str(Path(sys.executable).parent / "ridgeline"), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two models that we pulled, and one of LM Studio."""
    metadata = gguf_metadata(CONFIG, "llama") | vocabulary()
    for place in (
        "ridgeline/models/o/n/m-Q8_0.gguf",
        "ridgeline/models/o/n/m-Q4_0.gguf",
        ".lmstudio/models/o/other/x-Q8_0.gguf",
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        write_gguf(tmp_path / place, metadata, gguf_weights(CONFIG, "llama"))
    return tmp_path


def test_list_shows_everything_and_who_owns_it(home: Path) -> None:
    shown = ridgeline(home, "list").stdout
    path = home / "ridgeline/models/o/n/m-Q8_0.gguf"
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("o/n:Q8_0")]
    assert (row[0], row[-2:]) == ("o/n:Q8_0", ["ridgeline", str(path)])
    assert "lm studio" in shown
    assert "not here: smollm2 (98 MB, needs 435 MB of memory; SmolLM2" in shown
    assert ridgeline(home, "ls").stdout == ridgeline(home, "models").stdout == shown
    models = json.loads(ridgeline(home, "list", "--json").stdout)["models"]
    assert [(model["name"], model["owner"]) for model in models] == [
        ("o/n:Q4_0", "ridgeline"), ("o/n:Q8_0", "ridgeline"), ("o/other:Q8_0", "lm studio")
    ]  # fmt: skip
    assert all(Path(model["path"]).stat().st_size == model["size"] for model in models)


def test_a_damaged_manifest_is_said_and_hurts_nothing(home: Path) -> None:
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/m/1b"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{")
    done = ridgeline(home, "list")
    assert "o/n:Q8_0" in done.stdout
    assert done.stderr.startswith("ollama:m:1b: its manifest ")
    assert len(json.loads(ridgeline(home, "list", "--json").stdout)["problems"]) == 1


def test_show_says_what_a_model_is(home: Path) -> None:
    facts = json.loads(ridgeline(home, "show", "o/n:Q8_0", "--json").stdout)
    assert facts["path"].endswith("models/o/n/m-Q8_0.gguf")
    assert (facts["layers"], facts["vocabulary"]) == (2, CONFIG["vocab_size"])
    weights = gguf_weights(CONFIG, "llama")
    assert facts["parameters"] == sum(array.size for array in weights.values())
    assert sum(facts["formats"].values()) == len(weights)
    shown = ridgeline(home, "show", "o/n:Q8_0").stdout
    assert "kv heads" in shown
    assert "Q8_0" in shown


def test_several_files_of_a_repository_and_the_reason_for_one(home: Path) -> None:
    done = ridgeline(home, "show", "o/n", "--json")
    assert json.loads(done.stdout)["path"].endswith(("Q8_0.gguf", "Q4_0.gguf"))
    assert "is the best of 2 for" in done.stderr


def test_rm_removes_what_was_pulled_and_nothing_else(home: Path) -> None:
    refused = ridgeline(home, "rm", "o/n")
    assert refused.returncode == 1
    assert refused.stderr == "ridgeline: o/n means o/n:Q4_0, o/n:Q8_0: name one\n"
    other = ridgeline(home, "rm", "o/other:Q8_0")
    assert "belongs to lm studio: remove it there" in other.stderr
    assert "'nothing' is not here" in ridgeline(home, "rm", "nothing").stderr
    done = ridgeline(home, "rm", "o/n:Q4_0", "o/n:Q8_0", "--json")
    assert json.loads(done.stdout)["removed"] == ["o/n:Q4_0", "o/n:Q8_0"]
    assert not (home / "ridgeline/models/o").exists()
    assert (home / ".lmstudio/models/o/other/x-Q8_0.gguf").exists()


@pytest.mark.parametrize(
    "name", ["hf.co/o/n:Q4_0", "O/N:q4_0", "o/n:m-Q4_0.gguf", "https://huggingface.co/o/n:Q4_0"]
)
def test_rm_takes_the_names_that_run_takes(name: str, home: Path) -> None:
    done = ridgeline(home, "rm", name, "--json")
    assert json.loads(done.stdout)["removed"] == ["o/n:Q4_0"], done.stderr
    assert [file.name for file in (home / "ridgeline").rglob("*.gguf")] == ["m-Q8_0.gguf"]


def test_two_files_of_one_quantisation_are_told_apart_by_their_files(home: Path) -> None:
    folder = home / "ridgeline/models/o/n"
    (folder / "m-Q8_0.gguf").rename(folder / "a-Q4_0.gguf")
    listed = json.loads(ridgeline(home, "list", "--json").stdout)["models"]
    names = [model["name"] for model in listed if model["owner"] == "ridgeline"]
    assert sorted(names) == ["o/n:a-Q4_0.gguf", "o/n:m-Q4_0.gguf"]
    refused = ridgeline(home, "rm", "o/n:Q4_0")
    assert refused.stderr.startswith("ridgeline: o/n:Q4_0 means o/n:")
    assert all(name in refused.stderr for name in names)
    assert ridgeline(home, "show", names[0], "--json").returncode == 0
    assert ridgeline(home, "rm", "o/n:a-Q4_0.gguf").stdout.startswith("removed o/n:a-Q4_0.gguf:")
    assert ridgeline(home, "rm", "o/n:Q4_0").stdout.startswith("removed o/n:Q4_0:")


def test_a_model_of_another_program_says_where_it_was_found(home: Path) -> None:
    path = home / ".lmstudio/models/o/other/x-Q8_0.gguf"
    done = ridgeline(home, "show", "o/other")
    assert done.stderr == f"o/other: {path}\n"
    assert ridgeline(home, "show", str(path)).stderr == ""


def test_nothing_is_cut_where_a_program_reads(home: Path) -> None:
    deep = home / "/".join(["a-folder-with-a-long-name[b]"] * 8)
    path = deep / "ridgeline/models/o/n/m-Q8_0.gguf"
    path.parent.mkdir(parents=True)
    (home / "ridgeline/models/o/n/m-Q8_0.gguf").rename(path)
    for command in (("show", "o/n"), ("list",), ("doctor",)):
        shown = ridgeline(deep, *command).stdout
        assert str(path if command != ("doctor",) else path.parents[2]) in shown
        assert "…" not in shown
        environ = os.environ | {"RIDGELINE_HOME": str(deep / "ridgeline"), "COLUMNS": "40"}
        folded = subprocess.run(
            [Path(sys.executable).parent / "ridgeline", *command],
            env=environ, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert "…" not in folded


def test_clean_keeps_models_unless_told(home: Path) -> None:
    ours = home / "ridgeline"
    for place in ("kernels/a.o", "packed/a.weights", "models/.x.gguf.partial"):
        (ours / place).parent.mkdir(exist_ok=True)
        (ours / place).write_bytes(b"x" * 1000)
    assert json.loads(ridgeline(home, "clean", "--json").stdout)["freed_bytes"] == 3000
    assert sorted(path.name for path in ours.iterdir()) == ["models"]
    assert (ours / "models/o/n/m-Q8_0.gguf").exists()
    assert "freed in" in ridgeline(home, "clean", "--models").stdout
    assert list(ours.iterdir()) == []


def test_pull_of_what_is_here_says_where(home: Path) -> None:
    done = ridgeline(home, "pull", "o/n:Q8_0")
    assert done.stdout.startswith("o/n:Q8_0 is at ")
    assert done.stderr == "Next: ridgeline run o/n:Q8_0\n"
    missing = ridgeline(home, "pull", "o/missing")
    assert missing.returncode == 1
    assert "HF_HUB_OFFLINE forbids" in missing.stderr
