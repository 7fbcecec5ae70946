"""A server of a router on another machine: it opens all connections itself, through any NAT.

One link stays open, over which the router and the server tell each other that they are there. When
the router wants a connection, it says so over this link. The server then opens another one, proves
itself again, and passes its bytes on to its own Unix socket. When the router is gone, the server
looks for it until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ridgeline.serve.http.keys import Keys
from ridgeline.serve.http.listening import SocketFolder
from ridgeline.serve.http.request_state import LINK_PATH, LINK_PROTOCOL
from ridgeline.serve.tunnel.proof import (
    BEAT_S,
    FOREIGN,
    GREETING_S,
    LINE_BYTES,
    TICKET,
    FleetLink,
    NotTaken,
    Ticket,
    derived,
    greet_router,
    join_streams,
)
from ridgeline.version import __version__

_REST_S = 1.0  # between two searches for a router that is gone
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MOST_LINKS = 4096  # that a router may want at once
PLACED_AS = "RIDGELINE_PLACED_AS"  # a variable, not a flag: tells servers apart


class RouterAddress:
    """Where a router is, and how it is spoken to.

    Attributes:
        url: as people type it.
    """

    def __init__(self, url: str, ca_file: Path | None, *, is_plain: bool) -> None:
        """Take the ``url`` of a router.

        ``ca_file`` has the certificate to check the router's by, if no authority that the system
        knows has signed it. ``is_plain`` allows links without TLS to other machines. Raises
        ValueError or OSError.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--join is {url!r}: write the router's URL, as http://router:8000")
        is_safe = parts.scheme == "https" or parts.hostname in _LOOPBACK
        if not is_safe and not is_plain:
            raise ValueError(
                f"--join {url} would send prompts and answers as plain text: use https:// (the "
                "router has --ssl-certfile), or say --fleet-plain if nobody else is on that network"
            )
        self.url, self._host = url.rstrip("/"), parts.hostname
        try:
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ValueError(f"--join is {url!r}: {error}") from None
        self._path = parts.path.rstrip("/") + LINK_PATH
        self._tls = None
        if parts.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(
                    f"--fleet-ca {ca_file} is not a file of certificates ({error})"
                ) from None

    async def connect(self, ticket: str) -> FleetLink:
        """Open a connection and make it the link of a ticket. Raises NotTaken or OSError."""
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, limit=LINE_BYTES
        )
        try:
            head = f"GET {self._path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            head += f"connection: upgrade\r\nupgrade: {LINK_PROTOCOL}\r\n{TICKET}: {ticket}\r\n\r\n"
            writer.write(head.encode())
            answer = await reader.readuntil(b"\r\n\r\n")
        except (EOFError, asyncio.LimitOverrunError):
            answer = b""
        except BaseException:
            writer.close()
            raise
        if not answer.startswith(b"HTTP/1.1 101 "):
            writer.close()
            is_door = answer.startswith(b"HTTP/1.1 403 ")
            raise NotTaken(FOREIGN if is_door else "it is not a router with --fleet-key-file")
        return FleetLink(reader, writer)


class Joining:
    """A server's links to its router.

    Attributes:
        socket: where this server listens; only this user can open it.
        tunnel_key: by which it knows requests of its router.
        has_started: set once it listens.
    """

    def __init__(self, address: RouterAddress, key: bytes, keys: Keys) -> None:
        """Prepare to join the router at ``address``, whose fleet has the ``key``.

        ``keys`` are those of clients, which both must know.
        """
        self._address, self._key, self._keys = address, key, keys
        self._id = secrets.token_hex(16)
        self._folder = SocketFolder()
        self.socket = self._folder.path / "server.sock"
        self.tunnel_key = derived(key, self._id)
        self.has_started = asyncio.Event()
        self._requests = set[asyncio.Task[None]]()
        self._main: FleetLink | None = None
        self._is_leaving = self._has_belonged = False

    @contextlib.asynccontextmanager
    async def belonging(
        self,
        name: str,
        write: Callable[[str], object],
        stop: Callable[[], None],
        reload: Callable[[], None],
    ) -> AsyncIterator[None]:
        """Belong to the router for as long as the block lasts, which begins to listen.

        Args:
            name: of the model.
            write: takes the lines of the log.
            stop: called when the router does not take this server.
            reload: called when the router has read its files of keys and rules again.

        Raises ValueError then, in the end.
        """
        running = asyncio.ensure_future(self._run(name, write, reload))
        running.add_done_callback(lambda done: None if done.cancelled() else stop())
        try:
            yield
        finally:
            running.cancel()
            (result,) = await asyncio.gather(running, return_exceptions=True)
            self._folder.remove()
        if isinstance(result, NotTaken):
            message = f"the router at {self._address.url} does not take this server: {result}"
            raise ValueError(message)

    async def _run(
        self, name: str, write: Callable[[str], object], reload: Callable[[], None]
    ) -> None:
        """Join, and join again whenever the link has ended.

        Raises NotTaken if the router has never accepted this server. If it had before, a message
        may only have been garbled, or the router started with other flags for a moment.
        """
        await self.has_started.wait()
        is_gone = False
        try:
            while True:
                try:
                    async with asyncio.timeout(GREETING_S):
                        link = await self._address.connect(self._ticket(0))
                    with contextlib.closing(link):
                        await greet_router(link, self._key, self._hello(name))
                        self._main, is_gone = link, False
                        await self._stay(link, name, reload)
                except (OSError, NotTaken) as error:  # TimeoutError is one too
                    if isinstance(error, NotTaken) and not self._has_belonged:
                        raise
                    why = getattr(error, "strerror", None) or str(error) or "no answer"
                    if not is_gone:
                        url = self._address.url
                        write(f"cannot reach the router at {url} ({why}); trying again")
                    is_gone = True
                self._main = None
                await asyncio.sleep(_REST_S)
        finally:
            for request in self._requests:
                request.cancel()
            await asyncio.gather(*self._requests, return_exceptions=True)

    def _ticket(self, number: int) -> str:
        return Ticket(self._id, number).written(self._key)

    def _hello(self, name: str) -> dict[str, Any]:
        hello = {"kind": "server", "id": self._id, "model": name, "version": __version__}
        hello |= {"node": socket.gethostname(), "keys": self._keys.proof(self._key)}
        return hello | {"pid": os.getpid(), "place": os.environ.get(PLACED_AS, "")}

    def leave(self) -> None:
        """Get no more requests; those that run may end."""
        self._is_leaving = True
        if self._main is not None:
            self._main.say(leaving=True)

    async def _stay(self, link: FleetLink, name: str, reload: Callable[[], None]) -> None:
        if self._is_leaving:
            self.leave()
        beating = asyncio.ensure_future(_beat(link))
        try:
            while True:
                said = await link.hear()
                if "refused" in said:
                    raise NotTaken(str(said["refused"])[:300])
                if "joined" in said:
                    self._has_belonged = True
                    print(f"{name} is ready, and has joined {self._address.url}", flush=True)
                if "reload" in said:
                    reload()
                number = said.get("open")
                if type(number) is int and len(self._requests) < _MOST_LINKS:
                    task = asyncio.create_task(self._take_request(number))
                    self._requests.add(task)
                    task.add_done_callback(self._requests.discard)
        finally:
            beating.cancel()

    async def _take_request(self, number: int) -> None:
        """Give the router the connection to this server that it calls by this number."""
        with contextlib.suppress(OSError, NotTaken):  # the main link says why, if it lasts
            async with asyncio.timeout(GREETING_S):
                link = await self._address.connect(self._ticket(number))
            try:
                hello = {"kind": "request", "id": self._id, "number": number}
                await greet_router(link, self._key, hello)
                own_reader, own_writer = await asyncio.open_unix_connection(str(self.socket))
            except BaseException:
                link.close()
                raise
            await join_streams(link.reader, link.writer, own_reader, own_writer)


async def _beat(link: FleetLink) -> None:
    while True:
        link.say(beat=True)
        await asyncio.sleep(BEAT_S)
