"""What a batch has answered so far, in a file that survives the process, and the files made of it.

An answer is one appended line, so a process that is killed loses at most what it was writing: that
line is cut away at the next start, and its request asked again. No request is answered twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ridgeline.model.files.tensors import naming
from ridgeline.system.append_log import AppendLog, FileLock

_FORM, _MODE = 1, 0o666  # of the file; the user's mask says who may read it


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
        try:
            self._lock = FileLock(Path(f"{path}.lock"))
        except BlockingIOError:
            raise ValueError(f"{path.name}: another process is working on it") from None
        self._places: dict[int, tuple[bool, int, int]] = {}  # well answered, offset, length
        self.num_completed = self.num_failed = 0
        try:
            self._log = AppendLog(path, os.O_RDWR | os.O_CREAT, _MODE)
            with naming(path):
                self._read(dict(batch) | {"form": _FORM})
        except BaseException:
            self._lock.release()
            raise

    def __contains__(self, index: int) -> bool:
        """Whether a request has its answer."""
        return index in self._places

    def __len__(self) -> int:
        """How many requests have one."""
        return len(self._places)

    def _read(self, batch: dict[str, Any]) -> None:
        """Take what the file has up to the last whole line; begin it if it is new."""
        with self.path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):  # it ended before it had begun
                self._log.cut(0)
                self._log.append(json.dumps(batch).encode() + b"\n")
                return
            self._check_batch(first, batch)
            end = len(first)
            for line in file:
                head, _, rest = line.partition(b" ")
                if not line.endswith(b"\n") or not head.isdigit() or rest[:2] not in _MARKS:
                    break
                self._note(int(head), rest[:1] == b"+", end + len(head) + 3, len(rest) - 3)
                end += len(line)
        self._log.cut(end)

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
        head = b"%d %b " % (index, b"+" if is_completed else b"-")
        with naming(self.path):
            begin = self._log.append(head + line + b"\n")
        self._note(index, is_completed, begin + len(head), len(line))

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
        self._log.close()
        self._lock.release()

    def remove(self) -> None:
        """Delete the journal, when its files are there."""
        self.path.unlink(missing_ok=True)
        self.close()
        Path(f"{self.path}.lock").unlink(missing_ok=True)


_MARKS = (b"+ ", b"- ")
