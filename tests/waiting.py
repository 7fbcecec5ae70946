"""How tests wait, ask and start programs: by what happens, not by the clock; and all of it ends."""

from __future__ import annotations

import http.client
import itertools
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 300.0  # of all that waits, however busy the machine is: only a failure waits so long


def eventually(condition: Callable[[], object]) -> None:
    """Wait until something holds that then stays so, as it is looked at now and then."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.002)


@contextmanager
def connected(port: int, tls: ssl.SSLContext | None = None) -> Iterator[http.client.HTTPConnection]:
    """Yield a connection to a server of this machine; it is closed however the block ends."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    if tls:  # whose certificate has a name
        connection = http.client.HTTPSConnection("localhost", port, timeout=PATIENCE_S, context=tls)
    with closing(connection):
        yield connection


def children(pid: int, name: str = "") -> list[int]:
    """Return the processes that one has started, whose command has this in it.

    They are asked for their parent. The lists of children below ``/proc`` are no answer: they end
    early if a thread of the parent ends while they are read.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended in this moment
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and name in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return sorted(found)


def free_port() -> int:
    """Return a port that is free, and that nobody is given who asks for any: those are higher."""
    while True:
        with suppress(OSError), closing(socket.create_server(("127.0.0.1", next(_PORTS)))) as one:
            return int(one.getsockname()[1])


_PORTS = (20_000 + (os.getpid() * 97 + i) % 12_000 for i in itertools.count())  # each once


@contextmanager
def started(
    command: Sequence[str | os.PathLike[str]], **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a program that writes text; behind the block it has ended and its pipes are closed."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()
