"""Slots for the states of recurrent layers: who holds which, and which prefixes can be resumed.

A state is as large after one token as after thousands, and is written in place: a slot has one
holder, and is copied, never shared. A checkpoint is a copy that was taken at the end of a full
block. It is known by that block and goes with it. Before drafts a state is copied too: the
sequence goes on with that copy if one of them is wrong. This module moves no bytes: a backend does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Listing

from ridgeline.core.request import Content, Sequence
from ridgeline.core.step import Work

CHECKPOINT_EVERY = 1024  # tokens of a prompt, rounded down to whole blocks


def new_states(num_seqs: int, num_checkpoints: int | None) -> StateSlots | None:
    """Return slots for a model with states; None, without a number of checkpoints, for others."""
    return None if num_checkpoints is None else StateSlots(num_seqs, num_checkpoints)


class StateSlots:
    """A slot for each sequence that runs, and slots for checkpoints, oldest use evicted first."""

    def __init__(
        self, num_seqs: int, num_checkpoints: int, *, every: int = CHECKPOINT_EVERY
    ) -> None:
        """Manage ``num_seqs + num_checkpoints`` slots; keep a prompt every ``every`` tokens."""
        self.num_checkpoints = num_checkpoints
        self.every = every
        self.copies: list[tuple[int, int]] = []  # (from, to) for the next step
        self.checkpoints: OrderedDict[int, tuple[Content, int]] = OrderedDict()  # by their block
        self.free: list[int] = [*range(num_seqs + num_checkpoints)]
        self._saving: list[int] = []  # in the step under way
        self._rollback: dict[int, int] = {}  # in it: slot of a state, and of its copy before drafts

    def _take(self) -> int:
        """Return a slot to write in. There is always one: so few are held."""
        if not self.free:
            self.free.append(self.checkpoints.popitem(last=False)[1][1])
        return self.free.pop()

    def num_resumable(self, prefix: Listing[int], contents: Listing[Content | None]) -> int:
        """Return how many of a prefix's blocks lie before its last checkpoint.

        ``contents`` has the present content of each block; another one, even if equal, is not it.
        """
        for count in range(len(prefix), 0, -1):
            checkpoint = self.checkpoints.get(prefix[count - 1])
            if checkpoint is not None and checkpoint[0] is contents[prefix[count - 1]]:
                return count
        return 0

    def begin(self, seq: Sequence, prefix: Listing[int]) -> None:
        """Give a sequence a slot, with the state behind its prefix; none begins with zeros."""
        if not prefix:
            seq.state = self._take()
            return
        self.checkpoints.move_to_end(prefix[-1])
        source = self.checkpoints[prefix[-1]][1]
        seq.state = self._take()
        self.copies.append((source, seq.state))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give ``child`` a slot with its parent's state."""
        child.state = self._take()
        self.copies.append((parent.state, child.state))

    def release(self, seq: Sequence) -> None:
        """Take a sequence's slot, if it has one; into a free one nothing need be copied."""
        if seq.state >= 0:
            self.settle(seq, is_right=True)
            self.free.append(seq.state)
            self.copies = [pair for pair in self.copies if pair[1] != seq.state]
            seq.state = -1

    def keep(self, seq: Sequence) -> bool:
        """Take a slot for a state before drafts, if fewer are copied than checkpoints may be."""
        if len(self._rollback) + len(self._saving) >= self.num_checkpoints:
            return False
        self._rollback[seq.state] = self._take()
        return True

    def settle(self, seq: Sequence, *, is_right: bool) -> None:
        """Let a sequence go on behind its drafts, if it had some and all were right, or before."""
        if (other := self._rollback.pop(seq.state, -1)) >= 0:
            seq.state, other = (seq.state, other) if is_right else (other, seq.state)
            self.free.append(other)

    def add_to(self, work: list[Work], granted: Listing[Sequence], block_size: int) -> None:
        """Say in a step's work where each state is, and where to keep copies of it.

        They are taken where a later prompt can use them: at the end of the prompt, that is of its
        last full block with a token after it, and after every ``every`` tokens before that.
        """
        self.free += self._saving  # those of the last step that were not published
        self._saving = []
        every = max(self.every // block_size, 1) * block_size
        for i, (seq, item) in enumerate(zip(granted, work, strict=True)):
            last = (len(seq.request.prompt) - 1) // block_size * block_size
            num_sure = len(item.tokens) - item.drafts
            end = min(item.start + num_sure, last)
            save: list[tuple[int, int]] = []
            if seq.publish_at <= end:
                points = {*range(every, end + 1, every), *((last,) if end == last else ())}
                for at in sorted(points, reverse=True):  # the last is worth most
                    num_taken = len(self._saving) + len(self._rollback)
                    if at >= seq.publish_at and num_taken < self.num_checkpoints:
                        self._saving.append(self._take())
                        save.insert(0, (at - item.start, self._saving[-1]))
            if item.drafts:
                save.append((num_sure, self._rollback[seq.state]))
            work[i] = item._replace(state=seq.state, save=tuple(save))

    def publish(self, slot: int, block: int, content: Content) -> None:
        """Let later prompts resume behind a block, whose content is known by now."""
        self._saving.remove(slot)
        if block in self.checkpoints:
            self.free.append(self.checkpoints.pop(block)[1])
        self.checkpoints[block] = content, slot

    def restore(self, block: int, content: Content) -> int:
        """Return a slot for the state behind a block, which is known; write it there at once."""
        self._saving.append(slot := self._take())
        self.publish(slot, block, content)
        return slot

    def retract(self) -> None:
        """Drop all checkpoints: what a step that failed wrote, and where, is not known."""
        self.free += [slot for _, slot in self.checkpoints.values()]
        self.checkpoints.clear()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every slot is held once, and all that run hold one."""
        live = [seq.state for seq in sequences]
        checkpoints = [slot for _, slot in self.checkpoints.values()]
        slots = sorted([*self.free, *live, *checkpoints, *self._saving, *self._rollback.values()])
        assert slots == [*range(len(slots))], "a slot is lost, or has two holders"
        assert {*self._rollback} <= {*live}, "a state before drafts has no sequence"
        assert {new for _, new in self.copies} <= {*live}, "a copy into a slot without a holder"
