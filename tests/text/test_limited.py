"""Programs in processes of their own, when their parents end."""

from __future__ import annotations

import subprocess
import sys


def test_they_end_in_silence_when_nobody_reads_them() -> None:
    program = "input(); from ridgeline.text import limited; limited.answer({'is': 'ready'})"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        child.stdin.write(b"go\n")
        child.stdin.close()
        assert child.stderr.read() == b""
        assert child.wait(10) == 0
