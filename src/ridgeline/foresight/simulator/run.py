"""Simulation: the server's own path from arrival to token, under a clock that is a number.

The front, engine, scheduler, policies and cache are those of the server. What stands for the model
is a runner that answers at once and lets the clock go on by as long as a step would take. So a
simulation is a function of the load, the settings and the model of time; nothing in it is random.

Texts a simulation does not have: how many drafts are right is a parameter (``drafts``).
It knows nothing of files, HTTP and machines.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import inf
from typing import NamedTuple, Protocol

from ridgeline.core.engine import Engine, new_scheduler
from ridgeline.core.front import Front
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record, RequestRecord
from ridgeline.core.request import Sequence, Text
from ridgeline.core.scheduling.policies import Load
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.core.step import Event, Step, StepOutput, Work
from ridgeline.foresight.simulator.drafts import Drafts, SimDrafter
from ridgeline.foresight.step_time.features import Windows, of_step
from ridgeline.model.cost.costs import Features

_END = -1  # the token that ends an answer, where the settings name none
_WORD = 1 << 32  # and more: the tokens of an answer; no prompt has them, so no cache finds them


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """A request of a load.

    Attributes:
        prompt: token ids; equal beginnings are found in the prefix cache, as in a server.
        num_new: tokens of each of its answers.
        arrival_s: when it comes; None in a closed loop, where it comes when another has ended, and
            for later turns.
        params: None allows just these tokens. If it allows more, the answers end by themselves.
        tenant: whose request it is, for fairness.
        is_read: whether the client reads the answer while it grows.
        cache_root: only requests of the same root share cached prefixes.
        name: goes into the request's record.
        gone_s: when its client leaves, unless it has ended by then.
        answers: tokens of each answer, where they are known; the cache may find them again.
        due_s: when it is to run at the latest, if that was promised; it enters at once then.
        num_before: tokens that each answer has from elsewhere when it comes; empty if it begins.
        turn: 0, or how many turns of its session came before: the requests just before it. Then
            its prompt is what is new behind those prompts and answers.
        think_s: of a later turn: the seconds after the answer before it.
        is_background: whether it gives way to others; in a fleet none may.
        push: None, or a number that the prompts of one request have in common: they come together.
    """

    prompt: tuple[int, ...]
    num_new: tuple[int, ...]
    arrival_s: float | None = None
    params: SamplingParams | None = None
    tenant: str = ""
    is_read: bool = True
    cache_root: bytes = b""
    name: str = ""
    gone_s: float | None = None
    answers: tuple[tuple[int, ...], ...] = ()
    due_s: float = inf
    num_before: tuple[int, ...] = ()
    turn: int = 0
    think_s: float = 0.0
    is_background: bool = False
    push: int | None = None

    @property
    def num_seqs(self) -> int:
        """How many sequences it may run as."""
        return len(self.num_new) if self.params is None else self.params.num_seqs

    @property
    def num_to_read(self) -> int:
        """Tokens that are there when it comes: its prompt, and answers from elsewhere."""
        return len(self.prompt) + sum(self.num_before)

    def sampling(self) -> SamplingParams:
        """Return ``params``, or greedy ones for the answers that are known."""
        if self.params is not None:
            return self.params
        return SamplingParams(temperature=0.0, max_tokens=max(self.num_new), n=len(self.num_new))

    def token(self, index: int, num: int, max_tokens: int | None, end: int, word: int) -> int:
        """Return an answer's token of number ``num``, counted from 1.

        ``end`` is what ends an answer before ``max_tokens``, ``word`` what is said where no token
        is known.
        """
        if num >= self.num_new[index] and num != max_tokens:  # at its longest it ends without that
            return end
        answer = self.answers[index] if self.answers else ()
        return answer[num - 1] if num <= len(answer) else word

    def begun(self, end: int, word: int) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that its answers have from elsewhere; arguments as for ``token``."""
        most = self.sampling().max_tokens if self.num_before else None
        return tuple(
            tuple(self.token(i, num, most, end, word) for num in range(1, num_before + 1))
            for i, num_before in enumerate(self.num_before)
        )


class TimeModel(Protocol):
    """A model of time (``steptime.StepTime``), or what was recorded."""

    @property
    def windows(self) -> Windows:
        """The windows of the model's layers, which features depend on."""

    def seconds(self, features: Features) -> float:
        """Return the seconds from the begin of scheduling to the end of executing."""

    def after(self, num_rows: int, num_ended: int) -> float:
        """Return the seconds from then to the begin of the next step."""


class Clock:
    """Virtual time: seconds, which pass when it is told to."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s

    def wait_until(self, at_s: float) -> None:
        """Let time pass until then, if it is not over."""
        self.now_s = max(self.now_s, at_s)


class VirtualRunner:
    """A runner that computes nothing: time passes, and answers have the lengths that are known.

    Attributes:
        num_rows: of the output head, in the last step.
    """

    def __init__(self, clock: Clock, times: TimeModel, end: int) -> None:
        """Let ``clock`` go on as ``times`` says; ``end`` is the token that ends an answer."""
        self._clock, self._times, self._end = clock, times, end
        self._requests: dict[int, SimRequest] = {}
        self.num_rows = 0

    def note(self, request_id: int, request: SimRequest) -> None:
        """Take what the answers of a request are."""
        self._requests[request_id] = request

    def request(self, request_id: int) -> SimRequest:
        """Return the request that the engine knows by this number."""
        return self._requests[request_id]

    def execute(self, step: Step) -> StepOutput:
        """Let the time pass that the step takes; answer with the next token of each sequence."""
        features = of_step(step, self._times.windows)
        self.num_rows = features.num_rows
        self._clock.now_s += self._times.seconds(features)
        return StepOutput(tuple(map(self._tokens, step.work)))

    def _tokens(self, work: Work) -> tuple[int, ...]:
        num_seeds = len(work.seeds)
        if not num_seeds:
            return ()
        request_id, first = work.seq_id
        num = work.start + len(work.tokens) - work.drafts + 1 - work.sampling.prompt_len
        max_tokens = work.sampling.params.max_tokens
        if not work.drafts:  # num is that of the next token
            if num_seeds == 1:
                return (self._token(request_id, first, num, max_tokens),)
            each = range(first, first + num_seeds)
            return tuple([self._token(request_id, index, num, max_tokens) for index in each])
        tokens: list[int] = []
        for draft in (*work.tokens[-work.drafts :], None):
            tokens.append(self._token(request_id, first, num + len(tokens), max_tokens))
            if tokens[-1] != draft:
                break
        return tuple(tokens)

    def next_tokens(self, seq: Sequence, number: int) -> int:
        """Return what a sequence's token of this number will be; 1 is the first of the answer."""
        return self._token(*seq.id, number, seq.request.params.max_tokens)

    def _token(self, request_id: int, index: int, num: int, max_tokens: int | None) -> int:
        word = _WORD + request_id
        return self._requests[request_id].token(index, num, max_tokens, self._end, word)


class _PushedRequest(NamedTuple):
    """A request before the engine, or in it, and the numbers of its push and its own."""

    request: SimRequest
    pushed: tuple[int, int] | None = None  # None where it did not wait

    @property
    def push(self) -> int | None:
        return self.pushed and self.pushed[0]

    def has_left(self, now_s: float) -> bool:
        return self.request.gone_s is not None and self.request.gone_s <= now_s


class Replica:
    """A front and an engine: what the server runs in a thread, under any clock.

    Attributes:
        ended: the requests that ended in the last step.
    """

    def __init__(
        self,
        engine: Engine,
        on_add: Callable[[int, SimRequest], None] = lambda request_id, request: None,
        new_text: Callable[[SimRequest], Callable[[], Text] | None] = lambda request: None,
    ) -> None:
        """Take over an engine without requests; its runner and clock may be real or virtual.

        ``on_add`` is told the engine's number of each request that enters it, and ``new_text``
        says what makes the text of its answers.
        """
        self.engine = engine
        self.ended: list[SimRequest] = []
        self.front: Front[_PushedRequest] = Front()
        self._on_add, self._new_text = on_add, new_text
        self._owners: dict[int, _PushedRequest] = {}
        self._payers: dict[int, tuple[str, bool]] = {}  # tenant, and whether in the background
        self._num_inside: Counter[int | None] = Counter()  # sequences in the engine, by push
        self._some_leave = False
        self._closed: list[RequestRecord] = []
        self._num_entered = 0
        engine.end_listeners.append(self._note_end)

    def leave(self) -> None:
        """Give the engine back, which has no requests now."""
        self.engine.end_listeners.remove(self._note_end)

    def has_work(self) -> bool:
        """Whether any request waits or runs, but for what the background rests with."""
        return self.front.is_wanted or self.engine.has_work()

    @property
    def quiet_at_s(self) -> float:
        """When the background goes on, if nobody asks until then; inf if there is none."""
        rests = any(request.is_background for request, _ in self._owners.values())
        return self.front.quiet_at_s if rests or self.front.has_background else inf

    def push(self, *prompts: SimRequest) -> None:
        """Let a request wait for its turn, with all its prompts."""
        request, first = prompts[0], self.front.num_pushed
        self._some_leave |= any(one.gone_s is not None for one in prompts)
        self.front.push(
            request.tenant,
            [
                (_PushedRequest(one, (first, first + i)), len(one.prompt))
                for i, one in enumerate(prompts)
            ],
            request.num_seqs,
            is_promised=request.due_s < inf,
            is_background=request.is_background,
        )

    def admit(self) -> None:
        """Let in whom the engine could start, and drop whose clients have gone.

        While people wait, the background rests. Raises ValueError if a request can never run.
        """
        now_s, gave_way = self.engine.clock(), self.front.load.gives_way
        is_inside = any(not request.is_background for request, _ in self._owners.values())
        gives_way = self.front.is_waited_for(now_s, is_inside=is_inside)
        self.take(gives_way)
        if self._some_leave:
            self._end_gone(now_s)
        for request_id, (request, _) in self._owners.items() if gives_way != gave_way else ():
            if request.is_background:
                (self.engine.pause if gives_way else self.engine.resume)(request_id)

    def take(self, gives_way: bool) -> None:
        """Let in whom the engine could start. Raises ValueError if a request can never run."""
        for prompt in self.front.take(
            self.engine.scheduler.room,
            num_inside=lambda prompt: self._num_inside[prompt.push],
            is_busy=self.engine.has_work(),
            gives_way=gives_way,
            num_since=self.engine.num_since,
        ):
            self.enter(*prompt)

    def _end_gone(self, now_s: float) -> None:
        for prompt in self.front.remove(lambda prompt: prompt.has_left(now_s)):
            self.enter(*prompt)
        for request_id, prompt in self._owners.items():
            if prompt.has_left(now_s):
                self.engine.abort(request_id)

    def step(self, is_read: bool | None = None, num_outside: int | None = None) -> list[Event]:
        """Run a step behind ``admit``, if there is work for one; return its events.

        ``is_read`` and ``num_outside`` are for what was recorded; else the requests say it.
        """
        events, owners, load = list[Event](), self._owners, self.front.load
        if self.engine.has_work():
            if is_read is None:
                is_read = any(request.is_read for request, _ in owners.values())
            num_outside = load.num_outside if num_outside is None else num_outside
            events = self.engine.step(Load(num_outside, is_read, *load[2:]))
        payers = self._payers
        served = Counter([payers[one.seq_id[0]] for one in events if one.token is not None])
        for (tenant, is_background), num_tokens in served.items():
            self.front.charge(tenant, num_tokens, is_background=is_background)
        self.ended = []
        for record in self._closed:
            prompt, _ = owners.pop(record.request_id), payers.pop(record.request_id)
            request = prompt.request
            self.ended.append(request)
            self._num_inside[prompt.push] -= request.num_seqs
            if request.sampling().searches:  # beams that were not chosen are not reported
                num_all = request.num_seqs * max(record.num_generated)
                num_unseen = num_all - sum(record.num_generated)
                self.front.charge(request.tenant, num_unseen, is_background=request.is_background)
        self._closed.clear()
        return events

    def enter(self, request: SimRequest, pushed: tuple[int, int] | None = None) -> None:
        """Let a request into the engine. Raises ValueError if it can never run."""
        self._num_entered += 1
        end = next(iter(self.engine.eos_ids), _END)
        request_id = self.engine.add(
            request.prompt,
            request.sampling(),
            answers=request.begun(end, -_WORD - self._num_entered),
            new_text=self._new_text(request),
            arrival_s=request.arrival_s,
            name=request.name,
            cache_root=request.cache_root,
            owner=request.tenant,
            due_s=request.due_s,
            is_background=request.is_background,
            pushed=pushed,
        )
        self._owners[request_id] = prompt = _PushedRequest(request, pushed)
        self._payers[request_id] = request.tenant, request.is_background
        self._num_inside[prompt.push] += request.num_seqs
        self._on_add(request_id, request)

    def _note_end(self, record: RequestRecord) -> None:
        self._closed.append(record)


class SessionTurn(NamedTuple):
    """The next turn of a session, and when it comes; the order decides between equal times."""

    at_s: float
    order: int
    session: tuple[SimRequest, ...]
    turn: int
    said: tuple[int, ...]  # tokens of the turns before

    def request(self) -> SimRequest:
        """Return the request as a server gets it."""
        request = replace(
            self.session[self.turn],
            arrival_s=self.at_s,
            prompt=self.said + self.session[self.turn].prompt,
        )
        if len(self.session) == 1 or request.answers:
            return request
        word = _WORD + (self.order << 16) + self.turn
        return replace(request, answers=tuple((word,) * num for num in request.num_new))

    def then(self, request: SimRequest, now_s: float) -> SessionTurn | None:
        """Return the turn behind this one, which was ``request``; None if it was the last."""
        if self.turn + 1 == len(self.session):
            return None
        at_s = now_s + self.session[self.turn + 1].think_s
        said = request.prompt + request.answers[0]
        return self._replace(at_s=at_s, turn=self.turn + 1, said=said)


def simulate(
    load: Listing[SimRequest],
    settings: EngineRecord,
    times: TimeModel,
    *,
    concurrency: int | None = None,
    turnaround_s: float = 0.0,
    warmups: Listing[SimRequest] = (),
    drafts: Drafts | None = None,
) -> list[Record]:
    """Serve a load under a virtual clock; return the records that a server would write.

    Args:
        load: requests with arrival times; or, in a closed loop, in order.
        settings: how the engine is set up; a trace's first record is one.
        times: how long steps take.
        concurrency: closed loop: how many sessions run at a time, at once from the start.
        turnaround_s: closed loop: from the end of a session until the next comes.
        warmups: requests that come first, all at once; arrival times count from their end.
        drafts: what is guessed; None for no speculation.

    Raises ValueError if a request can never run.
    """
    clock, records = Clock(), list[Record]()
    replica, runner = new_replica(settings, clock, times, records.append, drafts)

    def pass_after_step() -> None:
        clock.now_s += times.after(runner.num_rows, len(replica.ended))

    hooks = ClockHooks(clock, clock.wait_until, pass_after_step)
    serve(replica, [replace(request, arrival_s=0.0) for request in warmups], hooks)
    serve(replica, load, hooks, concurrency=concurrency, turnaround_s=turnaround_s)
    return records


class ClockHooks(NamedTuple):
    """How time goes on, virtual or real.

    Attributes:
        now_s: returns the time.
        wait_until: waits until then, when nothing is to do.
        after_step: is called behind each step, for the time until the next.
    """

    now_s: Callable[[], float]
    wait_until: Callable[[float], None]
    after_step: Callable[[], None] = lambda: None


def serve(
    replica: Replica,
    load: Listing[SimRequest],
    hooks: ClockHooks,
    *,
    concurrency: int | None = None,
    turnaround_s: float = 0.0,
) -> None:
    """Serve a load to its end, with arrival times that count from now; see ``simulate``."""
    begin_s = hooks.now_s()
    sessions = [
        SessionTurn(begin_s + (session[0].arrival_s or 0.0), i, session, 0, ())
        for i, session in enumerate(sessions_of(load))
    ]
    at_first = len(sessions) if concurrency is None else concurrency
    due, waiting = sessions[:at_first], deque(sessions[at_first:])
    heapify(due)
    under_way: dict[int, tuple[SessionTurn, SimRequest]] = {}
    while due or replica.has_work() or replica.quiet_at_s < inf:
        if not replica.has_work():
            hooks.wait_until(min(replica.quiet_at_s, due[0].at_s if due else inf))
        come: list[SimRequest] = []
        while due and due[0].at_s <= hooks.now_s():
            turn = heappop(due)
            come.append(turn.request())
            under_way[id(come[-1])] = turn, come[-1]
        for _, prompts in groupby(come, key=_push_of):
            replica.push(*prompts)
        replica.admit()
        replica.step()
        hooks.after_step()
        for request in replica.ended:
            turn, _ = under_way.pop(id(request))
            then = turn.then(request, hooks.now_s())
            if then is None and waiting:
                then = waiting.popleft()._replace(at_s=hooks.now_s() + turnaround_s)
            if then is not None:
                heappush(due, then)


def _push_of(request: SimRequest) -> tuple[int | None, int]:
    """Return what the prompts of one request have in common, and no others."""
    return request.push, id(request) if request.push is None else 0


def sessions_of(load: Listing[SimRequest]) -> Iterator[tuple[SimRequest, ...]]:
    """Yield sessions, each with its turns in order."""
    session: list[SimRequest] = []
    for request in load:
        if session and not request.turn:
            yield tuple(session)
            session.clear()
        session.append(request)
    if session:
        yield tuple(session)


def new_replica(
    settings: EngineRecord,
    clock: Clock,
    times: TimeModel,
    listener: Callable[[Record], None] | None,
    drafts: Drafts | None = None,
) -> tuple[Replica, VirtualRunner]:
    """Return a replica under a virtual clock, and its runner; ``listener`` gets all records.

    Without one no record of a step is made, which takes a tenth of the time.
    """
    eos_ids = settings.eos_ids or (_END,)
    runner = VirtualRunner(clock, times, eos_ids[0])
    speculation = None
    if drafts is not None:
        drafter = SimDrafter(drafts.acceptance, runner.next_tokens)
        speculation = Speculation(drafter, most=drafts.most)
    engine = Engine(
        new_scheduler(settings, speculation=speculation),
        runner,
        clock,
        max_model_len=settings.max_model_len,
        eos_ids=eos_ids,
        seed=settings.seed,
        listeners=[] if listener is None else [listener],
    )
    return Replica(engine, runner.note), runner
