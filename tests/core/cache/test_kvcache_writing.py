"""KVCache, where sequences write: growing, forks with copy-on-write, roll-back, and check."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.request import Sequence
from tests.core.kv import admitted, append, compute, forked, new, state

# --- growing and copy-on-write ------------------------------------------------------------------


def test_reserve_grows_the_table_and_leaves_what_is_there() -> None:
    kv = KVCache(8, 4)
    seq = admitted(kv, [1] * 4)
    before = seq.table
    assert kv.reserve(seq, 5)
    assert seq.table[:1] == before
    assert (len(seq.table), seq.capacity) == (2, 8)
    assert kv.reserve(seq, 3)  # less than there is: nothing to do
    assert (len(seq.table), seq.capacity) == (2, 8)
    assert kv.copies == []


@pytest.mark.parametrize("writer", [0, 1])
def test_whoever_writes_first_into_a_shared_block_takes_a_copy(writer: int) -> None:
    kv = KVCache(8, 4)
    parent = admitted(kv, [1, 2, 3, 4, 5, 6])
    num_free = len(kv.pool.free)
    child = forked(kv, parent)
    assert child.table == parent.table
    assert len(kv.pool.free) == num_free, "a fork takes no block"
    kv.check([parent, child])
    first, other = (parent, child) if writer == 0 else (child, parent)
    shared = other.table
    for seq in (first, other):
        assert seq.capacity < 7, "the next write must ask"
        append(seq, 7)
        assert kv.reserve(seq, 7)
        kv.check([parent, child])
    assert kv.copies == [(shared[1], first.table[1])]
    assert other.table == shared, "the last holder writes in place"
    assert first.table[0] == shared[0]
    assert first.table[1] != shared[1]


def test_a_fork_on_a_block_boundary_copies_nothing() -> None:
    kv = KVCache(8, 4)
    parent = admitted(kv, [1, 2, 3, 4])
    child = forked(kv, parent)
    for seq in (parent, child):
        append(seq, 7)
        assert kv.reserve(seq, 5)
    assert kv.copies == []
    assert parent.table[0] == child.table[0]
    assert parent.table[1] != child.table[1]
    kv.check([parent, child])


def test_a_fork_shares_only_what_is_computed() -> None:
    kv = KVCache(8, 4)
    parent = new([1, 2, 3, 4, 5, 6])
    assert kv.admit(parent, 20)
    compute(kv, parent)
    child = forked(kv, parent)
    assert child.table == parent.table[:2]
    assert len(parent.table) == 5
    append(parent, 7)
    assert kv.reserve(parent, 20)
    assert (len(parent.table), len(kv.copies), parent.capacity) == (5, 1, 20)
    kv.check([parent, child])


def test_a_fork_inherits_keys_and_publishes_on_its_own() -> None:
    kv = KVCache(16, 2)
    parent = admitted(kv, [1, 2, 3])
    child = forked(kv, parent)
    append(child, 4)
    append(parent, 5)
    for seq in (child, parent):
        assert kv.reserve(seq, 4)
        compute(kv, seq)
    assert (len(child.chain), len(parent.chain)) == (2, 2)
    assert child.table[1] != parent.table[1]
    kv.check([parent, child])


def test_a_refused_reservation_changes_nothing() -> None:
    kv = KVCache(3, 2)
    parent = admitted(kv, [1, 2, 3])
    child = forked(kv, parent)
    append(child, 4)
    before = state(kv, parent, child)
    assert not kv.reserve(child, 5)  # a copy and a new block, but only one is free
    assert state(kv, parent, child) == before
    assert kv.reserve(child, 4)
    before = state(kv, parent, child)
    assert not kv.reserve(parent, 5)
    assert state(kv, parent, child) == before


def test_a_copy_into_a_block_that_was_given_back_is_forgotten() -> None:
    kv = KVCache(8, 4)
    parent = admitted(kv, [1, 2, 3])
    first, second = forked(kv, parent), forked(kv, parent)
    for child in (first, second):
        append(child, 4)
        assert kv.reserve(child, 4)
    assert len(kv.copies) == 2
    kv.release(first)
    assert kv.copies == [(parent.table[0], second.table[0])]
    kv.release(parent)
    assert len(kv.copies) == 1, "the source may go, the copy is still wanted"


# --- drafts -------------------------------------------------------------------------------------


def test_blocks_of_wrong_drafts_are_given_back() -> None:
    kv = KVCache(8, 4)
    seq = admitted(kv, [1, 2, 3, 4, 5, 6, 7])
    assert kv.reserve_drafts(seq, 14)
    assert (len(seq.table), seq.capacity) == (4, 16)
    seq.tokens.append(8)
    seq.num_pending += 1
    kv.release_drafts(seq)
    assert (len(seq.table), seq.capacity, len(kv.pool.free)) == (2, 8, 6)
    kv.check([seq])


def test_blocks_that_right_drafts_filled_are_kept() -> None:
    kv = KVCache(8, 4, enable_prefix_caching=False)
    seq = admitted(kv, [1, 2, 3, 4, 5, 6, 7])
    assert kv.reserve_drafts(seq, 14)
    seq.tokens += [8, 9, 10]
    seq.num_pending += 3
    compute(kv, seq, 10)
    kv.release_drafts(seq)
    assert len(seq.table) == 3
    kv.check([seq])


def test_drafts_take_no_block_unless_many_are_free() -> None:
    kv = KVCache(8, 4)
    seq = admitted(kv, list(range(16)))
    assert kv.reserve_drafts(seq, 28), "one of eight stays free"
    kv.release_drafts(seq)
    before = state(kv, seq)
    assert not kv.reserve_drafts(seq, 29)
    assert state(kv, seq) == before
    assert kv.reserve_drafts(seq, 16), "room that is there anyway"


def test_room_that_was_reserved_before_is_not_given_back() -> None:
    kv = KVCache(16, 4)
    seq = admitted(kv, [1, 2, 3, 4, 5])
    assert kv.reserve(seq, 30)
    assert kv.reserve_drafts(seq, 12)
    kv.release_drafts(seq)
    assert len(seq.table) == 8


# --- check --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda kv, seq: setattr(seq, "num_computed", 9), "too few blocks"),
        (lambda kv, seq: setattr(seq, "capacity", 9), "too few blocks"),
        (lambda kv, seq: setattr(seq, "num_computed", 3), "ran ahead"),
        (lambda kv, seq: setattr(seq, "num_pending", 1), "miscounts"),
        (lambda kv, seq: seq.tokens.__setitem__(0, 9), "not what the index says"),
        (lambda kv, seq: setattr(seq, "table", seq.table[:1] * 2), "shared block|disagree"),
        (lambda kv, seq: kv.pool.share(seq.table[0]), "reference counts and tables"),
        (lambda kv, seq: kv.pool.share(seq.table[1]), "shared block"),
    ],
)
def test_check_sees_what_is_broken(
    break_it: Callable[[KVCache, Sequence], None], complaint: str
) -> None:
    kv = KVCache(8, 4)
    seq = admitted(kv, [1, 2, 3, 4, 5, 6])
    kv.check([seq])
    break_it(kv, seq)
    with pytest.raises(AssertionError, match=complaint):
        kv.check([seq])
