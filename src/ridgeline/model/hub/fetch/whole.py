"""Files that are complete wherever they are: locked, written under a hidden name, then renamed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ELSEWHERE = "set RIDGELINE_HOME to a directory elsewhere"  # what to do about a disk that is full


def hidden(target: Path, suffix: str) -> Path:
    """Return the hidden name beside ``target`` for what belongs to it while it is made."""
    return target.with_name(f".{target.name}.{suffix}")


@contextmanager
def only_one(target: Path) -> Iterator[None]:
    """Wait until no other process on this machine writes ``target``. Makes its directory.

    Raises OSError, which names the way out, if the directory cannot be written.
    """
    from filelock import FileLock  # here: what only looks for models does not need it

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(hidden(target, "lock")).acquire()
    except OSError as error:
        raise OSError(
            f"models cannot be kept in {target.parent} ({error.strerror}): set RIDGELINE_HOME to a "
            f"directory that can be written"
        ) from error
    with lock:
        yield


def git_blob_of(path: Path) -> str:
    """Return the sha1 by which git, and so the hub, knows a file's bytes, in hex."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
