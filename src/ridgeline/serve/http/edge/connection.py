"""A connection: uvicorn's HTTP protocol with the limits that it lacks, and what strangers may hold.

The limits are a deadline for a request to arrive, a bound on its head, an error for bytes that are
not HTTP, and a way to cut a client that does not read. It never sees what bytes mean.

Strangers are callers who have not proved a key. At all sockets of a process together they hold
places, of connections that wait for something, and bytes: of heads, bodies and buffers. When there
are too many, the address that holds most gives up what it has held longest. A connection whose
request is being answered holds nothing here, nor does one whose caller has proved a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from math import inf
from typing import Any, ClassVar

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ridgeline.serve.http.errors import ApiError
from ridgeline.system.machine import give_back

MAX_WAITING = 2048  # connections that the system keeps until they are accepted
ACCEPTS_PER_TURN = 16  # of the loop: how often asyncio tries, also when the first try has failed
MOST_PLACES = 1024
MOST_BYTES = 4 << 20
_NET_BITS = 64  # of an IPv6 address: who has one has all addresses of that network
TakeLink = Callable[[asyncio.Transport, bytes], None]  # a connection, and what came behind its head
_MAX_HEAD_BYTES = 64 << 10
_HEADER_COST_BYTES = 32  # so that many empty headers are many bytes too
_MAX_UNREAD_BYTES = 8 << 10  # of an answer: what is more counts as held
_MAX_LINGER_S = 60.0
_FIRST_PAUSE_S = 0.001  # from the first probe to the second; each further one is ten times as long
_NAME = re.compile(rb"\n[^:\r\n]+")  # of a header, in a head


class _Pot:
    """An amount that all may hold together."""

    def __init__(self, most: float) -> None:
        self._most, self._total, self._given_up = most, 0, 0
        self._amounts: dict[str, dict[Stranger, int]] = {}  # by address, the longest first
        self._sums: Counter[str] = Counter()

    def set(self, one: Stranger, amount: int) -> None:
        """Let one hold so much; where that is too much for all, others give way, or this one."""
        amounts = self._amounts.setdefault(one.address, {})
        change = amount - amounts.get(one, 0)
        amounts[one] = amount
        if not amount:
            del amounts[one]
        self._total += change
        self._sums[one.address] += change
        if not amounts:
            del self._amounts[one.address], self._sums[one.address]
        while self._total > self._most:
            self.shed()

    def shed(self) -> bool:
        """Let one give way; return whether there was any."""
        if not self._sums:
            return False
        most = max(self._sums, key=self._sums.__getitem__)
        one, amount = next(iter(self._amounts[most].items()))
        one.step_aside()
        self._given_up += amount
        if self._given_up > self._most:  # a crowd comes, and what others gave up lies in pieces
            self._given_up = 0
            give_back()
        return True


class Strangers:
    """All of them, at all sockets that share this."""

    def __init__(self, most_places: float = MOST_PLACES, most_bytes: float = MOST_BYTES) -> None:
        """Begin with nobody."""
        self.places, self.bytes = _Pot(most_places), _Pot(most_bytes)
        self._by_file = dict[int, Stranger]()

    def enter(self, connection: Visitor, own_bytes: int) -> None:
        """Give a new connection a place; it takes ``own_bytes`` for itself while it waits."""
        stranger = connection.stranger
        self._by_file[connection.fileno()] = stranger
        stranger.own_bytes = own_bytes
        stranger.wait()

    def of(self, transport: Any) -> Stranger:
        """Return who is at the other end of a connection that has entered."""
        return self._by_file[transport.get_extra_info("socket").fileno()]

    def forget(self, connection: Visitor) -> None:
        """Forget a connection that ends."""
        if self._by_file.get(connection.fileno()) is connection.stranger:
            del self._by_file[connection.fileno()]
        connection.stranger.prove()


class Stranger:
    """A caller that has not proved a key, and what it holds.

    Attributes:
        address: from where.
        own_bytes: what the connection takes for itself.
        give_way: what ends the connection.
    """

    def __init__(self, all_of_them: Strangers, address: str, give_way: Callable[[], object]):
        self._all, self.address, self.give_way = all_of_them, address, give_way
        self.own_bytes = 0
        self._counts = True

    def wait(self) -> None:
        """Take a place, as the newest."""
        self._set(1, self.own_bytes)

    def hold(self, num_bytes: int) -> None:
        """Hold this many bytes from now on, beside those of the connection."""
        if self._counts:
            self._all.bytes.set(self, num_bytes + self.own_bytes)

    def rest(self) -> None:
        """Hold nothing, for it is others' turn to act."""
        self._set(0, 0)

    def prove(self) -> None:
        """Hold nothing here from now on."""
        self.rest()
        self._counts = False

    def step_aside(self) -> None:
        """Give up place and bytes, and with them the connection."""
        self.prove()
        self.give_way()

    def _set(self, num_places: int, num_bytes: int) -> None:
        if self._counts:
            self._all.places.set(self, num_places)
        if self._counts:  # it may just have given way itself
            self._all.bytes.set(self, num_bytes)


class Visitor(socket.socket):
    """A connection that was accepted: a stranger's, until a key is proved.

    Attributes:
        stranger: who it is.
    """

    def __init__(self, accepted: socket.socket, address: Any, strangers: Strangers) -> None:
        """Take the place of a socket that was accepted from an address."""
        super().__init__(accepted.family, accepted.type, accepted.proto, accepted.detach())
        self._strangers = strangers
        self.stranger = Stranger(strangers, _host(self.family, address), self._end)

    def close(self) -> None:
        """Close it; what it held is free."""
        if self.fileno() >= 0:
            self._strangers.forget(self)
        super().close()

    def _end(self) -> None:
        """Let its reader see its end."""
        with contextlib.suppress(OSError):  # the other side has left
            self.shutdown(socket.SHUT_RDWR)


def _host(family: int, address: Any) -> str:
    """Return what stands for an address: its network of IPv6, nothing for a Unix socket."""
    if family == socket.AF_INET6:
        host = ipaddress.IPv6Address(address[0].partition("%")[0])
        mapped = host.ipv4_mapped
        return str(mapped or int(host) >> (128 - _NET_BITS))
    return str(address[0]) if family == socket.AF_INET else ""


class _Parser(httptools.HttpRequestParser):
    """A parser that takes an offer of another protocol as an ordinary request (RFC 9110, 7.8).

    httptools stops after its head, although a body may follow: Java's HttpClient offers HTTP/2 with
    its first POST. A stopped parser cannot go on, so another one takes the head without the offer,
    and the rest.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        """Parse the next bytes. Raises HttpParserError."""
        unparsed, parser, protocol = memoryview(data), self, self._protocol
        while True:  # many offers may come at once
            try:
                return super(_Parser, parser).feed_data(unparsed)
            except httptools.HttpParserUpgrade as stop:
                rest = unparsed[stop.args[0] :]
                if protocol.asks_for_link():
                    if take := protocol.link_for(dict(protocol.headers)):
                        protocol.become_link(take, bytes(rest))
                        return None
                    rest = rest[:0]  # what would be said over it is no HTTP
                if parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("tunnels are not supported") from None
                version = parser.get_http_version().encode()
                head = b"%b %b HTTP/%b\r\n" % (parser.get_method(), protocol.url, version)
                headers = (pair for pair in protocol.headers if pair[0] != b"upgrade")
                head += b"".join(b"%b: %b\r\n" % pair for pair in headers)
                unparsed = rest
                protocol.parser = parser = _Parser(protocol)
                parser.feed_data(head + b"\r\n")


class _ConventionalHead:
    """A transport for one answer, which writes names of headers as Content-Type, not content-type.

    Case means nothing in them (RFC 9110, 5.1), but there are clients that look for that spelling.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport

    def write(self, data: bytes) -> None:
        """Write the head, and what may come before it; the rest no longer comes through here."""
        if self._cycle.response_started:
            self._cycle.transport = self._transport
            data = _conventional(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _conventional(head: bytes) -> bytes:
    return _NAME.sub(lambda name: name[0].title(), head)


def _unframed(cycle: RequestResponseCycle) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """Return a ``send`` for HTTP/1.0, which has no chunks (RFC 9112, 6.1).

    A body of unknown length ends with its connection.
    """
    send = cycle.send

    async def unframed(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            if b"content-length" not in names:
                cycle.chunked_encoding, cycle.keep_alive = False, False
        elif message["type"] == "http.response.body" and not cycle.expected_content_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return unframed


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    # Set on the subclass that a server makes. The second is told status, reason, method and path
    # (empty as far as they are not known) of what is refused before it is a request.
    receive_timeout_s = 30.0
    on_refused: Callable[[int, str, str, str], None] = staticmethod(lambda *_: None)
    most_connections = inf
    # Returns what takes a connection that becomes something else, told the headers, if they prove
    # that it may; and of which path and protocol they must speak.
    link_for: Callable[[Mapping[bytes, bytes]], TakeLink | None] = staticmethod(lambda _: None)
    link_target = b"", b""
    strangers = Strangers()
    # Connections that no request came of yet, or none since; the first waits longest.
    waiting: ClassVar[dict[BoundedProtocol, None]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline for the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(_MAX_UNREAD_BYTES)
        self.parser = _Parser(self)
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes, self._is_ignored, self.url = 0, False, b""
        self._num_held = 0  # bytes that came of a request which is not whole
        self._stranger = self.strangers.of(transport)
        self._stranger.give_way = self._make_room
        self.waiting[self] = None
        self._await_request()
        if len(self.connections) > self.most_connections and not self.strangers.places.shed():
            next(iter(self.waiting))._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock, and leave no circle of references: a crowd's would be much memory."""
        self.waiting.pop(self, None)
        self._drop_deadline()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it for connections that were reset
        self._stranger.give_way = lambda: None
        if self.cycle is not None:
            self.cycle.transport = self.transport

    def data_received(self, data: bytes) -> None:
        """Start the deadline with the first byte that follows an answer."""
        if not self._is_answering():
            if self._deadline is None:
                self.url = b""  # that of the request before
            self._await_request()
            self._hold(self._num_held + len(data))
        if not self.transport.is_closing():
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on for a client that has only shut its sending side, not for one that has left.

        They look the same until something is sent: then the system of a client that has left resets
        the connection, and the next send fails. Before an answer begins, an interim response can be
        sent to find out. HTTP/1.0 has none, and most of its clients have left (a proxy whose own
        client has): the others are told. A client that shuts during an answer has left it.
        """
        is_whole = self._is_answering() and not self.cycle.more_body
        if not is_whole or self.cycle.response_started:
            return False
        if self.cycle.scope["http_version"] == "1.0":
            self._drop_request()
            why = "this connection was shut before the answer: use HTTP/1.1, or shut it afterwards"
            self._write_error(400, why)
            return False
        self.cycle.keep_alive = False
        self._probe(_FIRST_PAUSE_S)
        return True

    def on_message_begin(self) -> None:
        """Begin to count the head."""
        super().on_message_begin()
        self._head_bytes, self._is_ignored = 0, self.transport.is_closing()
        self.scope["state"] |= {"cut": self.transport.abort, "proved": self._stranger.prove}
        self._await_request()

    def on_url(self, url: bytes) -> None:
        """Count the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        self._count(len(name) + len(value) + _HEADER_COST_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, if it may.

        A request that comes while another is answered is not taken, and the connection ends with
        that answer: uvicorn would stop reading, and not see the client leave.
        """
        if self._is_answering():
            self.cycle.keep_alive, self._is_ignored = False, True
        self._hold(self._head_bytes)
        if self.parser.should_upgrade():
            self._is_ignored = True  # it comes again, without the offer
        if not self._is_ignored:
            self._take_host_of_target()
        if not self._is_ignored and (fault := self._fault()):
            self._is_ignored = True
            self._refuse(*fault)
        if not self._is_ignored:
            super().on_headers_complete()
            self.cycle.transport = _ConventionalHead(self.cycle)  # type: ignore[assignment]
            if self.scope["http_version"] == "1.0":
                self.cycle.send = _unframed(self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body of a request that was started."""
        if not self._is_ignored:
            super().on_body(body)
        is_kept = not self._is_ignored and self._is_answering()
        self._hold(self._num_held + len(body) if is_kept else 0)

    def on_message_complete(self) -> None:
        """The request has arrived."""
        self._drop_deadline()
        if not self._is_ignored:
            self.waiting.pop(self, None)
            if self._is_answering():
                self._num_held = 0
                self._stranger.rest()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.waiting[self] = None
        self.cycle.body.clear()  # of a request that was answered unread
        self._stranger.wait()
        unread = self.transport.get_write_buffer_size()
        self._hold(unread if unread > _MAX_UNREAD_BYTES else 0)
        super().on_response_complete()

    def resume_writing(self) -> None:
        """The client has read nearly all of its answer."""
        super().resume_writing()
        if not self._is_answering():
            self._hold(0)

    def asks_for_link(self) -> bool:
        """Whether a head asks for what ``link_for`` returns."""
        path, protocol = self.link_target
        is_asked = self.url == path and (b"upgrade", protocol) in self.headers
        return is_asked and not self._is_answering()

    def become_link(self, take: TakeLink, rest: bytes) -> None:
        """Give the connection away."""
        self._stranger.prove()
        self._drop_deadline()
        self._unset_keepalive_if_required()
        self.waiting.pop(self, None)
        self.connections.discard(self)
        take(self.transport, rest)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP."""
        self._refuse(400, "this is not a valid HTTP request")

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, and do not wait for ever for a client that does not read."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(_MAX_LINGER_S, self.transport.abort)

    def _fault(self) -> tuple[int, str] | None:
        """Return why a head is refused that the parser accepts (RFC 9112, 3.2 and 6.1).

        Another server on the way may read it differently: see another host, or another end.
        """
        version = self.parser.get_http_version()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        codings = [value.strip() for name, value in self.headers if name == b"transfer-encoding"]
        if num_hosts > 1 or (num_hosts == 0 and version != "1.0"):
            return 400, f"the request has {num_hosts} Host headers: it must have one"
        if codings and version == "1.0":
            return 400, "HTTP/1.0 has no Transfer-Encoding: send a Content-Length"
        if codings and [coding.lower() for coding in codings] != [b"chunked"]:
            return 501, "the only Transfer-Encoding that is understood is chunked"
        return None

    def _take_host_of_target(self) -> None:
        """Let the host of an absolute target count, not the header's (RFC 9112, 3.2.2)."""
        if self.url.startswith((b"/", b"*")):
            return
        try:
            target = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            return  # it is refused as what it is
        host = (target.host or b"") + (b":%d" % target.port if target.port else b"")
        others = [pair for pair in self.headers if pair[0] != b"host"]
        self.headers[:] = [*others, *[(b"host", host)] * max(1, len(self.headers) - len(others))]

    def _make_room(self) -> None:
        """Give this connection's place to one that may have something to ask."""
        self.waiting.pop(self, None)
        why = "too many connections: this one waited longest and is closed; try again later"
        self._refuse(503, why)
        if self.scheme == "https" or self.transport.get_write_buffer_size():
            self.transport.abort()  # its last bytes would wait for a client that may not read

    def _hold(self, num_bytes: int) -> None:
        self._num_held = num_bytes
        self._stranger.hold(num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > _MAX_HEAD_BYTES and not self._is_ignored:
            self._is_ignored = True
            self._refuse(431, f"the head of the request exceeds {_MAX_HEAD_BYTES} bytes")

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _probe(self, pause_s: float) -> None:
        if not self.transport.is_closing() and not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(pause_s, self._probe, 10 * pause_s)

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.receive_timeout_s, self._too_slow)

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._refuse(408, f"the request took more than {self.receive_timeout_s:g} s to arrive")

    def _refuse(self, status: int, message: str) -> None:
        """Answer without a request and close the connection; an answer under way is cut instead."""
        if self._is_answering():
            self.cycle.scope["state"]["refused"] = (status, message)  # its log line says so
            if self.cycle.response_started:
                self.transport.abort()
                return
            self._drop_request()
        elif not self.transport.is_closing():
            path = self.url.partition(b"?")[0].decode("latin-1")
            method = self.parser.get_method().decode("latin-1") if path else ""
            self.on_refused(status, message, method, path)
        self._write_error(status, message)

    def _drop_request(self) -> None:
        """Let the request that is under way end as if its client had left."""
        self.cycle.disconnected = True
        self.cycle.body.clear()  # now, not only when its task has its turn
        self.cycle.message_event.set()

    def _write_error(self, status: int, message: str) -> None:
        body = ApiError(status, message).encode()
        reason = HTTPStatus(status).phrase.encode()
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n" % (status, reason)
        head += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(_conventional(head) + body)
        self.transport.close()
