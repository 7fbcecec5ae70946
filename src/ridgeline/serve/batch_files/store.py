"""The files and batches of those who use a server, each in a folder of its own, across restarts.

A record is a small file of JSON beside what it describes, and is replaced as a whole. Names that
come from outside are looked up among what is known, and never become paths.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ridgeline.system.append_log import FileLock

ENDED = ("completed", "failed", "cancelled")
_MOST_ENDED = 10_000  # batches of one owner whose records are kept

Record = TypeVar("Record", "StoredFile", "StoredBatch")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file: what was sent, or what a batch made.

    Attributes:
        id: made here.
        created_at: in Unix seconds.
        filename: as its owner calls it.
        purpose: "batch" or "batch_output".
        bytes: its size.
    """

    id: str
    created_at: int
    filename: str
    purpose: str
    bytes: int

    def shown(self) -> dict[str, Any]:
        """Return it as OpenAI writes it."""
        return asdict(self) | {"object": "file", "status": "processed"}


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch; names are OpenAI's.

    Attributes:
        id: made here.
        created_at: in Unix seconds.
        endpoint: where all its requests go.
        input_file_id: the file that they stand in.
        completion_window: what was asked for.
        seed: what the chance in its answers depends on.
        status: "validating" until it begins, "in_progress", "finalizing", "cancelling", or one of
            ``ENDED``.
        metadata: the owner's own.
        times: when it came into a state, as ``completed_at``, in Unix seconds.
        num_total: requests.
        num_completed: those that were answered well.
        num_failed: those that were not, and lines that are none.
        output_file_id: the answers.
        error_file_id: what is not answered, and why.
        usage: tokens of all answers, as OpenAI counts them, when it is over.
        problem: why it failed.
    """

    id: str
    created_at: int
    endpoint: str
    input_file_id: str
    completion_window: str
    seed: int
    status: str = "validating"
    metadata: dict[str, str] | None = None
    times: dict[str, int] = field(default_factory=dict)
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    usage: dict[str, Any] | None = None
    problem: str = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will become of it."""
        return self.status in ENDED

    def shown(self) -> dict[str, Any]:
        """Return it as OpenAI writes it."""
        problem = {"code": "batch_failed", "message": self.problem, "line": None, "param": None}
        states = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled")
        times = {f"{state}_at": self.times.get(f"{state}_at") for state in states}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": [problem]} if self.problem else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if self.is_over else None,
            "error_file_id": self.error_file_id if self.is_over else None,
            "created_at": self.created_at,
            **times,
            "expires_at": None,  # nothing is given up because it took long
            "expired_at": None,
            "request_counts": {
                "total": self.num_total,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "usage": self.usage,
            "metadata": self.metadata,
        }


class OwnerFiles:
    """The files and batches of one owner."""

    def __init__(self, folder: Path) -> None:
        """Read what ``folder`` has; it is made when the first file comes."""
        self._folder = folder
        self.files = {one.id: one for one in _records(folder, "file-*.json", StoredFile)}
        self.batches = {one.id: one for one in _records(folder, "batch_*.json", StoredBatch)}
        for path in folder.glob("*.writing"):  # what a process had begun that was killed
            path.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(one.bytes for one in self.files.values())

    def content(self, file_id: str) -> Path:
        """Return where the content of a file is, or will be."""
        return self._folder / f"{file_id}.jsonl"

    def progress_path(self, batch_id: str) -> Path:
        """Return where a batch keeps what it has answered."""
        return self._folder / f"{batch_id}.part"

    def receive(self, source: BinaryIO) -> str:
        """Keep the content of a file, and return the id of it; any thread may call.

        Raises OSError.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file_id = new_id("file-")
        part = self._folder / f"{file_id}.writing"
        try:
            with part.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        part.replace(self.content(file_id))
        return file_id

    def note_file(self, file_id: str, filename: str, purpose: str) -> StoredFile:
        """Know a file whose content is there."""
        size = self.content(file_id).stat().st_size
        file = StoredFile(file_id, int(time.time()), filename, purpose, size)
        self._write(file)
        self.files[file_id] = file
        return file

    def delete(self, file_id: str) -> None:
        """Delete a file, which must be known."""
        del self.files[file_id]
        (self._folder / f"{file_id}.json").unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)

    def keep(self, batch: StoredBatch) -> StoredBatch:
        """Know a batch, or what has become of it. Raises OSError."""
        self._write(batch)
        self.batches[batch.id] = batch
        ended = [one.id for one in self.batches.values() if one.is_over]
        for batch_id in ended[: max(0, len(ended) - _MOST_ENDED)]:
            del self.batches[batch_id]
            (self._folder / f"{batch_id}.json").unlink(missing_ok=True)
        return batch

    def moved(self, batch_id: str, status: str, **changes: Any) -> StoredBatch:
        """Keep that a batch has come into a state. Raises OSError."""
        batch = self.batches[batch_id]
        times = batch.times | {f"{status}_at": int(time.time())}
        return self.keep(replace(batch, status=status, times=times, **changes))

    def _write(self, record: StoredFile | StoredBatch) -> None:
        part = self._folder / f"{record.id}.json.writing"
        part.write_text(json.dumps(asdict(record)))
        part.replace(self._folder / f"{record.id}.json")


class Store:
    """The owners of files and batches, by their ids; one process at a time has a store."""

    def __init__(self, folder: Path) -> None:
        """Read what ``folder`` has, which is made if need be.

        Raises OSError if nothing can be kept there, and ValueError if another process has it.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        try:
            self._lock = FileLock(folder / ".lock")
        except BlockingIOError:
            raise ValueError("another server of this model keeps the files") from None
        folders = [path for path in sorted(folder.iterdir()) if path.is_dir()]
        self._owners = {path.name: OwnerFiles(path) for path in folders}

    def of(self, owner: str) -> OwnerFiles:
        """Return what an owner has; ``owner`` must be fit for the name of a folder."""
        if owner not in self._owners:
            self._owners[owner] = OwnerFiles(self._folder / owner)
        return self._owners[owner]

    @property
    def owners(self) -> Mapping[str, OwnerFiles]:
        """All who have anything."""
        return self._owners

    def close(self) -> None:
        """Let another process have it."""
        self._lock.release()


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed."""
    return prefix + uuid.uuid4().hex


def _records(folder: Path, pattern: str, kind: type[Record]) -> Iterator[Record]:
    """Yield the records that can be read, oldest first."""
    records: list[Record] = []
    for path in folder.glob(pattern):
        try:
            record = kind(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # of a later version, or damaged: it stays where it is
        if record.id == path.stem:
            records.append(record)
    yield from sorted(records, key=lambda one: (one.created_at, one.id))
