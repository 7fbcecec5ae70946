"""What a batch has answered so far, in a file that survives the process, and the files made of it.

An answer is one appended line, so a process that is killed loses at most what it was writing: that
line is cut away at the next start, and its request asked again. No request is answered twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ridgeline.model.files.tensors import naming

_FORM = 1  # of the file


class Journal:
    """The answers to the requests of one batch, by the requests' indices.

    The first line says which batch it is. A further one has a request's index, whether it is well
    answered, and the line that will stand in the output.

    Attributes:
        num_completed: requests that are well answered.
        num_failed: lines that are no requests, and requests that were refused or failed.
    """

    def __init__(self, path: Path, batch: Mapping[str, Any]) -> None:
        """Go on with the file at ``path``, or begin it; ``batch`` says which batch it must be.

        Raises ValueError if it is of another batch, or another process has it, and OSError.
        """
        self.path = path
        self._lock = FileLock(f"{path}.lock", blocking=False, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(f"{path.name}: another process is working on it") from None
        self._places: dict[int, tuple[bool, int, int]] = {}  # well answered, offset, length
        self.num_completed = self.num_failed = 0
        try:
            self._end = self._read(dict(batch) | {"form": _FORM})
            self._file = path.open("r+b", buffering=0)
            self._file.truncate(self._end)
            self._file.seek(self._end)
        except BaseException:
            self._lock.release()
            raise

    def __contains__(self, index: int) -> bool:
        """Whether a request has its answer."""
        return index in self._places

    def __len__(self) -> int:
        """How many requests have one."""
        return len(self._places)

    def _read(self, batch: dict[str, Any]) -> int:
        """Take what the file has; return where the last whole line ends."""
        if not self.path.exists():
            with naming(self.path):
                self.path.write_bytes(json.dumps(batch).encode() + b"\n")
        with self.path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):  # it ended before it had begun
                first = json.dumps(batch).encode() + b"\n"
                self.path.write_bytes(first)
                return len(first)
            self._check_batch(first, batch)
            end = len(first)
            for line in file:
                head, _, rest = line.partition(b" ")
                if not line.endswith(b"\n") or not head.isdigit() or rest[:2] not in _MARKS:
                    break
                self._note(int(head), rest[:1] == b"+", end + len(head) + 3, len(rest) - 3)
                end += len(line)
        return end

    def _check_batch(self, line: bytes, batch: Mapping[str, Any]) -> None:
        try:
            known = json.loads(line)
        except ValueError:
            known = None
        if not isinstance(known, dict) or "form" not in known:
            raise ValueError(f"{self.path}: this is not the journal of a batch")
        if other := [name for name in {**known, **batch} if known.get(name) != batch.get(name)]:
            raise ValueError(
                f"{self.path} was started with another {', '.join(sorted(other))}: remove it "
                "to start again, or use the same as before to resume"
            )

    def write(self, index: int, line: bytes, *, is_completed: bool) -> None:
        """Keep a request's answer: ``line`` is JSON.

        Raises OSError, which names the file, as where the disk is full; then nothing of it is kept.
        """
        line = line.replace(b"\n", b" ")  # white space, where JSON has any
        entry = b"%d %b %b\n" % (index, b"+" if is_completed else b"-", line)
        unwritten = entry
        try:
            with naming(self.path):
                while unwritten:
                    unwritten = unwritten[self._file.write(unwritten) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._end)
                self._file.seek(self._end)
            raise
        self._note(index, is_completed, self._end + len(entry) - 1 - len(line), len(line))
        self._end += len(entry)

    def _note(self, index: int, is_completed: bool, offset: int, length: int) -> None:
        if index not in self._places:
            self.num_completed += is_completed
            self.num_failed += not is_completed
        self._places[index] = is_completed, offset, length

    def finish(self, output: Path | None, errors: Path, *, in_order: bool) -> None:
        """Write what is answered well into one file, if it is given, and the rest into another.

        The second is not made if there is no rest. Lines are ``in_order`` of the requests, else in
        that of their ends. Each file appears whole or not at all. The journal stays: see
        ``remove``.
        """
        paths = ((errors if self.num_failed else None, False), (output, True))
        for path, is_completed in paths:
            if path is not None:
                part = path.with_name(f".{path.name}.writing")
                with naming(part), part.open("wb") as file:
                    for line in self.lines(is_completed=is_completed, in_order=in_order):
                        file.write(line + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)

    @property
    def num_bytes(self) -> int:
        """What all lines take in the files that ``finish`` writes."""
        return sum(length + 1 for _, _, length in self._places.values())

    def lines(self, *, is_completed: bool, in_order: bool) -> Iterator[bytes]:
        """Yield the lines of what is answered well, or of the rest."""
        places = [(i, *place) for i, place in self._places.items() if place[0] == is_completed]
        places.sort(key=lambda place: place[0] if in_order else place[2])
        with self.path.open("rb") as file:
            for _, _, offset, length in places:
                file.seek(offset)
                yield file.read(length)

    def close(self) -> None:
        """Let another process go on."""
        self._file.close()
        self._lock.release()

    def remove(self) -> None:
        """Delete the journal, when its files are there."""
        self.path.unlink(missing_ok=True)
        self.close()
        Path(f"{self.path}.lock").unlink(missing_ok=True)


_MARKS = (b"+ ", b"- ")
