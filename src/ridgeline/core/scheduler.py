"""The scheduler: grants wishes within the token budget and the memory, and folds results back.

It alone moves sequences between queues and asks the cache for blocks. It knows no clock, no text
beyond a sequence's stop watcher, and no backend.

Why it cannot livelock: wishes may come in any order, but blocks are taken from the youngest for
the oldest, never the other way round, and the budget has a token for every running sequence. So
in every step the oldest running sequence advances, whenever the pool can hold one request at all.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import zip_longest
from operator import attrgetter

from ridgeline.core.kvcache import KVCache
from ridgeline.core.policies import Policy
from ridgeline.core.request import Request, Sequence, Status
from ridgeline.core.step import (
    Event,
    FinishReason,
    SeqId,
    Step,
    StepOutput,
    TokenLogprobs,
    Wait,
    Work,
)

_by_age = attrgetter("id")
_new = tuple.__new__  # of named tuples: their own takes three times as long, 256 times a step
_RUNNING, _FINISHED = Status.RUNNING, Status.FINISHED


def _context(seq: Sequence, start: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return history and targets of a work item (``core.step.Work``)."""
    params, prompt = seq.request.params, seq.request.prompt
    history = tuple(seq.tokens) if params.penalises and end == len(seq.tokens) else ()
    return history, prompt[start + 1 : end + 1] if params.prompt_logprobs is not None else ()


class Scheduler:
    """Two queues in order of arrival, one budget, one cache."""

    def __init__(
        self, kv: KVCache, policy: Policy, *, max_num_batched_tokens: int, max_num_seqs: int
    ) -> None:
        """Schedule at most so many tokens a step, and so many sequences at a time.

        Raises ValueError unless every running sequence can have a token in each step.
        """
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs "
                f"({max_num_seqs}), and that at least 1"
            )
        self.kv = kv
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.backlog = 0  # prompts that wait elsewhere, to come when there is room; policies see it
        self._granted: list[Sequence] = []  # of the step under way, parallel to its work

    # --- coming and going ----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, with the numbers, if it can never run."""
        need, have = self.kv.blocks_for(request.max_len), len(self.kv.pool.refs)
        if need > have:
            raise ValueError(
                f"prompt and answer need up to {request.max_len} tokens = {need} blocks of "
                f"{self.kv.block_size}, but the KV cache has {have}: lower max_tokens or raise "
                f"--kv-cache-memory"
            )
        if self.policy.whole_prompts and request.max_len > self.max_num_batched_tokens:
            raise ValueError(
                f"this policy runs prompts whole, and prompt and answer may reach "
                f"{request.max_len} tokens: more than --max-num-batched-tokens "
                f"({self.max_num_batched_tokens})"
            )
        insort(self.waiting, request.sequences[0], key=_by_age)

    def abort(self, request: Request) -> list[Event]:
        """End a request now, whatever its state, even while its step is being computed."""
        alive = [seq for seq in request.sequences if seq.status is not _FINISHED]
        return [self._end(seq, FinishReason.ABORT) for seq in alive]

    def pause(self, request: Request) -> None:
        """Between steps: let a request rest, without seat and blocks, until ``resume``."""
        for seq in request.sequences:
            if seq.status is not _FINISHED:
                self.kv.release(seq)
                seq.status = Status.PAUSED
        self._requeue()

    def resume(self, request: Request) -> None:
        """Let a paused request wait for its turn again."""
        for seq in request.sequences:
            if seq.status is Status.PAUSED:
                seq.status = Status.PREEMPTED
        self._requeue()

    def has_work(self) -> bool:
        """Whether any sequence is alive and not paused."""
        return bool(self.running or self.waiting)

    # --- deciding ------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Decide the next step. Nothing is final until ``commit``; only blocks are taken."""
        granted: list[Sequence] = []
        work: list[Work] = []
        left = self.max_num_batched_tokens
        admitted: list[tuple[SeqId, int]] = []
        preempted: list[Sequence] = []
        verdicts: dict[SeqId, Wait] = {}
        whole = self.policy.whole_prompts
        rest = Wait.POLICY  # why those that the policy never named do not run
        for seq, wanted in self.policy.wishes(self.running, self.waiting, self.backlog):
            if seq.status is not _RUNNING:
                if preempted:
                    verdicts[seq.id] = Wait.BLOCKS
                    continue
                refusal = self._admit(seq, len(self.running) + len(admitted), left)
                if refusal is not None:
                    rest = refusal  # in order of arrival: who comes later waits for the same
                    break
                admitted.append((seq.id, seq.num_computed))
            pending = seq.num_pending
            num_tokens = wanted if wanted < pending else pending
            if num_tokens > left:
                if whole or not left:
                    verdicts[seq.id] = Wait.TOKEN_BUDGET
                    continue
                num_tokens = left
            start = seq.num_computed
            end = start + num_tokens
            if end > seq.capacity and not self.kv.reserve(seq, self._upto(seq, end)):
                victims = self._make_room(seq, end)
                preempted += victims
                verdicts.update((victim.id, Wait.BLOCKS) for victim in victims)
                left += self._withdraw(victims, granted, work)
                if end > seq.capacity:
                    verdicts[seq.id] = Wait.BLOCKS
                    continue
            request = seq.request
            history, targets = _context(seq, start, end) if request.needs_context else ((), ())
            seeds = seq.seeds if num_tokens == pending else ()
            tokens = (seq.tokens[start],) if num_tokens == 1 else tuple(seq.tokens[start:end])
            fields = (seq.id, start, tokens, seq.table, seeds, request.sampling, history, targets)
            work.append(_new(Work, fields))
            granted.append(seq)
            left -= num_tokens
        if admitted or preempted:
            self._requeue()
        self._granted = granted
        return Step(
            tuple(work),
            tuple(self.kv.copies),
            tuple(admitted),
            tuple(seq.id for seq in preempted),
            tuple(self._waits(verdicts, rest)),
        )

    def _upto(self, seq: Sequence, end: int) -> int:
        return seq.request.max_len if self.policy.reserve_full else end

    def _admit(self, seq: Sequence, num_running: int, left: int) -> Wait | None:
        """Start a waiting sequence with room for all its tokens, or say what is missing."""
        if num_running >= self.max_num_seqs:
            return Wait.MAX_NUM_SEQS
        least = 1
        if self.policy.whole_prompts and left < seq.num_pending:  # what is cached need not run
            least = seq.num_pending - self.kv.num_cached(seq)
        if left < least:
            return Wait.TOKEN_BUDGET
        if not self.kv.admit(seq, self._upto(seq, len(seq.tokens))):
            return Wait.BLOCKS
        seq.status = _RUNNING
        return None

    def _make_room(self, seq: Sequence, end: int) -> list[Sequence]:
        """Preempt younger sequences, the youngest first, until ``seq`` fits or none is left."""
        everyone = (*self.running, *self.waiting)  # who was admitted in this step still waits
        younger = [other for other in everyone if other.status is _RUNNING and other.id > seq.id]
        victims: list[Sequence] = []
        for victim in sorted(younger, key=_by_age, reverse=True):
            self._preempt(victim)
            victims.append(victim)
            if self.kv.reserve(seq, self._upto(seq, end)):
                break
        return victims

    def _preempt(self, seq: Sequence) -> None:
        self.kv.release(seq)
        seq.status = Status.PREEMPTED
        seq.num_preemptions += 1

    def _withdraw(self, victims: list[Sequence], granted: list[Sequence], work: list[Work]) -> int:
        """Take back what victims were granted in this step; return the tokens that this frees."""
        freed = 0
        for victim in victims:
            if victim in granted:
                i = granted.index(victim)
                freed += len(work[i].tokens)
                del granted[i], work[i]
        return freed

    def _requeue(self) -> None:
        """Move sequences to the queue that their status says; both stay in order of arrival."""
        everyone = sorted((*self.running, *self.waiting, *self.paused), key=_by_age)
        self.running = [seq for seq in everyone if seq.status is _RUNNING]
        self.paused = [seq for seq in everyone if seq.status is Status.PAUSED]
        resting = (_RUNNING, Status.PAUSED)
        self.waiting = [seq for seq in everyone if seq.status not in resting]

    def _waits(self, verdicts: dict[SeqId, Wait], rest: Wait) -> Iterator[tuple[SeqId, Wait]]:
        if len(self._granted) < len(self.running):
            chosen = {seq.id for seq in self._granted}
            for seq in self.running:
                if seq.id not in chosen:
                    yield seq.id, verdicts.get(seq.id, rest)
        for seq in self.waiting:
            yield seq.id, verdicts.get(seq.id, rest)
        for seq in self.paused:
            yield seq.id, Wait.PAUSED

    # --- folding back --------------------------------------------------------------------------

    def commit(self, step: Step, output: StepOutput) -> list[Event]:
        """Fold the results of ``schedule``'s step into the sequences; return their news."""
        self.kv.copies.clear()
        events: list[Event] = []
        no_news = (output.logprobs, output.prompt_logprobs, output.errors) == ({}, {}, {})
        items = zip(self._granted, step.work, output.tokens, strict=True)
        for i, (seq, work, tokens) in enumerate(items):
            if seq.status is _FINISHED:  # aborted while its step was computed
                continue
            if not no_news:
                if i in output.errors:
                    events.append(self._end(seq, FinishReason.ERROR, output.errors[i]))
                    continue
                found = output.prompt_logprobs.get(i, ())
                seq.request.prompt_logprobs.update(enumerate(found, work.start + 1))
            num_tokens = len(work.tokens)
            seq.num_computed += num_tokens
            seq.num_pending -= num_tokens
            if seq.num_computed >= seq.publish_at:
                self.kv.publish(seq)
            ranked = () if no_news else output.logprobs.get(i, ())
            if len(tokens) == 1:
                events.append(self._append(seq, tokens[0], ranked[0] if ranked else None))
            elif tokens:
                for member, token, logprobs in zip_longest(self._fork(seq), tokens, ranked):
                    events.append(self._append(member, token, logprobs))
        return events

    def _append(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> Event:
        """Add a sampled token and see whether it is the last."""
        seq.tokens.append(token)
        seq.num_pending += 1
        request = seq.request
        reason: FinishReason | None = None
        stopped_by: str | int | None = None
        if token in request.stop_ids:  # its text is not part of the answer
            reason = FinishReason.STOP
            stopped_by = token if token in request.params.stop_token_ids else None
        elif seq.text is not None:
            stopped_by = seq.text.feed(token, seq.num_generated > request.params.min_tokens)
            reason = None if stopped_by is None else FinishReason.STOP
        if reason is None and len(seq.tokens) >= request.max_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(seq, reason)
        text = "" if seq.text is None else seq.text.take()
        return _new(Event, (seq.id, token, text, logprobs, reason, stopped_by, None))

    def _fork(self, parent: Sequence) -> tuple[Sequence, ...]:
        """Give each seed beyond the first a sequence that shares the prompt's blocks."""
        request = parent.request
        for index, seed in enumerate(parent.seeds[1:], start=1):
            child = Sequence(request, index, list(parent.tokens), (seed,))
            request.sequences.append(child)
            if len(self.running) < self.max_num_seqs:
                self.kv.fork(parent, child)
                child.status = _RUNNING
                insort(self.running, child, key=_by_age)
            else:  # no seat: it comes back through the prefix cache
                insort(self.waiting, child, key=_by_age)
        parent.seeds = parent.seeds[:1]
        return tuple(request.sequences)

    def _end(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> Event:
        """End a sequence without another token."""
        self._finish(seq, reason)
        text = seq.text.take() if seq.text else ""
        return Event(seq.id, None, text, None, reason, None, error)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Take a sequence out of its queue, give its blocks back, release held-back text."""
        queues = {_RUNNING: self.running, Status.PAUSED: self.paused}
        queues.get(seq.status, self.waiting).remove(seq)
        self.kv.release(seq)
        seq.status = _FINISHED
        seq.finish_reason = reason
        if seq.text is not None:
            seq.text.finish()

    def retract(self) -> None:
        """Give up the step under way: its backend failed.

        What it wrote, and which copies it made, is unknown, so all that run start again.
        """
        for seq in self.running:
            self._preempt(seq)
        self.kv.copies.clear()
        self._requeue()

    def check(self) -> None:
        """Raise AssertionError unless everything that must hold between steps holds."""
        assert len(self.running) <= self.max_num_seqs, "too many sequences run"
        for queue in (self.running, self.waiting, self.paused):
            ages = [seq.id for seq in queue]
            assert ages == sorted(set(ages)), "a queue is out of order"
        assert all(seq.status is _RUNNING for seq in self.running)
        assert all(seq.status in (Status.WAITING, Status.PREEMPTED) for seq in self.waiting)
        assert all(seq.status is Status.PAUSED for seq in self.paused)
        idle = (*self.waiting, *self.paused)
        assert all(not seq.table and seq.num_computed == 0 for seq in idle)
        assert all(seq.num_pending > 0 for seq in (*self.running, *idle))
        self.kv.check(self.running)
