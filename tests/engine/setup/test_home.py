"""What killed processes leave behind is swept at the next start; what is in use stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from ridgeline.engine.setup.home import sweep
from tests.waiting import started

_WRITER = """
import sys, time
from pathlib import Path
from ridgeline.system.machine import write_whole

def content(file):
    file.write(b"half of it")
    file.flush()
    print("begun", flush=True)
    time.sleep(600)

write_whole(Path(sys.argv[1]), content)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_half_written_files_of_killed_processes_go(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "m.weights").write_bytes(b"whole")
    command = [sys.executable, "-c", _WRITER, str(packed / "other.weights")]
    with started(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        during = names(packed)
        sweep(tmp_path)
        assert names(packed) == during  # it is being written
        assert len(during) == 2
        os.kill(writer.pid, signal.SIGKILL)
    assert names(packed) == during
    sweep(tmp_path)
    assert names(packed) == ["m.weights"]


def test_folders_of_pulls_that_failed_go(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for owner in ("gone", "busy", "cut", "kept", ".hidden"):
        (models / owner).mkdir(parents=True)
        (models / owner / ".name.lock").touch()
    (models / "cut" / ".name.partial").mkdir()  # the next pull goes on from it
    (models / "kept" / "name").mkdir()
    (models / "m.gguf").write_bytes(b"x")
    (models / "empty").mkdir()
    with FileLock(models / "busy" / ".name.lock"):
        sweep(tmp_path)
        assert names(models) == [".hidden", "busy", "cut", "kept", "m.gguf"]
    sweep(tmp_path)
    assert names(models) == [".hidden", "cut", "kept", "m.gguf"]


def test_a_home_that_is_not_there_is_left_so(tmp_path: Path) -> None:
    sweep(tmp_path / "nowhere")
    assert names(tmp_path) == []
