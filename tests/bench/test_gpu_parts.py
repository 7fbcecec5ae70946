"""Parts of ``bench gpu`` are processes: who crashes or hangs ends itself alone, and says so."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.bench import gpu as parts
from ridgeline.bench.gpu import _Process, _Team, _work, run

_FINDING = {"part": "smoke", "what": "logits", "ok": True}


# A part with three cases, the second of which holds two: each says a number, or does what is given
# for it. As it would on a device, it skips what is known and takes its worker's share.
_PART = """
import json, os, signal, sys, time
def option(name): return sys.argv[sys.argv.index(name) + 1]
skip, ways = json.loads(option("--skip")), json.loads(sys.argv[1])
def say(**what): print(json.dumps({"part": "smoke", **what}), flush=True)
def case(name, inner=()):
    if name in skip: return
    say(begins=name)
    for one in inner: case(one)
    way = ways.get(name, "")
    if way == "abort": os.write(2, b"an illegal memory access\\n"); os.abort()
    if way == "hang": time.sleep(86398)
    if way == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if way == "lost": say(what=name, failed="the GPU failed", ok=False); say(ends=name); os._exit(5)
    say(what=name, worker=int(option("--worker")), ok=True)
    say(ends=name)
if "--worker" in sys.argv and int(option("--worker")) and ways: sys.exit()
case("a"); case("b", ("b1", "b2")); case("c")
"""


def findings_of(command: list[str], seconds: float = 600.0, **more: Any) -> list[Any]:
    found: list[Any] = []
    run("smoke", command, seconds, os.environ, found.append, **more)
    return found


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("abort", "its process ended with -6: an illegal memory access"),
        ("kill", "its process ended with -9: "),
        ("lost", "the GPU failed"),
    ],
)
@pytest.mark.parametrize("case", ["a", "b1", "c"])
def test_others_go_on_behind_a_case_that_ends_its_process(case: str, way: str, why: str) -> None:
    """The case is named with the reason, once; all others are measured, once."""
    command = [sys.executable, "-c", _PART, json.dumps({case: way})]
    *found, end = findings_of(command)
    failed = [one for one in found if not one["ok"]]
    assert [(one["what"], one["failed"]) for one in failed] == [(case, why)]
    assert [one["what"] for one in found if one["ok"]] == [
        name for name in ("a", "b1", "b2", "b", "c") if name != case
    ]
    assert (end["what"], end["code"]) == ("end", 0)


def test_a_case_that_is_silent_for_too_long_is_killed_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def left_s(self: Any, end_s: float, silent_s: float) -> float:
        return 0.0 if self._under_way[-1:] == ["b1"] else silent_s

    monkeypatch.setattr(_Process, "_left_s", left_s)
    command = [sys.executable, "-c", _PART, '{"b1": "hang"}']
    *found, end = findings_of(command, silent_s=600.0)
    assert [one["what"] for one in found] == ["a", "b1", "b2", "b", "c"]
    assert found[1]["failed"] == "silent for too long, killed."
    assert end["code"] == 0


def test_a_part_whose_cases_all_end_it_is_over_when_they_are() -> None:
    ways = dict.fromkeys(("a", "b1", "b2", "b", "c"), "kill")
    *found, end = findings_of([sys.executable, "-c", _PART, json.dumps(ways)])
    assert [one["what"] for one in found] == list(ways)
    assert end["code"] == 0


def test_what_a_deadline_cuts_off_is_named_and_nothing_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, later_s = list[Any](), 0.0

    def take(finding: Any) -> None:
        nonlocal later_s
        found.append(finding)
        later_s += 1e6 * (finding["what"] == "b1")

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s)
    monkeypatch.setattr(parts, "time", clock)
    command = [sys.executable, "-c", _PART, '{"b2": "hang"}']
    run("smoke", command, 600.0, os.environ, take)
    assert [one["what"] for one in found[:2]] == ["a", "b1"]
    cut, end = found[2:]
    assert cut["what"] in ("b", "b1", "b2")  # whichever had begun
    assert cut["failed"] == "no time was left, killed."
    assert end["code"] is None


def test_workers_are_side_by_side_and_have_one_end() -> None:
    found = findings_of([sys.executable, "-c", _PART, "{}"], workers=3)
    assert sorted(one["worker"] for one in found if one["what"] == "a") == [0, 1, 2]
    assert [one["what"] for one in found].count("end") == 1


def test_who_is_interrupted_leaves_nobody_behind() -> None:
    def interrupt(finding: Any) -> None:
        raise KeyboardInterrupt

    command = [sys.executable, "-c", _PART, '{"c": "hang"}']
    with pytest.raises(KeyboardInterrupt):
        run("smoke", command, 60.0, os.environ, interrupt, workers=2)
    assert not any("time.sleep(86398)" in "".join(words) for words in command_lines())


def test_nothing_is_started_once_all_are_told_to_stop() -> None:
    """A worker's process is lost while another worker is interrupted."""
    team, found = _Team(), list[Any]()
    team.stop()
    command = [sys.executable, "-c", _PART, "{}"]
    ended = _work(team, "smoke", command, time.monotonic() + 600, os.environ, found.append, 60, 0)
    assert (ended.code, ended.cases, found) == (None, [], [])


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
