"""The folder of a fleet's sockets, of a router or of a server that joins one.

Nobody else may enter it, and it is removed when its process ends. A process that is killed leaves
its folder behind without a lock; the next one that makes such a folder removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, which has no such sockets either
    fcntl = None  # type: ignore[assignment]

_PREFIX, _LOCK = "ridgeline-sockets-", "lock"


class SocketFolder:
    """A folder of one's own, for as long as this process lives."""

    def __init__(self) -> None:
        """Make one, and remove those whose processes are gone."""
        _sweep(Path(tempfile.gettempdir()))
        self._make()
        while not (self.path / _LOCK).exists():  # removed before it was locked, as if left behind
            os.close(self._lock)
            self._make()

    def _make(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        if fcntl:
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(place: Path) -> None:
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}") if fcntl else ():
        with contextlib.suppress(OSError):  # another user's, or of a process that lives
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
