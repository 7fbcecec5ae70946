"""Programs in processes of their own, when their parents end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S, started


def test_they_end_in_silence_when_nobody_reads_them() -> None:
    program = "input(); from ridgeline.text import process_limits as p; p.answer({'is': 'ready'})"
    with started(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        child.stdin.write("go\n")
        child.stdin.close()
        assert child.stderr.read() == ""
        assert child.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("name", ["template", "tokenizers", "grammar"])
@pytest.mark.parametrize("written", [b"", b'{"cut": "'])
def test_they_end_in_silence_if_the_parent_ends_before_it_has_said_anything(
    name: str, written: bytes
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"ridgeline.text.{name}.process"],
        input=written, capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
