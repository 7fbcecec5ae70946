"""The files of an audit log, which only grow: opened, added to, rotated, removed when they are old.

A log goes on where its last file ends, under its id. What a crash has left of a line stays, and the
next line marks it. That lines are missing at the end, compared with what ``head.json`` says, is
marked too.

Which files are old is told by what lines show, and not by one reading of the clock, which may be
wrong for a while, in either direction. So the present is what lines of two whole days before today
have shown: a time at which nothing else was written is no proof of it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.system.append_log import AppendLog, FileLock
from ridgeline.system.machine import make_once, sync_folder
from ridgeline.trust.audit.record_format import (
    HEAD_FILE,
    START,
    ChainPosition,
    Head,
    data_of,
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
_ID_BYTES = 16
_TAIL_BYTES = 1 << 16  # of a file, in which its last line is looked for first
_DAYS = 2  # that must have shown a time, before a file is as old as that says


class LogFiles:
    """The files of one log; one thread uses them at a time.

    Attributes:
        folder: of the log.
        id: of the log, for good; another log of the same key has another.
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
            keep_s: how long after its last line a file is removed, by what later lines show.
            now_s: the clock.

        Raises OSError, or ValueError if another process writes the folder, or its last line was
        changed or signed with another key.
        """
        self.folder, self._key, self._now_s = folder, key, now_s
        self._rotate_bytes, self._keep_s = rotate_bytes, keep_s
        self.end = self.synced = START
        self.id = ""
        self._number, self._day = 0, ""
        self._has_line = False  # the file that is written
        self._last_s: float | None = None  # its last line
        self._ended: list[EndedFile] = []  # those before it
        self._servers: dict[str, dict[str, Any]] = {}  # whose logs this one names, by their ids
        self._day_key = ("", b"")
        self._log: AppendLog | None = None
        self._head_file = -1
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._lock = FileLock(folder / "lock")
        except BlockingIOError:
            message = f"--audit {folder}: another server writes there: name a folder of its own"
            raise ValueError(message) from None
        try:
            self._open_known()
            began_s = now_s()
            self._rotate_if_full(began_s)
            self._remove_old(began_s)
            self.sync()
        except BaseException:
            self.close()
            raise

    def append(self, fields: dict[str, Any]) -> None:
        """Write a line. Raises OSError, and then there is none."""
        if self._log is None:
            self._reopen_later()
        now_s = self._now_s()
        if self._rotate_if_full(now_s):
            self._remove_old(now_s)
        self._mark(fields, now_s)
        if fields.get("event") == "server":
            said = {name: one for name, one in fields.items() if name != "event"}
            self._servers[fields["server_log"]] = said

    def sync(self) -> None:
        """Let all lines outlast a power failure. Raises OSError."""
        log = self._log or self._reopen_later()
        try:
            if self.synced != self.end:
                os.fsync(log.file.fileno())
                self._write_head(self.end)
                self.synced = self.end
            if not os.fstat(log.file.fileno()).st_nlink:
                raise OSError(errno.ENOENT, "its file was removed")
        except OSError:
            self._close_file()  # nobody knows what it has now: it is read again
            raise

    def keyed_hash(self, text: str) -> str:
        """Return a text's hash under the key of today, which is removed with today's lines.

        Raises OSError.
        """
        today = day_of(self._now_s())
        if self._day_key[0] != today:
            self._day_key = today, _kept_key(self.folder / f"{today}{_KEY_SUFFIX}")
        data = text.encode(errors="surrogatepass")
        return hashlib.blake2b(data, key=self._day_key[1], digest_size=32).hexdigest()

    def close(self) -> None:
        """Let another process write the folder."""
        self._close_file()
        if self._head_file >= 0:
            os.close(self._head_file)
        self._lock.release()

    # --- writing -------------------------------------------------------------------------------

    def _write(self, line: bytes) -> None:
        assert self._log is not None
        try:
            self._log.append(line)
        except OSError:
            if self._log.is_torn:
                self._close_file()
            raise
        self.end = ChainPosition(self.end.seq + 1, digest_of(line))

    def _rotate_if_full(self, now_s: float) -> bool:
        """Begin a new file if there must be one; return whether it was. Raises OSError."""
        is_old = day_of(now_s) != self._day
        size = self._log.num_bytes if self._log else 0
        is_full = size > 0 and (is_old or size >= self._rotate_bytes)
        if is_full:
            self.sync()
            self._ended.append(EndedFile(self.folder / file_name(self._number), self._last_s))
            self._open(self._number + 1, now_s)
        return is_full

    def _remove_old(self, now_s: float) -> None:
        """Remove files that are older than what is kept, and keys of their days; a line says so."""
        removed = old_files(self._ended, now_s, self._keep_s)
        last = _last_of(removed[-1].file) if removed else None
        if last is None:
            return
        said: dict[str, Any] = {"event": "removed", "last": last.fields["seq"]}
        said |= {"head": digest_of(last.data), "files": [one.file.name for one in removed]}
        self._mark(said, now_s)
        self.sync()
        self._ended = self._ended[len(removed) :]
        kept_days = {*_days_of(self._ended), day_of(now_s)}
        days = [day for day in _days_of(removed) if day not in kept_days]
        keys = [self.folder / f"{day}{_KEY_SUFFIX}" for day in days]
        for file in (*keys, *(one.file for one in removed)):
            file.unlink(missing_ok=True)

    # --- opening -------------------------------------------------------------------------------

    def _open_known(self) -> None:
        """Go on where the folder's files end. Raises OSError or ValueError."""
        expected, problem = Head(START, ""), ""
        if files_of(self.folder) or (self.folder / HEAD_FILE).exists():
            try:
                expected = read_head(self.folder, self._key)
            except ValueError as error:
                problem = str(error)
        self._reopen(expected, problem)

    def _reopen_later(self) -> AppendLog:
        """Go on after an error. Raises OSError."""
        try:
            return self._reopen(Head(self.end, self.id))
        except ValueError as error:
            raise OSError(errno.EIO, str(error)) from None

    def _reopen(self, expected: Head, problem: str = "") -> AppendLog:
        """Go on in the last file, and mark what is not as it should be: that it ends as expected.

        Raises OSError, or ValueError if its last line was changed or signed with another key.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        now_s, files = self._now_s(), files_of(self.folder)
        datas = (data_of(file) for file in reversed(files))
        in_last = data = next(datas, b"")
        line, end = _last_line(data)
        while line is None and (earlier := next(datas, None)) is not None:
            line, _ = _last_line(in_last := earlier)
        if line is not None and not is_signed(line.data, self._key):
            message = f"--audit {self.folder}: its last line was changed, or its key is another"
            raise ValueError(f"{message}: move the log away, or give it its --audit-key")
        found_id = _id_in(in_last, self._key)
        self.id = found_id or expected.log or secrets.token_hex(_ID_BYTES)
        self._open_head()
        last = self._open((number_of(files[-1]) or 0) if files else 0, now_s)
        self._ended = [EndedFile(file, _last_s(_last_of(file))) for file in files[:-1]]
        if line and in_last is data:
            self._day, self._has_line, self._last_s = line.fields["time"][:10], True, _last_s(line)
        self.end = ChainPosition(line.fields["seq"], digest_of(line.data)) if line else START
        torn = data[end:]
        if data and not data.endswith(b"\n"):
            last.append(b"\n")
            torn += b"\n" if torn else b""
        if torn:
            digest = hashlib.sha256(torn).hexdigest()
            self._mark({"event": "torn", "bytes": len(torn), "sha256": digest}, now_s)
        if why := problem or _difference(expected, Head(self.end, found_id)):
            self._mark({"event": "missing", "why": why}, now_s)
        if self._has_line and not found_id:  # an earlier version began it
            self._mark({"event": "named", "log": self.id}, now_s)
        return last

    def _mark(self, fields: dict[str, Any], now_s: float) -> None:
        """Write a line; the first of a file says whose it is. Raises OSError."""
        if not self._has_line:
            first: dict[str, Any] = {"log": self.id, "file": self._number}
            first |= {"servers": list(self._servers.values())} if self._servers else {}
            fields = first | fields
        self._write(written(fields, self.end, now_s, self._key))
        self._has_line, self._last_s = True, now_s

    def _open_head(self) -> None:
        """Open the file that says where the log ends; it is there before the first line."""
        if self._head_file >= 0:
            os.close(self._head_file)
        file = self.folder / HEAD_FILE
        self._head_file = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        if not os.fstat(self._head_file).st_size:
            self._write_head(START)
            os.fsync(self._head_file)

    def _write_head(self, place: ChainPosition) -> None:
        os.lseek(self._head_file, 0, os.SEEK_SET)
        os.write(self._head_file, written_head(Head(place, self.id), self._key))

    def _open(self, number: int, now_s: float) -> AppendLog:
        self._close_file()
        file = AppendLog(self.folder / file_name(number), os.O_WRONLY | os.O_CREAT)
        self._log, self._number = file, number
        self._day, self._has_line, self._last_s = day_of(now_s), False, None
        sync_folder(self.folder)
        return file

    def _close_file(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


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


def _last_of(file: Path) -> _LastLine | None:
    """Return the last whole line of a file, of which no more is read than that takes.

    Raises OSError.
    """
    with file.open("rb") as opened:
        size, length = opened.seek(0, os.SEEK_END), _TAIL_BYTES
        while True:
            opened.seek(max(0, size - length))
            line, _ = _last_line(opened.read())
            if line or length >= size:
                return line
            length *= 4


def _last_s(line: _LastLine | None) -> float | None:
    return seconds_of(line.fields["time"]) if line else None


def _days_of(ended: Sequence[EndedFile]) -> list[str]:
    return sorted({day_of(one.last_s) for one in ended if one.last_s is not None})


def _id_in(data: bytes, key: bytes) -> str:
    """Return the id that a file's lines name; nothing if none does."""
    for line in data.split(b"\n"):
        if b'"log":"' in line and is_signed(line, key) and (fields := read(line)):
            return str(fields.get("log", ""))
    return ""


def _difference(expected: Head, actual: Head) -> str:
    """Return what is missing at the end of a log, if anything is, or that it is another one."""
    if expected.log and actual.log and expected.log != actual.log:
        return f"{HEAD_FILE} was of the log {expected.log}, its files of {actual.log}"
    num = expected.place.seq - actual.place.seq
    if num > 0:
        return f"{num} lines were missing at the end, up to line {expected.place.seq}"
    if num == 0 and expected.place.digest != actual.place.digest:
        return f"line {actual.place.seq} was not the one that the log had ended with"
    return ""


def _kept_key(file: Path) -> bytes:
    """Return a day's key, which is made if there is none. Raises OSError."""
    make_once(file, lambda: secrets.token_bytes(_KEY_BYTES))
    return file.read_bytes()


class EndedFile(NamedTuple):
    """A file that gets no more lines, and when its last one was written: seconds of the epoch.

    The time is None if no line in it says so.
    """

    file: Path
    last_s: float | None


def seconds_of(time: str) -> float | None:
    """Return a time of a line as seconds of the epoch; None if it is none."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def day_of(now_s: float) -> str:
    """Return the day of a time, UTC."""
    return written_time(now_s)[:10]


def old_files(ended: Sequence[EndedFile], now_s: float, keep_s: float) -> Sequence[EndedFile]:
    """Return which of a log's files, the first ones, were ended more than ``keep_s`` ago.

    A file of a day that has not come yet was written while the clock was wrong: it is as old as
    the next one.
    """
    today = day_of(now_s)
    past = [one.last_s for one in ended if one.last_s is not None and day_of(one.last_s) < today]
    days = sorted(set(map(day_of, past)))
    if len(days) < _DAYS:
        return ()
    present_s = max(time_s for time_s in past if day_of(time_s) <= days[-_DAYS])
    num_old = 0
    for i, one in enumerate(ended, start=1):
        if one.last_s is None:
            break
        if day_of(one.last_s) > today:
            continue
        if one.last_s >= present_s - keep_s:
            break
        num_old = i
    return ended[:num_old]
