"""An audit log: the thread that writes it, and how the flags of a server open it.

A line to be written goes into a queue, so that neither the event loop nor the engine waits for a
disk. The thread syncs the file at most once a second, or at once where a request waits
until a line is on the disk (``--audit-strict``). It knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from ridgeline.engine.setup.home import default_home
from ridgeline.serve.http.options import ServeOptions
from ridgeline.trust.audit.files import LogFiles
from ridgeline.trust.audit.record_format import key_of
from ridgeline.version import __version__

Fields = dict[str, Any]
More = Callable[[Callable[[str], str]], Fields]  # of a line: the thread calls it, with a keyed hash

_MOST_WAITING = 10_000  # lines
_MOST_TOKENS = 1 << 24  # of the texts that they keep: about a hundred MiB
_SYNC_S = 1.0  # so much a power failure may take
_LAST_WORDS_S = 10.0
KEY_FILE = "audit.key"  # in Ridgeline's own folder, if no other is named
_log = logging.getLogger("ridgeline.serve")


class _Waiting(NamedTuple):
    """A line that waits to be written, and the request that is told when it is on the disk."""

    fields: Fields
    more: More
    num_tokens: int
    is_kept: Future[bool] | None = None


class AuditLog:
    """A log that lines are handed to, on any thread.

    Attributes:
        is_strict: whether no answer may end before its line is on the disk.
        trouble: why lines cannot be written now, if so.
        num_lost: lines that could not be written.
    """

    def __init__(self, files: LogFiles, *, is_strict: bool = False) -> None:
        """Write ``files``, and close them at the end."""
        self._files, self.is_strict = files, is_strict
        self.trouble: str | None = None
        self.num_lost = self._num_unsaid = self._num_tokens = 0
        self._counting = threading.Lock()
        self._synced_s = time.monotonic()
        self._waiting: queue.Queue[_Waiting | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def submit(self, fields: Fields, more: More = lambda _: {}, num_tokens: int = 0) -> None:
        """Have a line written. ``more`` returns what takes a while; what it reads must not change.

        The thread calls it, with what hashes texts. Until then it holds texts of ``num_tokens``.
        """
        self._put(_Waiting(fields, more, num_tokens))

    async def is_kept(self, fields: Fields, more: More = lambda _: {}, num_tokens: int = 0) -> bool:
        """Have a line written, wait until it is on the disk, and return whether it is."""
        is_kept: Future[bool] = Future()
        self._put(_Waiting(fields, more, num_tokens, is_kept))
        return await asyncio.wrap_future(is_kept)

    def head(self) -> dict[str, Any]:
        """Return where the log ends: with a copy elsewhere, a missing end is noticed."""
        place = self._files.synced
        said = {"log": self._files.id, "seq": place.seq, "head": place.digest}
        said |= {"lost": self.num_lost}
        return said | ({"trouble": self.trouble} if self.trouble else {})

    def loss(self) -> str | None:
        """Return what is to be said of lines that could not be written, if there are any."""
        if not self.num_lost and self.trouble is None:
            return None
        now = f"cannot be written now: {self.trouble}" if self.trouble else "is written again"
        return f"{self.num_lost} lines were lost; it {now}"

    def close(self) -> None:
        """Write what waits, and that the log ends here."""
        self.submit({"event": "stop"})
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_LAST_WORDS_S)
            self._thread.join(_LAST_WORDS_S)
        if not self._thread.is_alive():  # else the disk does not answer
            self._files.close()

    def _put(self, waiting: _Waiting) -> None:
        with self._counting:
            num_tokens = self._num_tokens + waiting.num_tokens
            is_taken = num_tokens <= _MOST_TOKENS and not self._waiting.full()
            if is_taken:
                self._num_tokens = num_tokens
                self._waiting.put_nowait(waiting)
        if not is_taken:
            num = self._waiting.qsize()
            self._lose([waiting], f"{num} lines with {num_tokens} tokens wait to be written")

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        is_over = False
        while not is_over:
            batch, is_over = self._next()
            written = [one for one in batch if self._is_written(one)]
            with self._counting:
                self._num_tokens -= sum(one.num_tokens for one in batch)
            is_due = is_over or time.monotonic() >= self._synced_s + _SYNC_S
            if is_due or any(one.is_kept for one in written):
                self._sync(written)

    def _next(self) -> tuple[list[_Waiting], bool]:
        """Return all that waits, once there is something or a sync is due, and whether it ends."""
        is_synced = self._files.synced == self._files.end
        batch: list[_Waiting] = []
        with contextlib.suppress(queue.Empty):
            one = self._waiting.get(timeout=None if is_synced else _SYNC_S)
            while one is not None:
                batch.append(one)
                one = self._waiting.get_nowait()
            return batch, True
        return batch, False

    def _is_written(self, one: _Waiting) -> bool:
        """Write a line, behind one that says how many are missing before it, if any are."""
        try:
            if num_unsaid := self._num_unsaid:
                self._files.append({"event": "lost", "lines": num_unsaid})
                with self._counting:
                    self._num_unsaid -= num_unsaid
            self._files.append(one.fields | self._more(one))
        except OSError as error:
            self._lose([one], error.strerror or str(error))
            return False
        return True

    def _more(self, one: _Waiting) -> Fields:
        try:
            return one.more(self._files.keyed_hash)
        except OSError:
            raise
        except Exception:
            _log.exception("a line of the audit log is not whole")
            return {"whole": False}

    def _sync(self, written: list[_Waiting]) -> None:
        self._synced_s = time.monotonic()
        try:
            self._files.sync()
        except OSError as error:
            self._lose(written, error.strerror or str(error))
        else:
            self.trouble = None
            _tell(written, is_kept=True)

    def _lose(self, lost: list[_Waiting], why: str) -> None:
        if self.trouble is None:
            _log.warning("the audit log in %s cannot be written: %s", self._files.folder, why)
        with self._counting:
            self.trouble = why
            self.num_lost += len(lost)
            self._num_unsaid += len(lost)
        _tell(lost, is_kept=False)


def _tell(waiting: list[_Waiting], *, is_kept: bool) -> None:
    for one in waiting:
        if one.is_kept is not None and one.is_kept.set_running_or_notify_cancel():
            one.is_kept.set_result(is_kept)


@contextmanager
def audit_log(options: ServeOptions, name: str = "") -> Iterator[AuditLog]:
    """Have the log that ``options`` ask for, in a folder of this name below theirs.

    Raises OSError or ValueError if it cannot be written.
    """
    assert options.audit is not None
    files = LogFiles(
        options.audit / name,
        key_of(options.audit_key or default_home() / KEY_FILE),
        rotate_bytes=options.audit_rotate_bytes,
        keep_s=options.audit_keep_s,
    )
    log = AuditLog(files, is_strict=options.audit_strict)
    log.submit({"event": "start", "version": __version__, "pid": os.getpid()})
    try:
        yield log
    finally:
        log.close()
