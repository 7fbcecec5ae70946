"""KVCache, coming and going: admission, prefix sharing, collisions, twins, eviction."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ridgeline.core.cache.kvcache import KVCache, hash_block
from ridgeline.core.request import Sequence
from tests.core.kv import admitted, append, compute, new, state

# --- admission and prefix sharing ---------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(num_tokens: int, blocks: int) -> None:
    assert KVCache(1, 4).blocks_for(num_tokens) == blocks


def test_admission_takes_room_for_what_is_asked() -> None:
    kv = KVCache(8, 4)
    seq = new([1, 2, 3, 4, 5])
    assert kv.admit(seq, 13)
    assert len(set(seq.table)) == 4
    assert (seq.num_computed, seq.num_pending, seq.capacity) == (0, 5, 16)
    kv.check([seq])


def test_full_blocks_of_a_computed_prompt_are_shared() -> None:
    kv = KVCache(16, 4)
    first = admitted(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = new([1, 2, 3, 4, 5, 6, 7, 8, 7])
    assert kv.admit(second, 9)
    assert second.table[:2] == first.table[:2]
    assert second.table[2] != first.table[2]
    assert (second.num_computed, second.num_pending, len(second.chain)) == (8, 1, 2)
    kv.check([first, second])


def test_sharing_ends_at_the_first_difference() -> None:
    kv = KVCache(16, 2)
    first = admitted(kv, [1, 2, 3, 4, 5, 6, 7])
    second = new([1, 2, 0, 4, 5, 6, 7])
    assert kv.admit(second, 7)
    assert second.num_computed == 2
    assert not set(second.table[1:]) & set(first.table)
    kv.check([first, second])


def test_one_token_is_always_left_to_compute() -> None:
    kv = KVCache(16, 2)
    admitted(kv, [1, 2, 3, 4])
    again = new([1, 2, 3, 4])
    assert kv.admit(again, 4)
    assert (again.num_computed, again.num_pending) == (2, 2)


def test_a_released_prefix_is_found_again_until_it_is_evicted() -> None:
    kv = KVCache(3, 2)
    kv.release(first := admitted(kv, [1, 2, 3, 4, 5]))
    assert (first.table, first.num_computed, first.num_pending, first.capacity) == ((), 0, 5, 0)
    second = new([1, 2, 3, 4, 6])
    assert kv.admit(second, 5)
    assert second.num_computed == 4
    kv.release(second)
    kv.release(admitted(kv, [9, 9, 9, 9, 9, 9]))
    third = new([1, 2, 3, 4, 5])
    assert kv.admit(third, 5)
    assert third.num_computed == 0


def test_the_tail_is_evicted_before_the_root() -> None:
    kv = KVCache(4, 2)
    kv.release(admitted(kv, [1, 2, 3, 4, 5, 6]))  # three known blocks and one that never was used
    other = new([9, 9, 9])
    assert kv.admit(other, 3)  # takes the unused one and the tail
    kv.release(other)  # never computed, so its blocks are the first to be taken again
    again = new([1, 2, 3, 4, 5, 6, 7])
    assert kv.admit(again, 5)
    assert again.num_computed == 4
    kv.check([again])


def test_without_prefix_caching_nothing_is_shared() -> None:
    kv = KVCache(16, 2, enable_prefix_caching=False)
    first = admitted(kv, [1, 2, 3, 4])
    assert first.num_computed < first.publish_at, "and nothing is offered when it grows"
    second = new([1, 2, 3, 4])
    assert kv.admit(second, 4)
    assert second.num_computed == 0
    assert not set(first.table) & set(second.table)


def test_prompt_logprobs_need_every_prompt_token_computed() -> None:
    kv = KVCache(16, 2)
    admitted(kv, [1, 2, 3, 4, 5])
    second = new([1, 2, 3, 4, 5], prompt_logprobs=1)
    assert kv.admit(second, 5)
    assert second.num_computed == 0
    compute(kv, second)  # and yet ends up sharing what it computed
    assert kv.pool.refs[second.table[0]] == 2


def test_a_refused_admission_changes_nothing() -> None:
    kv = KVCache(4, 2)
    kv.release(admitted(kv, [1, 2, 3, 4]))
    holder = admitted(kv, [8, 8])
    before = state(kv, holder)
    waiting = new([1, 2, 3, 4, 5])
    # Two of the three free blocks are its own prefix: they cannot serve as new blocks too.
    assert not kv.admit(waiting, 8)
    assert state(kv, holder) == before
    assert waiting.table == ()
    assert kv.admit(waiting, 6)
    kv.check([holder, waiting])


# --- collisions ---------------------------------------------------------------------------------


def constant(parent_key: bytes, tokens: tuple[int, ...]) -> bytes:
    return b"same"


def truncated(parent_key: bytes, tokens: tuple[int, ...]) -> bytes:
    return bytes([hash_block(parent_key, tokens)[0] & 1])


def unchained(parent_key: bytes, tokens: tuple[int, ...]) -> bytes:
    return hash_block(b"", tokens)


COLLIDING = [constant, truncated, unchained]


@pytest.mark.parametrize("colliding", COLLIDING)
def test_colliding_keys_never_give_a_wrong_block(
    colliding: Callable[[bytes, tuple[int, ...]], bytes],
) -> None:
    kv = KVCache(64, 2, hash_block=colliding)
    seqs: list[Sequence] = []
    written: dict[int, list[int]] = {}  # block -> all tokens up to its end
    for number in range(16):
        bits = [number >> i & 1 for i in range(4)]
        tokens = [bits[0], 7, bits[1], 7, bits[2], 7, bits[3]]
        seq = new(tokens)
        assert kv.admit(seq, len(tokens))
        for i, block in enumerate(seq.table[: seq.num_computed // 2]):
            assert written[block] == tokens[: 2 * i + 2]
        for i in range(seq.num_computed // 2, 3):
            written[seq.table[i]] = tokens[: 2 * i + 2]
        compute(kv, seq)
        kv.check([*seqs, seq])
        if number % 3:
            kv.release(seq)
        else:
            seqs.append(seq)


@pytest.mark.parametrize("hashing", [hash_block, *COLLIDING])
def test_requests_of_different_roots_share_nothing(
    hashing: Callable[[bytes, tuple[int, ...]], bytes],
) -> None:
    kv = KVCache(16, 2, hash_block=hashing)
    first = admitted(kv, [1, 2, 3, 4, 5], root=b"a")
    for root in (b"b", b""):
        other = admitted(kv, [1, 2, 3, 4, 5], root=root)
        assert not set(first.table) & set(other.table)
        if hashing is hash_block:  # else keys may collide, and then a block stays private
            assert len(other.chain) == len(first.chain) == 2
        kv.release(other)
    same = new([1, 2, 3, 4, 5], root=b"a")
    assert kv.num_cached(same) == len(first.chain) * 2 > 0
    kv.check([first])


def test_an_equal_block_after_another_beginning_is_not_shared() -> None:
    kv = KVCache(16, 2, hash_block=unchained)
    first = admitted(kv, [1, 1, 5, 5, 0])
    second = admitted(kv, [2, 2, 5, 5, 0])
    assert len(second.chain) == 1  # its second block has the key of first's, not its past
    assert not set(first.table) & set(second.table)
    third = new([2, 2, 5, 5, 0])
    assert kv.admit(third, 5)
    assert third.table[0] == second.table[0]
    assert third.num_computed == 2
    kv.check([first, second, third])


def test_a_private_block_is_published_once_its_key_is_free() -> None:
    kv = KVCache(5, 2, hash_block=unchained)
    first = admitted(kv, [1, 1, 5, 5])
    second = admitted(kv, [2, 2, 5, 5])
    assert len(second.chain) == 1
    kv.release(first)
    filler = new([9] * 6)
    assert kv.admit(filler, 6)  # evicts both blocks of first
    append(second, 6)
    kv.publish(second)
    assert len(second.chain) == 2
    kv.check([second, filler])


def test_the_key_of_a_block_depends_on_all_tokens_before() -> None:
    key = hash_block(b"", (1, 2))
    assert len(key) == 16
    keys = {key, hash_block(b"", (2, 1)), hash_block(key, (1, 2)), hash_block(b"", (1, 258))}
    assert len(keys) == 4


# --- twins --------------------------------------------------------------------------------------


def test_twins_computed_side_by_side_become_one() -> None:
    kv = KVCache(16, 2)
    first, second = new([1, 2, 3, 4, 5]), new([1, 2, 3, 4, 6])
    for seq in (first, second):
        assert kv.admit(seq, 5)
    assert not set(first.table) & set(second.table)
    num_free = len(kv.pool.free)
    compute(kv, first)
    compute(kv, second)
    assert first.table[:2] == second.table[:2]
    assert first.table[2] != second.table[2]
    assert len(kv.pool.free) == num_free + 2
    kv.check([first, second])


def test_publishing_waits_for_full_blocks() -> None:
    kv = KVCache(16, 4)
    seq = new([1] * 10)
    assert kv.admit(seq, 10)
    for upto, published, boundary in [(3, 0, 4), (4, 1, 8), (7, 1, 8), (10, 2, 12)]:
        compute(kv, seq, upto)
        assert (len(seq.chain), seq.publish_at) == (published, boundary)
        kv.check([seq])
