"""The files of an audit log: written, gone on with, and each way to change them found out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ridgeline.trust.audit.check import CheckedLog, check, logs_in
from ridgeline.trust.audit.files import LogFiles
from ridgeline.trust.audit.record_format import (
    HEAD_FILE,
    START,
    ChainPosition,
    Head,
    digest_of,
    files_of,
    written,
    written_head,
)

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
DAY_S = 86_400.0
NUM_LINES, PER_FILE = 30, 6


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1_795_000_000.0

    def __call__(self) -> float:
        return self.now_s


def opened(folder: Path, key: bytes = KEY, **options: Any) -> LogFiles:
    base = {"rotate_bytes": 1 << 20, "keep_s": 180 * DAY_S, "now_s": Clock()}
    return LogFiles(folder, key, **base | options)


def written_log(folder: Path, key: bytes = KEY, since_s: float = 0.0) -> str:
    """Write a log of five files; return the hash of its last line."""
    clock = Clock()
    clock.now_s += since_s
    one = len(written({"event": "request", "id": "id00"}, ChainPosition(10, "0" * 64), 1.0, key))
    files = opened(folder, key, rotate_bytes=PER_FILE * one - 20, now_s=clock)
    for i in range(NUM_LINES):
        files.append({"event": "request", "id": f"id{i:02}"})
    files.sync()
    files.close()
    assert len(files_of(folder)) == NUM_LINES // PER_FILE
    return files.end.digest


def head_of(end: ChainPosition, key: bytes, log: str = "") -> bytes:
    return written_head(Head(end, log), key)


def id_of(folder: Path) -> str:
    return str(json.loads(lines_of(files_of(folder)[0])[0])["log"])


def checked(folder: Path, key: bytes | None = KEY, head: str | None = None) -> CheckedLog:
    return check(folder, files_of(folder), key, head)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    written_log(tmp_path / "log")
    return tmp_path / "log"


def lines_of(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines(keepends=True)


def change(file: Path, new: Callable[[list[bytes]], list[bytes]]) -> None:
    file.write_bytes(b"".join(new(lines_of(file))))


def file_of(log: Path, number: int) -> Path:
    return files_of(log)[number]


def test_a_log_is_as_it_was_written(log: Path) -> None:
    found = checked(log)
    assert found.faults == found.notes == []
    assert (found.num_lines, found.num_requests, found.num_files) == (30, 30, 5)
    assert checked(log, None).faults == []
    assert checked(log, head=digest_of(lines_of(file_of(log, 2))[0])).faults == []


def swapped(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[2], lines[1], *lines[3:]]


def renamed(log: Path, a: int, b: int) -> None:
    one, two = file_of(log, a), file_of(log, b)
    one.rename(log / "x")
    two.rename(one)
    (log / "x").rename(two)


def replaced(log: Path) -> None:
    """Put another log's file of the same place, and of the same key, into this one."""
    written_log(log.parent / "other", since_s=1.0)
    change(file_of(log, 2), lambda _: lines_of(file_of(log.parent / "other", 2)))


def computed_again(log: Path, key: bytes) -> None:
    """Change a line, and all hashes that follow from it, and the head's."""
    end, whose = START, id_of(log)
    for file in files_of(log):
        lines = []
        for line in lines_of(file):
            fields = json.loads(line)
            for name in ("seq", "time", "before", "mac"):
                del fields[name]
            fields["id"] = "id99" if fields["id"] == "id07" else fields["id"]
            lines.append(written(fields, end, Clock()(), key))
            end = ChainPosition(end.seq + 1, digest_of(lines[-1]))
        file.write_bytes(b"".join(lines))
    (log / HEAD_FILE).write_bytes(head_of(end, key, whose))


def appended(log: Path) -> None:
    last = lines_of(file_of(log, 4))[-1]
    line = written({"event": "request"}, ChainPosition(29, digest_of(last)), 2e9, OTHER_KEY)
    change(file_of(log, 4), lambda lines: [*lines, line])


def marked_as_torn(lines: list[bytes]) -> list[bytes]:
    """Hide a line as what a crash would have left of one."""
    torn = b'{"seq":1,\n'
    before = ChainPosition(json.loads(lines[0])["seq"], digest_of(lines[0]))
    mark = {"event": "torn", "bytes": len(torn), "sha256": digest_of(torn)}
    return [lines[0], torn, written(mark, before, 2e9, OTHER_KEY), *lines[2:]]


TAMPERINGS: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    # What is done, what is said, and whether it takes the key to see it.
    "a character": (
        lambda log: change(file_of(log, 1), lambda x: [x[0].replace(b"id06", b"id66"), *x[1:]]),
        "00000001.jsonl:1 was changed",
        False,
    ),
    "a character of the last line": (
        lambda log: change(file_of(log, 4), lambda x: [*x[:-1], x[-1].replace(b"id29", b"id99")]),
        "00000004.jsonl:6 was changed",
        False,
    ),
    "a signature": (
        lambda log: change(
            file_of(log, 1),
            lambda x: [x[0].replace(b'"mac":"', b'"mac":"0')[:-4] + b'"}\n', *x[1:]],
        ),
        "00000001.jsonl:1 was changed",
        False,
    ),
    "a line removed": (
        lambda log: change(file_of(log, 1), lambda x: [*x[:2], *x[3:]]),
        "00000001.jsonl:3: 1 line is missing before it: 8",
        False,
    ),
    "the first line removed": (
        lambda log: change(file_of(log, 0), lambda x: x[1:]),
        "1 lines are missing before",
        False,
    ),
    "two lines swapped": (
        lambda log: change(file_of(log, 1), swapped),
        "00000001.jsonl:3 is line 7, after line 8: it was moved",
        False,
    ),
    "a line repeated": (
        lambda log: change(file_of(log, 1), lambda x: [*x[:2], *x[1:]]),
        "it was moved",
        False,
    ),
    "a line of no log": (
        lambda log: change(file_of(log, 1), lambda x: [*x[:2], b"{}\n", *x[2:]]),
        "00000001.jsonl:3 is not a line of an audit log",
        False,
    ),
    "a line without the key": (appended, "00000004.jsonl:7 was changed, or written without", True),
    "a line hidden as a crash": (
        lambda log: change(file_of(log, 1), marked_as_torn),
        "00000001.jsonl:3 was changed, or written without",
        False,
    ),
    "lines cut at the end": (
        lambda log: change(file_of(log, 4), lambda x: x[:-2]),
        "2 lines are missing at the end",
        False,
    ),
    "cut within the last line": (
        lambda log: file_of(log, 4).write_bytes(file_of(log, 4).read_bytes()[:-9]),
        "1 line is missing at the end",
        False,
    ),
    "the last file removed": (
        lambda log: file_of(log, 4).unlink(),
        "6 lines are missing at the end",
        False,
    ),
    "the last file emptied": (
        lambda log: file_of(log, 4).write_bytes(b""),
        "6 lines are missing at the end",
        False,
    ),
    "all files removed": (
        lambda log: [file.unlink() for file in files_of(log)],
        "30 lines are missing at the end",
        False,
    ),
    "a file removed from the middle": (
        lambda log: file_of(log, 2).unlink(),
        "00000003.jsonl:1: 6 lines are missing before it: 12 to 17",
        False,
    ),
    "the first file removed": (
        lambda log: file_of(log, 0).unlink(),
        "6 lines are missing before",
        False,
    ),
    "the last file renamed": (
        lambda log: file_of(log, 4).rename(log / "audit-00000009.jsonl"),
        "audit-00000009.jsonl was written as audit-00000004.jsonl: it was renamed",
        False,
    ),
    "all files renamed": (
        lambda log: [
            one.rename(log / f"audit-{i + 7:08d}.jsonl")
            for i, one in reversed([*enumerate(files_of(log))])
        ],
        "audit-00000007.jsonl was written as audit-00000000.jsonl: it was renamed",
        False,
    ),
    "the head of another log": (
        lambda log: (log / HEAD_FILE).write_bytes(
            head_of(ChainPosition(28, "0" * 64), KEY, "another")
        ),
        "head.json is of the log another, and the files of ",
        False,
    ),
    "two files renamed": (lambda log: renamed(log, 1, 2), "6 lines are missing before it", False),
    "a file replaced": (replaced, "is of another log", False),
    "a chain computed again": (
        lambda log: computed_again(log, OTHER_KEY),
        "00000000.jsonl:1 was changed, or written without the key",
        True,
    ),
    "the head removed": (lambda log: (log / HEAD_FILE).unlink(), "head.json is missing", False),
    "the head changed": (
        lambda log: (log / HEAD_FILE).write_bytes(head_of(ChainPosition(28, "0" * 64), OTHER_KEY)),
        "head.json was changed, or written with another key",
        True,
    ),
    "the head spoilt": (
        lambda log: (log / HEAD_FILE).write_bytes(b"{}"),
        "head.json cannot be read",
        False,
    ),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_each_tampering_is_found(log: Path, name: str) -> None:
    tamper, says, _ = TAMPERINGS[name]
    tamper(log)
    assert says in "\n".join(checked(log).faults)


@pytest.mark.parametrize("name", [name for name in TAMPERINGS if not TAMPERINGS[name][2]])
def test_without_the_key_all_but_new_chains_are_found(log: Path, name: str) -> None:
    TAMPERINGS[name][0](log)
    assert checked(log, None).faults


@pytest.mark.parametrize("key", [KEY, None])
def test_any_change_of_a_byte_is_found(log: Path, key: bytes | None) -> None:
    """Changed, removed or put in, at random; and cut anywhere."""
    random = Random(1)
    for _ in range(300):
        file = random.choice([*files_of(log), log / HEAD_FILE])
        data = file.read_bytes()
        at, new = random.randrange(len(data.rstrip())), random.randrange(256)
        kinds = (
            data[:at] + bytes([new]) + data[at + 1 :],
            data[:at] + data[at + 1 :],
            data[:at] + bytes([new]) + data[at:],
            data[:at],
        )
        spoilt = random.choice(kinds)
        file.write_bytes(spoilt)
        is_other = spoilt != data and (key is not None or file.name != HEAD_FILE)
        assert bool(checked(log, key).faults) or not is_other, (file.name, at, spoilt)
        file.write_bytes(data)
    assert checked(log, key).faults == []


def test_a_kept_hash_finds_a_log_put_back_to_an_earlier_state(tmp_path: Path) -> None:
    """Also where all of its files, the head among them, are those of that time."""
    files = opened(tmp_path)
    files.append({"event": "request"})
    files.sync()
    earlier = {file: file.read_bytes() for file in tmp_path.iterdir()}
    files.append({"event": "request"})
    files.sync()
    files.close()
    for file, data in earlier.items():
        file.write_bytes(data)
    assert checked(tmp_path).faults == []  # nothing in the folder can say it
    (fault,) = checked(tmp_path, head=files.end.digest).faults
    assert files.end.digest in fault


def test_a_log_of_another_key_is_not_as_it_was_written(log: Path) -> None:
    assert len(checked(log, OTHER_KEY).faults) > NUM_LINES


def test_some_files_are_checked_for_what_they_are(log: Path) -> None:
    middle = files_of(log)[1:3]
    found = check(log, middle, KEY)
    assert found.faults == []
    assert found.num_lines == 12
    assert found.notes == [
        "6 lines before these are in other files",
        "files after audit-00000002.jsonl are not among these",
    ]
    assert check(log, files_of(log)[1::2], KEY).faults  # one between them is left out


def test_folders_and_files_are_found(log: Path, tmp_path: Path) -> None:
    written_log(tmp_path / "log" / "below")
    assert list(logs_in([tmp_path])) == [log, log / "below"]
    assert logs_in([file_of(log, 1), file_of(log, 0)]) == {log: files_of(log)[:2]}
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "none", log / HEAD_FILE):
        with pytest.raises(ValueError, match=path.name):
            logs_in([path])


# --- going on -------------------------------------------------------------------------------------


def test_a_log_goes_on_after_a_restart(tmp_path: Path) -> None:
    for i in range(3):
        files = opened(tmp_path)
        files.append({"event": "request", "id": str(i)})
        files.sync()
        files.close()
    found = checked(tmp_path)
    assert (found.faults, found.notes, found.num_lines) == ([], [], 3)
    assert len(files_of(tmp_path)) == 1


@pytest.mark.parametrize("left", [1, 20, -2, -1, 0])
def test_a_line_that_a_crash_has_cut_is_marked(tmp_path: Path, left: int) -> None:
    """At its first bytes, near its end, before its newline, and not at all."""
    files = opened(tmp_path)
    files.append({"event": "request", "id": "a"})
    files.sync()
    size = files_of(tmp_path)[0].stat().st_size
    files.append({"event": "request", "id": "b"})  # it is not synced
    files.close()
    (file,) = files_of(tmp_path)
    os.truncate(file, size + left if left > 0 else file.stat().st_size + left)
    is_cut = left not in (-1, 0)  # a line that lacks its newline alone is whole
    assert bool(checked(tmp_path).notes) == (left != 0)
    files = opened(tmp_path)
    files.append({"event": "request", "id": "c"})
    files.sync()
    files.close()
    found = checked(tmp_path)
    assert found.faults == []
    assert found.num_requests == (2 if is_cut else 3)
    assert [note.rpartition(" ")[2] for note in found.notes] == ["it"] * is_cut
    assert all("cut short when the server was killed" in note for note in found.notes)


def test_what_a_power_failure_leaves_is_marked(tmp_path: Path) -> None:
    """Blocks of zeros, and pieces of lines; also as all of a new file."""
    files = opened(tmp_path)
    files.append({"event": "request"})
    files.sync()
    files.close()
    with files_of(tmp_path)[0].open("ab") as file:
        file.write(b'{"seq":\n' + bytes(4096))
    (tmp_path / "audit-00000001.jsonl").write_bytes(b'{"seq":1')
    files = opened(tmp_path)
    files.append({"event": "request"})
    files.sync()
    files.close()
    found = checked(tmp_path)
    assert found.num_requests == 2
    assert [fault.split(" is ")[1] for fault in found.faults] == ["not a line of an audit log"]
    assert ["marked" in note for note in found.notes] == [True]


def test_lines_that_are_missing_at_a_start_stay_told(log: Path) -> None:
    change(file_of(log, 4), lambda lines: lines[:-2])
    files = opened(log)
    files.append({"event": "request"})
    files.sync()
    files.close()
    (fault,) = checked(log).faults
    assert "2 lines were missing at the end, up to line 29" in fault


@pytest.mark.parametrize("change_head", ["removed", "spoilt", "of another key"])
def test_a_head_that_is_gone_at_a_start_stays_told(log: Path, change_head: str) -> None:
    head = log / HEAD_FILE
    if change_head == "removed":
        head.unlink()
    else:
        head.write_bytes(b"" if change_head == "spoilt" else head_of(START, OTHER_KEY))
    opened(log).close()
    (fault,) = checked(log).faults
    assert "when the server started" in fault
    assert HEAD_FILE in fault


def test_a_log_is_not_gone_on_with_another_key(log: Path) -> None:
    with pytest.raises(ValueError, match="--audit-key"):
        opened(log, OTHER_KEY)
    opened(log).close()  # it is free again


def test_two_do_not_write_one_log(log: Path) -> None:
    files = opened(log)
    with pytest.raises(ValueError, match="another server writes there"):
        opened(log)
    files.close()
    opened(log).close()


# --- disks that fail ------------------------------------------------------------------------------

FULL = """
import resource, sys
from pathlib import Path
from ridgeline.trust.audit.files import LogFiles
files = LogFiles(Path(sys.argv[1]), b"k" * 32, rotate_bytes=1 << 20, keep_s=1e9)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
num_lost = 0
for limit in (1000, most):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    for i in range(10):
        try:
            files.append({"event": "request", "id": str(i)})
        except OSError:
            num_lost += 1
files.sync()
print(num_lost)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limits")
def test_a_line_that_does_not_fit_leaves_nothing_of_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    num_lost = int(subprocess.run(command, check=True, capture_output=True).stdout)
    found = checked(tmp_path)
    assert 0 < num_lost < 10
    assert (found.faults, found.notes, found.num_lines) == ([], [], 20 - num_lost)


def test_a_log_that_was_removed_begins_again_and_says_so(tmp_path: Path) -> None:
    files = opened(tmp_path / "log")
    files.append({"event": "request"})
    files.sync()
    for file in [*files_of(tmp_path / "log"), tmp_path / "log" / HEAD_FILE]:
        file.unlink()
    with pytest.raises(OSError, match="removed"):
        files.sync()
    files.append({"event": "request"})
    files.sync()
    files.close()
    (fault,) = checked(tmp_path / "log").faults
    assert "1 lines were missing at the end, up to line 0" in fault
