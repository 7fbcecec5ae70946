"""What callers who have not proved a key hold, at all sockets of a process together.

That is places, of connections that wait for something, and bytes: of heads, bodies and buffers.
When there are too many, the address that holds most gives up what it has held longest. A connection
whose request is being answered holds nothing here, nor does one whose caller has proved a key.
This module knows nothing of protocols and keys.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

from ridgeline.system.machine import give_back

MAX_WAITING = 2048  # connections that the system keeps until they are accepted
ACCEPTS_PER_TURN = 16  # of the loop: how often asyncio tries, also when the first try has failed
MOST_PLACES = 1024
MOST_BYTES = 4 << 20
_NET_BITS = 64  # of an IPv6 address: who has one has all addresses of that network


class _Pot:
    """An amount that all may hold together."""

    def __init__(self, most: float) -> None:
        self._most, self._total, self._given_up = most, 0, 0
        self._held: dict[str, dict[Stranger, int]] = {}  # by address, the longest first
        self._sums: Counter[str] = Counter()

    def set(self, one: Stranger, amount: int) -> None:
        """Let one hold so much; where that is too much for all, others give way, or this one."""
        held = self._held.setdefault(one.address, {})
        change = amount - held.get(one, 0)
        held[one] = amount
        if not amount:
            del held[one]
        self._total += change
        self._sums[one.address] += change
        if not held:
            del self._held[one.address], self._sums[one.address]
        while self._total > self._most:
            self.shed()

    def shed(self) -> bool:
        """Let one give way; return whether there was any."""
        if not self._sums:
            return False
        most = max(self._sums, key=self._sums.__getitem__)
        one, amount = next(iter(self._held[most].items()))
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


def _host(family: int, address: Any) -> str:
    """Return what stands for an address: its network of IPv6, nothing for a Unix socket."""
    if family == socket.AF_INET6:
        host = ipaddress.IPv6Address(address[0].partition("%")[0])
        mapped = host.ipv4_mapped
        return str(mapped or int(host) >> (128 - _NET_BITS))
    return str(address[0]) if family == socket.AF_INET else ""
