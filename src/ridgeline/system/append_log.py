"""Files that only grow: one process writes them, and a record is there whole or not at all.

What a record looks like is its owner's matter, who also knows where the last whole one ends. A
crash may have torn what follows it: that is cut, or marked.
"""

from __future__ import annotations

import errno
import io
import os
import weakref
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # of no use, and not there, on Windows
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None


class FileLock:
    """A lock that one process has at a time, till ``release``, or as long as this is kept."""

    def __init__(self, path: Path) -> None:
        """Lock a file, which is made if need be.

        Raises BlockingIOError if another process has it, and OSError if it cannot be had.
        """
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(path, flags, 0o600)
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            if fcntl:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(descriptor).st_nlink:  # another has just removed it
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError:
            self.release()
            raise


class AppendLog:
    """A file to which records are appended; it is closed when nobody has this any more.

    Attributes:
        path: of the file.
        file: open, and not buffered.
        num_bytes: what it has; a record that could not be written whole does not count.
        is_torn: whether a part of such a record is still there: the next one waits until it is cut.
    """

    def __init__(self, path: Path, flags: int, mode: int = 0o600) -> None:
        """Open a file with the ``flags`` of ``os.open``. Raises OSError."""
        self.path, self.is_torn = path, False
        opened = os.open(path, flags | os.O_APPEND, mode)
        self.file = io.FileIO(path, "r+", opener=lambda *_: opened)
        self.close = weakref.finalize(self, self.file.close)
        self.num_bytes = os.fstat(opened).st_size

    def append(self, *parts: bytes | memoryview) -> int:
        """Add a record, given in parts; return where it begins.

        Raises OSError, as where the disk is full; then nothing of it is left, unless ``is_torn``.
        """
        begin = end = self.num_bytes
        if self.is_torn:
            self.cut(begin)
        self.is_torn = True
        try:
            for part in parts:
                unwritten = memoryview(part).cast("B")
                end += len(unwritten)
                while unwritten:
                    unwritten = unwritten[self.file.write(unwritten) :]
        except OSError:
            with suppress(OSError):
                self.cut(begin)
            raise
        self.num_bytes, self.is_torn = end, False
        return begin

    def cut(self, end: int) -> None:
        """Let the file end here: what follows was torn. Raises OSError."""
        self.file.truncate(end)
        self.num_bytes, self.is_torn = end, False
