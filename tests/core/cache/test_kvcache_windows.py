"""Windows: blocks that nobody sees any more are given back; a prefix needs what the next sees."""

from __future__ import annotations

import pytest

from ridgeline.core.cache.kvcache import NOWHERE, KVCache, held_blocks
from ridgeline.core.params import SamplingParams
from tests.core.harness import expected, finish, make_engine, make_scheduler, tokens_of
from tests.core.kv import admitted, append, compute, forked, new, state

WINDOW = 8


def windowed(num_blocks: int, block_size: int = 2, window: int = WINDOW) -> KVCache:
    return KVCache(num_blocks, block_size, windows=(window,))


@pytest.mark.parametrize(
    ("window", "step", "num_tokens", "blocks"),
    [
        (8, 1, 1000, 5),  # eight tokens that begin within a block of two
        (8, 4, 1000, 7),
        (8, 4, 6, 3),  # a short text is all of it
        (1, 1, 1000, 2),
    ],
)
def test_what_a_sequence_holds_at_once(
    window: int, step: int, num_tokens: int, blocks: int
) -> None:
    assert windowed(1, window=window).most_blocks(num_tokens, step) == blocks


def test_without_a_window_all_of_a_text_is_held() -> None:
    assert KVCache(1, 2).most_blocks(1000, 4) == 500


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_long_text_needs_no_more_blocks_than_its_window_and_a_step(
    budget: int, block_size: int
) -> None:
    most = windowed(1, block_size).most_blocks(1000, budget)
    scheduler = make_scheduler(most, block_size, budget=budget, seats=1, windows=(WINDOW,))
    engine, _ = make_engine(scheduler)
    request_id = engine.add((1, 2, 3) * 100, SamplingParams(max_tokens=200))
    answers = expected(engine.requests[request_id])
    assert tokens_of(finish(engine)) == answers
    fewer = make_scheduler(most - 1, block_size, budget=budget, seats=1, windows=(WINDOW,))
    with pytest.raises(ValueError, match=f"= {most} blocks"):
        make_engine(fewer)[0].add((1, 2, 3) * 100, SamplingParams(max_tokens=200))


def test_more_streams_fit() -> None:
    most: dict[int | None, int] = {}
    for window in (None, WINDOW):
        scheduler = make_scheduler(32, 4, budget=16, seats=8, windows=(window,))
        engine, runner = make_engine(scheduler)
        answers = {}
        for i in range(8):
            request_id = engine.add((i % 3, 1), SamplingParams(max_tokens=62))
            answers |= expected(engine.requests[request_id])
        assert tokens_of(finish(engine)) == answers
        long = [sum(work.start >= 48 for work in step.work) for step in runner.steps]
        most[window] = max(long)
    assert most == {None: 2, WINDOW: 8}


def test_blocks_behind_the_window_go_when_more_are_needed() -> None:
    kv = windowed(16)
    seq = admitted(kv, range(12))
    first = seq.table
    assert len(kv.pool.free) == 10
    append(seq, 99)
    assert kv.reserve(seq, 13)
    # Token 12 sees 5 to 12, which begin in the block of 4 and 5.
    assert seq.table[:3] == (NOWHERE, NOWHERE, first[2])
    assert held_blocks(seq) == list(seq.table[2:])
    assert len(kv.pool.free) == 11
    kv.check([seq])


def test_a_refused_reservation_gives_nothing_back() -> None:
    kv = windowed(6)
    seq = admitted(kv, range(12))
    other = forked(kv, seq)  # what it holds too is not free when this one lets go
    seq.tokens += range(5)
    seq.num_pending += 5
    before = state(kv, seq, other)
    assert not kv.reserve(seq, 14)
    assert state(kv, seq, other) == before
    kv.release(other)
    assert not kv.reserve(seq, 17)
    assert kv.reserve(seq, 16)
    kv.check([seq])


def test_a_fork_shares_what_is_still_held() -> None:
    kv = windowed(16)
    seq = admitted(kv, range(12))
    append(seq, 99)
    assert kv.reserve(seq, 13)
    compute(kv, seq)
    child = forked(kv, seq)
    assert child.table == seq.table
    kv.check([seq, child])
    kv.release(seq)
    kv.check([child])


def test_a_prefix_needs_only_what_its_window_shows() -> None:
    kv = windowed(8)
    kv.release(admitted(kv, range(13)))  # six full blocks, and one that nobody knows
    filler = new([50, 51, 52, 53, 54])
    assert kv.admit(filler, 5)  # the unknown one, the unused one, and the tail
    kv.release(filler)
    # Blocks 0 to 4 are there, 5 is not.
    assert kv.num_cached(new(range(13))) == 10
    kv = windowed(8)
    seq = admitted(kv, range(12))
    for token in range(12, 15):
        append(seq, token)
    assert kv.reserve(seq, 15)
    compute(kv, seq)
    filler = new([50, 51, 52, 53])
    assert kv.admit(filler, 4)  # takes what was never used, and then what fell out first
    kv.release(seq)
    again = new(range(15))
    assert kv.num_cached(again) == 14
    assert kv.admit(again, 15)
    assert again.num_computed == 14
    assert again.table[:3] == (NOWHERE,) * 3
    assert NOWHERE not in again.table[3:]
    assert len(again.chain) == 7
    kv.check([again, filler])
    compute(kv, again)
    kv.check([again, filler])


def test_a_prefix_ends_before_a_hole_that_its_window_shows() -> None:
    kv = windowed(9)
    seq = admitted(kv, range(14))
    seq.tokens += range(14, 17)
    seq.num_pending += 3
    assert kv.reserve(seq, 17)
    for _ in range(2):
        kv.pool.take()  # the first two: they fell out before the third
    kv.release(seq)
    assert kv.num_cached(new(range(12))) == 0, "it would see tokens 3 and up, in block 1"
    assert kv.num_cached(new(range(15))) == 14
    other = new([*range(12), 77, 78, 79])
    assert kv.num_cached(other) == 12, "of token 12 on, whose window begins in block 2"


def test_another_beginning_is_not_believed_behind_a_hole() -> None:
    """The blocks within the window are equal, and so are their keys."""

    def unchained(parent_key: bytes, tokens: tuple[int, ...]) -> bytes:
        return bytes(tokens)

    kv = KVCache(8, 2, windows=(4,), hash_block=unchained)
    kv.release(admitted(kv, [1, 1, *range(2, 11)]))
    assert kv.num_cached(new([1, 1, *range(2, 11)])) == 10
    assert kv.num_cached(new([9, 9, *range(2, 11)])) == 0


def test_a_block_that_stayed_private_may_be_gone() -> None:
    kv = KVCache(16, 2, windows=(4,), hash_block=lambda parent, tokens: b"same")
    holder = admitted(kv, [7, 7, 7])
    seq = admitted(kv, range(8))
    assert len(seq.chain) == 0
    append(seq, 99)
    append(seq, 98)
    assert kv.reserve(seq, 10)
    assert seq.table[:2] == (NOWHERE, NOWHERE)
    kv.release(holder)
    compute(kv, seq)
    assert len(seq.chain) == 0
    kv.check([seq])


def test_a_contrastive_search_compares_all_states() -> None:
    kv = windowed(16)
    seq = admitted(kv, range(12), penalty_alpha=0.5, top_k=4)
    append(seq, 99)
    assert kv.reserve(seq, 13)
    assert NOWHERE not in seq.table


def test_check_sees_a_hole_in_the_window() -> None:
    kv = windowed(16)
    seq = admitted(kv, range(12))
    kv.pool.release(seq.table[4])
    seq.table = (*seq.table[:4], NOWHERE, *seq.table[5:])
    with pytest.raises(AssertionError, match=r"block 4 of .* is gone and can be seen"):
        kv.check([seq])
