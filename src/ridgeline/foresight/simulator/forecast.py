"""A forecast: when the requests of an engine will have their first tokens and their ends.

The engine's state is copied in lengths: no token id leaves it. A fresh scheduler over as many
blocks goes on from there under a model of time, without records and texts. Answers are taken to be
as long as they may become. Drafts are not modelled, nor is a search: its beams count as answers.
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
from ridgeline.core.fold import commit
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord
from ridgeline.core.request import Request, Sequence, Status
from ridgeline.core.scheduling.policies import Load
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.step import StepOutput
from ridgeline.foresight.simulator.run import TimeModel
from ridgeline.foresight.simulator.scheduler import new_scheduler
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


def new_standing(
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
    standings = tuple(_standing_of(queues.kv, request) for request in requests.values())
    return State(settings, standings, is_read)


def _standing_of(kv: KVCache, request: Request) -> RequestSnapshot:
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
    alive: Callable[[], None] = lambda: None,
) -> dict[int, PredictedTimes]:
    """Return what is foreseen of the requests with the numbers ``wanted``.

    Args:
        state: where it begins.
        times: how long steps take.
        wanted: it ends when all of these have.
        queued: requests that enter as soon as there is room, in order.
        coming: requests that enter before the first step that begins after their seconds, which
            rise.
        under_way_s: how long ago it began; the second step has not begun.
        within_s: what comes later is not asked for.
        alive: is called before each step; what it raises ends the forecast.
    """
    scheduler = _scheduler(state)
    queues, waiting, on_the_way = scheduler.queues, deque(queued), deque(coming)
    _place(scheduler, state.requests)
    firsts = {s.number: 0.0 for s in state.requests if _has_begun(s)}
    ends: dict[int, float] = {}
    left, now_s = set(wanted), 0.0
    while left and now_s <= within_s:
        while on_the_way and (now_s >= on_the_way[0][0] or not queues.has_work()):
            coming_s, standing = on_the_way.popleft()
            now_s = max(now_s, coming_s)
            _place(scheduler, [standing])
        while waiting and min(scheduler.room()[:2]) > 0:
            _place(scheduler, [waiting.popleft()])
        alive()
        step = scheduler.schedule(Load(len(waiting), state.is_read))
        if not step.work:
            break
        features = of_step(step, times.windows)
        now_s += times.seconds(features)
        tokens = tuple((0,) * len(work.seeds) for work in step.work)
        ended = set()
        for event in commit(queues, step, StepOutput(tokens)):
            number = event.seq_id[0]
            firsts.setdefault(number, now_s)
            if event.finish_reason is not None:
                ends[number] = now_s  # the last of its answers stays
                ended.add(number)
        if ended:
            ended -= {number for number, _ in queues.alive}  # its other answers go on
            left -= ended
        now_s = max(now_s + times.after(features.num_rows, len(ended)), under_way_s)
    going_on = {number for number, _ in queues.alive}
    return {
        number: PredictedTimes(
            firsts.get(number, inf), inf if number in going_on else ends.get(number, inf)
        )
        for number in wanted
    }


def _has_begun(standing: RequestSnapshot) -> bool:
    return any(answer.num_tokens > standing.num_prompt for answer in standing.answers)


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


def _place(scheduler: Scheduler, standings: Listing[RequestSnapshot]) -> None:
    """Let requests be where they were: in their queues, with their blocks."""
    queues, placed = scheduler.queues, list[tuple[Sequence, int]]()
    for standing in standings:
        request = Request(
            standing.number,
            (0,) * standing.num_prompt,
            _ALL,
            max_model_len=standing.num_prompt + standing.num_new,
            owner=standing.owner,
            due_s=standing.due_s,
        )
        request.sequences = []
        for answer in standing.answers:
            seq = Sequence(request, answer.place, [0] * answer.num_tokens, (0,) * answer.num_seeds)
            request.sequences.append(seq)
            queues.alive[seq.id] = seq
            queues.waiting.append(seq)
            placed.append((seq, answer.num_cached))
            if answer.tables:
                _hold(queues.kv, seq, answer)
    for seq, num_cached in placed:  # when it is known which blocks are free
        _pretend(queues.kv, seq, num_cached, scheduler.max_num_batched_tokens)
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


def _pretend(kv: KVCache, seq: Sequence, num_cached: int, longest_step: int) -> None:
    """Let the cache find this many tokens of a sequence, as if it had run before, in such steps."""
    num_cached -= num_cached % kv.block_size
    if num_cached and kv.admit(seq, num_cached, longest_step):
        while seq.num_computed < num_cached:
            end = min(seq.num_computed + longest_step, num_cached)
            if end > seq.capacity and not kv.reserve(seq, end):
                break
            seq.num_computed = end
            kv.publish(seq)
        kv.release(seq)
