"""The file behind ``--trace``: the engine's records, as JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TextIO

from ridgeline.core.records import EngineRecord, Record
from ridgeline.foresight.record_json import to_json

_MODE = 0o600  # of a new file: it has the token ids of prompts


class TraceWriter:
    """Writes records to a file. If that fails it gives the file up, and the engine goes on.

    Attributes:
        num_lost: records that are not in the file.
    """

    def __init__(self, path: Path) -> None:
        """Begin a new file. Raises OSError, which names it, if that cannot be."""
        self.path = path
        self.num_lost = 0
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE)
            self._file: TextIO | None = open(descriptor, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise self._said(error) from None

    def __call__(self, record: Record) -> None:
        """Write a record. Raises OSError only for the first, before the engine has begun."""
        if self._file is None:
            self.num_lost += 1
            return
        try:
            print(json.dumps(to_json(record), separators=(",", ":")), file=self._file)
        except OSError as error:
            self.num_lost += 1
            self.close()
            if isinstance(record, EngineRecord):
                raise self._said(error) from None
            import logging  # here: a start without trouble needs none

            log = logging.getLogger("ridgeline.trace")
            log.error("%s; it ends here, and the engine goes on", self._said(error))

    def close(self) -> None:
        """Close the file; what could not be written is lost."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _said(self, error: OSError) -> OSError:
        return OSError(f"cannot write the trace {self.path}: {error.strerror}")
