"""A folder of records: blocks of one model's cache, each with what it is the cache of.

``PATH/NAME/00000001.kv`` and so on are segments. A segment is a header and records of one form, of
blocks or of states, which are appended and never changed. What there is stands in the records'
heads alone, so nothing else can be out of date: the index is read from them at the start. A torn
record at the end is cut, and a damaged one is passed over. The segment that was used least lately
goes first, and before it those of other names: of a model, formats or code that are not in use.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from ridgeline.system.append_log import AppendLog, FileLock
from ridgeline.system.machine import free_bytes
from ridgeline.system.report import gb

_MAGIC = b"RLKV0001"
_MOST_SEGMENT_BYTES = 64 << 20
_LEAST_RECORDS = 16  # that a folder must have room for, of the largest
_ROOT_BYTES = 64  # of a first block's root, or of a parent's key
_CHECK_BYTES = 8
_HEADER_BYTES = len(_MAGIC) + 16 + 8  # with the name and the form
_MODE, _FOLDER_MODE = 0o600, 0o700  # they have the tokens of prompts
_SEGMENT = re.compile(r"\d{8}\.kv")
_NAME = re.compile(r"[0-9a-f]{32}")


class KeptBlock(NamedTuple):
    """A place of a text: its tokens, after those of its parent, and the blocks of all groups.

    ``parent`` is the key of the block before, or of a first block its request's root. A state
    behind a block is a record too: with that block's tokens, and its key as the parent.
    """

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    data: bytes | memoryview


class RecordForm(NamedTuple):
    """How large the parts of a record are: tokens, and bytes of data."""

    num_tokens: int
    data_bytes: int

    @property
    def head(self) -> struct.Struct:
        """Key, length of parent, parent, tokens, CRC of all."""
        return struct.Struct(f"<16sB3x{_ROOT_BYTES}s{self.num_tokens}II")

    @property
    def record_bytes(self) -> int:
        """Of all of it."""
        return self.head.size + _CHECK_BYTES + self.data_bytes

    def written(self, record: KeptBlock) -> list[bytes | memoryview]:
        """Return a record as it is stored, in parts."""
        key, parent, tokens, data = record
        begin = self.head.pack(key, len(parent), parent, *tokens, 0)
        crc = zlib.crc32(data, zlib.crc32(begin))
        head = self.head.pack(key, len(parent), parent, *tokens, crc)
        return [head, _check(head), data]

    def key_of(self, head: bytes) -> bytes | None:
        """Return the key in a record's head, None if it is damaged."""
        fields, check = head[: self.head.size], head[self.head.size :]
        return fields[:16] if len(check) == _CHECK_BYTES and check == _check(fields) else None

    def read(self, stored: memoryview) -> KeptBlock | None:
        """Return a stored record, of which ``stored`` stays a part; None if it is damaged."""
        end = self.head.size + _CHECK_BYTES
        if self.key_of(bytes(stored[:end])) is None:
            return None
        key, size, parent, *tokens, crc = self.head.unpack(stored[: self.head.size])
        begin = self.head.pack(key, size, parent, *tokens, 0)
        data = stored[end:]
        if zlib.crc32(data, zlib.crc32(begin)) != crc:
            return None
        return KeptBlock(key, parent[:size], tuple(tokens), data)


class _Segment:
    """A file of records; it is closed when nobody uses it any more."""

    def __init__(self, path: Path, form_of: dict[bytes, RecordForm], *, can_write: bool) -> None:
        """Open a file, of whose header ``form_of`` says which form its records have.

        Raises OSError, and ValueError if it is none of ours.
        """
        self.log = AppendLog(path, os.O_RDWR if can_write else os.O_RDONLY)
        header = os.pread(self.log.file.fileno(), _HEADER_BYTES, 0)
        if header not in form_of:
            raise ValueError(f"{path} has another form")
        self.form = form_of[header]
        self.used = 0  # when, in reads and writes
        whole = self.place(self.num_records)
        if can_write and whole < self.log.num_bytes:
            self.log.cut(whole)

    @property
    def num_records(self) -> int:
        """How many are whole."""
        return (self.log.num_bytes - _HEADER_BYTES) // self.form.record_bytes

    def place(self, number: int) -> int:
        """Return where a record begins."""
        return _HEADER_BYTES + number * self.form.record_bytes

    def heads(self) -> Iterator[bytes]:
        """Yield the heads of all records."""
        size = self.form.head.size + _CHECK_BYTES
        for number in range(self.num_records):
            yield os.pread(self.log.file.fileno(), size, self.place(number))

    def read(self, number: int, room: memoryview) -> int:
        """Put a record, as it is stored, into ``room``; return how many bytes there are of it."""
        return os.preadv(self.log.file.fileno(), [room], self.place(number))

    def append(self, record: KeptBlock) -> int:
        """Add a record behind those that are whole; return its number. Raises OSError."""
        number = self.num_records
        self.log.append(*self.form.written(record))
        return number


class Segments:
    """The records under one name in a folder that has records of others too.

    Attributes:
        folder: that of this name.
        forms: of the records: of blocks, and of states if there are some.
        can_write: whether this process adds records; another one may do that, or nobody can.
        num_bad: records that were damaged.
    """

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        name: str,
        forms: Sequence[RecordForm],
        say: Callable[[str], None],
    ) -> None:
        """Read which records there are.

        Raises ValueError, in a line, if the folder cannot be had or is too small for what it holds.
        """
        largest = max(form.record_bytes for form in forms)
        least = _LEAST_RECORDS * largest
        if most_bytes < least:
            raise ValueError(
                f"--kv-disk: {most_bytes:,} bytes hold fewer than {_LEAST_RECORDS} blocks or "
                f"states of this model: give at least {least:,}"
            )
        self.forms, self._say = tuple(forms), say
        self._top, self.folder = folder, folder / name
        self._most_bytes = most_bytes = self._that_fit(most_bytes)
        begin = _MAGIC + bytes.fromhex(name)
        self._header_of = {form: begin + struct.pack("<II", *form) for form in forms}
        self._form_of = {header: form for form, header in self._header_of.items()}
        most = max(_MOST_SEGMENT_BYTES, _HEADER_BYTES + largest)
        self._segment_bytes = min(most, most_bytes // 8)
        self._index: dict[bytes, tuple[_Segment, int]] = {}
        self._segments: list[_Segment] = []
        self._lock, self._clock, self.num_bad = Lock(), 0, 0
        self._writes: FileLock | None = None
        self.can_write = self._begin() and most_bytes >= least
        for path in sorted(one for one in self.folder.glob("*.kv") if _SEGMENT.match(one.name)):
            self._enter(path)

    def _that_fit(self, most_bytes: int) -> int:
        """Return how many bytes may be kept: what is there and what is free, if that is less."""
        with suppress(OSError):  # then nothing can be kept, which is said
            there = sum(one.stat().st_size for one in self._top.glob("*/*.kv"))
            if (room := there + (free := free_bytes(self._top))) < most_bytes:
                self._say(
                    f"--kv-disk needs {gb(most_bytes)}, but {gb(free)} are "
                    f"free in {self._top}: at most {gb(room)} are kept; make room, or "
                    "give a smaller size"
                )
                return room
        return most_bytes

    def _begin(self) -> bool:
        """Make the folder and lock it; return whether records can be added, and say if not."""
        try:
            self.folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            if not self._top.is_dir():
                raise ValueError(f"--kv-disk: {self._top}: {error.strerror}") from None
            self._say(f"--kv-disk: no blocks are kept in {self._top}: {error.strerror}")
            return False
        try:
            self._writes = FileLock(self.folder / "lock")
        except BlockingIOError:
            self._say(f"--kv-disk: another process writes to {self.folder}: this one only reads")
        except OSError as error:
            self._say(f"--kv-disk: {self.folder} is only read: {error.strerror}")
        return self._writes is not None

    def _enter(self, path: Path) -> None:
        try:
            segment = _Segment(path, self._form_of, can_write=self.can_write)
        except (OSError, ValueError):  # damaged at its beginning, or no file of ours
            self.num_bad += 1
            return
        self._segments.append(segment)
        for number, head in enumerate(segment.heads()):
            if (key := segment.form.key_of(head)) is None:
                self.num_bad += 1
            else:
                self._index[key] = segment, number

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    @property
    def num_bytes(self) -> int:
        """What all segments under this name take."""
        return sum(one.log.num_bytes for one in tuple(self._segments))

    def room(self, count: int, form: RecordForm) -> list[memoryview]:
        """Return room for this number of records, on huge pages where the system has them."""
        size = form.record_bytes
        area = mmap.mmap(-1, count * size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # an operating system without them
                area.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(area)
        return [whole[i * size : (i + 1) * size] for i in range(count)]

    def read(self, key: bytes, room: memoryview) -> KeptBlock | None:
        """Return a record, which is read into ``room``; None if it is not there, or damaged.

        Any thread may call.
        """
        with self._lock:
            place = self._index.get(key)
            if place is None:
                return None
            segment, number = place
            self._clock += 1
            segment.used = self._clock
        record = None
        with suppress(OSError):  # then it is lost, as a damaged one
            if segment.read(number, room) == len(room):
                record = segment.form.read(room)
        if record is None or record.key != key:
            with self._lock:
                self.num_bad += 1
                if self._index.get(key) == place:
                    del self._index[key]
            return None
        return record

    def append(self, record: KeptBlock) -> None:
        """Add a record, and make room for it. Raises OSError, as on a full disk."""
        with self._lock:
            if not self.can_write or record.key in self._index:
                return
            try:
                segment = self._room(len(record.data))
                number = segment.append(record)
            except OSError:
                self.can_write = False
                raise
            self._clock += 1
            segment.used = self._clock
            self._index[record.key] = segment, number

    def close(self) -> None:
        """Let go of the folder."""
        with self._lock:
            self.can_write = False
            self._writes = None
            self._segments.clear()
            self._index.clear()

    # --- room ----------------------------------------------------------------------------------

    def _room(self, data_bytes: int) -> _Segment:
        """Return the segment to append a record of this size to."""
        (form,) = {form for form in self.forms if form.data_bytes == data_bytes}
        last = next((one for one in reversed(self._segments) if one.form == form), None)
        if last is not None and last.place(last.num_records + 1) <= self._segment_bytes:
            return last
        number = 1 + max((int(one.log.path.stem) for one in self._segments), default=0)
        path = self.folder / f"{number:08d}.kv"
        while path.exists():  # one of another form
            number += 1
            path = self.folder / f"{number:08d}.kv"
        self._make_room()
        begun = AppendLog(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        begun.append(self._header_of[form])
        self._segments.append(segment := _Segment(path, self._form_of, can_write=True))
        return segment

    def _make_room(self) -> None:
        """Remove segments until there is room for one more: those of other names first."""
        others = list(self._others())
        over = self.num_bytes + sum(size for _, size in others) + self._segment_bytes
        over -= self._most_bytes
        for folder, size in others:
            if over <= 0:
                return
            over -= size if _removed(folder) else 0
        while over > 0 and self._segments:
            oldest = min(self._segments, key=lambda one: one.used)
            self._segments.remove(oldest)
            gone = [key for key, (segment, _) in self._index.items() if segment is oldest]
            for key in gone:
                del self._index[key]
            oldest.log.path.unlink(missing_ok=True)
            over -= oldest.log.num_bytes

    def _others(self) -> Iterator[tuple[Path, int]]:
        """Yield the folders of other names with their sizes, the one that was written first."""
        folders = [one for one in self._top.iterdir() if _NAME.fullmatch(one.name)]
        others = [one for one in folders if one != self.folder and one.is_dir()]
        for folder in sorted(others, key=lambda one: one.stat().st_mtime):
            yield folder, sum(one.stat().st_size for one in folder.glob("*.kv"))


def _removed(folder: Path) -> bool:
    """Remove the records of another name, unless a process writes them; return whether it did."""
    with suppress(OSError):
        lock = FileLock(folder / "lock")
        for path in (*folder.glob("*.kv"), folder / "lock"):
            path.unlink(missing_ok=True)
        folder.rmdir()
        lock.release()
        return True
    return False


def _check(head: bytes) -> bytes:
    return blake2b(head, digest_size=_CHECK_BYTES).digest()
