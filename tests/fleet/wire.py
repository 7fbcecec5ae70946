"""A network between a router and servers that join it, which can be disturbed: a relay of bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

Fault = Literal["cut", "half late", "within a frame", "garbage"]
_LATE_S = 2.0


class Wire:
    """Passes bytes on between whoever connects and a port of this machine.

    Attributes:
        port: where to connect.
        faults: what is done to the next bytes that come from a server, in turn.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.faults: list[Fault] = []
        self._moves = threading.Event()
        self._moves.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def stand_still(self) -> None:
        """Pass nothing on, in either direction, and end nothing: as if packets were dropped."""
        self._moves.clear()

    def move(self) -> None:
        """Pass everything on again, also what has waited."""
        self._moves.set()

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._cut()
        self._moves.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _cut(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                server, _ = self._listener.accept()
            except OSError:
                return
            router = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [server, router]
            for source, target in ((server, router), (router, server)):
                way = (source, target, source is server)
                self._start(self._pass_on, *way)

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._moves.wait()
                # Lines of the link that stays are short; answers are not.
                if is_answer and len(data) > 100 and self.faults:
                    self._disturb(self.faults.pop(), data, target)
                else:
                    target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        source.close()

    def _disturb(self, fault: Fault, data: bytes, target: socket.socket) -> None:
        half = len(data) // 2
        if fault == "cut":
            self._cut()
        elif fault == "half late":
            target.sendall(data[:half])
            time.sleep(_LATE_S)
            target.sendall(data[half:])
        elif fault == "within a frame":
            target.sendall(data[:half])
            target.shutdown(socket.SHUT_RDWR)
        else:
            target.sendall(b"\xff" * len(data))


@contextmanager
def wire(port: int) -> Iterator[Wire]:
    made = Wire(port)
    try:
        yield made
    finally:
        made.close()
