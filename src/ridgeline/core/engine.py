"""The engine: schedule, execute, commit, and say what happened.

The runner and the clock are parameters, so that serving, simulating and testing differ in nothing
else. An engine's record says how it is set up, and from it another is set up alike. It knows
nothing of text formats, threads and files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from typing import Any, TypeVar

from ridgeline.core import commit
from ridgeline.core.cache.kvcache import KVCache, hash_block
from ridgeline.core.cache.state_slots import new_states
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record, RequestRecord, StepRecord
from ridgeline.core.request import NO_ADAPTER, Adapter, Constraint, Request, Search, Text
from ridgeline.core.scheduling.policies import Load, policy_of
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.core.step import NO_RULES, Event, Runner, Step, StepOutput, TokenRules

R = TypeVar("R")
_SEED_STRIDE = 0xBF58476D1CE4E5B9  # odd, so that no two requests of an engine share a seed
_AS_IN_REQUEST = (  # what the record of a request says of it, by the same names
    *("name", "owner", "arrival_s", "scheduled_s", "first_token_s", "error", "num_cached_tokens"),
    *("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_preemptions", "answers"),
    *("is_background", "pushed"),
)
_SINCE = ("arrived", "aborted", "paused", "resumed")  # since the step before, as its record says


class Engine:
    """Requests in, events and records out, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float],
        *,
        max_model_len: int,
        eos_ids: tuple[int, ...] = (),
        seed: int = 0,
        listeners: Sequence[Callable[[Record], None]] = (),
        new_search: Callable[[Request], Search | None] = lambda request: None,
    ) -> None:
        """Drive ``scheduler`` and ``runner``; ``clock`` returns seconds and never goes back.
        Each of ``listeners`` is called with every record. More may be added to the attribute of
        this name later; they miss what came before. Those of ``end_listeners`` hear of requests
        that ended and of nothing else. ``new_search`` makes a request's search.
        """
        self.scheduler = scheduler
        self.requests: dict[int, Request] = {}  # those alive
        self.max_model_len = max_model_len
        self.eos_ids = eos_ids
        self.seed = seed
        self.runner = runner
        self.clock = clock
        self._new_search = new_search
        self.listeners = list(listeners)
        self.end_listeners: list[Callable[[RequestRecord], None]] = []
        self._next_id = self._num_steps = 0
        self._since = defaultdict[str, list[int]](list)
        self._tell(self.describe, self.listeners)

    def add(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        new_text: Callable[[], Text] | None = None,
        arrival_s: float | None = None,
        name: str = "",
        cache_root: bytes = b"",
        adapter: Adapter = NO_ADAPTER,
        prediction: tuple[int, ...] = (),
        owner: str = "",
        new_constraint: Callable[[], Constraint] | None = None,
        token_rules: TokenRules = NO_RULES,
        due_s: float = inf,
        answers: tuple[tuple[int, ...], ...] = (),
        is_background: bool = False,
        pushed: tuple[int, int] | None = None,
    ) -> int:
        """Queue a request, as ``Request`` has it; return its id.

        It goes on behind ``answers``, the tokens that each of its answers has from elsewhere: the
        rest is the same, and no event tells of these again. But searches and vectors begin again.
        ``arrival_s`` is for one that came earlier and waited elsewhere, on the engine's clock.
        Raises ValueError if it can never run, and then nothing has changed.
        """
        request_id = self._next_id
        request = Request(
            request_id,
            prompt,
            params,
            eos_ids=self.eos_ids,
            max_model_len=self.max_model_len,
            default_seed=self.seed + (request_id + 1) * _SEED_STRIDE,
            new_text=new_text,
            name=name,
            cache_root=cache_root,
            adapter=adapter,
            prediction=prediction,
            owner=owner,
            new_constraint=new_constraint,
            token_rules=token_rules,
            new_search=self._new_search,
            due_s=due_s,
            answers=answers,
            is_background=is_background,
            pushed=pushed,
            arrival_s=self.clock() if arrival_s is None else arrival_s,
        )
        commit.resume(request)
        self.scheduler.add(request)
        self._next_id += 1
        self.requests[request_id] = request
        self._since["arrived"].append(request_id)
        return request_id

    def abort(self, request_id: int) -> list[Event]:
        """End a request now; unknown and finished ids are ignored."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        self._since["aborted"].append(request_id)
        events = commit.abort(self.scheduler.queues, request)
        self._close(request_id, self.clock())
        return events

    def pause(self, request_id: int) -> None:
        """Pause a request, between steps, until ``resume``; it keeps nothing but its tokens."""
        if request_id in self.requests:
            self._since["paused"].append(request_id)
            self.scheduler.queues.pause(self.requests[request_id])

    def resume(self, request_id: int) -> None:
        """Let a paused request go on; its answers are the same as without the pause."""
        if request_id in self.requests:
            self._since["resumed"].append(request_id)
            self.scheduler.queues.resume(self.requests[request_id])

    @property
    def num_since(self) -> tuple[int, ...]:
        """How many arrived, were aborted, paused and resumed since the last step."""
        since = self._since
        return tuple([len(since[name]) if name in since else 0 for name in _SINCE])

    def has_work(self) -> bool:
        """Whether any request is alive and not paused."""
        return self.scheduler.queues.has_work()

    def gauges(self) -> dict[str, float]:
        """Return how full it is now, by the names of metrics. Any thread may call."""
        queues = self.scheduler.queues
        pool = queues.kv.pool
        return {
            "num_requests_running": len(queues.running),
            "num_requests_waiting": len(queues.waiting) + len(queues.paused),
            "kv_cache_usage_perc": 1 - len(pool.free) / len(pool.refs),
        }

    def step(self, load: Load = Load()) -> list[Event]:
        """Run one step; return the events of its sequences.

        ``load`` tells the policy about the world outside the engine. An exception of the runner
        passes through: nothing is committed, every request starts again at the next call, and the
        answers stay the same.
        """
        start_s = self.clock()
        try:
            step = self.scheduler.schedule(load)
        except BaseException:  # of a draft model
            self.scheduler.retract()
            raise
        if not step.work:
            if self.has_work():
                raise RuntimeError(f"nothing can run: {step.waits}")
            return []
        scheduled_s = self.clock()
        self._note_admissions(step, scheduled_s)
        filled = self._filled() if self.listeners else {}
        try:
            output = self.runner.execute(step)
        except BaseException:
            self.scheduler.retract()
            times_s = start_s, scheduled_s, self.clock()
            self._note_step(step, StepOutput(()), load, filled, times_s)
            raise
        executed_s = self.clock()
        if self.scheduler.speculation:
            self.scheduler.speculation.note_step(step, output, executed_s - start_s)
        events = commit.commit(self.scheduler.queues, step, output)
        if self.scheduler.speculation and any(work.drafts for work in step.work):
            output = output._replace(tokens=_to_end(step, output, events))
        self._note_step(step, output, load, filled, (start_s, scheduled_s, executed_s))
        self._note_events(events, executed_s)
        return events

    def check(self) -> None:
        """Raise AssertionError unless everything that must hold between steps holds."""
        self.scheduler.queues.check()

    # --- keeping records -----------------------------------------------------------------------

    def _note_admissions(self, step: Step, now_s: float) -> None:
        for (request_id, _), num_cached in step.admitted:
            request = self.requests[request_id]
            if request.scheduled_s is None:
                request.scheduled_s = now_s
                request.num_cached_tokens = min(num_cached, len(request.prompt))

    def _note_events(self, events: list[Event], now_s: float) -> None:
        for event in events:
            request = self.requests[event.seq_id[0]]
            if request.first_token_s is None:
                has_news = event.token is not None or event.vector is not None
                request.first_token_s = now_s if has_news else None
            if event.error:
                request.error = request.error or event.error
        for request_id in {event.seq_id[0]: None for event in events if event.finish_reason}:
            if self.requests[request_id].is_finished:
                self._close(request_id, now_s)

    def _close(self, request_id: int, now_s: float) -> None:
        request = self.requests.pop(request_id)
        seqs = request.sequences
        if self.scheduler.speculation:
            self.scheduler.speculation.forget(request)
        self._tell(
            lambda: RequestRecord(
                request_id=request_id,
                cache_root=request.cache_root.hex(),
                adapter=request.adapter.digest.hex(),
                prompt_token_ids=request.prompt,
                params=changed(request.params),
                finish_s=now_s,
                num_generated=tuple(seq.num_generated - seq.num_before for seq in seqs),
                finish_reasons=tuple(str(seq.finish_reason) for seq in seqs),
                due_s=None if request.due_s == inf else request.due_s,
                **{name: getattr(request, name) for name in _AS_IN_REQUEST},
            ),
            (*self.listeners, *self.end_listeners),
        )
        request.adapter = NO_ADAPTER  # whose memory others may wait for

    def _filled(self) -> dict[str, Any]:
        """Return how full the queues and the cache are, by the names of a step's record."""
        queues, pool = self.scheduler.queues, self.scheduler.queues.kv.pool
        return {
            "num_running": len(queues.running),
            "num_waiting": len(queues.waiting) + len(queues.paused),
            "blocks_used": len(pool.refs) - len(pool.free),
            "blocks_indexed": pool.num_indexed,
        }

    def _note_step(
        self,
        step: Step,
        output: StepOutput,
        load: Load,
        filled: dict[str, Any],
        times_s: tuple[float, float, float],
    ) -> None:
        start_s, scheduled_s, executed_s = times_s
        sampled, errors = output.tokens, output.errors
        since: dict[str, Any] = {name: tuple(self._since.pop(name, ())) for name in _SINCE}
        if errors:  # the tokens of a failed item mean nothing
            sampled = tuple(() if i in errors else tokens for i, tokens in enumerate(sampled))
        self._tell(
            lambda: StepRecord(
                number=self._num_steps,
                start_s=start_s,
                schedule_s=scheduled_s - start_s,
                execute_s=executed_s - scheduled_s,
                commit_s=self.clock() - executed_s,
                work=tuple((work.seq_id, work.start, len(work.tokens)) for work in step.work),
                sampled=sampled,
                drafts=tuple((w.seq_id, w.tokens[-w.drafts :]) for w in step.work if w.drafts),
                ranked=tuple((step.work[i].seq_id, top) for i, top in output.top.items()),
                similarities=tuple((step.work[i].seq_id, v) for i, v in output.similarity.items()),
                errors=tuple((step.work[i].seq_id, error) for i, error in errors.items()),
                admitted=step.admitted,
                preempted=step.preempted,
                waits=tuple((seq_id, wait.value) for seq_id, wait in step.waits),
                num_copies=len(step.copies),
                **load._asdict(),
                **filled,
                **since,
            ),
            self.listeners,
        )
        self._num_steps += 1

    def _tell(self, record: Callable[[], R], listeners: Sequence[Callable[[R], None]]) -> None:
        """Call listeners with a record, which is made only if there are some."""
        if listeners:
            value = record()
            for listener in tuple(listeners):  # one may leave meanwhile
                listener(value)

    def describe(self) -> EngineRecord:
        """Return the record of how the engine is set up."""
        scheduler, kv = self.scheduler, self.scheduler.queues.kv
        return EngineRecord(
            policy=scheduler.policy.name,
            block_size=kv.block_size,
            num_blocks=len(kv.pool.refs),
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.queues.max_num_seqs,
            max_model_len=self.max_model_len,
            enable_prefix_caching=kv.enable_prefix_caching,
            seed=self.seed,
            eos_ids=self.eos_ids,
            num_checkpoints=None if kv.states is None else kv.states.num_checkpoints,
            windows=kv.windows,
            looks_ahead=scheduler.looks_ahead,
            least_prompt_tokens=scheduler.policy.min_chunk,
            reserve_full=scheduler.policy.reserve_full,
        )


def new_scheduler(
    settings: EngineRecord,
    *,
    speculation: Speculation | None = None,
    keeps_states: bool = True,
    hash_block: Callable[[bytes, tuple[int, ...]], bytes] = hash_block,
) -> Scheduler:
    """Return a scheduler without requests, for an engine with these settings.

    ``keeps_states`` of recurrent layers, where the model has some. Raises LookupError for a policy
    that is not known.
    """
    num_checkpoints = settings.num_checkpoints if keeps_states else None
    kv = KVCache(
        settings.num_blocks,
        settings.block_size,
        enable_prefix_caching=settings.enable_prefix_caching,
        hash_block=hash_block,
        states=new_states(settings.max_num_seqs, num_checkpoints),
        windows=settings.windows,
    )
    return Scheduler(
        kv,
        policy_of(settings.policy, settings.least_prompt_tokens, settings.reserve_full),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        speculation=speculation,
        looks_ahead=settings.looks_ahead,
    )


def _to_end(step: Step, output: StepOutput, events: list[Event]) -> tuple[tuple[int, ...], ...]:
    """Return the output's tokens without those behind an end among the drafts."""
    num_kept = Counter(event.seq_id for event in events)
    return tuple(
        tokens[: num_kept[work.seq_id]] if work.drafts else tokens
        for work, tokens in zip(step.work, output.tokens, strict=True)
    )


_DEFAULTS = asdict(SamplingParams())


def changed(params: SamplingParams) -> dict[str, object]:
    """Return the parameters that are not as by default, by name."""
    pairs = ((n, v) for n, default in _DEFAULTS.items() if (v := getattr(params, n)) != default)
    return {n: asdict(v) if n == "structured_outputs" else v for n, v in pairs}
