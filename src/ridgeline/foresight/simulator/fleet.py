"""Several replicas under one virtual time: which one gets a request, and what
happens when one goes.

Each replica is what ``run.simulate`` runs, with a clock of its own. The next thing to happen is the
earliest on a heap: an arrival, a fault, or a step of a replica. Every request ends exactly once: it
is finished, or lost. With one replica and no fault it is ``simulate``, step for step.

Routers are functions of a request and of what can be seen of the open replicas. It knows nothing of
machines, prices and models of time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ridgeline.core.cache.kvcache import hash_block
from ridgeline.core.records import EngineRecord, RequestRecord
from ridgeline.foresight.simulator.drafts import Drafts
from ridgeline.foresight.simulator.run import Clock, SimRequest, TimeModel, new_replica
from ridgeline.foresight.step_time.features import Windows
from ridgeline.physics.costs import Features
from ridgeline.routing.prompt import PromptKeys
from ridgeline.routing.where import Placed, Where


class View(NamedTuple):
    """What a router sees of a replica that takes requests.

    Attributes:
        replica: which one it is.
        num_pending_tokens: prompt and answer tokens that are still to come, as far as is known.
        num_cached_tokens: of this request's prompt, what the replica was sent before.
    """

    replica: int
    num_pending_tokens: int
    num_cached_tokens: int


Router = Callable[[SimRequest, Sequence[View]], int]
_PIECE_TOKENS = 128  # of a prompt, for the router's own rule: 512 bytes of text


def round_robin() -> Router:
    """Return a router that takes one replica after the other."""
    turn = count()
    return lambda asked, views: views[next(turn) % len(views)].replica


def least_tokens(asked: SimRequest, views: Sequence[View]) -> int:
    """Return the replica with the fewest tokens to come; of equals the first."""
    return min(views, key=lambda view: (view.num_pending_tokens, view.replica)).replica


def prefix_aware(max_more_tokens: int = 8192) -> Router:
    """Return a router that takes the longest cached prefix, unless that replica is far behind.

    Only replicas count whose tokens to come exceed the fewest by at most ``max_more_tokens``
    (bounded imbalance; Srivatsa et al., "Preble", 2024).
    """

    def choose(asked: SimRequest, views: Sequence[View]) -> int:
        fewest = min(view.num_pending_tokens for view in views)
        near = [view for view in views if view.num_pending_tokens <= fewest + max_more_tokens]
        best = max(near, key=lambda view: (view.num_cached_tokens, -view.num_pending_tokens))
        return best.replica

    return choose


def least_work() -> Where:
    """Return the rule of ``ridgeline serve`` itself; a key stands for about as much text there."""
    return Where(_PIECE_TOKENS)


ROUTERS: dict[str, Callable[[], Router | Where]] = {
    "least-work": least_work,
    "round-robin": round_robin,
    "least-tokens": lambda: least_tokens,
    "prefix": prefix_aware,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """A replica goes.

    Attributes:
        at_s: when it is told; from then on it gets no request.
        replica: which one.
        notice_s: how long it still runs.
        drain: what has not ended by then is resumed elsewhere, by reading prompt and answer so far
            again. Otherwise it is lost.
        back_s: when one like it takes requests again, loaded and empty; None for never.
    """

    at_s: float
    replica: int
    notice_s: float = 0.0
    drain: bool = True
    back_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """From ``at_s`` on a replica takes ``factor`` times as long for everything."""

    at_s: float
    replica: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a request ended.

    Attributes:
        asked: the request, as it was given.
        replica: where it ended; None if it never got to one.
        arrival_s: when it came.
        first_token_s: when its first token was there; None if there was none.
        finish_s: when it ended.
        num_new: tokens of its answers that were made, each counted once.
        is_lost: it got no whole answer.
        num_moves: how often it was resumed elsewhere.
        num_again: tokens that were computed again because of that.
        token_s: when each of its tokens was there.
        num_cached_tokens: of its prompt, what the cache had where it began last.
    """

    asked: SimRequest
    replica: int | None
    arrival_s: float
    first_token_s: float | None
    finish_s: float
    num_new: int
    is_lost: bool
    num_moves: int
    num_again: int
    token_s: tuple[float, ...]
    num_cached_tokens: int


class _SlowedTimes:
    """A model of time that can become slower."""

    def __init__(self, times: TimeModel) -> None:
        self._times, self.factor = times, 1.0

    @property
    def windows(self) -> Windows:
        return self._times.windows

    def seconds(self, features: Features) -> float:
        return self.factor * self._times.seconds(features)

    def after(self, num_rows: int, num_ended: int) -> float:
        return self.factor * self._times.after(num_rows, num_ended)


class _Way:
    """A request on its way: where it is, and what it has got."""

    def __init__(self, asked: SimRequest, arrival_s: float) -> None:
        self.asked, self.arrival_s = asked, arrival_s
        self.now = replace(asked, arrival_s=arrival_s)  # what a replica is asked
        self.num_moves = self.num_again = 0
        self.token_s: list[float] = []  # when each token was there
        self.num_cached = 0
        self.placed: Placed | None = None  # by the router's own rule
        self._begin_s = arrival_s  # where it is now
        self._keys: tuple[bytes, ...] | None = None
        self._num_said = [0] * asked.num_seqs  # tokens of each answer, wherever they were made

    @property
    def num_pending(self) -> int:
        num_here = len(self.token_s) - sum(self.now.num_before)
        return len(self.now.prompt) + sum(self.now.num_new) - num_here

    def note_token(self, index: int, now_s: float) -> None:
        """Take a token of an answer."""
        self._num_said[index] += 1
        self.token_s.append(now_s)
        if self.placed is not None:
            self.placed.has_read(now_s - self._begin_s)

    def move(self, now_s: float) -> None:
        """Be what is left, for another replica, which reads prompt and answers so far again."""
        self.num_again += len(self.asked.prompt) + len(self.token_s)
        self.num_moves += 1
        self._begin_s = now_s
        if self.placed is not None:
            self.placed.end()
        self.now = replace(self.asked, arrival_s=now_s, num_before=tuple(self._num_said))

    def keys(self) -> tuple[bytes, ...]:
        """Return what the router's own rule knows of the prompt, made once."""
        if self._keys is None:
            self._keys = tuple(_keys_of(self.asked.prompt, _PIECE_TOKENS))
        return self._keys

    def end(self, replica: int | None, now_s: float, *, is_lost: bool) -> Ended:
        if self.placed is not None:
            self.placed.end()
        return Ended(
            asked=self.asked,
            replica=replica,
            arrival_s=self.arrival_s,
            first_token_s=self.token_s[0] if self.token_s else None,
            finish_s=now_s,
            num_new=len(self.token_s),
            is_lost=is_lost,
            num_moves=self.num_moves,
            num_again=self.num_again,
            token_s=tuple(self.token_s),
            num_cached_tokens=self.num_cached,
        )


def _keys_of(prompt: tuple[int, ...], size: int) -> list[bytes]:
    """Return a key for each ``size`` tokens, which depends on all that is before."""
    keys, key = list[bytes](), b""
    for begin in range(0, len(prompt) - size + 1, size):
        key = hash_block(key, prompt[begin : begin + size])
        keys.append(key)
    return keys


class _FleetReplica:
    """A replica of the fleet, with its clock."""

    def __init__(
        self,
        index: int,
        settings: EngineRecord,
        times: TimeModel,
        opens_s: float,
        drafts: Drafts | None,
    ) -> None:
        self.index, self._settings, self._drafts = index, settings, drafts
        self.pace = _SlowedTimes(times)
        self.is_open = opens_s <= 0
        self.start(opens_s)

    def start(self, now_s: float) -> None:
        """Be a fresh replica, with nothing in its cache."""
        self.clock = Clock()
        self.clock.now_s = max(0.0, now_s)
        self.replica, self.runner = new_replica(
            self._settings, self.clock, self.pace, None, self._drafts
        )
        self.replica.engine.end_listeners.append(self._note)
        self.ways: dict[int, _Way] = {}  # by the id of what the replica was asked
        self.num_pending = 0
        self._sent: dict[bytes, None] = {}

    def _note(self, record: RequestRecord) -> None:
        way = self.ways[id(self.runner.asked(record.request_id))]
        way.num_cached = record.num_cached_tokens

    def take(self, way: _Way, now_s: float) -> None:
        """Let a request wait here."""
        if not self.replica.has_work():
            self.clock.now_s = max(self.clock.now_s, now_s)
        self.ways[id(way.now)] = way
        self.num_pending += way.num_pending
        self.replica.push(way.now)
        if self._settings.enable_prefix_caching:
            self._sent |= dict.fromkeys(_keys_of(way.now.prompt, self._settings.block_size))
            while len(self._sent) > self._settings.num_blocks:
                del self._sent[next(iter(self._sent))]

    def num_cached(self, asked: SimRequest) -> int:
        """Return the tokens of a prompt that came here before, and fit into the cache since."""
        num_tokens = 0
        for key in _keys_of(asked.prompt, self._settings.block_size):
            if key not in self._sent:
                break
            num_tokens += self._settings.block_size
        return num_tokens

    def step(self) -> list[Ended]:
        """Run a step; return the requests that ended in it."""
        self.replica.admit()
        events = self.replica.step()
        ended_s = self.clock.now_s
        for event in events:
            if event.token is not None:
                self.num_pending -= 1
                number, index = event.seq_id
                self.ways[id(self.runner.asked(number))].note_token(index, ended_s)
        self.clock.now_s += self.pace.after(self.runner.num_rows, len(self.replica.ended))
        ended = []
        for asked in self.replica.ended:
            way = self.ways.pop(id(asked))
            self.num_pending -= way.num_pending
            ended.append(way.end(self.index, ended_s, is_lost=False))
        return ended


_Fault = Evict | Slow
# Of what happens at the same time faults come first, then arrivals, then steps.
_FAULT, _ARRIVAL, _STEP = range(3)


class _Fleet:
    """The heap and what stands around it."""

    def __init__(self, members: Sequence[_FleetReplica], router: Router | Where) -> None:
        self.members, self._router = members, router
        for member in members if isinstance(router, Where) else ():
            if member.is_open:
                self._note_open(member)
        self.heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = count()
        self.ended: list[Ended] = []
        self.on_end: Callable[[float], None] = lambda now_s: None
        self._homeless: deque[_Way] = deque()
        self._stepping: set[int] = set()

    def _note_open(self, member: _FleetReplica) -> None:
        assert isinstance(self._router, Where)
        self._router.add(str(member.index), machine=str(member.index))

    def at(self, now_s: float, kind: int, act: Callable[[], None]) -> None:
        """Let something happen."""
        heappush(self.heap, (now_s, kind, next(self._order), act))

    def arrive(self, way: _Way, now_s: float) -> None:
        """Send a request where the router says; let it wait if no replica is open."""
        member = self._chosen(way)
        if member is None:
            self._homeless.append(way)
        else:
            member.take(way, now_s)
            self._wake(member)

    def _chosen(self, way: _Way) -> _FleetReplica | None:
        """Return the replica that the router chooses; None if none is open."""
        if isinstance(self._router, Where):  # which knows those that are open
            prompt = PromptKeys(way.now.num_to_read, way.keys())
            name = self._router.best(prompt)
            if name is None:
                return None
            way.placed = self._router.place(name, prompt)
            return self.members[int(name)]
        views = [
            View(m.index, m.num_pending, m.num_cached(way.now)) for m in self.members if m.is_open
        ]
        return self.members[self._router(way.now, views)] if views else None

    def open(self, member: _FleetReplica, now_s: float) -> None:
        """Let a replica take requests, first those that found none open."""
        if isinstance(self._router, Where) and not member.is_open:
            self._note_open(member)
        member.is_open = True
        waiting, self._homeless = self._homeless, deque()
        for way in waiting:
            self.arrive(way, now_s)

    def evict(self, fault: Evict) -> None:
        """Close a replica; it goes on until its notice is over."""
        member = self.members[fault.replica]
        if isinstance(self._router, Where) and member.is_open:
            self._router.remove(str(member.index))
        member.is_open = False
        end_s = fault.at_s + fault.notice_s
        self.at(end_s, _FAULT, lambda: self._go(member, end_s, drain=fault.drain))
        if fault.back_s is not None:
            back_s = max(end_s, fault.back_s)
            self.at(back_s, _FAULT, lambda: self.open(member, back_s))

    def _go(self, member: _FleetReplica, now_s: float, *, drain: bool) -> None:
        left = list(member.ways.values())
        member.start(now_s)
        for way in left:
            if drain:
                way.move(now_s)
                self.arrive(way, now_s)
            else:
                self.end(way.end(member.index, now_s, is_lost=True))

    def _wake(self, member: _FleetReplica) -> None:
        if member.index not in self._stepping and member.replica.has_work():
            self._stepping.add(member.index)
            self.at(member.clock.now_s, _STEP, lambda: self._step(member))

    def _step(self, member: _FleetReplica) -> None:
        self._stepping.discard(member.index)
        if not member.replica.has_work():
            return  # it went, and its requests with it
        for ended in member.step():
            self.end(ended)
        self._wake(member)

    def end(self, ended: Ended) -> None:
        """Note that a request ended."""
        self.ended.append(ended)
        self.on_end(self.members[ended.replica or 0].clock.now_s)

    def run(self) -> None:
        """Let everything happen; what no replica ever takes is lost."""
        now_s = 0.0
        while self.heap:
            now_s, _, _, act = heappop(self.heap)
            act()
        while self._homeless:
            self.end(self._homeless.popleft().end(None, now_s, is_lost=True))


def serve_fleet(
    load: Sequence[SimRequest],
    settings: EngineRecord,
    times: TimeModel,
    num_replicas: int,
    *,
    router: Router | Where = least_tokens,
    faults: Sequence[_Fault] = (),
    concurrency: int | None = None,
    opens_s: Sequence[float] = (),
    drafts: Drafts | None = None,
) -> list[Ended]:
    """Serve a load with several replicas; return how each request ended, in that order.

    Args:
        load: requests with arrival times, of one turn, whose clients stay to the end; or, in a
            closed loop, in order.
        settings: of each replica.
        times: how long steps take on one that is not slow.
        num_replicas: how many there are.
        router: which replica gets a request.
        faults: what happens to replicas.
        concurrency: closed loop: how many requests run at a time, over all replicas.
        opens_s: when each replica takes requests: it loads its weights first; 0 if not given.
        drafts: what each guesses; None for no speculation.

    Raises ValueError if a request can never run, or a fault names no replica.
    """
    for fault in faults:
        if not 0 <= fault.replica < num_replicas:
            raise ValueError(f"there is no replica {fault.replica} of {num_replicas}")
    opens = [*opens_s, *[0.0] * num_replicas][:num_replicas]
    members = [_FleetReplica(i, settings, times, opens[i], drafts) for i in range(num_replicas)]
    fleet = _Fleet(members, router)
    for member, at_s in zip(members, opens, strict=True):
        if at_s > 0:
            fleet.at(at_s, _FAULT, lambda member=member, at_s=at_s: fleet.open(member, at_s))  # type: ignore[misc]
    for fault in faults:
        fleet.at(fault.at_s, _FAULT, lambda fault=fault: _happen(fleet, fault))  # type: ignore[misc]
    waiting = deque(load)

    def arrive(asked: SimRequest, now_s: float) -> None:
        fleet.at(now_s, _ARRIVAL, lambda: fleet.arrive(_Way(asked, now_s), now_s))

    def next_one(now_s: float) -> None:
        if waiting:
            arrive(waiting.popleft(), now_s)

    if concurrency is None:
        for asked in waiting:
            arrive(asked, asked.arrival_s or 0.0)
        waiting.clear()
    else:
        fleet.on_end = next_one
        for _ in range(concurrency):
            next_one(0.0)
    fleet.run()
    return fleet.ended


def _happen(fleet: _Fleet, fault: _Fault) -> None:
    if isinstance(fault, Evict):
        fleet.evict(fault)
    else:
        fleet.members[fault.replica].pace.factor = fault.factor
