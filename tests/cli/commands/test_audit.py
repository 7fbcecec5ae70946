"""``ridgeline audit verify``: what it says, and how it exits."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ridgeline.cli.main import app
from ridgeline.trust.audit.files import LogFiles
from ridgeline.trust.audit.record_format import files_of, key_of


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "home"))
    key = key_of(tmp_path / "home" / "audit.key")
    files = LogFiles(tmp_path / "log", key, rotate_bytes=300, keep_s=1e9)
    for i in range(5):
        files.append({"event": "request", "id": f"id{i}"})
    files.sync()
    files.close()
    return tmp_path / "log"


def verified(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit", "verify", *map(str, arguments)])


def test_a_log_that_is_as_it_was_written(log: Path) -> None:
    for paths in ([log], files_of(log)):
        done = verified(*paths)
        assert done.exit_code == 0, done.output
        first, last = done.output.splitlines()
        assert first.startswith(f"{log}: 5 lines in 3 files, 5 requests, from 20")
        assert last.startswith("  it is as it was written, up to line 4, ")
    head = last.rpartition(" ")[2]
    assert verified(log, "--head", head).exit_code == 0
    assert verified(log, "--head", "0" * 64).exit_code == 1


def test_a_log_that_is_not(log: Path) -> None:
    files_of(log)[1].unlink()
    done = verified(log)
    assert done.exit_code == 1
    assert "wrong: " in done.output
    assert "2 lines are missing before it: 2 to 3" in done.output
    assert done.output.splitlines()[-1] == "  it is NOT as it was written"


def test_without_the_key_it_says_what_that_means(log: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / "audit.key").unlink()
    done = verified(log)
    assert done.exit_code == 0
    assert "audit.key does not exist" in done.output


def test_what_cannot_be_checked_is_said_in_a_line(log: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc\n")
    for arguments, words in (
        ([tmp_path / "none"], "does not exist"),
        ([tmp_path / "home"], "has no audit log"),
        ([log / "head.json"], "is not a file of an audit log"),
        ([log, "--key", tmp_path / "short"], "is not the key of an audit log"),
        ([log, "--key", tmp_path / "absent"], "absent"),
    ):
        done = verified(*arguments)
        assert done.exit_code != 0
        assert words in str(done.exception)
