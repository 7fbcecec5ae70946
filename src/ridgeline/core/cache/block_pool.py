"""BlockPool: who holds which block, which blocks are free, and which hold known content.

Mechanism only: it knows block ids, reference counts and keys, and no sequences. The free list is
the eviction order: a free block keeps its content, and can be shared again, until it is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakValueDictionary

from ridgeline.core.request import Content


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
        self.known: WeakValueDictionary[bytes, Content] = WeakValueDictionary()
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
        content = self.known.get(key)
        if content is None or content.parent != parent or content.tokens != tokens:
            return None
        return content

    def publish(
        self, block: int, key: bytes, parent: Content | bytes, tokens: tuple[int, ...]
    ) -> Content | None:
        """Enter a full block into its group's index unless one is there; None: its key is taken."""
        content = self.find(key, parent, tokens)
        if content is None:
            if key in self.known:
                return None
            content = self.known[key] = Content(key, parent, tokens)
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
        known = {block: content for block, content in enumerate(self.content) if content}
        assert self.num_indexed == len(known), "index and contents disagree"
        for block, content in known.items():
            index = self.index[self.group[block]]
            assert index.get(content.key) == block, f"block {block} is not in the index"
            assert self.known.get(content.key) is content, f"block {block} has unknown content"
