"""Block tables: which blocks hold a sequence's K/V, shared where the content is the same.

Layers that see equally far form groups. Each has a table of its own, and a block is a block of one
group; all are of equal size, so any group may take any.

Every method either succeeds whole or changes nothing. This module moves no bytes: it says which
blocks to copy, and a backend copies them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Listing
from hashlib import blake2b
from itertools import zip_longest
from weakref import WeakValueDictionary

from ridgeline.core.cache.state_slots import StateSlots
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Content, Sequence
from ridgeline.core.step import Work

NOWHERE = -1  # in a table: the block of tokens that no later token sees
_NEVER = 1 << 62
_PLAIN = SamplingParams()


def held_blocks(seq: Sequence) -> list[int]:
    """Return the blocks of a sequence's tables, in the order of their tokens."""
    by_place = zip_longest(seq.table, *seq.others, fillvalue=NOWHERE)
    return [block for blocks in by_place for block in blocks if block != NOWHERE]


def _set_tables(seq: Sequence, tables: Listing[tuple[int, ...]]) -> None:
    seq.table, seq.others = tables[0], tuple(tables[1:])


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
        states: StateSlots | None = None,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        """Manage ``num_blocks`` blocks of ``block_size`` tokens, and states if a model has them.

        ``windows`` says for each group of layers how many last tokens a token sees, itself
        included; sequences give back the blocks behind. None sees all. States go with one group
        without a window.
        """
        self.pool = BlockPool(num_blocks, len(windows))
        self.block_size = block_size
        self.windows = windows
        self._no_windows = (None,) * len(windows)
        self.enable_prefix_caching = enable_prefix_caching
        self.states = states
        self.copies: list[tuple[int, int]] = []  # (from, to) for the next step
        self._hash_block = hash_block

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of a group hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(
        self, num_tokens: int, max_num_batched_tokens: int, params: SamplingParams = _PLAIN
    ) -> int:
        """Return how many blocks a sequence of this length holds at once, at most.

        With a window these are its blocks and those of the longest step, each cut anywhere.
        """
        return sum(self._most_by_group(num_tokens, max_num_batched_tokens, params))

    def _most_by_group(
        self, num_tokens: int, max_num_batched_tokens: int, params: SamplingParams
    ) -> Iterator[int]:
        for window in self._windows(params):
            reach = num_tokens if window is None else window - 1 + max_num_batched_tokens
            yield min(self.blocks_for(num_tokens), self.blocks_for(reach) + 1)

    def _windows(self, params: SamplingParams) -> tuple[int | None, ...]:
        """Return what each group sees; a contrastive search compares the states of all tokens."""
        return self._no_windows if params.penalty_alpha else self.windows

    def num_cached(self, seq: Sequence) -> int:
        """Return how many of a waiting sequence's tokens ``admit`` would find in the cache."""
        return len(self._cached_prefix(seq)[1]) * self.block_size

    def admit(self, seq: Sequence, upto: int, max_num_batched_tokens: int = _NEVER) -> bool:
        """Adopt the longest cached prefix and make room for ``upto`` tokens; False if none is.

        No step computes more than ``max_num_batched_tokens`` of them. At least one token is left
        to compute, because its logits are wanted.
        """
        prefixes, chain = self._cached_prefix(seq)
        cached_blocks = [block for prefix in prefixes for block in prefix if block != NOWHERE]
        most_by_group = self._most_by_group(upto, max_num_batched_tokens, seq.request.params)
        needs = [
            min(most + prefix.count(NOWHERE), self.blocks_for(upto)) - len(prefix)
            for most, prefix in zip(most_by_group, prefixes, strict=True)
        ]
        refs = self.pool.refs
        if sum(needs) > len(self.pool.free) - sum(refs[block] == 0 for block in cached_blocks):
            return False
        for block in cached_blocks:
            self.pool.share(block)
        tables = [
            (*prefix, *(self.pool.take(group) for _ in range(need)))
            for group, (prefix, need) in enumerate(zip(prefixes, needs, strict=True))
        ]
        _set_tables(seq, tables)
        seq.num_computed = len(chain) * self.block_size
        seq.num_pending = len(seq.tokens) - seq.num_computed
        seq.chain = chain
        seq.publish_at = self._next_boundary(seq)
        seq.capacity = min(map(len, tables)) * self.block_size
        if self.states is not None:
            self.states.begin(seq, prefixes[0])
        return True

    def reserve(self, seq: Sequence, upto: int) -> bool:
        """Make tokens ``num_computed .. upto`` writable; False if too few blocks are free.

        A partly filled block that others also hold is replaced by a copy. Blocks that a window has
        left behind are given back first.
        """
        refs, written = self.pool.refs, seq.num_computed // self.block_size
        tables = [[*table] for table in (seq.table, *seq.others)]
        left = list[int]()
        for window, table in zip(self._windows(seq.request.params), tables, strict=True):
            place = self._num_behind(window, seq.num_computed)
            while place and table[place - 1] != NOWHERE:  # what is gone lies before what is not
                place -= 1
                left.append(table[place])
                table[place] = NOWHERE
        shared = [written < len(table) and refs[table[written]] > 1 for table in tables]
        grow = self._missing(seq, upto)
        num_free = len(self.pool.free) + sum(refs[block] == 1 for block in left)
        if sum(grow) + sum(shared) > num_free:
            return False
        for block in reversed(left):
            self.pool.release(block)
        for group, table in enumerate(tables):
            if shared[group]:
                old, table[written] = table[written], self.pool.take(group)
                self.copies.append((old, table[written]))
                self.pool.release(old)
            table.extend(self.pool.take(group) for _ in range(grow[group]))
        _set_tables(seq, [tuple(table) for table in tables])
        seq.capacity = min(map(len, tables)) * self.block_size
        return True

    def publish(self, seq: Sequence) -> None:
        """Offer the blocks that became full to later prompts.

        Where equal content is there already, the sequence moves over to it and its own block is
        freed, so equal prefixes computed side by side end up shared.
        """
        for i in range(len(seq.chain), seq.num_computed // self.block_size):
            tables = [seq.table, *seq.others]
            blocks = [table[i] for table in tables]
            if NOWHERE in blocks:
                break  # it stayed private, and is gone
            identity = self._content(seq, i, seq.chain)
            contents = [self.pool.publish(block, *identity) for block in blocks]
            if (content := contents[0]) is None:
                break  # another content has this key: stay private
            for group, block in enumerate(blocks):
                if (twin := self.pool.index[group][content.key]) != block:
                    self.pool.share(twin)
                    self.pool.release(block)
                    tables[group] = (*tables[group][:i], twin, *tables[group][i + 1 :])
            _set_tables(seq, tables)
            seq.chain.append(content)
        seq.publish_at = self._next_boundary(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` continue from what ``parent`` has computed, sharing every block.

        Needs no free block: the first to write into the shared last block takes a copy.
        """
        num_blocks = self.blocks_for(parent.num_computed)
        _set_tables(child, [table[:num_blocks] for table in (parent.table, *parent.others)])
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

    def reserve_ahead(self, seq: Sequence, upto: int) -> None:
        """Make tokens up to ``upto`` writable before they are needed, if as much stays free."""
        if self._is_roomy(sum(self._missing(seq, upto))):
            self.reserve(seq, upto)

    def _missing(self, seq: Sequence, upto: int) -> list[int]:
        """Return how many blocks more each table of a sequence needs for its tokens."""
        return [max(0, self.blocks_for(upto) - len(t)) for t in (seq.table, *seq.others)]

    def _is_roomy(self, num_blocks: int) -> bool:
        return (len(self.pool.free) - num_blocks) * 8 >= len(self.pool.refs)

    def reserve_drafts(self, seq: Sequence, upto: int) -> bool:
        """Make tokens up to ``upto`` writable for drafts, if an eighth of all blocks stays free.

        Free blocks hold what later prompts may find, and drafts may be wrong. A state needs a slot
        in which it is kept as it is before them.
        """
        need = self._missing(seq, upto)
        if any(need) and not self._is_roomy(sum(need)):
            return False
        if self.states is not None and not self.states.keep(seq):
            return False
        if any(need):
            seq.num_draft_blocks = tuple(need)
            self.reserve(seq, upto)
        return True

    def release_drafts(self, seq: Sequence) -> None:
        """Give back the blocks that only wrong drafts needed."""
        if seq.num_draft_blocks:
            least, tables = self.blocks_for(len(seq.tokens)), [seq.table, *seq.others]
            for group, num_draft_blocks in enumerate(seq.num_draft_blocks):
                for _ in range(min(len(tables[group]) - least, num_draft_blocks)):
                    self.pool.release(tables[group][-1])
                    tables[group] = tables[group][:-1]
            _set_tables(seq, tables)
            seq.capacity = min(seq.capacity, min(map(len, tables)) * self.block_size)
            seq.num_draft_blocks = ()

    def release(self, seq: Sequence) -> None:
        """Give back all blocks, the tail first, so that leaves are evicted before roots."""
        for block in reversed(held_blocks(seq)):
            self.pool.release(block)
        if self.copies:  # into blocks that are free now, nothing need be copied
            self.copies = [pair for pair in self.copies if self.pool.refs[pair[1]]]
        if self.states is not None:
            self.states.release(seq)
        seq.table, seq.others, seq.chain, seq.num_draft_blocks = (), (), [], ()
        seq.num_computed = seq.capacity = 0
        seq.num_pending = len(seq.tokens)

    def add_states(self, work: list[Work], granted: list[Sequence]) -> tuple[tuple[int, int], ...]:
        """Say in a step's work where states are; return the copies of states before it."""
        if self.states is None:
            return ()
        self.states.add_to(work, granted, self.block_size)
        return tuple(self.states.copies)

    def publish_states(self, seq: Sequence, work: Work) -> None:
        """Let later prompts resume from the states that a step saved, but not for its drafts."""
        assert self.states is not None, "states are saved where there are none"
        for num_tokens, slot in work.save[: -1 if work.drafts else None]:
            block = seq.table[(work.start + num_tokens) // self.block_size - 1]
            content = self.pool.content[block]
            if content is not None:  # else another content has its key
                self.states.publish(slot, block, content)

    def forget(self) -> None:
        """Drop all that later prompts could share; no sequence holds a block."""
        self.pool.content = [None] * len(self.pool.refs)
        for index in self.pool.index:
            index.clear()
        if self.states is not None:
            self.states.retract()

    def forget_copies(self) -> None:
        """Drop the copies that a step began with."""
        self.copies.clear()
        if self.states is not None:
            self.states.copies.clear()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless tables, counts and published content agree.

        ``sequences`` are all that may hold blocks.
        """
        self.pool.check()
        sequences = [*sequences]
        if self.states is not None:
            self.states.check(sequences)
        refs = [0] * len(self.pool.refs)
        for seq in sequences:
            tables = seq.table, *(seq.others or [()] * (len(self.windows) - 1))
            windows = self._windows(seq.request.params)
            for group, (window, table) in enumerate(zip(windows, tables, strict=True)):
                self._check_table(seq, group, table, self._num_behind(window, seq.num_computed))
                for block in table:
                    if block != NOWHERE:
                        refs[block] += 1
            room = min(map(len, tables)) * self.block_size
            assert max(seq.num_computed, seq.capacity) <= room, f"{seq.id} has too few blocks"
            assert len(seq.chain) * self.block_size <= seq.num_computed, f"{seq.id} ran ahead"
            assert seq.num_pending == len(seq.tokens) - seq.num_computed, f"{seq.id} miscounts"
        assert refs == self.pool.refs, "reference counts and tables disagree"

    def _check_table(
        self, seq: Sequence, group: int, table: tuple[int, ...], num_behind: int
    ) -> None:
        for i, block in enumerate(table):
            if block == NOWHERE:
                assert i < num_behind, f"block {i} of {seq.id} is gone and can be seen"
                assert i == 0 or table[i - 1] == NOWHERE, f"block {i} of {seq.id} went too early"
                continue
            assert self.pool.group[block] == group, f"block {block} is of another group"
            if i < len(seq.chain):
                content = self.pool.find(*self._content(seq, i, seq.chain))
                is_known = content is not None and self.pool.content[block] is content
                assert is_known, f"block {i} of {seq.id} is not what the index says"
        written, writable = seq.num_computed // self.block_size, seq.capacity // self.block_size
        for block in table[written:writable]:
            assert self.pool.refs[block] == 1, f"{seq.id} may write into shared block {block}"

    def _cached_prefix(self, seq: Sequence) -> tuple[list[list[int]], list[Content]]:
        """Return tables of the longest prefix of which all is there that the next token sees.

        Beside them is what its blocks hold, or held.
        """
        # Nothing may be skipped where every prompt token's logits, or its final state, is needed.
        chain, params = list[Content](), seq.request.params
        if not self._shares(seq) or params.prompt_logprobs is not None:
            return [[] for _ in self.windows], chain
        for i in range((len(seq.tokens) - 1) // self.block_size):
            content = self.pool.find(*self._content(seq, i, chain))
            if content is None:
                break
            chain.append(content)
        prefixes = [[index.get(one.key, NOWHERE) for one in chain] for index in self.pool.index]
        end = len(chain)
        if self.states is not None:
            end = self.states.num_resumable(prefixes[0], self.pool.content)
        is_whole = False
        while not is_whole:  # a prefix that is cut for one group ends earlier for the others too
            is_whole = True
            for window, prefix in zip(self.windows, prefixes, strict=True):
                visible_blocks = prefix[self._num_behind(window, end * self.block_size) : end]
                if NOWHERE in visible_blocks:
                    end -= len(visible_blocks) - visible_blocks.index(NOWHERE)
                    is_whole = False
        for window, prefix in zip(self.windows, prefixes, strict=True):
            behind = self._num_behind(window, end * self.block_size)
            prefix[:] = [NOWHERE] * behind + prefix[behind:end]
        return prefixes, chain[:end]

    def _num_behind(self, window: int | None, num_tokens: int) -> int:
        """Return how many of the first blocks no token behind ``num_tokens`` others sees."""
        if window is None:
            return 0
        return max(num_tokens - window + 1, 0) // self.block_size

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


class BlockPool:
    """Reference counts, a free list in eviction order, and an index of full blocks by key.

    A block belongs to one group of layers while it is held or its content is known. Each group has
    an index of its own: equal tokens have other keys and values in other layers.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        """Start with all of ``num_blocks`` free and unknown."""
        self.refs = [0] * num_blocks
        self.content: list[Content | None] = [None] * num_blocks
        self.group = [0] * num_blocks
        self.index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.by_key: WeakValueDictionary[bytes, Content] = WeakValueDictionary()
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_indexed(self) -> int:
        """How many blocks have content that can be shared."""
        return sum(map(len, self.index))

    def take(self, group: int = 0) -> int:
        """Return a block for a group to write in; it is the one that was freed longest ago.

        Raises KeyError if none is free: ask ``len(free)`` first.
        """
        block, _ = self.free.popitem(last=False)
        evicted = self.content[block]
        if evicted is not None:
            del self.index[self.group[block]][evicted.key]
            self.content[block] = None
        self.group[block] = group
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a holder."""
        if self.refs[block] == 0:
            del self.free[block]
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """Drop a holder; a block without one is free.

        Unindexed blocks go to the front of the free list, indexed ones to the back.
        Holders release their tail first: a child is freed, and so evicted, before its parent, but
        for parents that a window has left behind.
        """
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.free[block] = None
            if self.content[block] is None:
                self.free.move_to_end(block, last=False)

    def find(self, key: bytes, parent: Content | bytes, tokens: tuple[int, ...]) -> Content | None:
        """Return just this content if it is known; equal keys alone are not believed."""
        content = self.by_key.get(key)
        if content is None or content.parent != parent or content.tokens != tokens:
            return None
        return content

    def publish(
        self, block: int, key: bytes, parent: Content | bytes, tokens: tuple[int, ...]
    ) -> Content | None:
        """Enter a full block into its group's index unless one is there; None: its key is taken."""
        content = self.find(key, parent, tokens)
        if content is None:
            if key in self.by_key:
                return None
            content = self.by_key[key] = Content(key, parent, tokens)
        index = self.index[self.group[block]]
        if key not in index:
            index[key] = block
            self.content[block] = content
        return content

    def check(self) -> None:
        """Raise AssertionError unless everything that must hold between steps holds."""
        assert all(refs >= 0 for refs in self.refs), "a block was released too often"
        unheld = [block for block, refs in enumerate(self.refs) if refs == 0]
        assert sorted(self.free) == unheld, "free list and reference counts disagree"
        contents = {block: content for block, content in enumerate(self.content) if content}
        assert self.num_indexed == len(contents), "index and contents disagree"
        for block, content in contents.items():
            index = self.index[self.group[block]]
            assert index.get(content.key) == block, f"block {block} is not in the index"
            assert self.by_key.get(content.key) is content, f"block {block} has unknown content"
