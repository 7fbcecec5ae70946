"""What the tests of the core share: small engines over the ledger, and what each step must obey."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ridgeline.core.cache.kvcache import KVCache, hash_block
from ridgeline.core.cache.state_slots import StateSlots
from ridgeline.core.commit import commit
from ridgeline.core.decoding.search import new_search
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record
from ridgeline.core.request import NO_ADAPTER, Adapter, Request, Sequence
from ridgeline.core.scheduling.policies import POLICIES as by_name
from ridgeline.core.scheduling.policies import Load, Policy, Queue, TokenRequest
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.scheduling.speculate import Guess, Speculation
from ridgeline.core.step import Event, FinishReason, SeqId, Step, StepOutput, Wait, Work
from tests.fakes import Ledger, candidates, expected_tokens, extend, similarity

POLICIES = tuple(by_name.values())


@dataclass(frozen=True)
class YoungestFirst:
    """A policy that asks in the worst order, so that the young are granted, then preempted."""

    name: str = "youngest first"
    reserve_full: bool = False
    whole_prompts: bool = False
    min_chunk: int = 1

    def token_requests(
        self, running: Queue, waiting: Queue, load: Load, budget: int
    ) -> Iterator[TokenRequest]:
        for seq in reversed(running):
            yield seq, seq.num_pending
        for seq in waiting:
            yield seq, seq.num_pending


class Clock:
    """Seconds that pass by one with each look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@dataclass
class Watched:
    """A runner that checks each step as a whole, then lets the ledger compute it.

    ``during`` is called before the ledger runs and ``after`` behind it: what happens elsewhere
    while a step is computed, or an exception of the backend.
    """

    scheduler: Scheduler
    ledger: Ledger
    during: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    steps: list[Step] = field(default_factory=list)

    def execute(self, step: Step) -> StepOutput:
        self.steps.append(step)
        check_step(self.scheduler, step)
        self.during()
        output = self.ledger.execute(step)
        self.after()
        return output


def check_step(scheduler: Scheduler, step: Step) -> None:
    """What holds for each step of every policy."""
    sizes = {work.seq_id: len(work.tokens) for work in step.work}
    waits = dict(step.waits)
    queues = scheduler.queues.running, scheduler.queues.waiting, scheduler.queues.paused
    running, waiting, paused = ([seq.id for seq in queue] for queue in queues)
    ranks = {seq.id: (seq.is_over_share, seq.request.order) for queue in queues for seq in queue}
    assert len(sizes) == len(step.work), "a sequence runs twice in one step"
    assert sum(sizes.values()) <= scheduler.max_num_batched_tokens
    assert len(running) <= scheduler.queues.max_num_seqs
    alive = sorted([*running, *waiting, *paused])
    assert sorted([*sizes, *waits]) == alive, "each runs, or says why not"
    assert paused == [seq_id for seq_id, why in step.waits if why is Wait.PAUSED]
    alive_seqs = scheduler.queues.alive
    idle = [seq_id for seq_id in alive if alive_seqs[seq_id].candidates]
    assert not set(idle) & set(sizes), "a beam with candidates has nothing to compute"
    assert all(waits[i] is Wait.BEAMS for i in idle if i in running)
    assert next(i for i in running if i not in idle) in sizes, "the oldest that runs must advance"
    if scheduler.policy.whole_prompts:
        assert all(work.seeds or work.top or work.pool for work in step.work), (
            "a prompt ran in pieces"
        )
    assert set(step.preempted) <= set(waiting)
    given = [seq_id for seq_id in step.preempted if waits[seq_id] is not Wait.BEAMS]
    scarce = (Wait.BLOCKS, Wait.MAX_NUM_SEQS)
    assert all(waits[seq_id] in scarce for seq_id in given)
    owners = {seq_id: seq.request.owner for seq_id, seq in alive_seqs.items()}
    assert all(
        (ranks[one], one) > (ranks[other], other)
        for one in given
        for other in running
        if owners[one] == owners[other]
    ), "of each owner the last give way"
    for work in step.work:
        assert 0 <= work.drafts < len(work.tokens)
        assert not work.drafts or len(work.seeds) == 1, "drafts where it is not decided who goes on"
        assert not work.drafts or not step.preempted, "somebody gave way for a guess"
    targets = [new for _, new in step.copies]
    assert len(set(targets)) == len(targets), "two copies into one block"
    assert all(scheduler.queues.kv.pool.refs[block] == 1 for block in targets)
    has_states = scheduler.queues.kv.states is not None
    assert all((work.state >= 0) == has_states for work in step.work)


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    policy: Policy = POLICIES[2],
    budget: int = 64,
    seats: int = 8,
    caching: bool = True,
    hash_block: Callable[[bytes, tuple[int, ...]], bytes] = hash_block,
    speculation: Speculation | None = None,
    checkpoints: int | None = None,
    every: int = 8,
    windows: tuple[int | None, ...] = (None,),
    looks_ahead: bool = False,
) -> Scheduler:
    states = None if checkpoints is None else StateSlots(seats, checkpoints, every=every)
    kv = KVCache(
        num_blocks,
        block_size,
        enable_prefix_caching=caching,
        hash_block=hash_block,
        states=states,
        windows=windows,
    )
    return Scheduler(
        kv,
        policy,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        speculation=speculation,
        looks_ahead=looks_ahead,
    )


@dataclass
class Oracle:
    """A drafter that knows what comes, and says so with a chance of ``accuracy`` for each token."""

    accuracy: float
    dice: random.Random
    vocab_size: int = 4

    def draft(self, wanted: Listing[tuple[Sequence, int]]) -> list[Guess]:
        return [
            Guess(tuple(self._tokens(seq, most)), self.dice.randint(2, 20)) for seq, most in wanted
        ]

    def _tokens(self, seq: Sequence, most: int) -> Iterator[int]:
        for token in expected_tokens(
            tuple(seq.tokens),
            seq.seeds[0],
            self.dice.randint(0, most),
            self.vocab_size,
            adapter=seq.request.adapter.number,
        ):
            right = self.dice.random() < self.accuracy
            yield token if right else self.dice.randrange(self.vocab_size)

    def note_draws(self, work: Work, draws: tuple[int, ...]) -> None:
        return None

    def forget(self, request: Request) -> None:
        return None


@dataclass
class Reciter:
    """A drafter that repeats what answers said before, with a wrong token now and then."""

    said: Mapping[SeqId, Listing[int]]
    accuracy: float = 1.0
    dice: random.Random = field(default_factory=random.Random)

    def draft(self, wanted: Listing[tuple[Sequence, int]]) -> list[Guess]:
        return [Guess(tuple(self._tokens(seq, most)), 9) for seq, most in wanted]

    def _tokens(self, seq: Sequence, most: int) -> Iterator[int]:
        for token in self.said[seq.id][seq.num_generated :][:most]:
            yield token if self.dice.random() < self.accuracy else token ^ 1

    def note_draws(self, work: Work, draws: tuple[int, ...]) -> None:
        return None

    def forget(self, request: Request) -> None:
        return None


def make_request(
    request_id: int,
    prompt: Listing[int],
    *,
    cache_root: bytes = b"",
    adapter: Adapter = NO_ADAPTER,
    due_s: float = inf,
    owner: str = "",
    **params: Any,
) -> Request:
    return Request(
        request_id,
        tuple(prompt),
        SamplingParams(**params),
        max_model_len=1000,
        cache_root=cache_root,
        adapter=adapter,
        new_search=new_search,
        due_s=due_s,
        owner=owner,
    )


def make_engine(
    scheduler: Scheduler | None = None,
    *,
    max_model_len: int = 1000,
    eos_ids: tuple[int, ...] = (),
    vocab_size: int = 4,
    listeners: Listing[Callable[[Record], None]] = (),
) -> tuple[Engine, Watched]:
    """Return an engine over a ledger with a clock that counts, and the runner between them."""
    scheduler = scheduler or make_scheduler()
    kv = scheduler.queues.kv
    ledger = Ledger(len(kv.pool.refs), kv.block_size, vocab_size, windows=kv.windows)
    runner = Watched(scheduler, ledger)
    engine = Engine(
        scheduler,
        runner,
        Clock(),
        max_model_len=max_model_len,
        eos_ids=eos_ids,
        listeners=listeners,
        new_search=new_search,
    )
    return engine, runner


def expected(request: Request, vocab_size: int = 4) -> dict[SeqId, list[int]]:
    """Return what the ledger answers to a request that has not run yet, sequence by sequence."""
    if request.search:
        return {(request.id, i): found for i, found in enumerate(searched(request, vocab_size))}
    seeds = request.sequences[0].seeds
    most, number = request.max_len - len(request.prompt), request.adapter.number
    return {
        (request.id, i): expected_tokens(
            request.prompt, seed, most, vocab_size, request.stop_ids, number
        )
        for i, seed in enumerate(seeds)
    }


def searched(request: Request, vocab_size: int = 4) -> list[list[int]]:
    """Return what a request's search answers over the ledger's model, without an engine."""
    search = new_search(request)
    assert search is not None
    texts: list[tuple[int, ...]] = [request.prompt]
    while True:
        number = request.adapter.number
        lasts = [prefixes_of(text, number)[-1] for text in texts]
        found = [candidates(prefix, search.num_candidates, vocab_size) for prefix in lasts]
        moves = search.advance(found, [similarity(prefixes_of(text, number)) for text in texts])
        last = search.settled[-1].token if search.settled else None
        is_full = len(request.prompt) + len(search.settled) >= request.max_len
        if not moves or last in request.stop_ids or is_full:
            return [[entry.token for entry in answer] for answer in search.answers()]
        texts = [(*texts[parent], token) for parent, token in moves]


def prefixes_of(text: Listing[int], adapter: int = 0) -> list[int]:
    """Return the ledger's prefix after each token of a text."""
    return [*itertools.accumulate(text, extend, initial=adapter)][1:]


def adapter(number: int) -> Adapter:
    """Return an adapter of this number, none for 0."""
    return Adapter(number, bytes([number]) * 16) if number else NO_ADAPTER


def finish(engine: Engine, max_steps: int = 2000) -> list[Event]:
    """Run until nothing is left, checking all invariants after each step; return all events."""
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
        engine.check()
        max_steps -= 1
        assert max_steps, "the engine does not come to an end"
    assert not any(engine.scheduler.queues.kv.pool.refs), "blocks are left over"
    assert not engine.requests
    return events


def tokens_of(events: Listing[Event]) -> dict[SeqId, list[int]]:
    """Return the tokens of each sequence in order."""
    out: dict[SeqId, list[int]] = {}
    for event in events:
        out.setdefault(event.seq_id, [])
        if event.token is not None:
            out[event.seq_id].append(event.token)
    return out


def reasons_of(events: Listing[Event]) -> dict[SeqId, FinishReason]:
    """Return how each sequence ended."""
    return {event.seq_id: event.finish_reason for event in events if event.finish_reason}


def run_step(scheduler: Scheduler, tokens: dict[SeqId, tuple[int, ...]] | None = None) -> Step:
    """Schedule and commit one step with given tokens (else zeros); return the step."""
    step = scheduler.schedule()
    known = tokens or {}
    sampled = (known.get(work.seq_id, (0,) * len(work.seeds)) for work in step.work)
    commit(scheduler.queues, step, StepOutput(tuple(sampled)))
    scheduler.queues.check()
    return step


def sizes_of(step: Step) -> dict[SeqId, int]:
    """Return how many tokens of each sequence are in a step, in the order of the work."""
    return {work.seq_id: len(work.tokens) for work in step.work}
