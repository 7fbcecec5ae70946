"""The digest of a model's files: copies have the same digest, different files of one name do not.

A file's digest is its SHA-256, as ``sha256sum`` and model hubs write it. It is taken once, in a
thread while the model loads, and kept with the file's size and times. No program can set the time
of a file's last change (ctime). So a file that was replaced in place is noticed, even if its size
and its time of writing are those of the old one. Inodes do not count, because mounted object stores
number files differently each time.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ridgeline.system.machine import sha256_of, usable_cpus, write_whole

_WORTH_KEEPING_BYTES = 8 << 20  # reading less again takes a hundredth of a second
_MOST_THREADS = 4


class FileDigests:
    """The files that a model was read from; any thread may ask for their digest.

    Args:
        files: each by its name in the model, which counts where there are several.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self._lock = threading.Lock()  # held while files are read
        self._each: dict[str, str] | None = None

    def cached_digest(self, folder: Path) -> str | None:
        """Return the digest if no large file must be read for it, with those kept in ``folder``.

        Raises OSError if a file is gone.
        """
        if self._each is None:
            digests = {name: _cached_digest(path, folder) for name, path in self.files.items()}
            each = {name: one for name, one in digests.items() if one is not None}
            self._each = each if len(each) == len(digests) else None
        return None if self._each is None else _of_all(self._each)

    def start(self, folder: Path) -> None:
        """Take the digest in a thread, unless it is known: ``digest`` will wait less, or not."""

        def take() -> None:
            with suppress(OSError):  # a caller that needs the digest gets the error
                self.digest(folder)

        with suppress(OSError):
            if self.cached_digest(folder) is None:
                threading.Thread(target=take, name="digest", daemon=True).start()

    def digest(self, folder: Path) -> str:
        """Return the digest in hex: a file's SHA-256, or that of a list as ``sha256sum`` writes it.

        Waits until the files are read, unless their digests are kept in ``folder``; they are kept
        there now. Raises OSError if a file cannot be read.
        """
        return _of_all(self.each(folder))

    def each(self, folder: Path) -> dict[str, str]:
        """Return the SHA-256 of each file in hex, by its name in the model; as ``digest``."""
        with self._lock:
            if self.cached_digest(folder) is None:
                from concurrent.futures import ThreadPoolExecutor  # not at every start

                def digest(path: Path) -> str:
                    return _cached_digest(path, folder) or _taken(path, folder)

                with ThreadPoolExecutor(max(1, min(_MOST_THREADS, usable_cpus() // 2))) as pool:
                    taken = pool.map(digest, self.files.values())
                    self._each = dict(zip(self.files, taken, strict=True))
            assert self._each is not None
            return self._each


def _of_all(digests: Mapping[str, str]) -> str:
    if len(digests) == 1:
        return next(iter(digests.values()))
    lines = [f"{one}  {name}\n" for name, one in digests.items()]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _cached_digest(path: Path, folder: Path) -> str | None:
    """Return the digest of a file that is kept, if the file has not changed; small ones are read.

    Raises OSError if the file is gone.
    """
    facts = _facts(path)
    if facts["size"] < _WORTH_KEEPING_BYTES:
        return sha256_of(path)
    try:
        record = json.loads(_place(path, folder).read_bytes())
        digest = record["sha256"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # not there, or damaged
        return None
    return digest if record == _record(facts, digest) else None


def _taken(path: Path, folder: Path) -> str:
    """Read a file; return its digest, which is kept if the file did not change meanwhile."""
    before, digest = _facts(path), sha256_of(path)
    if _facts(path) == before:
        with suppress(OSError):  # a later start reads it again
            record = json.dumps(_record(before, digest)).encode()
            write_whole(_place(path, folder), lambda file: file.write(record))
    return digest


def _record(facts: Mapping[str, Any], digest: str) -> dict[str, Any]:
    """Return what is kept; ``check`` tells a damaged record, whose digest nothing else would."""
    check = hashlib.sha256(f"{sorted(facts.items())} {digest}".encode()).hexdigest()
    return {**facts, "sha256": digest, "check": check}


def _facts(path: Path) -> dict[str, Any]:
    stat = path.stat()
    times = {"written_ns": stat.st_mtime_ns, "changed_ns": stat.st_ctime_ns}
    return {"path": str(path.resolve()), "size": stat.st_size, **times}


def _place(path: Path, folder: Path) -> Path:
    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    return folder / f"{key[:32]}.digest"
