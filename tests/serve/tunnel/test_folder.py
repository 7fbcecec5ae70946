"""The folder of a fleet's sockets outlives nobody for long."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ridgeline.serve.http.listening import SocketFolder
from tests.waiting import started

OTHER = """
from ridgeline.serve.http.listening import SocketFolder
print(SocketFolder().path, flush=True)
input()
"""


def test_what_a_killed_process_leaves_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what belongs to one that lives is not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with started(
        [sys.executable, "-c", OTHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        own = SocketFolder()
        assert sorted(tmp_path.iterdir()) == sorted([theirs, own.path])
        other.kill()
        other.wait()
    own.remove()
    assert list(tmp_path.iterdir()) == [theirs]
    again = SocketFolder()
    assert list(tmp_path.iterdir()) == [again.path]
    again.remove()
