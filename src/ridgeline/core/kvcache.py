"""Block tables: which blocks hold a sequence's K/V, shared where the content is the same.

Every method either succeeds whole or changes nothing. This module moves no bytes: it says which
blocks to copy, and a backend copies them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b

from ridgeline.core.block_pool import BlockPool, Content
from ridgeline.core.request import Sequence
from ridgeline.core.states import States
from ridgeline.core.step import Work

NOWHERE = -1  # in a table: the block of tokens that no later token sees
_NEVER = 1 << 62


def held_blocks(seq: Sequence) -> list[int]:
    """Return the blocks of a sequence's table."""
    return [block for block in seq.table if block != NOWHERE]


def hash_block(parent_key: bytes, tokens: tuple[int, ...]) -> bytes:
    """Key of a block: a hash of its tokens chained to its parent's key (BLAKE2b, 16 bytes)."""
    return blake2b(array("q", tokens).tobytes(), key=parent_key, digest_size=16).digest()


class KVCache:
    """The paged cache's book-keeping over a ``BlockPool``."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_block: Callable[[bytes, tuple[int, ...]], bytes] = hash_block,
        states: States | None = None,
        window: int | None = None,
    ) -> None:
        """Manage ``num_blocks`` blocks of ``block_size`` tokens, and states if a model has them.

        Where a token sees only the last ``window`` tokens, itself included, sequences give back
        the blocks behind. States and windows do not go together.
        """
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.window = window
        self.enable_prefix_caching = enable_prefix_caching
        self.states = states
        self.copies: list[tuple[int, int]] = []  # (from, to) for the next step
        self._hash_block = hash_block

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, longest_step: int) -> int:
        """Return how many blocks a sequence of this length holds at once, at most.

        With a window these are its blocks and those of the longest step, each cut anywhere.
        """
        reach = num_tokens if self.window is None else self.window - 1 + longest_step
        return min(self.blocks_for(num_tokens), self.blocks_for(reach) + 1)

    def num_cached(self, seq: Sequence) -> int:
        """Return how many of a waiting sequence's tokens ``admit`` would find in the cache."""
        return len(self._cached_prefix(seq)[0]) * self.block_size

    def admit(self, seq: Sequence, upto: int, longest_step: int = _NEVER) -> bool:
        """Adopt the longest cached prefix and make room for ``upto`` tokens; False if none is.

        No step computes more than ``longest_step`` of them. At least one token is left to compute,
        because its logits are wanted.
        """
        prefix, chain = self._cached_prefix(seq)
        held = [block for block in prefix if block != NOWHERE]
        most = self.most_blocks(upto, longest_step) - len(held)
        need = min(most, self.blocks_for(upto) - len(prefix))
        refs = self.pool.refs
        if need > len(self.pool.free) - sum(refs[block] == 0 for block in held):
            return False
        for block in held:
            self.pool.share(block)
        seq.table = (*prefix, *(self.pool.take() for _ in range(need)))
        seq.num_computed = len(prefix) * self.block_size
        seq.num_pending = len(seq.tokens) - seq.num_computed
        seq.chain = chain
        seq.publish_at = self._next_boundary(seq)
        seq.capacity = len(seq.table) * self.block_size
        if self.states is not None:
            self.states.begin(seq, prefix)
        return True

    def reserve(self, seq: Sequence, upto: int) -> bool:
        """Make tokens ``num_computed .. upto`` writable; False if too few blocks are free.

        A partly filled block that others also hold is replaced by a copy. Blocks that the window
        has left behind are given back first.
        """
        num_behind = self._num_behind(seq, seq.num_computed)
        left = [block for block in seq.table[:num_behind] if block != NOWHERE]
        written = seq.num_computed // self.block_size
        shared = written < len(seq.table) and self.pool.refs[seq.table[written]] > 1
        grow = max(0, self.blocks_for(upto) - len(seq.table))
        if grow + shared > len(self.pool.free) + sum(self.pool.refs[block] == 1 for block in left):
            return False
        table = list(seq.table)
        if left:
            table[:num_behind] = [NOWHERE] * num_behind
            for block in left:
                self.pool.release(block)
        if shared:
            old, table[written] = table[written], self.pool.take()
            self.copies.append((old, table[written]))
            self.pool.release(old)
        table.extend(self.pool.take() for _ in range(grow))
        seq.table = tuple(table)
        seq.capacity = len(table) * self.block_size
        return True

    def publish(self, seq: Sequence) -> None:
        """Offer the blocks that became full to later prompts.

        Where equal content is there already, the sequence moves over to it and its own block is
        freed, so equal prefixes computed side by side end up shared.
        """
        for i in range(seq.num_published, seq.num_computed // self.block_size):
            if (block := seq.table[i]) == NOWHERE:
                break  # it stayed private, and is gone
            content = self.pool.publish(block, *self._content(seq, i, seq.chain))
            if content is None:
                break  # another content has this key: stay private
            if (twin := self.pool.index[content.key]) != block:
                self.pool.share(twin)
                self.pool.release(block)
                seq.table = (*seq.table[:i], twin, *seq.table[i + 1 :])
            seq.chain.append(content)
        seq.publish_at = self._next_boundary(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` continue from what ``parent`` has computed, sharing every block.

        Needs no free block: the first to write into the shared last block takes a copy.
        """
        child.table = parent.table[: self.blocks_for(parent.num_computed)]
        for block in held_blocks(child):
            self.pool.share(block)
        child.keys, child.chain = parent.keys.copy(), parent.chain.copy()
        child.num_computed = parent.num_computed
        child.num_pending = len(child.tokens) - child.num_computed
        child.publish_at = parent.publish_at
        full = parent.num_computed // self.block_size * self.block_size
        child.capacity = parent.capacity = full  # so the next write asks, and finds it shared
        if self.states is not None:
            self.states.fork(parent, child)

    def reserve_drafts(self, seq: Sequence, upto: int) -> bool:
        """Make tokens up to ``upto`` writable for drafts, if an eighth of all blocks stays free.

        Free blocks hold what later prompts may find, and drafts may be wrong.
        """
        need = self.blocks_for(upto) - len(seq.table)
        if need > 0:
            if (len(self.pool.free) - need) * 8 < len(self.pool.refs):
                return False
            seq.num_draft_blocks = need
            self.reserve(seq, upto)
        return True

    def release_drafts(self, seq: Sequence) -> None:
        """Give back the blocks that only wrong drafts needed."""
        if seq.num_draft_blocks:
            spare = len(seq.table) - self.blocks_for(len(seq.tokens))
            for _ in range(min(spare, seq.num_draft_blocks)):
                self.pool.release(seq.table[-1])
                seq.table = seq.table[:-1]
            seq.capacity = min(seq.capacity, len(seq.table) * self.block_size)
            seq.num_draft_blocks = 0

    def release(self, seq: Sequence) -> None:
        """Give back all blocks, the tail first, so that leaves are evicted before roots."""
        for block in reversed(held_blocks(seq)):
            self.pool.release(block)
        if self.copies:  # into blocks that are free now, nothing need be copied
            self.copies = [pair for pair in self.copies if self.pool.refs[pair[1]]]
        if self.states is not None:
            self.states.release(seq)
        seq.table, seq.chain = (), []
        seq.num_computed = seq.capacity = seq.num_draft_blocks = 0
        seq.num_pending = len(seq.tokens)

    def add_states(self, work: list[Work], granted: list[Sequence]) -> tuple[tuple[int, int], ...]:
        """Say in a step's work where states are; return the copies of states before it."""
        if self.states is None:
            return ()
        self.states.add_to(work, granted, self.block_size)
        return tuple(self.states.copies)

    def publish_states(self, seq: Sequence, work: Work) -> None:
        """Let later prompts resume from the states that a step saved."""
        assert self.states is not None, "states are saved where there are none"
        for num_tokens, slot in work.save:
            block = seq.table[(work.start + num_tokens) // self.block_size - 1]
            content = self.pool.content[block]
            if content is not None:  # else another content has its key
                self.states.publish(slot, block, content)

    def forget_copies(self) -> None:
        """Drop the copies that a step began with."""
        self.copies.clear()
        if self.states is not None:
            self.states.copies.clear()

    def retract(self) -> None:
        """Drop the copies of a step that failed, and what it may have written over."""
        self.copies.clear()
        if self.states is not None:
            self.states.retract()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless tables, counts and published content agree.

        ``sequences`` are all that may hold blocks.
        """
        self.pool.check()
        sequences = [*sequences]
        if self.states is not None:
            self.states.check(sequences)
        held = [0] * len(self.pool.refs)
        for seq in sequences:
            num_behind = self._num_behind(seq, seq.num_computed)
            for i, block in enumerate(seq.table):
                if block == NOWHERE:
                    assert i < num_behind, f"block {i} of {seq.id} is gone and can be seen"
                    continue
                held[block] += 1
                if i < seq.num_published:
                    known = self.pool.find(*self._content(seq, i, seq.chain))
                    is_known = known is not None and self.pool.content[block] is known
                    assert is_known, f"block {i} of {seq.id} is not what the index says"
            room = len(seq.table) * self.block_size
            assert max(seq.num_computed, seq.capacity) <= room, f"{seq.id} has too few blocks"
            assert seq.num_published * self.block_size <= seq.num_computed, f"{seq.id} ran ahead"
            assert seq.num_pending == len(seq.tokens) - seq.num_computed, f"{seq.id} miscounts"
            written, writable = seq.num_computed // self.block_size, seq.capacity // self.block_size
            for block in seq.table[written:writable]:
                assert self.pool.refs[block] == 1, f"{seq.id} may write into shared block {block}"
        assert held == self.pool.refs, "reference counts and tables disagree"

    def _cached_prefix(self, seq: Sequence) -> tuple[list[int], list[Content]]:
        """Return the table of the longest prefix of which all is there that the next token sees.

        Beside it is what its blocks hold, or held.
        """
        # Nothing may be skipped where every prompt token's logits, or its final state, is needed.
        prefix, chain = list[int](), list[Content]()
        params = seq.request.params
        if not self._shares(seq) or params.prompt_logprobs is not None:
            return prefix, chain
        for i in range((len(seq.tokens) - 1) // self.block_size):
            content = self.pool.find(*self._content(seq, i, chain))
            if content is None:
                break
            chain.append(content)
            prefix.append(self.pool.index.get(content.key, NOWHERE))
        if self.states is not None:
            del prefix[self.states.num_resumable(prefix, self.pool.content) :]
        while NOWHERE in prefix[(behind := self._num_behind(seq, len(prefix) * self.block_size)) :]:
            del prefix[prefix.index(NOWHERE, behind) :]
        prefix[:behind] = [NOWHERE] * behind
        return prefix, chain[: len(prefix)]

    def _num_behind(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of the first blocks no token behind ``num_tokens`` others sees."""
        if self.window is None or seq.request.params.penalty_alpha:  # whose states are all compared
            return 0
        return max(num_tokens - self.window + 1, 0) // self.block_size

    def _content(
        self, seq: Sequence, i: int, chain: list[Content]
    ) -> tuple[bytes, Content | bytes, tuple[int, ...]]:
        tokens = tuple(seq.tokens[i * self.block_size : (i + 1) * self.block_size])
        if i == len(seq.keys):  # keys are made once, in order; tokens never change under them
            parent_key = seq.keys[i - 1] if i else seq.request.cache_root
            seq.keys.append(self._hash_block(parent_key, tokens))
        return seq.keys[i], chain[i - 1] if i else seq.request.cache_root, tokens

    def _shares(self, seq: Sequence) -> bool:
        """Whether a sequence takes part in the prefix cache; final states are not published."""
        return self.enable_prefix_caching and not seq.request.params.penalty_alpha

    def _next_boundary(self, seq: Sequence) -> int:
        if not self._shares(seq):
            return _NEVER
        return (seq.num_computed // self.block_size + 1) * self.block_size
