"""Where a server listens: an address or a Unix socket, its folder, and with which certificate."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import ssl
import stat
import tempfile
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

from ridgeline.serve.http.edge.connection import Strangers, Visitor
from ridgeline.serve.http.options import ServeOptions

try:
    import fcntl
except ImportError:  # Windows, which has no such sockets either
    fcntl = None  # type: ignore[assignment]

_PREFIX, _LOCK = "ridgeline-sockets-", "lock"  # of a folder, and the file in it that is locked


class Listener(socket.socket):
    """A listening socket.

    Attributes:
        strangers: who has connected to it, and to others.
        own_bytes: what each connection takes for itself.
    """

    strangers = Strangers(inf, inf)
    own_bytes = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, which gets a place. Raises OSError."""
        accepted, address = super().accept()
        visitor = Visitor(accepted, address, self.strangers)
        self.strangers.enter(visitor, self.own_bytes)
        return visitor, address


def bind(host: str, port: int, *, flag: str = "--port") -> Listener:
    """Take the address before anything slow begins. Raises OSError that says what to do."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _bound(Listener(family, kind), address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(f"cannot listen on {host}: this machine has no such address") from error
        why = error.strerror or str(error)
        raise OSError(f"cannot listen on {host}:{port} ({why}): try another {flag}") from error


def _bound(listener: Listener, address: Any) -> Listener:
    try:
        if not isinstance(address, str):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def bind_unix(path: Path) -> Listener:
    """Take a Unix socket; one without a listener is replaced.

    Raises OSError that says what to do.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OSError(f"cannot listen on {path}: Python has no Unix sockets here; use --port")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise OSError(
                f"cannot listen on {path}: it exists and is not a socket; name another --uds"
            )
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(
                    f"cannot listen on {path}: another server listens there; name another --uds"
                )
        path.unlink()
    try:
        return _bound(Listener(socket.AF_UNIX), str(path))
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(f"cannot listen on {path} ({why}): name another --uds") from error


@contextlib.contextmanager
def unbound(listener: socket.socket) -> Iterator[None]:
    """Close a listener in the end; the file of a Unix socket goes with it."""
    name = listener.getsockname()
    try:
        yield
    finally:
        listener.close()
        if isinstance(name, str) and name:
            with contextlib.suppress(OSError):
                os.unlink(name)


def certificate_settings(options: ServeOptions) -> dict[str, Any]:
    """Return what uvicorn is told of the certificate; nothing without one.

    Raises ValueError if its files do not fit together, before anything slow begins.
    """
    cert, key = options.ssl_certfile, options.ssl_keyfile
    if cert is None:
        return {}
    password = options.ssl_keyfile_password
    questions: list[bool] = []

    def tell() -> str:
        questions.append(True)
        return password or ""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, tell)
    except FileNotFoundError as error:
        missing = next((one for one in (cert, key) if one and not one.exists()), cert)
        raise ValueError(f"there is no file {missing}: see --ssl-certfile") from error
    except (ssl.SSLError, OSError) as error:
        raise ValueError(_why(error, cert, key or cert, bool(questions), password)) from error
    return {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_keyfile_password": password}


def _why(error: OSError, cert: Path, key: Path, is_encrypted: bool, password: str | None) -> str:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    if reason == "KEY_VALUES_MISMATCH":
        return f"the key in {key} does not belong to the certificate in {cert}"
    if is_encrypted:
        problem = "is wrong" if password else "is needed: the key is encrypted"
        return f"--ssl-keyfile-password {problem} ({key})"
    return f"{cert} and {key} are not a certificate and its key in PEM form ({reason})"


class SocketFolder:
    """A folder for the sockets of a router, or of a server that joins one.

    Nobody else may enter it, and it is removed when its process ends. A process that is killed
    leaves its folder behind without a lock; the next one that makes such a folder removes it.
    """

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
