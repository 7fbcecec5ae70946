"""The web server around an application: its gate, uvicorn as this project wants it, open files."""

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
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from ridgeline.serve.http.gate import OWN, Gate
from ridgeline.serve.http.http_limits import BoundedProtocol, TakeLink
from ridgeline.serve.http.keys import Keys
from ridgeline.serve.http.limits import Limits
from ridgeline.serve.http.listening import certificate_settings
from ridgeline.serve.http.logs import log_line
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.strangers import (
    ACCEPTS_PER_TURN,
    MAX_WAITING,
    MOST_BYTES,
    MOST_PLACES,
    Listener,
    Strangers,
)
from ridgeline.serve.tunnel.proof import PATH, PROTOCOL
from ridgeline.system.machine import max_open_files

if TYPE_CHECKING:  # imported only where a server has an audit log
    from ridgeline.trust.audit.log import AuditLog

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})
_FLUSH_S = 2.0  # for last words to reach their clients
_KEEP_ALIVE_S = 65  # longer than clients keep theirs, so that none sends into a closing one
_OTHER_FILES = 128  # that stay free for all but connections
# Of a connection with TLS, and the buffer in it: asyncio's own would be 256 KiB, and those of
# handshakes that failed stay until the garbage collector comes by.
_TLS_BYTES, _TLS_BUFFER_BYTES = 96 << 10, 16 << 10
_QUIET_S = 60.0  # between two warnings that connections wait


class WebServer(uvicorn.Server):
    """uvicorn without its signal handlers, and without its ten checks a second for the end.

    Attributes:
        app: the application behind its gate, for requests that do not come over HTTP.
        gate: this gate.
        strangers: who has connected without having proved a key yet, at this socket and others.
        on_started: called once it listens.
        ended: set to end it.
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
        audit: AuditLog | None = None,
        vouched: Callable[[Mapping[bytes, bytes]], str | None] | None = None,
        link_for: Callable[[Mapping[bytes, bytes]], TakeLink | None] = lambda headers: None,
    ) -> None:
        """Put the gate before ``app``, which has ``routes``.

        ``limits`` are those of each key. ``write`` takes the lines of the log, ``count`` path,
        method and status of each request, and ``audit`` a line about each. ``vouched`` is the
        gate's. ``link_for`` returns what takes a connection of a server of another machine, if
        these headers prove that it is one.
        """
        self._write, self._log_format, self._warned_s = write, options.log_format, -math.inf
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self.gate = gate = Gate(
            app,
            keys=keys,
            hosts=_hosts(options),
            root_path=options.root_path,
            origins=_origins(options),
            limits=limits,
            max_body_bytes=options.max_body_bytes,
            max_file_bytes=options.max_file_bytes,
            routes=routes,
            log=self._log_request,
            count=count,
            vouched=vouched or (lambda headers: None),
        )
        self.app: ASGIApp = gate
        on_refused: Callable[[int, str, str, str], object] = gate.on_refused
        if audit:
            from ridgeline.trust.audit.requests import Audited

            self.app = audited = Audited(gate, audit)
            gate.closed, on_refused = audited.closed, audited.on_refused
        most = _most_connections()
        # Where nobody has a key all are strangers: many ask at once, and one sends a whole body.
        is_for_all = not keys.are_needed and vouched is None
        most_bytes = max(MOST_BYTES, 2 * options.max_body_bytes * is_for_all)
        most_places = MOST_PLACES * (2 if is_for_all else 1)
        self.strangers = Strangers(min(most_places, most // 2), most_bytes)
        own = {
            "receive_timeout_s": options.receive_timeout,
            "on_refused": staticmethod(on_refused),
            "most_connections": most,
            "link_for": staticmethod(link_for),
            "link_target": (f"{options.root_path}{PATH}".encode(), PROTOCOL.encode()),
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

    def _log_request(self, fields: dict[str, Any]) -> None:
        is_well = fields["path"] == "/health" and fields["status"] == 200  # probes ask each second
        is_told = fields.get("passed_on") or fields.get("polled")  # to a process with a line, or
        if not is_well and not is_told:  # again and again by a page
            self._write(log_line(fields, self._log_format))

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
