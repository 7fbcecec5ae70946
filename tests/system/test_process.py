"""Processes of our own: they end with us, get time to end by themselves, and have last words."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgeline.system import process
from ridgeline.system.process import (
    RunningTime,
    end_with_parent,
    end_within,
    signal_of,
    start_connected,
)
from tests.waiting import PATIENCE_S

CHILD = f"""
import signal
from {end_with_parent.__module__} import end_with_parent
end_with_parent(signal.SIGKILL)
print("follows", flush=True)
signal.pause()
"""
PARENT = f"""
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", {CHILD!r}])
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked")
def test_a_process_ends_with_its_parent_however_that_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"follows\n"
        parent.kill()
        assert parent.communicate(timeout=PATIENCE_S)[0] == b"", "the pipe ends with the child"


def test_a_process_may_end_by_itself_before_it_is_killed() -> None:
    ends = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"]
    willing = subprocess.Popen(ends, stdin=subprocess.PIPE)
    assert willing.stdin is not None
    willing.stdin.close()
    end_within(PATIENCE_S, willing)
    assert (willing.returncode, signal_of(willing.returncode)) == (3, "")

    stays = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    stubborn = subprocess.Popen([sys.executable, "-c", stays])
    end_within(0.01, stubborn)
    assert (stubborn.returncode, signal_of(stubborn.returncode)) == (-9, "SIGKILL")


def test_only_a_signal_has_a_name() -> None:
    assert [signal_of(status) for status in (None, 0, 1, 139)] == [""] * 4
    assert signal_of(-signal.SIGSEGV) == "SIGSEGV"
    assert signal_of(-40) == "signal 40", "it has no name"


ECHO = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as connection:
    while heard := connection.recv(100):
        connection.sendall(heard.upper())
"""


def test_a_module_is_started_with_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_of_a_test.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started, ours = start_connected("echo_of_a_test")
    with ours:
        ours.sendall(b"hello")
        assert ours.recv(100) == b"HELLO"
    end_within(PATIENCE_S, started)
    assert started.returncode == 0
    killed, ours = start_connected("echo_of_a_test")
    with ours:
        killed.kill()
        assert ours.recv(100) == b"", "nobody here keeps its end open"
    killed.wait()


def test_time_in_which_nothing_runs_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(process, "time", clock)
    waited = RunningTime(0.5)
    passed_s = []
    for step_s in (0.2, 0.25, 3600.0, 0.0):
        clock.now_s += step_s
        passed_s.append(waited.look())
    assert passed_s == pytest.approx([0.2, 0.45, 0.95, 0.95])
    waited.passed_s = 0.0
    clock.now_s += 0.3
    assert waited.look() == pytest.approx(0.3)
