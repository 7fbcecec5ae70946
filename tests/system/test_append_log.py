"""A file that only grows keeps each whole record, wherever a crash or a full disk ended it."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.system.append_log import AppendLog, FileLock

READ_WRITE = os.O_RDWR | os.O_CREAT
RECORDS = st.lists(st.binary(max_size=9), min_size=1, max_size=6)


def write(log: AppendLog, record: bytes) -> int:
    return log.append(bytes([len(record)]), memoryview(record))


def read(log: AppendLog) -> tuple[list[bytes], int]:
    """Return the whole records, and where the last of them ends."""
    records, end = list[bytes](), 0
    while size := os.pread(log.file.fileno(), 1, end):
        record = os.pread(log.file.fileno(), size[0], end + 1)
        if len(record) < size[0]:
            break
        records.append(record)
        end += 1 + size[0]
    return records, end


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow further, as on a full disk: a part of a record may fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@given(RECORDS, RECORDS, st.data())
@settings(max_examples=100, deadline=None)
def test_any_cut_of_the_tail_loses_only_the_torn_record(
    before: list[bytes], after: list[bytes], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        log, ends = AppendLog(path, READ_WRITE), [0]
        for record in before:
            assert write(log, record) == ends[-1]
            ends.append(log.num_bytes)
        log.close()
        left = data.draw(st.integers(0, ends[-1]), "bytes that are left")
        os.truncate(path, left)
        whole = before[: sum(end <= left for end in ends) - 1]

        log = AppendLog(path, READ_WRITE)
        assert log.num_bytes == left
        found, end = read(log)
        assert found == whole
        log.cut(end)
        for record in after:
            write(log, record)
        assert read(log) == ([*whole, *after], path.stat().st_size)
        log.close()


@given(RECORDS, st.binary(min_size=20, max_size=20), st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_a_record_that_does_not_fit_leaves_nothing_of_itself(
    records: list[bytes], large: bytes, room: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = AppendLog(path := Path(folder) / "log", READ_WRITE)
        for record in records:
            write(log, record)
        size = path.stat().st_size
        with files_of_at_most(size + room), pytest.raises(OSError, match="too large"):
            write(log, large)
        assert (log.is_torn, log.num_bytes, path.stat().st_size) == (False, size, size)
        write(log, large)
        assert read(log)[0] == [*records, large]
        log.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="a file that cannot shrink")
def test_nothing_is_added_behind_a_torn_record_that_cannot_be_cut() -> None:
    descriptor = os.memfd_create("log", os.MFD_ALLOW_SEALING)
    log = AppendLog(Path(f"/proc/self/fd/{descriptor}"), os.O_RDWR)
    write(log, b"whole")
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with files_of_at_most(10), pytest.raises(OSError, match="too large"):
        write(log, b"not whole")
    assert (log.is_torn, log.num_bytes, os.fstat(descriptor).st_size) == (True, 6, 10)
    with pytest.raises(PermissionError):
        write(log, b"more")
    assert os.fstat(descriptor).st_size == 10
    log.close()
    os.close(descriptor)


def test_a_closed_log_is_written_no_more(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "log", READ_WRITE)
    write(log, b"one")
    log.close()
    other = os.open(tmp_path / "other", READ_WRITE)  # it may have the number of the closed one
    log.close()
    assert os.fstat(other).st_size == 0
    with pytest.raises(ValueError, match="closed"):
        write(log, b"two")
    assert (tmp_path / "log").read_bytes() == b"\x03one"
    os.close(other)


def test_one_has_a_lock_until_it_lets_it_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock(path)
    with pytest.raises(BlockingIOError):
        FileLock(path)
    first.release()
    first.release()
    second = FileLock(path)
    with pytest.raises(BlockingIOError):
        FileLock(path)
    del second
    FileLock(path).release()
    assert path.stat().st_mode & 0o777 == 0o600


HOLDER = """
import sys
from pathlib import Path
from ridgeline.system.append_log import FileLock
lock = FileLock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(BlockingIOError):
            FileLock(tmp_path / "lock")
        holder.kill()
    FileLock(tmp_path / "lock").release()


def test_a_lock_that_is_removed_while_it_is_taken_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next to come would make a new one, and two would have it."""
    path, flock = tmp_path / "lock", fcntl.flock

    def after_its_removal(descriptor: int, operation: int) -> None:
        path.unlink()
        flock(descriptor, operation)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", after_its_removal)
        with pytest.raises(BlockingIOError):
            FileLock(path)
    FileLock(path).release()
