"""The web server around an application: the row before it, uvicorn as we want it, open files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import signal
import socket
import sys
from asyncio import sslproto
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import uvicorn
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ridgeline.serve.http.edge.body import BodyReader
from ridgeline.serve.http.edge.connection import (
    ACCEPTS_PER_TURN,
    MAX_WAITING,
    MOST_BYTES,
    MOST_PLACES,
    BoundedProtocol,
    Strangers,
    TakeLink,
)
from ridgeline.serve.http.edge.keys import KeyCheck, Pacing
from ridgeline.serve.http.edge.origin import OWN, OriginCheck
from ridgeline.serve.http.edge.request_log import RequestLog
from ridgeline.serve.http.keys import Keys, Limits
from ridgeline.serve.http.listening import Listener, certificate_settings
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.request_state import CALLER, LINK_PATH, LINK_PROTOCOL
from ridgeline.system.machine import max_open_files

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})
_FLUSH_S = 2.0  # for last words to reach their clients
_KEEP_ALIVE_S = 65  # longer than clients keep theirs, so that none sends into a closing one
_OTHER_FILES = 128  # that stay free for all but connections
# Of a connection with TLS, and the buffer in it: asyncio's own would be 256 KiB, and those of
# handshakes that failed stay until the garbage collector comes by.
_TLS_BYTES, _TLS_BUFFER_BYTES = 96 << 10, 16 << 10
_QUIET_S = 60.0  # between two warnings that connections wait


class FrontApp(Protocol):
    """What takes all requests of a server, and is told what its protocol has refused."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

    def on_refused(self, status: int, reason: str, method: str, path: str) -> dict[str, Any]:
        """Log what is refused before it is a request; return the line of the log."""


class Edge:
    """The row of ASGI callables that a request passes: log, origin, key, pace and body.

    Each knows the next one alone, as what it calls. They tell each other through the state of the
    request (``request_state``).

    Attributes:
        front: the first of them.
        needs_keys: whether a request needs anything to come in.
        pace: how requests of a key are spaced out.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[BaseRoute],
        options: ServeOptions,
        keys: Keys,
        limits: Limits,
        write: Callable[[str], object],
        count: Callable[[str, str, int], None],
        vouched: Callable[[Mapping[bytes, bytes]], str | None] | None = None,
    ) -> None:
        """Stand before ``app``, which has ``routes``.

        ``limits`` are those of each key. ``write`` takes the lines of the log, and ``count`` path,
        method and status of each request. ``vouched`` is as in ``KeyCheck``.
        """
        self.pace, self.needs_keys = limits.pace, keys.are_needed or vouched is not None
        body = BodyReader(app, routes, options.max_body_bytes, options.max_file_bytes)
        self._pacing = Pacing(body, limits)
        self._keys = KeyCheck(self._pacing, keys, vouched)
        origin = OriginCheck(self._keys, _hosts(options), _origins(options))
        self.front: FrontApp = RequestLog(origin, routes, options, write, count)

    def is_proved(self, headers: dict[bytes, bytes]) -> bool:
        """Whether what comes by another way has a key. Raises ApiError 401 if it needs one."""
        return self._keys.tenant(headers)[1]

    async def admit(self, headers: dict[bytes, bytes], num_bytes: int) -> None:
        """Let what comes by another way wait, as a request with a body of this length would.

        What is done for it then counts as done for its key. Raises ApiError 401.
        """
        tenant, _ = self._keys.tenant(headers)
        CALLER.set(tenant)
        await self._pacing.wait(tenant, num_bytes)


class WebServer(uvicorn.Server):
    """uvicorn without its signal handlers, and without its ten checks a second for the end.

    Attributes:
        app: what requests that do not come over HTTP ask.
        edge: the row before the application.
        strangers: who has connected without having proved a key yet, at this socket and others.
        on_started: called once it listens.
        ended: set to end it.
    """

    def __init__(
        self,
        edge: Edge,
        options: ServeOptions,
        write: Callable[[str], object],
        front: FrontApp | None = None,
        link_for: Callable[[Mapping[bytes, bytes]], TakeLink | None] = lambda headers: None,
    ) -> None:
        """Serve what stands behind ``edge``; ``front`` stands around it, if it is given.

        ``write`` takes the lines of the log. ``link_for`` returns what takes a connection of a
        server of another machine, if these headers prove that it is one.
        """
        self._write, self._warned_s = write, -math.inf
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self.edge, self.app = edge, front or edge.front
        most = _most_connections()
        # Where nobody has a key all are strangers: many ask at once, and one sends a whole body.
        most_bytes = max(MOST_BYTES, 2 * options.max_body_bytes * (not edge.needs_keys))
        most_places = MOST_PLACES * (1 if edge.needs_keys else 2)
        self.strangers = Strangers(min(most_places, most // 2), most_bytes)
        own = {
            "receive_timeout_s": options.receive_timeout,
            "on_refused": staticmethod(self.app.on_refused),
            "most_connections": most,
            "link_for": staticmethod(link_for),
            "link_target": (f"{options.root_path}{LINK_PATH}".encode(), LINK_PROTOCOL.encode()),
            "strangers": self.strangers,
            "waiting": {},
        }
        protocol = type("Protocol", (BoundedProtocol,), own)
        super().__init__(
            uvicorn.Config(
                self.app,
                http=protocol,
                backlog=ACCEPTS_PER_TURN,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(_FLUSH_S) + 1,
                **certificate_settings(options),
            )
        )
        self.on_started: Callable[[], None] = lambda: None
        self.ended = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(MAX_WAITING)  # asyncio has one number for this and its tries
        self.on_started()  # it listens: not a moment earlier

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command."""
        yield

    async def main_loop(self) -> None:
        """Run until ``ended``."""
        await self.ended.wait()

    async def serve_on(self, listener: Listener) -> None:
        """Serve on a bound socket until ``ended``."""
        listener.strangers = self.strangers
        if self.config.ssl_certfile:
            listener.own_bytes = _TLS_BYTES
            sslproto.SSLProtocol.max_size = _TLS_BUFFER_BYTES
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await self.serve([listener])

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say in one line, and not each second, that there is no room for connections.

        A Unix socket of anyio that is readable in the turn in which its reader was cancelled sets
        the result of a future that is done. Nobody waits for that one any more.
        """
        error = context.get("exception")
        if isinstance(error, asyncio.InvalidStateError) and "set_result" in context["message"]:
            return
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() > self._warned_s + _QUIET_S:
            self._warned_s = loop.time()
            reason = f"all {max_open_files()} files that may be open are"
            self._write(f"warning: new connections wait: {reason}; raise that limit (ulimit -n)")


def _most_connections() -> float:
    """Return how many connections there may be, so that there is room to accept further ones."""
    files = max_open_files()
    return math.inf if files is None else max(files // 2, files - _OTHER_FILES)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether uvicorn says what no line of ours says: bytes that are no request have one."""
    return record.getMessage() != "Invalid HTTP request received."


def _hosts(options: ServeOptions) -> frozenset[str] | None:
    """Return the names that a Host header may have; None allows any.

    A server that listens on this machine alone is called by the machine's own names. Any other name
    is a web page's, which was given our address.
    """
    named = frozenset(name.lower() for name in options.allowed_host or ())
    if "*" in named:
        return None
    if options.uds is None and options.host in LOOPBACK:
        return LOOPBACK | {options.host} | named
    return LOOPBACK | named if named else None


def _origins(options: ServeOptions) -> list[str]:
    """Return the origins that may call: by default pages of this machine, if only it can."""
    is_own = options.uds is None and options.host in LOOPBACK
    return options.cors_origin or ([OWN] if is_own else [])


def address(listener: socket.socket, options: ServeOptions) -> str:
    """Return the URL under which a server on ``listener`` can be reached from this machine."""
    scheme = "https" if options.ssl_certfile else "http"
    if options.uds:
        return f"{scheme}+unix:{options.uds}{options.root_path}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"{scheme}://{host}:{port}{options.root_path}"


def settle() -> None:
    """Have what is there at the end of a start, which stays, passed over by the garbage collector.

    It would look through some hundred thousand objects again and again, and stop all threads
    meanwhile, the event loop's among them: 50 ms and more each time.
    """
    gc.collect()
    gc.freeze()


def obey_signals(
    stop: Callable[[], None],
    reload_keys: Callable[[], None],
    sleep: Callable[[], None] | None = None,
) -> None:
    """From now on SIGTERM and Ctrl-C call ``stop`` on the running loop, SIGHUP ``reload_keys``.

    SIGUSR1 calls ``sleep``, if it is given.
    """
    loop = asyncio.get_running_loop()
    actions = {"SIGTERM": stop, "SIGINT": stop, "SIGHUP": reload_keys}
    for name, action in (actions | ({"SIGUSR1": sleep} if sleep else {})).items():
        signum = getattr(signal, name, None)
        if signum is None:  # Windows has no SIGHUP
            continue
        if sys.platform == "win32":  # its loops take no signals: the interpreter wakes them
            signal.signal(signum, lambda *_, action=action: loop.call_soon_threadsafe(action))
        else:
            loop.add_signal_handler(signum, action)
