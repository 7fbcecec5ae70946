"""The scheduler: decides a step by granting token requests within the token budget and the memory.

It admits and preempts, and takes blocks for what it grants. It knows nothing of clocks, texts and
backends. ``core.commit`` folds the results of a step back.

Why it cannot livelock: requests may come in any order, but blocks are taken from the last in the
order of queues for the first, never the other way round, and the budget has a token for every
running sequence. So the first running sequence advances in every step, whenever the pool can hold
one request at all.

A beam with candidates keeps its blocks and waits for its request's other beams. A sequence that is
to be admitted may take them if its own request comes before theirs: no two searches wait for each
other. What is due may also take the place of what its owner has that is not, and what is within its
owner's share that of what others have over theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf

from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.request import Request, Sequence, Status
from ridgeline.core.scheduling.admission import Room
from ridgeline.core.scheduling.policies import Load, Policy
from ridgeline.core.scheduling.queues import Queues, by_order
from ridgeline.core.scheduling.speculate import Speculation, max_draws
from ridgeline.core.step import SeqId, Step, Wait, Work

_RUNNING = Status.RUNNING
_SCARCE = (Wait.MAX_NUM_SEQS, Wait.BLOCKS)


def _as_asked(item: Work, seq: Sequence, *, is_last: bool) -> Work:
    """Return work with what few requests ask for; most of it behind the last token only."""
    request = seq.request
    if seq.others:
        item = item._replace(others=seq.others)
    if request.adapter.number:
        item = item._replace(adapter=request.adapter.number)
    if request.search:
        top = request.search.num_candidates if is_last else 0
        item = item._replace(top=top, similar=bool(request.params.penalty_alpha))
    elif request.params.pool and is_last:
        item = item._replace(pool=request.params.pool)
    return item


def _context(seq: Sequence, start: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return history and targets of a work item (``core.step.Work``)."""
    params, prompt = seq.request.params, seq.request.prompt
    history = tuple(seq.tokens) if params.needs_history and end == len(seq.tokens) else ()
    return history, prompt[start + 1 : end + 1] if params.prompt_logprobs is not None else ()


def _add_masks(granted: list[Sequence], work: list[Work]) -> None:
    """Add to a step's work what constrained answers may say."""
    for i, (seq, item) in enumerate(zip(granted, work, strict=True)):
        if seq.constraint is not None and (item.seeds or item.top):
            drafts = item.tokens[len(item.tokens) - item.drafts :]
            work[i] = item._replace(masks=seq.constraint.masks(drafts))


def _ready(queues: Queues) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
    """Return who runs and who waits, both without idle beams; and the idle beams with blocks.

    Idle beams have their candidates, and wait for others of their request.
    """
    running, waiting, idle = queues.running, queues.waiting, list[Sequence]()
    if queues.searching:
        idle = [seq for seq in running if seq.candidates]
        running, waiting = ([seq for seq in q if not seq.candidates] for q in (running, waiting))
    return running, waiting, idle


class Scheduler:
    """A policy, a budget and the queues."""

    def __init__(
        self,
        kv: KVCache,
        policy: Policy,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        speculation: Speculation | None = None,
        looks_ahead: bool = False,
    ) -> None:
        """Schedule at most these numbers of tokens in a step and of sequences at a time.

        ``speculation`` adds drafts where room is left; ``looks_ahead`` keeps room for a token more,
        for runners that go on unasked. Raises ValueError if a step lacks a token for each sequence.
        """
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs "
                f"({max_num_seqs}), and that at least 1"
            )
        self.queues = Queues(kv, max_num_seqs)
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.speculation = speculation
        self.looks_ahead = looks_ahead

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, with the numbers, if it can never run."""
        kv, first = self.queues.kv, request.sequences[0]
        need = kv.most_blocks(request.max_len, self.max_num_batched_tokens, request.params)
        have, width = len(kv.pool.refs), first.num_slots
        name = "top_k" if request.params.penalty_alpha else "best_of"
        if width > (most := self.queues.max_num_seqs):
            raise ValueError(
                f"{name} asks for {width} at once, but at most {most} sequences run at a time: "
                f"lower {name} or raise --max-num-seqs"
            )
        if width * need > have:
            each = f"{name} is {width}: for each, " if width > 1 else ""
            raise ValueError(
                f"{each}prompt and answer need up to {request.max_len} tokens = {need} blocks of "
                f"{kv.block_size}, but the KV cache has {have}: lower max_tokens or raise "
                f"--kv-cache-memory"
            )
        if self.policy.whole_prompts and request.max_len > self.max_num_batched_tokens:
            raise ValueError(
                f"this policy runs prompts whole, and prompt and answer may reach "
                f"{request.max_len} tokens: more than --max-num-batched-tokens "
                f"({self.max_num_batched_tokens})"
            )
        if request.search:
            self.queues.searching[request.id] = request
        for seq in request.sequences:
            if seq.status is Status.WAITING:  # else it ended elsewhere
                self.queues.add(seq)

    def room(self) -> Room:
        """Return what could be started in the next step in addition to the queues.

        Half of a step is kept for short prompts: those of at most an eighth of it.
        """
        queues, budget = self.queues, self.max_num_batched_tokens
        everyone = (*queues.running, *queues.waiting)
        inside, reading = Counter[str](), Counter[str]()
        prompts = [s.num_pending for s in everyone if s.num_pending > 1 or s.status is not _RUNNING]
        short_len = budget // 8
        for seq in everyone:
            inside[seq.request.owner] += max(seq.num_slots, len(seq.seeds))
            reading[seq.request.owner] += seq.num_pending
        inside |= {one: queues.max_num_seqs for one in reading if reading[one] >= budget}
        return Room(
            num_seqs=queues.max_num_seqs - sum(seq.num_slots for seq in everyone),
            num_tokens=budget - sum(prompts),
            short_len=short_len,
            num_short_tokens=budget // 2 - sum(n for n in prompts if n <= short_len),
            max_num_seqs=queues.max_num_seqs,
            inside=inside,
        )

    def schedule(self, load: Load = Load()) -> Step:
        """Decide the next step. Nothing is final until it is committed; only blocks are taken."""
        queues, kv = self.queues, self.queues.kv
        granted: list[Sequence] = []
        work: list[Work] = []
        left = self.max_num_batched_tokens
        admitted: list[tuple[SeqId, int]] = []
        preempted: list[Sequence] = []
        queues.share_out()
        running, waiting, idle = _ready(queues)
        verdicts: dict[SeqId, Wait] = {}
        slots = queues.slots_taken() if waiting else 0
        whole = self.policy.whole_prompts
        unnamed = Wait.POLICY  # why sequences that the policy did not name do not run
        for seq, wanted in self.policy.token_requests(running, waiting, load, left):
            if seq.status is not _RUNNING:
                if preempted and not (queues.is_shared and by_order(seq) < by_order(preempted[-1])):
                    verdicts[seq.id] = Wait.BLOCKS
                    continue
                if unnamed is not Wait.POLICY:  # later ones wait for the same reason
                    continue
                refusal = self._admit(seq, slots, left)
                while refusal in _SCARCE and (victim := self._giving_way(seq, idle)):
                    slots -= victim.num_slots
                    queues.preempt(victim)
                    preempted.append(victim)
                    verdicts[victim.id] = Wait.BEAMS if victim.candidates else refusal
                    left += self._withdraw([victim], granted, work)
                    refusal = self._admit(seq, slots, left)
                if refusal is not None:
                    unnamed = refusal
                    continue
                slots += seq.num_slots
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
            if end > seq.capacity and not kv.reserve(seq, self._upto(seq, end)):
                victims = self._make_room(seq, end)
                preempted += victims
                verdicts.update((victim.id, Wait.BLOCKS) for victim in victims)
                left += self._withdraw(victims, granted, work)
                if end > seq.capacity:
                    verdicts[seq.id] = Wait.BLOCKS
                    continue
            request = seq.request
            if self.looks_ahead and end == seq.capacity < request.max_len:
                kv.reserve_ahead(seq, end + 1)
            history, targets = _context(seq, start, end) if request.needs_context else ((), ())
            seeds = seq.seeds if num_tokens == pending else ()
            tokens = (seq.tokens[start],) if num_tokens == 1 else tuple(seq.tokens[start:end])
            item = Work(seq.id, start, tokens, seq.table, seeds, request.sampling, history, targets)
            work.append(_as_asked(item, seq, is_last=num_tokens == pending))
            granted.append(seq)
            left -= num_tokens
        if admitted or preempted:
            queues.sort()
        if self.speculation is not None and not preempted:
            left = min(left, max_draws(queues.max_num_seqs) - len(work))
            self.speculation.extend(kv, granted, work, left)
        _add_masks(granted, work)
        state_copies = kv.add_states(work, granted)
        gone = tuple(seq.id for seq in preempted)
        waits = tuple(self._waits(granted, verdicts, unnamed))
        return Step(tuple(work), tuple(kv.copies), tuple(admitted), gone, waits, state_copies)

    def _upto(self, seq: Sequence, end: int) -> int:
        return seq.request.max_len if self.policy.reserve_full else end

    def _admit(self, seq: Sequence, slots_taken: int, left: int) -> Wait | None:
        """Start a waiting sequence with room for all its tokens, or say what is missing."""
        if slots_taken + seq.num_slots > self.queues.max_num_seqs:
            return Wait.MAX_NUM_SEQS
        least = 1
        if self.policy.whole_prompts and left < seq.num_pending:  # cached tokens need not run
            least = seq.num_pending - self.queues.kv.num_cached(seq)
        if left < least:
            return Wait.TOKEN_BUDGET
        upto = self._upto(seq, len(seq.tokens))
        if not self.queues.kv.admit(seq, upto, self.max_num_batched_tokens):
            return Wait.BLOCKS
        seq.status = _RUNNING
        return None

    def _giving_way(self, seq: Sequence, idle: list[Sequence]) -> Sequence | None:
        """Return the last that must give way if ``seq`` is to be admitted; None if none must."""
        mine, others = seq.request, [one for one in idle if one.request.order > seq.request.order]
        if mine.due_s < inf or self.queues.is_shared:
            for one in self._after(seq):
                is_later = one.request.due_s == inf > mine.due_s and one.request.owner == mine.owner
                others += [one] if is_later or one.is_over_share > seq.is_over_share else ()
        still = [one for one in others if one.status is _RUNNING]
        return max(still, key=by_order, default=None)

    def _after(self, seq: Sequence) -> list[Sequence]:
        """Return those that run, also from this step on, and come after ``seq``."""
        everyone = (*self.queues.running, *self.queues.waiting)  # those admitted now still wait
        return [one for one in everyone if one.status is _RUNNING and by_order(one) > by_order(seq)]

    def _make_room(self, seq: Sequence, end: int) -> list[Sequence]:
        """Preempt sequences behind ``seq``, the last first, until it fits or none is left."""
        queues = self.queues
        victims: list[Sequence] = []
        for victim in sorted(self._after(seq), key=by_order, reverse=True):
            queues.preempt(victim)
            victims.append(victim)
            if queues.kv.reserve(seq, self._upto(seq, end)):
                break
        return victims

    def _withdraw(self, victims: list[Sequence], granted: list[Sequence], work: list[Work]) -> int:
        """Take back the grants of victims in this step; return how many tokens this frees."""
        freed = 0
        for victim in victims:
            if victim in granted:
                i = granted.index(victim)
                freed += len(work[i].tokens)
                del granted[i], work[i]
        return freed

    def _waits(
        self, granted: list[Sequence], verdicts: dict[SeqId, Wait], unnamed: Wait
    ) -> Iterator[tuple[SeqId, Wait]]:
        if len(granted) < len(self.queues.running):
            chosen = {seq.id for seq in granted}
            for seq in self.queues.running:
                if seq.id not in chosen:
                    yield seq.id, verdicts.get(seq.id, Wait.BEAMS if seq.candidates else unnamed)
        for seq in self.queues.waiting:
            yield seq.id, verdicts.get(seq.id, Wait.BEAMS if seq.candidates else unnamed)
        for seq in self.queues.paused:
            yield seq.id, Wait.PAUSED

    def retract(self) -> None:
        """Give up the step under way: its backend failed.

        What it wrote, and which copies it made, is unknown, so all that run start again.
        """
        for seq in self.queues.running:
            self.queues.preempt(seq)
        self.queues.kv.forget_copies()
        if self.queues.kv.states is not None:
            self.queues.kv.states.retract()
        self.queues.sort()
