"""One chat template in a process of its own, with limits on its time and memory.

The process starts with the first rendering, or when told to, and sleeps between two. It is killed
when a rendering takes too long; the next one gets a new process. This module knows nothing of
jinja2 and messages: JSON values go in, text comes out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("jinja_process.py")
_MAX_RENDERING_S = 2.0
_GOODBYE_S = 1.0


class Renderer:
    """Renders one template; any thread may call, and one call is served at a time."""

    def __init__(self, source: str) -> None:
        """Prepare to render ``source``, in jinja2 as Hugging Face's templates are written."""
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process now, so that the first rendering need not wait for it."""
        with self._lock:
            self._running()

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text that the template makes of ``variables``, which are JSON values.

        Raises:
            ValueError: the template is broken, refuses, or takes more time or memory than it may.
        """
        with self._lock:
            reply = self._ask(self._running(), _line(variables))
            if not reply:
                self._end()
                raise ValueError(
                    f"the chat template fails: it takes more than {_MAX_RENDERING_S:g} s, "
                    "or more memory than any template needs"
                )
        answer: dict[str, str] = json.loads(reply)
        if "error" in answer:
            raise ValueError(f"the chat template fails: {answer['error']}")
        return answer["text"]

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process and self._process.poll() is not None:  # it was killed
            self._end()
        if self._process is None:
            self._process = subprocess.Popen(
                # -P: no module beside the program may replace one of the standard library.
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
            if not _exchange(self._process, _line(self._source)):
                self._end()
                raise ValueError("the chat template fails: its process does not start")
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> bytes:
        limit = threading.Timer(_MAX_RENDERING_S, process.kill)
        limit.start()
        try:
            return _exchange(process, line)
        except BaseException:  # Ctrl-C: an unread answer must not be taken for the next one
            process.kill()
            self._end()
            raise
        finally:
            limit.cancel()

    def _end(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Send a line and return the line that answers it, nothing if the process is gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the process see the end of its input, and wait for it to go."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it is gone, with something unread
        process.stdin.close()
    try:
        process.wait(_GOODBYE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
