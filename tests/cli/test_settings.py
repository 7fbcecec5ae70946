"""Flags from the command line, the environment and a file; what is in force, and from where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ridgeline.cli.main import app
from ridgeline.cli.settings import name_variables
from tests.cli.test_help import commands


def ridgeline(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("RIDGELINE_")}
    command = [str(Path(sys.executable).parent / "ridgeline"), *arguments]
    return subprocess.run(command, env=base | environ, capture_output=True, text=True, check=False)


def in_force(*arguments: str, **environ: str) -> dict[str, dict[str, object]]:
    done = ridgeline("config", *arguments, "--json", **environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, object]] = json.loads(done.stdout)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ridgeline.toml"
    path.write_text(
        """
        max-model-len = 1024
        threads = 2

        [serve]
        port = 9000
        threads = 1
        cors_origin = ["https://a.example", "https://b.example"]
        log-content = true

        [bench.offline]
        new-tokens = 16
        """
    )
    return path


def test_defaults(file: Path) -> None:
    found = in_force()
    assert found["port"] == {"value": 8000, "from": "default"}
    assert found["api_key"]["value"] in (None, [])


def test_a_flag_s_variable_is_its_spelling() -> None:
    root = typer.main.get_command(app)
    name_variables(root)
    for path, command in commands(root):
        for flag in command.params:
            if flag.param_type_name != "option" or not flag.envvar or flag.name == "api_key":
                continue  # a client's key has a name that others use too
            spelled = [one[2:].replace("-", "_") for one in flag.opts if one.startswith("--")]
            assert flag.envvar in [f"RIDGELINE_{name.upper()}" for name in spelled], path


def test_the_help_names_the_file() -> None:
    assert "--config FILE" in ridgeline("--help").stdout


def test_a_table_counts_more_than_the_top_of_the_file(file: Path) -> None:
    found = in_force("serve", "--config", str(file))
    assert found["port"] == {"value": 9000, "from": "config file"}
    assert found["threads"] == {"value": 1, "from": "config file"}
    assert found["max_model_len"] == {"value": 1024, "from": "config file"}
    assert found["cors_origin"]["value"] == ["https://a.example", "https://b.example"]
    assert found["log_content"]["value"] is True
    assert in_force("run", f"--config={file}")["threads"]["value"] == 2
    bench = in_force("bench", "offline", RIDGELINE_CONFIG=str(file))
    assert (bench["new_tokens"]["value"], bench["threads"]["value"]) == (16, 2)


def test_the_environment_counts_more_than_the_file(file: Path) -> None:
    environ = {
        "RIDGELINE_PORT": "9001",
        "RIDGELINE_CORS_ORIGIN": "https://c.example https://d.example",
    }
    found = in_force("--config", str(file), **environ)
    assert found["port"] == {"value": 9001, "from": "RIDGELINE_PORT"}
    assert found["cors_origin"]["value"] == ["https://c.example", "https://d.example"]
    assert found["threads"]["from"] == "config file"


def test_the_command_line_counts_most(file: Path, tmp_path: Path) -> None:
    """Seen in what a command refuses, before it does anything."""
    damaged = tmp_path / "x.gguf"
    damaged.write_bytes(b"GGUF")
    base = ("run", str(damaged), "x", "--config", str(file))
    from_file = file.with_name("wrong.toml")
    from_file.write_text("block-size = -1\n")
    wrong = ridgeline("run", str(damaged), "x", "--config", str(from_file))
    assert (wrong.returncode, "block-size" in wrong.stderr) == (2, True)
    assert "block-size" in ridgeline(*base, RIDGELINE_BLOCK_SIZE="-2").stderr
    right = ridgeline(*base, "--block-size", "16", RIDGELINE_BLOCK_SIZE="-2")
    assert "block-size" not in right.stderr
    assert "x.gguf" in right.stderr


def test_keys_are_not_shown(file: Path) -> None:
    done = ridgeline("config", RIDGELINE_API_KEY="secret")
    assert "secret" not in done.stdout
    assert "RIDGELINE_API_KEY" in done.stdout
    assert "***" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1", "there is no flag 'prot': did you mean 'port'?"),  # "spot" has as many of them
        ("porrt = 1", "there is no flag 'porrt': did you mean 'port'?"),
        (
            "[serve]\nmax-modellen = 1",
            "[serve] there is no flag 'max-modellen': did you mean 'max-model-len'",
        ),
        ("[run]\nport = 1", "[run] there is no flag 'port'"),
        (
            "[srve]\nport = 1",
            "there is no command [srve]: did you mean [serve]?",
        ),
        ("[bench.x]\na = 1", "there is no command [bench.x]"),
        ("[qqq]\na = 1", "there is no command [qqq]; there are [pull], [list], "),
        ("[config]\nas-json = true", "there is no command [config]"),
        ("[clean]\nmodels = true", "[clean] there is no flag 'models'"),
        ("format = 7", "format is 7: "),
        ('port = "http"', "port is 'http': 'http' is not a whole number"),
        ("isolate-keys = 2", "isolate-keys is 2: 2 is not yes or no"),
        ("[serve]\nport = [1]", "[serve] port is [1]: "),
        ("port = ", "cannot be read as TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(content)
    done = ridgeline("config", "--config", str(path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"ridgeline: {path}")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    missing = ridgeline("config", "--config", str(tmp_path / "none.toml"))
    assert "none.toml cannot be read as TOML: No such file" in missing.stderr
    assert "--config needs a file" in ridgeline("config", "--config").stderr


def test_an_unknown_command_is_answered_with_the_list() -> None:
    done = ridgeline("config", "sreve")
    assert "there is no command 'sreve' with flags: did you mean serve?" in done.stderr
    assert "with flags; there are pull, list, show, " in ridgeline("config", "q").stderr


def test_every_command_takes_its_flags_from_everywhere(file: Path, tmp_path: Path) -> None:
    done = ridgeline("ps", RIDGELINE_URL="http://127.0.0.1:9/v1")
    assert "no server answers at http://127.0.0.1:9 " in done.stderr
    assert in_force("ps", RIDGELINE_URL="http://x")["url"]["from"] == "RIDGELINE_URL"
    home = {"RIDGELINE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    assert json.loads(ridgeline("list", RIDGELINE_JSON="1", **home).stdout)["models"] == []
    file.write_text('format = "json"\n[ps]\nurl = "http://127.0.0.1:9"\n[list]\njson = true\n')
    settings = home | {"RIDGELINE_CONFIG": str(file)}
    assert "no server answers at http://127.0.0.1:9 " in ridgeline("ps", **settings).stderr
    assert json.loads(ridgeline("list", **settings).stdout)["models"] == []
    for command in ("plan", "explain"):
        assert in_force(command, **settings)["format"] == {"value": "json", "from": "config file"}


def test_every_flag_has_a_variable_but_that_of_clean() -> None:
    root = typer.main.get_command(app)
    name_variables(root)
    without = {
        (*names, param.name)
        for names, command in commands(root)
        for param in command.params
        if param.param_type_name == "option" and param.name != "help" and not param.envvar
        if names != ("config",) and not command.hidden
    }
    assert without == {("clean", "with_models")}


def test_what_is_in_force_is_shown_whole() -> None:
    origins = " ".join(f"https://a-long-name-of-a-page-{i}.example" for i in range(8))
    for environ in ({}, {"COLUMNS": "40"}):
        shown = ridgeline("config", RIDGELINE_CORS_ORIGIN=origins, **environ).stdout
        assert "…" not in shown
    assert origins.replace(" ", ", ") in ridgeline("config", RIDGELINE_CORS_ORIGIN=origins).stdout


def test_the_units_first_lines_make_the_file_that_it_names() -> None:
    unit = Path(__file__).parents[2].joinpath("contrib/ridgeline.service").read_text()
    named = re.search(r"^ExecStart=.* --config (\S+)", unit, re.MULTILINE)
    assert named
    assert re.search(rf"^#.* touch {re.escape(named[1])}\b", unit, re.MULTILINE)
