"""Without a standard error, or with one that is no file, all runs as with one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.engine.setup.progress import bytes_bar, count_bar, say
from tests.cli.test_main import ridgeline
from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.waiting import PATIENCE_S, connected, started

RIDGELINE = Path(sys.executable).parent / "ridgeline"
FLAGS = ["--kv-cache-memory", "1MiB", "--threads", "1"]


def shell(words: str, *arguments: str) -> list[str]:
    """A command whose words end in redirections."""
    return ["sh", "-c", f'exec "$0" "$@" {words}', str(RIDGELINE), *arguments]


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_run_answers_without_a_standard_error(model: Path, closed: str) -> None:  # noqa: F811
    command = shell(closed, "run", str(model), "hello", "--max-tokens", "3", *FLAGS)
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    assert (done.returncode, bool(done.stdout)) == (0, ">&- 2" not in closed)


def test_an_error_without_a_standard_error_is_a_status(tmp_path: Path) -> None:
    command = shell("2>&-", "run", str(tmp_path / "nothing.gguf"), "hello")
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 1


@pytest.mark.parametrize("num_models", [1, 2])
def test_serve_answers_without_a_standard_error(
    model: Path,  # noqa: F811
    tmp_path: Path,
    num_models: int,
) -> None:
    """Its sockets do not get the number of standard error either: words to that would go there."""
    names = [str(model), str(tmp_path / "other")][:num_models]
    (tmp_path / "other").symlink_to(model)
    command = shell("2>&-", "serve", *names, "--port", "0", *FLAGS)
    with started(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "ready at http://" in line
        port = urlsplit(line.split("ready at ")[1].split()[0]).port
        assert Path(f"/proc/{server.pid}/fd/2").readlink() == Path("/dev/null")
        body = f'{{"model": "{model.name}", "prompt": [40], "max_tokens": 2}}'
        headers = {"content-type": "application/json"}
        with connected(port or 0) as connection:
            for _ in range(2):
                connection.request("POST", "/v1/completions", body, headers)
                response = connection.getresponse()
                assert (response.status, bool(response.read())) == (200, True)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


class OnlyWrites:
    """What some programs put in the place of standard error."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


class Closed(OnlyWrites):
    """A file that was closed."""

    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")

    def isatty(self) -> bool:
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("stream", [None, OnlyWrites(), Closed()])
def test_python_answers_whatever_standard_error_is(
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stream: OnlyWrites | None,
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    for bar in (bytes_bar, count_bar):
        with bar("reading") as report:
            report(1, 2)
    say("a note")
    assert stream is None or stream.text == ("" if isinstance(stream, Closed) else "a note\n")
    with LLM(model, kv_cache_memory="1MiB", threads=1) as llm:
        assert llm.generate("hello", SamplingParams(max_tokens=2))
    assert not capsys.readouterr().out, "and nothing goes to standard output in its place"


def test_input_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [RIDGELINE, "run", str(tmp_path), "Repeat:"], input=b"gr\xfcn", capture_output=True,
        timeout=PATIENCE_S, check=False, env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert done.returncode == 2
    assert b"standard input is not UTF-8 at byte 2" in done.stderr


@pytest.mark.parametrize("columns", ["abc", "0", "-3", "\u00b2"])
def test_a_width_that_is_no_number_is_no_width(columns: str, tmp_path: Path) -> None:
    shown = ridgeline("list", COLUMNS=columns, RIDGELINE_HOME=str(tmp_path))
    assert shown.returncode == 0, shown.stderr
