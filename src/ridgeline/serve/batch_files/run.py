"""A batch from its first request to its last: some at a time, each answer kept as it comes.

An answer is one line that is appended to a file, which survives the process: one that is killed
loses at most what it was writing. That line is cut away at the next start, and its request asked
again; no request is answered twice. Who answers is not known here: ``ask`` does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.model.files.tensors import naming
from ridgeline.serve.batch_files.lines import RequestLine
from ridgeline.system.append_log import AppendLog, FileLock

_FORM, _MODE = 1, 0o666  # of the file; the user's mask says who may read it
_MARKS = (b"+ ", b"- ")
_ENTRY = (
    b'{"id": "batch_req_%b", "custom_id": %b, "response": '
    b'{"status_code": %d, "request_id": "batch-%b"%b, "body": %b}, "error": null}'
)


class BatchProgress:
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
            header = json.loads(line)
        except ValueError:
            header = None
        if not isinstance(header, dict) or "form" not in header:
            raise ValueError(f"{self.path}: this is not the journal of a batch")
        if other := [name for name in {**header, **batch} if header.get(name) != batch.get(name)]:
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
        that of their ends. Each file appears whole or not at all. The progress file stays: see
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
        """Delete the progress file, when its files are there."""
        self.path.unlink(missing_ok=True)
        self.close()
        Path(f"{self.path}.lock").unlink(missing_ok=True)


class ItemRequest(NamedTuple):
    """A request of a batch, as it is to be answered.

    Attributes:
        url: the route.
        body: its JSON.
        request_id: what the answer is called.
        seed: what its chance depends on if the body has no seed.
    """

    url: str
    body: dict[str, Any]
    request_id: str
    seed: int


class ItemResponse(NamedTuple):
    """The answer: a status of HTTP, JSON, and notes beside it, by name: see ``LocalClient``."""

    status: int
    body: bytes
    notes: Mapping[str, str] = {}


class Stopped(Exception):
    """Nothing is answered any more; what was answered is kept."""


Ask = Callable[[ItemRequest], Awaitable[ItemResponse]]


class BatchRun:
    """The requests of a batch, asked side by side."""

    def __init__(
        self, progress: BatchProgress, ask: Ask, *, name: str, seed: int, most_at_once: int
    ) -> None:
        """Have ``ask`` answer what ``progress`` has no answer of.

        The ids of answers depend on ``name`` and the requests' places; the chance in them on
        ``seed`` and the places. So it does not matter in which order they are asked, nor when.
        """
        self._progress, self._ask = progress, ask
        self._name, self._seed, self._most_at_once = name, seed, most_at_once

    async def run(self, lines: Iterator[RequestLine], report: Callable[[], object]) -> None:
        """Ask until all is answered; ``report`` is called whenever there is more.

        Raises Stopped, OSError if an answer cannot be kept, and what reading ``lines`` raises.
        """
        running: set[asyncio.Task[None]] = set()
        try:
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                if line.index in self._progress:
                    continue
                if line.problem:
                    self._progress.write(line.index, self._wrong(line), is_completed=False)
                    report()
                    continue
                running.add(asyncio.create_task(self._answer(line, report)))
                while len(running) >= self._most_at_once:
                    running = await _some(running)
            while running:
                running = await _some(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, line: RequestLine, report: Callable[[], object]) -> None:
        name = self._digest(line.index).hex()
        answer = await self._ask(
            ItemRequest(line.url, line.body, f"batch-{name}", self._seed_of(line))
        )
        custom_id = json.dumps(line.custom_id).encode()
        notes = b", " + json.dumps(answer.notes).encode()[1:-1] if answer.notes else b""
        of_answer = answer.status, name.encode(), notes, answer.body
        data = _ENTRY % (name.encode(), custom_id, *of_answer)
        self._progress.write(line.index, data, is_completed=answer.status == 200)
        report()

    def _wrong(self, line: RequestLine) -> bytes:
        error = {"code": "invalid_line", "message": line.problem, "line": line.number}
        entry = {"id": f"batch_req_{self._digest(line.index).hex()}", "custom_id": line.custom_id}
        return json.dumps(entry | {"response": None, "error": error}).encode()

    def _digest(self, index: int) -> bytes:
        return hashlib.blake2b(f"{self._name}:{index}".encode(), digest_size=12).digest()

    def _seed_of(self, line: RequestLine) -> int:
        digest = hashlib.blake2b(f"{self._seed}:{line.index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest)


async def _some(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until some tasks have ended, and return the others. Raises what a task raised."""
    ended, others = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
    return others
