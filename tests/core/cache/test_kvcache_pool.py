"""BlockPool: reference counts, eviction order, and an index that is not fooled by equal keys."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.core.cache.kvcache import BlockPool
from ridgeline.core.request import Content


def content(
    key: bytes, parent: Content | bytes = b"", tokens: tuple[int, ...] = (1, 2)
) -> tuple[bytes, Content | bytes, tuple[int, ...]]:
    return key, parent, tokens


def found(pool: BlockPool, *wanted: Any) -> int | None:
    """The block that holds just this content, if any does."""
    known = pool.find(*content(*wanted))
    return None if known is None else pool.index[0].get(known.key)


def test_blocks_are_taken_once_each() -> None:
    pool = BlockPool(3)
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
    assert pool.refs == [1, 1, 1]
    with pytest.raises(KeyError):
        pool.take()
    pool.check()


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    pool.release(block)
    assert not pool.free
    pool.release(block)
    assert list(pool.free) == [block]
    pool.check()


def test_freed_longest_ago_is_evicted_first() -> None:
    pool = BlockPool(3)
    for i in range(3):
        assert pool.publish(pool.take(), *content(bytes([i])))
    for block in (1, 2, 0):
        pool.release(block)
    pool.share(2)  # used again, so it is the freshest when it is freed again
    pool.release(2)
    assert [pool.take() for _ in range(3)] == [1, 0, 2]
    assert pool.index == [{}]
    assert pool.content == [None] * 3


def test_unknown_content_is_reused_before_known() -> None:
    pool = BlockPool(3)
    known, unknown = pool.take(), pool.take()
    pool.publish(known, *content(b"k"))
    pool.release(known)
    pool.release(unknown)
    assert pool.take() == unknown
    assert found(pool, b"k") == known


def test_a_free_block_can_be_found_and_shared_until_it_is_taken() -> None:
    pool = BlockPool(1)
    pool.publish(pool.take(), *content(b"k"))
    pool.release(0)
    assert found(pool, b"k") == 0
    pool.share(0)
    assert not pool.free
    assert pool.refs == [1]
    pool.release(0)
    pool.take()
    assert found(pool, b"k") is None
    pool.check()


def test_equal_keys_are_not_believed() -> None:
    pool = BlockPool(2)
    pool.publish(pool.take(), *content(b"k", b"", (1, 2)))
    assert found(pool, b"k", b"", (1, 2)) == 0
    assert found(pool, b"k", b"", (1, 3)) is None
    assert found(pool, b"k", b"root", (1, 2)) is None
    assert found(pool, b"other", b"", (1, 2)) is None


def test_a_key_is_published_once() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    assert pool.publish(first, *content(b"k"))
    assert not pool.publish(second, *content(b"k", b"", (9, 9)))
    assert pool.content[second] is None
    assert found(pool, b"k") == first
    pool.check()


def broken_pool() -> BlockPool:
    """A pool with a free block and a published one, to be broken."""
    pool = BlockPool(3)
    parent = pool.publish(pool.take(), *content(b"k"))
    assert parent is not None
    pool.publish(pool.take(), *content(b"child", parent))
    pool.check()
    return pool


def test_check_sees_a_block_released_too_often() -> None:
    pool = broken_pool()
    pool.refs[0] = -1
    with pytest.raises(AssertionError, match="released too often"):
        pool.check()


def test_check_sees_a_free_list_that_disagrees() -> None:
    pool = broken_pool()
    pool.free[0] = None
    with pytest.raises(AssertionError, match="free list"):
        pool.check()


def test_check_sees_an_index_that_disagrees() -> None:
    pool = broken_pool()
    del pool.index[0][b"k"]
    with pytest.raises(AssertionError, match="index and contents disagree"):
        pool.check()
    pool.index[0][b"other"] = 0
    with pytest.raises(AssertionError, match="block 0 is not in the index"):
        pool.check()


def test_content_is_known_while_a_child_is() -> None:
    """A window may leave a parent's block behind: what the child says is still believed."""
    pool = broken_pool()
    for block in (0, 1):
        pool.release(block)
    assert [pool.take(), pool.take()] == [2, 0]
    assert found(pool, b"k") is None, "its block is taken"
    parent = pool.find(*content(b"k"))
    assert parent is not None
    assert found(pool, b"child", parent) == 1
    assert found(pool, b"child") is None, "another beginning"
    assert pool.publish(2, *content(b"k", b"", (9, 9))) is None, "its key is taken"
    assert pool.publish(2, *content(b"k")) is parent, "the same content is there again"
    assert found(pool, b"k") == 2
    pool.check()
    del parent
    pool.take()
    assert b"child" not in pool.by_key
    pool.check()


def test_check_sees_content_that_is_not_known() -> None:
    pool = broken_pool()
    del pool.by_key[b"child"]
    with pytest.raises(AssertionError, match="unknown content"):
        pool.check()
