"""The files of an audit log, which only grow: opened, added to, rotated, removed when they are old.

A log goes on where its last file ends. What a crash has left of a line stays, and the next line
marks it. That lines are missing at the end, compared with what ``head.json`` says, is marked too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.machine import lock_file, write_whole
from ridgeline.server.audit.lines import (
    HEAD_FILE,
    START,
    LinePlace,
    digest_of,
    file_name,
    files_of,
    is_signed,
    number_of,
    read,
    read_head,
    written,
    written_head,
    written_time,
)

_KEY_SUFFIX = ".key"  # of the file with a day's key
_KEY_BYTES = 32


class LogFiles:
    """The files of one log; one thread uses them at a time.

    Attributes:
        end: the last line that was written; ``synced``: that is on the disk.
    """

    def __init__(
        self,
        folder: Path,
        key: bytes,
        *,
        rotate_bytes: int,
        keep_s: float,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Go on with a folder, or begin one.

        Args:
            folder: of the log; no other process may write it.
            key: signs the lines.
            rotate_bytes: how long a file may become; each day has a new one, too.
            keep_s: how long after its last line a file is removed.
            now_s: the clock.

        Raises OSError, or ValueError if another process writes the folder, or its last line was
        changed or signed with another key.
        """
        self._folder, self._key, self._now_s = folder, key, now_s
        self._rotate_bytes, self._keep_s = rotate_bytes, keep_s
        self.end = self.synced = START
        self._number, self._size, self._day = 0, 0, ""
        self._day_key = ("", b"")
        self._file = self._head_file = -1
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._lock = lock_file(folder / "lock")
        except BlockingIOError:
            message = f"--audit {folder}: another server writes there: name a folder of its own"
            raise ValueError(message) from None
        try:
            self._open_known()
            self._rotate_if_full()
            self._remove_old()
            self.sync()
        except BaseException:
            self.close()
            raise

    def append(self, fields: dict[str, Any]) -> None:
        """Write a line. Raises OSError, and then there is none."""
        if self._file < 0:
            self._reopen_later()
        if self._rotate_if_full():
            self._remove_old()
        self._mark(fields)

    def sync(self) -> None:
        """Let all lines outlast a power failure. Raises OSError."""
        if self._file < 0:
            self._reopen_later()
        try:
            if self.synced != self.end:
                os.fsync(self._file)
                self._write_head(self.end)
                self.synced = self.end
            if not os.fstat(self._file).st_nlink:
                raise OSError(errno.ENOENT, "its file was removed")
        except OSError:
            self._close_file()  # nobody knows what it has now: it is read again
            raise

    def keyed_hash(self, text: str) -> str:
        """Return a text's hash under the key of today, which is removed with today's lines.

        Raises OSError.
        """
        today = written_time(self._now_s())[:10]
        if self._day_key[0] != today:
            self._day_key = today, _kept_key(self._folder / f"{today}{_KEY_SUFFIX}")
        data = text.encode(errors="surrogatepass")
        return hashlib.blake2b(data, key=self._day_key[1], digest_size=32).hexdigest()

    def close(self) -> None:
        """Let another process write the folder."""
        self._close_file()
        if self._head_file >= 0:
            os.close(self._head_file)
        os.close(self._lock)

    # --- writing -------------------------------------------------------------------------------

    def _write(self, line: bytes) -> None:
        unwritten = line
        try:
            while unwritten:
                unwritten = unwritten[os.write(self._file, unwritten) :]
        except OSError:
            try:
                os.ftruncate(self._file, self._size)
            except OSError:
                self._close_file()
            raise
        self._size += len(line)
        self.end = LinePlace(self.end.seq + 1, digest_of(line))

    def _rotate_if_full(self) -> bool:
        """Begin a new file if there must be one; return whether it was. Raises OSError."""
        is_old = written_time(self._now_s())[:10] != self._day
        is_full = self._size > 0 and (is_old or self._size >= self._rotate_bytes)
        if is_full:
            self.sync()
            self._open(self._number + 1)
        return is_full

    def _remove_old(self) -> None:
        """Remove files, and keys of days, that are older than what is kept; a line says so."""
        oldest = written_time(self._now_s() - self._keep_s)
        removed: list[Path] = []
        last: _LastLine | None = None
        for file in files_of(self._folder)[:-1]:
            found, _ = _last_line(file.read_bytes())
            if found is None or found.fields["time"] >= oldest:
                break
            removed.append(file)
            last = found
        if last is not None:
            said: dict[str, Any] = {"event": "removed", "last": last.fields["seq"]}
            said |= {"head": digest_of(last.data), "files": [file.name for file in removed]}
            self._mark(said)
            self.sync()
        keys = [
            one for one in self._folder.glob(f"????-??-??{_KEY_SUFFIX}") if one.stem < oldest[:10]
        ]
        for file in (*removed, *keys):
            file.unlink(missing_ok=True)

    # --- opening -------------------------------------------------------------------------------

    def _open_known(self) -> None:
        """Go on where the folder's files end. Raises OSError or ValueError."""
        expected, problem = START, ""
        if files_of(self._folder) or (self._folder / HEAD_FILE).exists():
            try:
                expected = read_head(self._folder, self._key)
            except ValueError as error:
                problem = str(error)
        self._reopen(expected, problem)

    def _reopen_later(self) -> None:
        """Go on after an error. Raises OSError."""
        try:
            self._reopen(self.end)
        except ValueError as error:
            raise OSError(errno.EIO, str(error)) from None

    def _reopen(self, expected: LinePlace, problem: str = "") -> None:
        """Go on in the last file, and mark what is not as it should be: that it ends as expected.

        Raises OSError, or ValueError if its last line was changed or signed with another key.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        files = files_of(self._folder)
        datas = (file.read_bytes() for file in reversed(files))
        data = next(datas, b"")
        line, end = _last_line(data)
        in_last = line is not None
        while line is None and (earlier := next(datas, None)) is not None:
            line, _ = _last_line(earlier)
        if line is not None and not is_signed(line.data, self._key):
            message = f"--audit {self._folder}: its last line was changed, or its key is another"
            raise ValueError(f"{message}: move the log away, or give it its --audit-key")
        self._open_head()
        self._open((number_of(files[-1]) or 0) if files else 0)
        if line and in_last:
            self._day = line.fields["time"][:10]
        self.end = LinePlace(line.fields["seq"], digest_of(line.data)) if line else START
        torn = data[end:]
        if data and not data.endswith(b"\n"):
            self._size += os.write(self._file, b"\n")
            torn += b"\n" if torn else b""
        if torn:
            digest = hashlib.sha256(torn).hexdigest()
            self._mark({"event": "torn", "bytes": len(torn), "sha256": digest})
        if why := problem or _difference(expected, self.end):
            self._mark({"event": "missing", "why": why})

    def _mark(self, fields: dict[str, Any]) -> None:
        self._write(written(fields, self.end, self._now_s(), self._key))

    def _open_head(self) -> None:
        """Open the file that says where the log ends; it is there before the first line."""
        if self._head_file >= 0:
            os.close(self._head_file)
        file = self._folder / HEAD_FILE
        self._head_file = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        if not os.fstat(self._head_file).st_size:
            self._write_head(START)
            os.fsync(self._head_file)

    def _write_head(self, place: LinePlace) -> None:
        os.lseek(self._head_file, 0, os.SEEK_SET)
        os.write(self._head_file, written_head(place, self._key))

    def _open(self, number: int) -> None:
        self._close_file()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(self._folder / file_name(number), flags, 0o600)
        self._number, self._size = number, os.fstat(self._file).st_size
        self._day = written_time(self._now_s())[:10]
        _sync_folder(self._folder)

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _LastLine(NamedTuple):
    fields: dict[str, Any]
    data: bytes


def _last_line(data: bytes) -> tuple[_LastLine | None, int]:
    """Return the last whole line of a file, and where it ends; what follows is none."""
    end = len(data)
    while end:
        begin = data.rfind(b"\n", 0, end - 1) + 1
        if (fields := read(data[begin:end])) is not None:
            return _LastLine(fields, data[begin:end]), end
        end = begin
    return None, 0


def _difference(expected: LinePlace, found: LinePlace) -> str:
    """Return what is missing at the end of a log, if anything is."""
    num = expected.seq - found.seq
    if num > 0:
        return f"{num} lines were missing at the end, up to line {expected.seq}"
    if num == 0 and expected.digest != found.digest:
        return f"line {found.seq} was not the one that the log had ended with"
    return ""


def _kept_key(file: Path) -> bytes:
    """Return a day's key, which is made if there is none. Raises OSError."""
    if not file.exists():
        write_whole(file, lambda out: out.write(secrets.token_bytes(_KEY_BYTES)))
    return file.read_bytes()


def _sync_folder(folder: Path) -> None:
    """Let new names outlast a power failure; not every system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
