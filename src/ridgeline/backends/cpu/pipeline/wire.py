"""What stages say to each other, over any socket: numbers in JSON, and rows as they lie in memory.

Nothing is unpickled: whatever the other end sends, it makes nothing run here. Both ends
prove first that they know the same key; over a network what follows is not encrypted.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.backends.cpu.buffers import HiddenRows
from ridgeline.core.step import Step, Work
from ridgeline.system.shared_secret import is_proof, proof, read_key

KNOWN_STEPS = 64  # that a step may refer to: those of two rounds with all their parts
_HEAD = struct.Struct("<IQ")  # bytes of JSON, and of rows behind it
_MOST_JSON, _MOST_ROWS = 1 << 28, 1 << 36
_NONCE_BYTES, _PROOF_DIGITS = 32, 64
_PROOF_S = 10.0  # in which the other end proves itself


class Link:
    """One end of a connection between the engine and a stage.

    Attributes:
        is_closed: whether this end has closed it.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take a connected socket."""
        self._socket, self._lock, self.is_closed = connection, threading.Lock(), False
        if connection.family != getattr(socket, "AF_UNIX", None):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, kind: str, what: Any = None, rows: HiddenRows | None = None) -> None:
        """Send a message; several threads may. Raises OSError if nobody is there."""
        text = json.dumps([kind, what], separators=(",", ":")).encode()
        body = b"" if rows is None else rows.x.tobytes() + rows.non_finite.tobytes()
        with self._lock:
            self._socket.sendall(_HEAD.pack(len(text), len(body)) + text + body)

    def receive(self) -> tuple[str, Any, bytes]:
        """Return the next message: its kind, what it says, and rows. Raises EOFError, OSError."""
        num_json, num_rows = _HEAD.unpack(self._exactly(_HEAD.size))
        if num_json > _MOST_JSON or num_rows > _MOST_ROWS:
            raise EOFError("it sent something that is not a message")
        text, body = self._exactly(num_json), self._exactly(num_rows)
        try:
            kind, what = json.loads(text)
        except (ValueError, RecursionError):
            raise EOFError("it sent something that is not a message") from None
        return str(kind), what, bytes(body)

    def close(self) -> None:
        """End the connection; a thread that waits on it goes on."""
        self.is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def prove(self, key: bytes, own: str, other: str) -> None:
        """Prove to know a key, and see the same proof (``machine.proof``). Raises PermissionError.

        ``own`` and ``other`` name the ends.
        """
        self._socket.settimeout(_PROOF_S)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            self._socket.sendall(nonce)
            theirs = self._exactly(_NONCE_BYTES)
            self._socket.sendall(proof(key, own, (nonce.hex(), theirs.hex())).encode())
            given = self._exactly(_PROOF_DIGITS)
        except (EOFError, OSError):
            raise PermissionError("the other end has another key, or is no stage") from None
        if not is_proof(given.decode("latin-1"), key, other, (theirs.hex(), nonce.hex())):
            raise PermissionError("the other end has another --stage-key-file")
        self._socket.settimeout(None)

    def _exactly(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("it ended")
            view = view[count:]
        return bytes(data)


def key_of(file: Path | None) -> bytes:
    """Return the key in a file, or nothing without one. Raises OSError or ValueError."""
    return read_key(file) if file else b""


def rows_of(body: bytes, num_tokens: int) -> HiddenRows:
    """Return the rows of a message. Raises ValueError if they are fewer or more."""
    values = np.frombuffer(body, np.float32)
    if not num_tokens or len(values) % num_tokens:
        raise ValueError("rows of another length")
    x = values[: len(values) - num_tokens].reshape(num_tokens, -1)
    return HiddenRows(x, values[len(values) - num_tokens :])


def bare(step: Step) -> Step:
    """Return a step with nothing but what layers need: which tokens of which texts, and where."""
    nothing: Any = None
    work = tuple(
        Work(
            item.seq_id, item.start, item.tokens, item.table, (), nothing, (), (),
            others=item.others,
        )
        for item in step.work
    )  # fmt: skip
    return Step(work, step.copies, (), (), (), ())


def read_written(written: Any) -> Any:
    """Return what ``step_codec.StepEncoder`` wrote, after it went through JSON."""
    items, copies, waits, state_copies = _tuples(written)
    return [(Work(*item), growth) for item, growth in items], copies, waits, state_copies


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
