"""The queues: which sequences run, wait or are paused, and which are alive.

A sequence's status says in which queue it is. Every queue is in one order: those within the share
of their owner before those over it; then those that are due at a time before those that are not,
the earliest first (Liu and Layland, JACM 1973), else by arrival.
Deciding (``scheduler``) and folding results back (``commit``) both work on them.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from operator import attrgetter

from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.request import Request, Sequence, Status
from ridgeline.core.scheduling.admission import fair_share
from ridgeline.core.step import FinishReason, SeqId

_by_age = attrgetter("request.order", "id")
by_order = attrgetter("is_over_share", "request.order", "id")  # changed by ``share_out`` alone


class Queues:
    """Sequences in three queues, and the cache that holds their blocks."""

    def __init__(self, kv: KVCache, max_num_seqs: int) -> None:
        """Let at most ``max_num_seqs`` sequences run at a time, with blocks of ``kv``."""
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.alive: dict[SeqId, Sequence] = {}
        self.searching: dict[int, Request] = {}  # requests whose search is not over
        self.is_shared = False  # whether sequences of several owners are there, and some wait

    def slots_taken(self) -> int:
        """Return how many slots are taken by the sequences that run."""
        return sum(seq.num_slots for seq in self.running)

    def has_work(self) -> bool:
        """Whether any sequence is alive and not paused."""
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """Let a new sequence wait for its turn."""
        self.alive[seq.id] = seq
        insort(self.waiting, seq, key=by_order)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a new sequence run with its parent's blocks; without a free slot it waits.

        Later it finds its prompt in the prefix cache. A preempted parent has no blocks to share.
        """
        if parent.status is not Status.RUNNING or self.slots_taken() >= self.max_num_seqs:
            self.add(child)
            return
        self.kv.fork(parent, child)
        child.status = Status.RUNNING
        self.alive[child.id] = child
        insort(self.running, child, key=by_order)

    def share_out(self) -> None:
        """Mark what is beyond the share of its owner, while some wait and there are several owners.

        A sequence counts as its slots, or as what part of the cache its blocks are. An owner's
        first is within its share. Idle beams are not, so that the others of their search can run.
        """
        everyone, most = (*self.running, *self.waiting), self.max_num_seqs
        owners = {seq.request.owner for seq in everyone} if self.waiting else set[str]()
        was_shared, self.is_shared = self.is_shared, len(owners) > 1
        if not (was_shared or self.is_shared):
            return
        have, per = len(self.kv.pool.refs), -self.kv.block_size  # negative: rounded up
        sizes = {s.id: max(s.num_slots, -(len(s.tokens) // per * most // have)) for s in everyone}
        wanted, had = Counter[str](), Counter[str]()
        for seq in everyone:
            wanted[seq.request.owner] += sizes[seq.id]
        share = max(1, fair_share(wanted.values(), most)) if self.is_shared else sum(sizes.values())
        for seq in sorted(everyone, key=_by_age):
            before, is_idle = had[seq.request.owner], self.is_shared and bool(seq.candidates)
            seq.is_over_share = is_idle or (before > 0 and before + sizes[seq.id] > share)
            seq.num_slots = min(seq.num_slots, share)  # other beams of it wait for theirs
            had[seq.request.owner] += 0 if is_idle else sizes[seq.id]
        self.sort()

    def preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks and let it wait again; ``sort`` moves it."""
        self.kv.release(seq)
        seq.status = Status.PREEMPTED
        seq.request.num_preemptions += 1

    def pause(self, request: Request) -> None:
        """Take slots and blocks from a request until ``resume``."""
        for seq in request.sequences:
            if seq.status is not Status.FINISHED:
                self.kv.release(seq)
                seq.status, seq.is_over_share = Status.PAUSED, False
        self.sort()

    def resume(self, request: Request) -> None:
        """Let a paused request wait for its turn again."""
        for seq in request.sequences:
            if seq.status is Status.PAUSED:
                seq.status = Status.PREEMPTED
        self.sort()

    def sort(self) -> None:
        """Move sequences to the queue that their status says; each stays in order."""
        everyone = sorted((*self.running, *self.waiting, *self.paused), key=by_order)
        self.running = [seq for seq in everyone if seq.status is Status.RUNNING]
        self.paused = [seq for seq in everyone if seq.status is Status.PAUSED]
        elsewhere = (Status.RUNNING, Status.PAUSED)
        self.waiting = [seq for seq in everyone if seq.status not in elsewhere]

    def swap(self, seq: Sequence, other: Sequence) -> None:
        """Let two sequences of a request change ids, and the text with them."""
        seq.id, other.id = other.id, seq.id
        seq.text, other.text = other.text, seq.text
        self.alive[seq.id], self.alive[other.id] = seq, other
        self.sort()

    def drop(self, seq: Sequence) -> None:
        """Take a sequence out of its queue, and give its blocks back."""
        queues = {Status.RUNNING: self.running, Status.PAUSED: self.paused}
        queues.get(seq.status, self.waiting).remove(seq)
        del self.alive[seq.id]
        self.kv.release(seq)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Drop a sequence that ends, and release held-back text."""
        self.drop(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        if seq.text is not None:
            seq.text.finish()

    def check(self) -> None:
        """Raise AssertionError unless everything that must hold between steps holds."""
        assert self.slots_taken() <= self.max_num_seqs, "too many sequences run"
        for queue in (self.running, self.waiting, self.paused):
            ranks = [*map(by_order, queue)]
            assert ranks == sorted(set(ranks)), "a queue is out of order"
        assert all(seq.status is Status.RUNNING for seq in self.running)
        assert all(seq.status in (Status.WAITING, Status.PREEMPTED) for seq in self.waiting)
        assert all(seq.status is Status.PAUSED for seq in self.paused)
        idle = (*self.waiting, *self.paused)
        assert all(not seq.table and seq.num_computed == 0 for seq in idle)
        assert all(seq.state < 0 for seq in idle)
        everyone = sorted((*self.running, *idle), key=attrgetter("id"))
        assert all(seq.num_pending > 0 or seq.candidates for seq in everyone)
        for request in self.searching.values():
            assert all(beam.id in self.alive for beam in request.sequences), "a beam is lost"
            assert not all(beam.candidates for beam in request.sequences), "beams wait for nothing"
        assert [*map(id, everyone)] == [id(self.alive[key]) for key in sorted(self.alive)]
        self.kv.check(self.running)
