"""Parts of ``bench gpu`` are processes: who crashes or hangs ends itself alone, and says so."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ridgeline.bench.gpu.parts import run

_FINDING = {"part": "smoke", "what": "logits", "ok": True}


def findings_of(command: list[str], seconds: float = 60.0) -> list[Any]:
    found: list[Any] = []
    run("smoke", command, seconds, os.environ, found.append)
    return found


def python(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(lines)]


def test_findings_come_in_order_and_what_libraries_print_does_not() -> None:
    first, end = findings_of(
        python(f"print({json.dumps(_FINDING)!r})", "print('a warning', 3)", "print('[1, 2]')")
    )
    assert first == _FINDING
    assert (end["what"], end["code"]) == ("end", 0)
    assert end["tail"] == ["a warning 3", "[1, 2]"]


def test_a_crash_keeps_what_was_found_and_what_was_said_last() -> None:
    first, end = findings_of(
        python(
            "import os",
            f"print({json.dumps(_FINDING)!r}, flush=True)",
            "for i in range(9): print('line', i, flush=True)",
            "os.write(2, b'an illegal memory access\\n')",
            "os.abort()",
        )
    )
    assert first == _FINDING
    assert end["code"] < 0
    assert end["tail"] == ["line 6", "line 7", "line 8", "an illegal memory access"]


def test_who_hangs_is_ended_with_all_that_it_started() -> None:
    marker = f"{86400 + os.getpid()}"  # no other process sleeps as long
    found = findings_of(["sh", "-c", f"sleep {marker} & sleep {marker}; wait"], seconds=0.5)
    assert found[-1]["code"] is None
    while any(marker in words for words in command_lines()):
        time.sleep(0.01)  # killed, and about to be gone


def test_who_closes_its_output_and_stays_is_ended_too() -> None:
    (end,) = findings_of(["sh", "-c", "exec sleep 86399 >&- 2>&-"], seconds=0.5)
    assert end["code"] is None


def command_lines() -> list[list[str]]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_text("utf-8", errors="replace").split("\0"))
        except OSError:  # it ended meanwhile
            continue
    return found
