"""The ledger: a runner without a model that proves the cache right.

Its K/V slots hold a hash of the whole prefix that was written there, and it verifies every slot
that a real backend would read. The next token is a function of that prefix alone, so a sequence's
text is known in advance however it is batched, chunked, shared, preempted or forked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

from ridgeline.core.step import Candidates, Step, StepOutput, Work


def extend(prefix: int, token: int) -> int:
    """Hash of a prefix with one more token."""
    return hash((prefix, token))


def next_token(prefix: int, seed: int, vocab_size: int) -> int:
    """The token that the ledger's "model" samples after a prefix."""
    return hash((prefix, seed, 17)) % vocab_size


def candidates(prefix: int, count: int, vocab_size: int) -> Candidates:
    """The likeliest tokens after a prefix, as the ledger's "model" has them; many are equal."""
    weights = [1 + hash((prefix, token, 29)) % 5 for token in range(vocab_size)]
    order = sorted(range(vocab_size), key=lambda token: -weights[token])[:count]
    return tuple((token, math.log(weights[token] / sum(weights))) for token in order)


def similarity(prefixes: Sequence[int]) -> float:
    """How like the texts before it the last of some prefixes is; often equal to others."""
    *before, last = prefixes
    return max((hash((prefix, last, 31)) % 64 / 64 for prefix in before), default=0.0)


def expected_tokens(
    prompt: tuple[int, ...],
    seed: int,
    num_tokens: int,
    vocab_size: int,
    stop_ids: frozenset[int] = frozenset(),
    adapter: int = 0,
) -> list[int]:
    """What the ledger generates when it serves one sequence alone."""
    prefix = reduce(extend, prompt, adapter)
    out: list[int] = []
    while len(out) < num_tokens and not (out and out[-1] in stop_ids):
        token = next_token(prefix, seed, vocab_size)
        out.append(token)
        prefix = extend(prefix, token)
    return out


@dataclass
class Ledger:
    """A ``Runner`` whose cache slots and states are checked at each read.

    A slot holds the hash of the prefix before its token, and with it, and the group of layers that
    wrote it: so a context is right only if its slots form one chain. The chain begins with the
    adapter's number: all follows from it.
    A state is the hash of the prefix that it has seen, and is written in place, as real ones are.
    """

    num_blocks: int
    block_size: int
    vocab_size: int = 4
    fail: dict[int, str] = field(default_factory=dict)  # request id -> error of its items
    slots: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    states: set[tuple[int, int]] = field(default_factory=set)  # slots whose states were kept
    recurrent: dict[int, int] = field(default_factory=dict)  # slot -> prefix
    num_steps: int = 0
    windows: tuple[int | None, ...] = (None,)  # so many last tokens each group of layers sees

    def execute(self, step: Step) -> StepOutput:
        """Copy blocks, write every item's slots, then read every context and sample."""
        self.num_steps += 1
        self._copy(step.copies)
        self.recurrent |= {new: self.recurrent[old] for old, new in step.state_copies}
        self._pass_through_states(step)
        written: dict[tuple[int, int], tuple[int, int, int]] = {}
        for work in step.work:
            assert work.tokens, f"{work.seq_id} has nothing to do"
            prefix = self.slots[self._slot(work, work.start - 1)][1] if work.start else work.adapter
            for position, token in enumerate(work.tokens, start=work.start):
                before, prefix = prefix, extend(prefix, token)
                for group, table in enumerate((work.table, *work.others)):
                    slot = self._slot_in(table, position)
                    assert slot not in written, f"two sequences, or groups, write slot {slot}"
                    written[slot] = before, prefix, group
        self.slots |= written
        self.states -= written.keys()
        self.states |= {
            self._slot(work, work.start + i)
            for work in step.work
            if work.similar
            for i in range(len(work.tokens))
        }
        read = [self._read(work) for work in step.work]
        tokens = tuple(self._sample(*pair) for pair in zip(step.work, read, strict=True))
        failed = {i: self.fail.get(work.seq_id[0]) for i, work in enumerate(step.work)}
        errors = {i: error for i, error in failed.items() if error}
        top = {
            i: self._likeliest(work, read[i][-1])
            for i, work in enumerate(step.work)
            if work.top and i not in errors
        }
        alike = {i: self._similarity(step.work[i], read[i]) for i in top if step.work[i].similar}
        vectors = {
            i: (float(read[i][-1]),)
            for i, work in enumerate(step.work)
            if work.pool and i not in errors
        }
        return StepOutput(tokens, errors=errors, top=top, similarity=alike, vectors=vectors)

    def _pass_through_states(self, step: Step) -> None:
        """Let every item's tokens pass through its state; save it where the step says so."""
        held = [slot for work in step.work for slot in (work.state, *(s for _, s in work.save))]
        held = [slot for slot in held if slot >= 0]
        assert len({*held}) == len(held), "two hold one state"
        for work in step.work:
            if work.state >= 0:
                state, saves, before = work.adapter, dict(work.save), work.adapter
                if work.start:
                    state = self.recurrent[work.state]
                    before = self.slots[self._slot(work, work.start - 1)][1]
                assert state == before, f"{work.seq_id} continues a foreign state"
                for count, token in enumerate(work.tokens, start=1):
                    state = extend(state, token)
                    if count in saves:
                        self.recurrent[saves.pop(count)] = state
                assert not saves, f"{work.seq_id} saves a state that it does not reach"
                self.recurrent[work.state] = state

    def _similarity(self, work: Work, prefixes: list[int]) -> float:
        slots = {self._slot(work, position) for position in range(len(prefixes))}
        assert slots <= self.states, f"{work.seq_id} compares states that nobody kept"
        return similarity(prefixes)

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        offsets = range(self.block_size)
        read = [(new, i, self.slots.get((old, i))) for old, new in copies for i in offsets]
        kept = {(new, i) for old, new in copies for i in offsets if (old, i) in self.states}
        self.states -= {(new, i) for _, new in copies for i in offsets}
        self.states |= kept
        for new, i, value in read:
            self.slots.pop((new, i), None)
            if value is not None:
                self.slots[new, i] = value

    def _slot(self, work: Work, position: int) -> tuple[int, int]:
        return self._slot_in(work.table, position)

    def _slot_in(self, table: tuple[int, ...], position: int) -> tuple[int, int]:
        block = table[position // self.block_size]
        assert 0 <= block < self.num_blocks
        return block, position % self.block_size

    def _read(self, work: Work) -> list[int]:
        """The prefix after each token of an item's context, every slot of which is checked.

        Of what only a window shows, the first is believed: it is in all prefixes that follow. The
        last of them is the same in all groups.
        """
        tables = work.table, *work.others
        pairs = enumerate(zip(self.windows, tables, strict=True))
        found = [self._read_group(work, *pair) for pair in pairs]
        assert len({prefixes[-1] for prefixes in found}) == 1, f"{work.seq_id} reads two texts"
        return max(found, key=len)

    def _read_group(
        self, work: Work, group: int, pair: tuple[int | None, tuple[int, ...]]
    ) -> list[int]:
        first, (window, table) = 0, pair
        if window is not None and not work.similar:
            first = max(0, work.start - window + 1)
        prefix = self.slots[self._slot_in(table, first)][0] if first else work.adapter
        prefixes = []
        for position in range(first, work.start + len(work.tokens)):
            before, after, writer = self.slots[self._slot_in(table, position)]
            assert writer == group, f"{work.seq_id} reads keys of other layers at {position}"
            assert before == prefix, f"{work.seq_id} reads foreign content at {position}"
            prefix = after
            prefixes.append(prefix)
        return prefixes

    def _sample(self, work: Work, prefixes: list[int]) -> tuple[int, ...]:
        prefix = prefixes[-1]
        if work.drafts:  # of what follows a wrong draft, the engine must make nothing
            prefixes = prefixes[-1 - work.drafts :]
            pairs = [(prefix, work.seeds[0]) for prefix in prefixes]
        else:
            pairs = [(prefix, seed) for seed in work.seeds]
        tokens = [next_token(*pair, self.vocab_size) for pair in pairs]
        if work.masks and not work.top:
            assert len(work.masks) == (1 if len(work.seeds) > 1 else work.drafts + 1)
            masks = work.masks * len(work.seeds) if len(work.seeds) > 1 else work.masks
            tokens = [self._allowed(*pair) for pair in zip(tokens, masks, strict=True)]
        return tuple(tokens)

    def _likeliest(self, work: Work, prefix: int) -> Candidates:
        found = candidates(prefix, self.vocab_size, self.vocab_size)
        assert len(work.masks) <= 1
        for mask in work.masks:
            found = tuple(pair for pair in found if has(mask, pair[0]))
        return found[: work.top]

    def _allowed(self, token: int, mask: bytes) -> int:
        """The first token from this one on, and round again, that a mask has."""
        size = self.vocab_size
        return next(other % size for other in range(token, token + size) if has(mask, other % size))


def has(mask: bytes, token: int) -> bool:
    """Whether a mask has a token."""
    return bool(mask[token >> 3] >> (token & 7) & 1)
