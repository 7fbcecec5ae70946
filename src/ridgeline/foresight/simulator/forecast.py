"""A forecast: when the requests of an engine will have their first tokens and their ends.

The engine's state is copied in lengths: no token id leaves it. A fresh engine over as many blocks
goes on from there under a model of time, without records and texts. Answers are taken to be as long
as they may become. Drafts are not modelled, nor is a search: its beams count as answers.
It knows nothing of clocks, threads and promises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Listing
from itertools import count
from math import inf
from typing import NamedTuple

from ridgeline.core.cache.kvcache import KVCache, held_blocks
from ridgeline.core.engine import Engine, new_scheduler
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, RequestRecord
from ridgeline.core.request import Request, Sequence, Status
from ridgeline.core.scheduling.policies import Load
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.step import Step, StepOutput
from ridgeline.foresight.simulator.run import Clock, TimeModel
from ridgeline.foresight.step_time.features import of_step

_NEVER = 1 << 62
_ALL = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


class PredictedAnswer(NamedTuple):
    """One sequence: its tokens, how many of them are computed, and the blocks that hold these."""

    place: int  # among the answers of its request
    num_tokens: int
    num_computed: int
    capacity: int
    tables: tuple[tuple[int, ...], ...]  # of each group of layers; none where it does not run
    num_seeds: int = 1  # more where others will fork from it
    num_cached: int = 0  # tokens that the prefix cache has, where it does not run


class RequestSnapshot(NamedTuple):
    """A request as it stands.

    Attributes:
        number: what it is called by; of equal ``due_s``, the lower one goes first.
        num_prompt: tokens of the prompt.
        num_new: most tokens of each answer.
        answers: those that have not ended.
        due_s: when it is due, on the clock of the engine that it is copied from.
        owner: whose it is; slots are shared between owners.
    """

    number: int
    num_prompt: int
    num_new: int
    answers: tuple[PredictedAnswer, ...]
    due_s: float = inf
    owner: str = ""


class State(NamedTuple):
    """What an engine is at, between two steps."""

    settings: EngineRecord
    requests: tuple[RequestSnapshot, ...]
    is_read: bool = True  # by a client, while an answer grows


class PredictedTimes(NamedTuple):
    """Seconds from now until the first token of a request, and until its last; inf is later."""

    first_s: float = inf
    end_s: float = inf


def new_snapshot(
    number: int,
    num_prompt: int,
    num_new: int,
    *,
    num_answers: int = 1,
    due_s: float = inf,
    num_cached: int = 0,
    owner: str = "",
) -> RequestSnapshot:
    """Return a request that has not begun."""
    answer = PredictedAnswer(
        place=0,
        num_tokens=num_prompt,
        num_computed=0,
        capacity=0,
        tables=(),
        num_seeds=num_answers,
        num_cached=num_cached,
    )
    return RequestSnapshot(number, num_prompt, num_new, (answer,), due_s, owner)


def state_of(settings: EngineRecord, scheduler: Scheduler, is_read: bool = True) -> State:
    """Copy what a scheduler has to do, but for what is paused. Call it between two steps."""
    queues = scheduler.queues
    requests = {seq.request.id: seq.request for seq in (*queues.running, *queues.waiting)}
    snapshots = tuple(_snapshot_of(queues.kv, request) for request in requests.values())
    return State(settings, snapshots, is_read)


def _snapshot_of(kv: KVCache, request: Request) -> RequestSnapshot:
    """Copy a request in lengths."""
    answers = []
    for seq in request.sequences:
        if seq.status in (Status.FINISHED, Status.PAUSED):
            continue
        num_seeds = seq.num_slots if request.search else len(seq.seeds)
        num_computed = min(seq.num_computed, len(seq.tokens) - 1)  # also of a beam that waits
        num_cached = 0 if seq.table else kv.num_cached(seq)
        answer = PredictedAnswer(
            place=seq.id[1],
            num_tokens=len(seq.tokens),
            num_computed=num_computed,
            capacity=seq.capacity,
            tables=(seq.table, *seq.others) if seq.table else (),
            num_seeds=max(1, num_seeds),
            num_cached=num_cached,
        )
        answers.append(answer)
    num_prompt = len(request.prompt)
    num_new = max(request.max_len - num_prompt, 1)  # a vector is like one token
    answers_of = request.id, num_prompt, num_new, tuple(answers)
    return RequestSnapshot(*answers_of, request.due_s, request.owner)


def forecast(
    state: State,
    times: TimeModel,
    wanted: Listing[int],
    *,
    queued: Listing[RequestSnapshot] = (),
    coming: Listing[tuple[float, RequestSnapshot]] = (),
    under_way_s: float = 0.0,
    within_s: float = inf,
    check_cancel: Callable[[], None] = lambda: None,
    clock: Clock | None = None,
) -> dict[int, PredictedTimes]:
    """Return the prediction for the requests with the numbers ``wanted``.

    Args:
        state: where it begins.
        times: how long steps take.
        wanted: it ends when all of these have.
        queued: requests that enter as soon as there is room, in order.
        coming: requests that enter before the first step that begins after their seconds, which
            rise.
        under_way_s: how long ago it began; the second step has not begun.
        within_s: what comes later is not asked for.
        check_cancel: is called before each step; what it raises ends the forecast.
        clock: shows the time of the forecast, from 0 on, to a model whose speed changes with it.
    """
    clock, ended = clock or Clock(), list[RequestRecord]()
    runner = _AnyTokens(clock, times)
    engine = Engine(_scheduler(state), runner, clock, max_model_len=state.settings.max_model_len)
    engine.end_listeners.append(ended.append)
    waiting, on_the_way = deque(queued), deque(coming)
    _place(engine, state.requests)
    left = set(wanted)
    while left and clock.now_s <= within_s:
        while on_the_way and (clock.now_s >= on_the_way[0][0] or not engine.has_work()):
            coming_s, snapshot = on_the_way.popleft()
            clock.wait_until(coming_s)
            _place(engine, [snapshot])
        while waiting and min(engine.scheduler.room()[:2]) > 0:
            _place(engine, [waiting.popleft()])
        check_cancel()
        if not engine.has_work():
            break
        num_before = len(ended)
        engine.step(Load(len(waiting), state.is_read))
        left.difference_update([record.request_id for record in ended[num_before:]])
        clock.now_s += times.after(runner.num_rows, len(ended) - num_before)
        clock.wait_until(under_way_s)
    times_s = {number: (one.first_token_s, inf) for number, one in engine.requests.items()}
    times_s |= {record.request_id: (record.first_token_s, record.finish_s) for record in ended}
    never = None, inf
    seconds = {number: times_s.get(number, never) for number in wanted}
    return {
        n: PredictedTimes(inf if first is None else first, end)
        for n, (first, end) in seconds.items()
    }


class _AnyTokens:
    """A runner that computes nothing: time passes, and each answer gets any token.

    Attributes:
        num_rows: of the output head, in the last step.
    """

    def __init__(self, clock: Clock, times: TimeModel) -> None:
        self._clock, self._times, self.num_rows = clock, times, 0

    def execute(self, step: Step) -> StepOutput:
        features = of_step(step, self._times.windows)
        self.num_rows = features.num_rows
        self._clock.now_s += self._times.seconds(features)
        return StepOutput(tuple((0,) * len(work.seeds) for work in step.work))


def _has_begun(snapshot: RequestSnapshot) -> bool:
    return any(answer.num_tokens > snapshot.num_prompt for answer in snapshot.answers)


def _scheduler(state: State) -> Scheduler:
    """Return a scheduler with no request, set up as the engine's own.

    It keeps no states: how much a checkpoint saves is in what the cache is said to hold.
    """
    fresh = count()
    return new_scheduler(
        state.settings,
        keeps_states=False,
        hash_block=lambda parent, tokens: b"%d" % next(fresh),  # no two contents are the same
    )


def _place(engine: Engine, snapshots: Listing[RequestSnapshot]) -> None:
    """Let requests be where they were: in their queues, with their blocks."""
    queues, placed = engine.scheduler.queues, list[tuple[Sequence, int]]()
    for snapshot in snapshots:
        request = Request(
            snapshot.number,
            (0,) * snapshot.num_prompt,
            _ALL,
            max_model_len=snapshot.num_prompt + snapshot.num_new,
            owner=snapshot.owner,
            due_s=snapshot.due_s,
            first_token_s=0.0 if _has_begun(snapshot) else None,
        )
        request.sequences = []
        engine.requests[request.id] = request
        for answer in snapshot.answers:
            seq = Sequence(request, answer.place, [0] * answer.num_tokens, (0,) * answer.num_seeds)
            request.sequences.append(seq)
            queues.alive[seq.id] = seq
            queues.waiting.append(seq)
            placed.append((seq, answer.num_cached))
            if answer.tables:
                _hold(queues.kv, seq, answer)
    for seq, num_cached in placed:  # when it is known which blocks are free
        _pretend(queues.kv, seq, num_cached, engine.scheduler.max_num_batched_tokens)
    queues.sort()


def _hold(kv: KVCache, seq: Sequence, answer: PredictedAnswer) -> None:
    """Let a sequence run with the blocks that it had."""
    seq.status, seq.capacity = Status.RUNNING, answer.capacity
    seq.table, seq.others = answer.tables[0], answer.tables[1:]
    seq.num_computed = answer.num_computed
    seq.num_pending = answer.num_tokens - answer.num_computed
    seq.publish_at = _NEVER
    for block in held_blocks(seq):
        kv.pool.share(block)


def _pretend(kv: KVCache, seq: Sequence, num_cached: int, max_num_batched_tokens: int) -> None:
    """Let the cache find this many tokens of a sequence, as if it had run before, in such steps."""
    num_cached -= num_cached % kv.block_size
    if num_cached and kv.admit(seq, num_cached, max_num_batched_tokens):
        while seq.num_computed < num_cached:
            end = min(seq.num_computed + max_num_batched_tokens, num_cached)
            if end > seq.capacity and not kv.reserve(seq, end):
                break
            seq.num_computed = end
            kv.publish(seq)
        kv.release(seq)
