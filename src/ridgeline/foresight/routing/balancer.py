"""Which server gets a request: the one with the least to do for it, counting what it has read.

A server is charged for what it still has to read, and three times for what this prompt would add:
what is read twice also costs those that wait. One that has far more requests than the others comes
last, whatever it has read. So a prefix draws requests, and never all of them. On a machine that
reads twice as fast the same work costs half. It has no clock, no network and no tokens: the router
uses it, and so does the simulator.

A prompt is bytes here, cut into pieces with chained keys: prompts that begin alike have the same
first keys, as blocks of tokens have in the engine. How many servers there should be follows from
the same requests.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

PIECE_BYTES = 512  # that a key stands for: about eight blocks of a cache
_MAX_KEYS = 4096  # of one prompt: 2 MiB of it
# What becomes a prompt, in the words of all dialects, as chat templates order it.
_FIELDS = (
    *("tools", "system", "instructions", "messages", "input_prefix", "input", "prompt"),
    *("text_input", "query", "documents", "text_1", "text_2", "content", "suffix"),
)
_ADDED = 3.0  # what a byte costs that is read for this prompt, against one that waits already
_MORE_THAN_MEAN = 1.5  # times the mean number of requests, and one: beyond, a server comes last
_FASTEST = 16.0  # times the mean: the most that a machine counts for, and the least is its inverse
_DECAY = 0.9  # of what was measured before, at each prompt that has been read
_NUM_LOOKED_AT = 16  # of many servers: those with most of the prompt, and as many in turn
CALM_S = 300.0  # for which fewer are enough before one goes; Kubernetes' autoscaler waits as long


class PromptKeys(NamedTuple):
    """How much there is to read, and what it begins with.

    Attributes:
        size: of the prompt, in any unit; a key stands for as many as ``Placement`` was told.
        keys: one for each whole piece; each depends on all that is before it.
    """

    size: int
    keys: tuple[bytes, ...] = ()


NOTHING = PromptKeys(0)


def prompt_of(fields: Mapping[str, Any], salt: str = "") -> PromptKeys:
    """Return what a request's body becomes a prompt of, in bytes.

    Prompts with another ``salt`` have no key in common.
    """
    data = b"\x1e".join(_parts(fields))
    key, keys = salt.encode(), list[bytes]()
    end = min(len(data) // PIECE_BYTES, _MAX_KEYS) * PIECE_BYTES
    for begin in range(0, end, PIECE_BYTES):
        key = blake2b(key + data[begin : begin + PIECE_BYTES], digest_size=16).digest()
        keys.append(key)
    return PromptKeys(len(data), tuple(keys))


def _parts(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the texts of a body that are read; of a list, each entry is a part."""
    for name in _FIELDS:
        value = fields.get(name)
        entries: Iterable[Any] = value if isinstance(value, list) else (value,)
        for one in entries:
            if one is not None:
                text = one if isinstance(one, str) else json.dumps(one, separators=(",", ":"))
                yield text.encode(errors="surrogatepass")


class _Machine:
    """How fast the servers of a machine read, as far as was seen: the newest counts most.

    Attributes:
        num_servers: how many there are on it.
    """

    def __init__(self) -> None:
        self._num_read = self._seconds = 0.0
        self.num_servers = 0

    @property
    def speed(self) -> float | None:
        """Pieces of a prompt's size a second; None as long as nothing was seen."""
        return self._num_read / self._seconds if self._seconds else None

    def note(self, num_read: int, seconds: float) -> None:
        """Take note that so much was read in this time."""
        self._num_read = _DECAY * self._num_read + num_read
        self._seconds = _DECAY * self._seconds + seconds


class _ServerLoad:
    """What a server has to do, and what it has read."""

    __slots__ = ("is_gone", "machine", "num_requests", "read", "unread")

    def __init__(self, machine: _Machine) -> None:
        self.is_gone, self.machine = False, machine
        self.num_requests = self.unread = 0
        self.read = OrderedDict[bytes, None]()  # keys; the first is forgotten first


class ServerLease:
    """A request at a server, from its beginning to its end."""

    def __init__(self, where: PrefixBalancer, load: _ServerLoad, added: int) -> None:
        self._where, self._load, self._unread = where, load, added
        self._before = load.unread  # which is read first
        self._is_over = False

    def has_read(self, seconds: float | None = None) -> None:
        """Its prompt has been read: the first token is there, or it will not come.

        ``seconds`` from its beginning to the first token say how fast its machine is.
        """
        if seconds and self._unread:
            self._where.note_speed(self._load.machine, self._before + self._unread, seconds)
        self._load.unread -= self._unread
        self._unread = 0

    def end(self) -> None:
        """It is over; called again, nothing happens."""
        self.has_read()
        if not self._is_over:
            self._is_over = True
            self._load.num_requests -= 1
            self._where.note_end(is_gone=self._load.is_gone)


class PrefixBalancer:
    """Servers by name, what each has to do, and what each has read."""

    def __init__(self, piece: int = PIECE_BYTES, max_keys: int = 4096) -> None:
        """Begin with no server.

        Args:
            piece: how much of a prompt a key stands for.
            max_keys: how many keys are kept of a server; more should fit into its cache.
        """
        self._piece, self._max_keys = piece, max_keys
        self._loads: dict[str, _ServerLoad] = {}
        self._names: list[str] = []
        self._machines: dict[str, _Machine] = {}
        self._speeds, self._num_seen = 0.0, 0  # their sum over servers whose machine was seen
        self._holders: dict[bytes, dict[str, None]] = {}
        self._num_requests = self._turn = 0

    def add(self, name: str, machine: str = "") -> None:
        """Take a server that has read nothing; those of one machine are equally fast."""
        assert name not in self._loads
        self._loads[name] = _ServerLoad(self._machines.setdefault(machine, _Machine()))
        self._loads[name].machine.num_servers += 1
        self._note_change()

    def remove(self, name: str) -> None:
        """Forget a server; what was placed there may still end."""
        load = self._loads.pop(name)
        load.is_gone = True
        load.machine.num_servers -= 1
        self._machines = {key: one for key, one in self._machines.items() if one.num_servers}
        self._note_change()
        self._num_requests -= load.num_requests
        for key in load.read:
            self._drop(key, name)

    def num_requests(self, name: str) -> int:
        """Return how many requests a server has."""
        return self._loads[name].num_requests

    def num_read(self, name: str) -> int:
        """Return how many keys are known of what a server has read."""
        return len(self._loads[name].read)

    def speed(self, name: str) -> float:
        """Return how fast a server reads, against the mean; 1 if nobody knows."""
        return _relative(self._loads[name], self._mean_speed())

    def _note_change(self) -> None:
        """Sum up anew: servers come and go rarely, and what is added for ever would drift."""
        self._names = list(self._loads)
        speeds = self._seen_speeds()
        self._speeds, self._num_seen = sum(speeds), len(speeds)

    def _seen_speeds(self) -> list[float]:
        return [speed for load in self._loads.values() if (speed := load.machine.speed)]

    def note_speed(self, machine: _Machine, num_read: int, seconds: float) -> None:
        """Take note that a machine read so much in this time."""
        before = machine.speed
        machine.note(num_read, seconds)
        if machine.num_servers and machine.speed is not None:
            self._speeds += machine.num_servers * (machine.speed - (before or 0.0))
            self._num_seen += machine.num_servers if before is None else 0

    def _mean_speed(self) -> float | None:
        is_known = len(self._machines) > 1 and self._num_seen
        return self._speeds / self._num_seen if is_known else None

    def best(
        self, prompt: PromptKeys, takes: Callable[[str], bool] = lambda name: True
    ) -> str | None:
        """Return which server should get a request, of those that it ``takes``; None if none is.

        Of 1,000 servers it costs no more than of 32.
        """
        some = self._some(prompt, takes)
        if not some:
            return None
        share = _MORE_THAN_MEAN * (self._num_requests + 1) / len(self._loads)
        mean = self._mean_speed()

        def cost(name: str) -> tuple[bool, float, float]:
            load = self._loads[name]
            speed = _relative(load, mean)
            work = load.unread + _ADDED * self._added(load, prompt)
            num_requests = load.num_requests
            return num_requests >= share * speed + 1, work / speed, num_requests / speed

        return min(some, key=cost)

    def place(self, name: str, prompt: PromptKeys) -> ServerLease:
        """Let a server have a request."""
        load = self._loads[name]
        placed = ServerLease(self, load, added := self._added(load, prompt))
        load.unread += added
        load.num_requests += 1
        self._num_requests += 1
        for key in reversed(prompt.keys):  # so that the last of them is forgotten first
            load.read[key] = None
            load.read.move_to_end(key)
            self._holders.setdefault(key, {})[name] = None
        while len(load.read) > self._max_keys:
            self._drop(load.read.popitem(last=False)[0], name)
        return placed

    def note_end(self, *, is_gone: bool) -> None:
        """Take note that a request is over, perhaps of a server that is gone."""
        self._num_requests -= not is_gone

    def check(self) -> None:
        """Raise AssertionError if the counts contradict each other."""
        assert self._num_requests == sum(one.num_requests for one in self._loads.values())
        holdings = {(key, name) for name, one in self._loads.items() for key in one.read}
        assert self._names == list(self._loads)
        speeds = self._seen_speeds()
        assert len(speeds) == self._num_seen
        assert abs(sum(speeds) - self._speeds) <= 1e-6 * sum(speeds)
        assert holdings == {(key, name) for key, names in self._holders.items() for name in names}
        for one in self._loads.values():
            assert one.num_requests >= 0 <= one.unread
            assert len(one.read) <= self._max_keys
            assert one.num_requests or not one.unread

    def _added(self, load: _ServerLoad, prompt: PromptKeys) -> int:
        """Return how much of a prompt a server would have to read; at least 1.

        It has the pieces before each one that it has: the last ones are forgotten first.
        """
        keys = prompt.keys
        num_held = bisect_left(range(len(keys)), True, key=lambda i: keys[i] not in load.read)
        return max(1, prompt.size - num_held * self._piece)

    def _some(self, prompt: PromptKeys, takes: Callable[[str], bool]) -> Sequence[str]:
        """Return those to be looked at: all of few, of many those that matter most.

        The least busy of 16, other ones each time, is nearly the least busy of all.
        """
        names, most = self._names, 2 * _NUM_LOOKED_AT
        if len(names) <= most:
            return [*filter(takes, names)]
        begin = self._turn = (self._turn + _NUM_LOOKED_AT) % len(names)
        in_turn = (names[i - len(names)] for i in range(begin, begin + len(names)))
        some = dict.fromkeys(islice(filter(takes, in_turn), _NUM_LOOKED_AT))
        for key in reversed(prompt.keys):  # a server with the last ones has most of the prompt
            if len(some) >= most:
                break
            holders = filter(takes, self._holders.get(key, ()))
            some |= dict.fromkeys(islice(holders, most - len(some)))
        return list(some)

    def _drop(self, key: bytes, name: str) -> None:
        holders = self._holders[key]
        del holders[name]
        if not holders:
            del self._holders[key]


def _relative(load: _ServerLoad, mean: float | None) -> float:
    own = load.machine.speed
    return 1.0 if own is None or mean is None else min(_FASTEST, max(1 / _FASTEST, own / mean))


class Scaling:
    """The number of servers that are wanted, which follows the number of requests.

    More are wanted at once. Fewer are wanted when fewer were enough for the last five minutes: a
    machine takes minutes to come, and what it has read goes with it.
    """

    def __init__(self, least: int, most: int, requests_each: int) -> None:
        """Want ``least`` to ``most`` servers, one for each ``requests_each`` at a time."""
        self._least, self._most, self._requests_each = least, most, requests_each
        # Of the last minutes, (time, servers): each number is above all that came after it.
        self._needed = deque[tuple[float, int]]()

    def wanted(self, num_requests: int, now_s: float) -> int:
        """Return how many servers are wanted for what runs and waits at this time, in seconds."""
        needed = -(-num_requests // self._requests_each)
        while self._needed and self._needed[-1][1] <= needed:
            self._needed.pop()
        self._needed.append((now_s, needed))
        while self._needed[0][0] < now_s - CALM_S:
            self._needed.popleft()
        return min(self._most, max(self._least, self._needed[0][1]))
