"""Serves a load with several replicas under one virtual time, some of which go meanwhile.

Each replica is what ``run.simulate`` runs, with a clock of its own. The next thing to happen is the
earliest on a heap: an arrival, a fault, or a step of a replica. Every request ends exactly once: it
is finished, or lost. With one replica and no fault it is ``simulate``, step for step.

It knows nothing of machines, prices and models of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, islice
from typing import NamedTuple

from ridgeline.core.cache.kvcache import hash_block
from ridgeline.core.records import EngineRecord, RequestRecord
from ridgeline.foresight.routing.balancer import PrefixBalancer, PromptKeys, ServerLease
from ridgeline.foresight.simulator.drafts import Drafts
from ridgeline.foresight.simulator.run import (
    Clock,
    SessionTurn,
    SimRequest,
    TimeModel,
    new_replica,
    sessions_of,
)
from ridgeline.foresight.step_time.features import Windows
from ridgeline.model.cost.costs import Features


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
PIECE_TOKENS = 128  # of a prompt, for the router's own rule: 512 bytes of text


def round_robin() -> Router:
    """Return a router that takes one replica after the other."""
    turn = count()
    return lambda request, views: views[next(turn) % len(views)].replica


def least_tokens(request: SimRequest, views: Sequence[View]) -> int:
    """Return the replica with the fewest tokens to come; of equals the first."""
    return min(views, key=lambda view: (view.num_pending_tokens, view.replica)).replica


def prefix_aware(max_more_tokens: int = 8192) -> Router:
    """Return a router that takes the longest cached prefix, unless that replica is far behind.

    Only replicas count whose tokens to come exceed the fewest by at most ``max_more_tokens``
    (bounded imbalance; Srivatsa et al., "Preble", 2024).
    """

    def choose(request: SimRequest, views: Sequence[View]) -> int:
        fewest = min(view.num_pending_tokens for view in views)
        near = [view for view in views if view.num_pending_tokens <= fewest + max_more_tokens]
        best = max(near, key=lambda view: (view.num_cached_tokens, -view.num_pending_tokens))
        return best.replica

    return choose


def least_work() -> PrefixBalancer:
    """Return the rule of ``ridgeline serve`` itself; a key stands for about as much text there."""
    return PrefixBalancer(PIECE_TOKENS)


ROUTERS: dict[str, Callable[[], Router | PrefixBalancer]] = {
    "least-work": least_work,
    "round-robin": round_robin,
    "least-tokens": lambda: least_tokens,
    "prefix": prefix_aware,
}


def keys_of(prompt: tuple[int, ...], size: int) -> list[bytes]:
    """Return a key for each ``size`` tokens, which depends on all that is before."""
    keys, key = list[bytes](), b""
    for begin in range(0, len(prompt) - size + 1, size):
        key = hash_block(key, prompt[begin : begin + size])
        keys.append(key)
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """How a request ended.

    Attributes:
        request: the request, as it was given.
        replica: where it ended; None if it never got to one.
        arrival_s: when it came.
        first_token_s: when its first token was there; None if there was none.
        finish_s: when it ended.
        num_new: tokens of its answers that were made, each counted once.
        is_lost: it got no whole answer.
        num_moves: how often it was resumed elsewhere.
        num_again: tokens that were computed again because of that; what a cache had of them was
            not.
        num_computed: all tokens that were computed for it, those among them.
        token_s: when each of its tokens was there.
        num_cached_tokens: of its prompt, what the cache had where it began last.
    """

    request: SimRequest
    replica: int | None
    arrival_s: float
    first_token_s: float | None
    finish_s: float
    num_new: int
    is_lost: bool
    num_moves: int
    num_again: int
    num_computed: int
    token_s: tuple[float, ...]
    num_cached_tokens: int


class SimulatedRequest:
    """A request on its way: where it is, and what it has got."""

    def __init__(self, request: SimRequest, arrival_s: float) -> None:
        self.request, self.arrival_s = request, arrival_s
        self.now = replace(request, arrival_s=arrival_s)  # what a replica is asked
        self.num_moves = self.num_again = self.num_computed = 0
        self.token_s: list[float] = []  # when each token was there
        self.num_cached = 0
        self.placed: ServerLease | None = None  # by the router's own rule
        self._begin_s = arrival_s  # where it is now
        self._keys: tuple[bytes, ...] | None = None
        self.num_to_read = len(request.prompt)  # and of answers that go on, where it is now
        self._num_known = 0  # tokens that were computed, wherever that was
        self._num_said = [0] * request.num_seqs  # tokens of each answer, wherever they were made

    @property
    def num_pending(self) -> int:
        """Tokens of its prompt and answers that are to come where it is."""
        num_here = len(self.token_s) - sum(self.now.num_before)
        return len(self.now.prompt) + sum(self.now.num_new) - num_here

    def note_token(self, index: int, now_s: float) -> None:
        """Take a token of an answer."""
        self._num_said[index] += 1
        self.token_s.append(now_s)
        if self.placed is not None:
            self.placed.has_read(now_s - self._begin_s)

    def note_work(self, num_done: int, num_cached: int) -> None:
        """Take note of what the replica where it is has done of it.

        Args:
            num_done: tokens of prompt and answers whose keys and values it had at the end.
            num_cached: of them, what its cache had at the beginning.
        """
        self.num_cached = num_cached
        self.num_computed += max(0, num_done - num_cached)
        self.num_again += max(0, min(self._num_known, num_done) - num_cached)
        self._num_known = max(self._num_known, num_done)

    def move(self, now_s: float) -> None:
        """Be what is left, for another replica, which reads prompt and answers so far."""
        self.num_moves += 1
        self._begin_s = now_s
        if self.placed is not None:
            self.placed.end()
        going_on = [
            said
            for said, whole in zip(self._num_said, self.request.num_new, strict=True)
            if said < whole
        ]
        self.num_to_read = len(self.request.prompt) + sum(going_on)
        self.now = replace(self.request, arrival_s=now_s, num_before=tuple(self._num_said))

    def keys(self) -> tuple[bytes, ...]:
        """Return what the router's own rule knows of the prompt, made once."""
        if self._keys is None:
            self._keys = tuple(keys_of(self.request.prompt, PIECE_TOKENS))
        return self._keys

    def end(self, replica: int | None, now_s: float, *, is_lost: bool) -> RequestOutcome:
        """Return how it has ended."""
        if self.placed is not None:
            self.placed.end()
        return RequestOutcome(
            request=self.request,
            replica=replica,
            arrival_s=self.arrival_s,
            first_token_s=self.token_s[0] if self.token_s else None,
            finish_s=now_s,
            num_new=len(self.token_s),
            is_lost=is_lost,
            num_moves=self.num_moves,
            num_again=self.num_again,
            num_computed=self.num_computed,
            token_s=tuple(self.token_s),
            num_cached_tokens=self.num_cached,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """A replica goes.

    Attributes:
        at_s: when it is told; from then on it gets no request.
        replica: which one.
        notice_s: how long it still runs.
        drain: what it has is resumed elsewhere, by reading prompt and answer so far again: at once
            if another replica takes requests, as a server that leaves does it, else when the notice
            is over. Otherwise what has not ended by then is lost.
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
        self.ways: dict[int, SimulatedRequest] = {}  # by the id of what the replica was asked
        self.num_pending = 0
        self._sent: dict[bytes, None] = {}

    def _note(self, record: RequestRecord) -> None:
        way = self.ways[id(self.runner.request(record.request_id))]
        num_done = way.num_to_read + sum(record.num_generated)
        way.note_work(num_done, record.num_cached_tokens)

    def leave(self) -> list[SimulatedRequest]:
        """Give up all requests, which have not ended; return them."""
        for number, request in self.replica.engine.requests.items():
            num_prompt = len(request.prompt)
            done = [one.num_computed for one in request.sequences]  # 0 of those that have ended
            num_done = min(num_prompt, max(done)) + sum(max(0, one - num_prompt) for one in done)
            way = self.ways[id(self.runner.request(number))]
            way.note_work(num_done, request.num_cached_tokens)
        return list(self.ways.values())

    def take(self, way: SimulatedRequest, now_s: float) -> None:
        """Let a request wait here."""
        if not self.replica.has_work():
            self.clock.now_s = max(self.clock.now_s, now_s)
        self.ways[id(way.now)] = way
        self.num_pending += way.num_pending
        self.replica.push(way.now)

    def keys(self, request: SimRequest) -> list[bytes]:
        """Return the keys of a prompt's blocks, by which a cache finds it."""
        is_cached = self._settings.enable_prefix_caching
        return keys_of(request.prompt, self._settings.block_size) if is_cached else []

    def note_sent(self, keys: Sequence[bytes]) -> None:
        """Take note of what a prompt leaves in the cache; what fits no more is forgotten."""
        self._sent |= dict.fromkeys(keys)
        while len(self._sent) > self._settings.num_blocks:
            del self._sent[next(iter(self._sent))]

    def num_cached(self, keys: Sequence[bytes]) -> int:
        """Return the tokens of a prompt that came here before, and fit into the cache since."""
        num_blocks = next((i for i, key in enumerate(keys) if key not in self._sent), len(keys))
        return num_blocks * self._settings.block_size

    def step(self) -> list[RequestOutcome]:
        """Run a step; return the requests that ended in it."""
        self.replica.admit()
        events = self.replica.step()
        ended_s = self.clock.now_s
        for event in events:
            if event.token is not None:
                self.num_pending -= 1
                number, index = event.seq_id
                self.ways[id(self.runner.request(number))].note_token(index, ended_s)
        self.clock.now_s += self.pace.after(self.runner.num_rows, len(self.replica.ended))
        ended = []
        for request in self.replica.ended:
            way = self.ways.pop(id(request))
            self.num_pending -= way.num_pending
            ended.append(way.end(self.index, ended_s, is_lost=False))
        return ended


_Fault = Evict | Slow
# Of what happens at the same time faults come first, then arrivals, then steps.
_FAULT, _ARRIVAL, _STEP = range(3)


class _Fleet:
    """The heap and what stands around it."""

    def __init__(self, members: Sequence[_FleetReplica], router: Router | PrefixBalancer) -> None:
        self.members, self._router = members, router
        for member in members if isinstance(router, PrefixBalancer) else ():
            if member.is_open:
                self._note_open(member)
        self.heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = count()
        self.ended: list[RequestOutcome] = []
        self.on_end: Callable[[RequestOutcome, float], None] = lambda ended, now_s: None
        self._homeless: deque[SimulatedRequest] = deque()
        self._stepping: set[int] = set()

    def _note_open(self, member: _FleetReplica) -> None:
        assert isinstance(self._router, PrefixBalancer)
        self._router.add(str(member.index), machine=str(member.index))

    def at(self, now_s: float, kind: int, act: Callable[[], None]) -> None:
        """Let something happen."""
        heappush(self.heap, (now_s, kind, next(self._order), act))

    def arrive(self, way: SimulatedRequest, now_s: float) -> None:
        """Send a request where the router says; let it wait if no replica is open."""
        member = self._chosen(way)
        if member is None:
            self._homeless.append(way)
        else:
            member.take(way, now_s)
            self._wake(member)

    def _chosen(self, way: SimulatedRequest) -> _FleetReplica | None:
        """Return the replica that the router chooses; None if none is open."""
        if isinstance(self._router, PrefixBalancer):  # which knows those that are open
            prompt = PromptKeys(way.now.num_to_read, way.keys())
            name = self._router.best(prompt)
            if name is None:
                return None
            way.placed = self._router.place(name, prompt)
            return self.members[int(name)]
        keys = self.members[0].keys(way.now)  # of all: they have equal settings
        views = [
            View(m.index, m.num_pending, m.num_cached(keys)) for m in self.members if m.is_open
        ]
        if not views:
            return None
        member = self.members[self._router(way.now, views)]
        member.note_sent(keys)
        return member

    def open(self, member: _FleetReplica, now_s: float) -> None:
        """Let a replica take requests, first those that found none open."""
        if isinstance(self._router, PrefixBalancer) and not member.is_open:
            self._note_open(member)
        member.is_open = True
        waiting, self._homeless = self._homeless, deque()
        for way in waiting:
            self.arrive(way, now_s)

    def evict(self, fault: Evict) -> None:
        """Close a replica; it goes on until its notice is over."""
        member = self.members[fault.replica]
        if isinstance(self._router, PrefixBalancer) and member.is_open:
            self._router.remove(str(member.index))
        member.is_open = False
        end_s = fault.at_s + fault.notice_s
        goes_s = fault.at_s if fault.drain and any(m.is_open for m in self.members) else end_s
        self.at(goes_s, _FAULT, lambda: self._go(member, goes_s, drain=fault.drain))
        if fault.back_s is not None:
            back_s = max(end_s, fault.back_s)
            self.at(back_s, _FAULT, lambda: self.open(member, back_s))

    def _go(self, member: _FleetReplica, now_s: float, *, drain: bool) -> None:
        left = member.leave()
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

    def end(self, ended: RequestOutcome) -> None:
        """Note that a request ended."""
        self.ended.append(ended)
        self.on_end(ended, self.members[ended.replica or 0].clock.now_s)

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
    router: Router | PrefixBalancer = least_tokens,
    faults: Sequence[_Fault] = (),
    concurrency: int | None = None,
    opens_s: Sequence[float] = (),
    drafts: Drafts | None = None,
) -> list[RequestOutcome]:
    """Serve a load with several replicas; return how each request ended, in that order.

    Args:
        load: requests with arrival times, whose clients stay to the end; or, in a closed loop, in
            order. Behind a turn that is lost no other one of its session comes.
        settings: of each replica.
        times: how long steps take on one that is not slow.
        num_replicas: how many there are.
        router: which replica gets a request.
        faults: what happens to replicas.
        concurrency: closed loop: how many sessions run at a time, over all replicas.
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
    _let_come(fleet, load, concurrency)
    fleet.run()
    return fleet.ended


def _let_come(fleet: _Fleet, load: Sequence[SimRequest], concurrency: int | None) -> None:
    """Let sessions arrive, and each further turn behind the one before."""
    turns = (
        SessionTurn(one[0].arrival_s or 0.0, i, one, 0, ())
        for i, one in enumerate(sessions_of(load))
    )
    under_way: dict[int, SessionTurn] = {}

    def arrive(turn: SessionTurn) -> None:
        request = turn.request() if len(turn.session) > 1 else turn.session[0]
        under_way[id(request)] = turn
        way = SimulatedRequest(request, turn.at_s)
        fleet.at(turn.at_s, _ARRIVAL, lambda: fleet.arrive(way, turn.at_s))

    def go_on(ended: RequestOutcome, now_s: float) -> None:
        turn = under_way.pop(id(ended.request))
        then = None if ended.is_lost else turn.then(ended.request, now_s)
        if then is None and concurrency is not None and (first := next(turns, None)):
            then = first._replace(at_s=now_s)
        if then is not None:
            arrive(then)

    fleet.on_end = go_on
    for turn in islice(turns, concurrency):
        arrive(turn)


def _happen(fleet: _Fleet, fault: _Fault) -> None:
    if isinstance(fault, Evict):
        fleet.evict(fault)
    else:
        fleet.members[fault.replica].pace.factor = fault.factor
