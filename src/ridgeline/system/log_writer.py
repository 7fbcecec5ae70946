"""A log that a thread writes: no request waits for it. It does not know what its lines say."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from typing import Any

_MOST_LINES = 10_000  # lines that wait to be written
_LAST_WORDS_S = 1.0  # for lines that still wait at the end
_MOST_LETTERS = 500  # of a line of a traceback, whose values are those of requests


def log_line(fields: dict[str, Any], form: str) -> str:
    """Return a line of the log: JSON, or ``name=value`` with all control characters escaped."""
    fields = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **fields}
    if form == "json":
        return json.dumps(fields)
    shown = ((name, _shown(value)) for name, value in fields.items() if value is not None)
    return " ".join(f"{name}={text}" for name, text in shown)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if re.fullmatch(r"[\w.:/+@,-]+", text, re.ASCII) else json.dumps(text)


class _ShortLines(logging.Formatter):
    """Words of ``logging``, tracebacks among them, in lines that are no longer than needed."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).split("\n")
        return "\n".join(line[:_MOST_LETTERS] for line in lines)


def standard_error() -> int:
    """Return the descriptor that words about this process go to."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # replaced by something that is no file
        return 2


class LogWriter:
    """A file for lines whose reader may be slow or gone: a thread writes, ``write`` never waits.

    When 10,000 lines wait, further ones are dropped, and the log says how many once it flows again.
    A descriptor that takes nothing (a full disk, a closed pipe) loses its lines, and nothing else.
    """

    def __init__(self, descriptor: int) -> None:
        """Write to a descriptor, which stays open."""
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)
        self._num_dropped = 0
        # Not sys.stderr: a thread that waits inside its lock at exit crashes the interpreter.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def take_logging(self) -> None:
        """Write warnings of ``logging`` too."""
        handler = logging.StreamHandler(self)
        handler.setFormatter(_ShortLines("%(levelname)s: %(message)s"))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])

    def line(self, text: str) -> None:
        """Write a line."""
        self.write(text + "\n")

    def write(self, text: str) -> None:
        """Write whole lines, each with its end."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._num_dropped += 1

    def flush(self) -> None:
        """Do nothing: for ``logging``, which takes this for a file."""

    def close(self) -> None:
        """Wait a moment until all is written; a reader that is too slow misses the rest."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_LAST_WORDS_S)
            self._thread.join(_LAST_WORDS_S)

    def _run(self) -> None:
        while (text := self._lines.get()) is not None:
            if self._num_dropped:
                num_dropped, self._num_dropped = self._num_dropped, 0
                text = f"warning: {num_dropped} lines of this log found no reader\n{text}"
            unwritten = text.encode(errors="backslashreplace")
            with contextlib.suppress(OSError):
                while unwritten:
                    unwritten = unwritten[os.write(self._descriptor, unwritten) :]
