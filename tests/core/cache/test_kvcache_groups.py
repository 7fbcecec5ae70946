"""Groups of layers: each has a table, all take their blocks from one pool."""

from __future__ import annotations

import random

import pytest

from ridgeline.core.cache.kvcache import NOWHERE, KVCache, held_blocks
from ridgeline.core.params import SamplingParams
from ridgeline.core.scheduling.policies import Policy
from ridgeline.core.scheduling.speculate import Speculation
from tests.core.harness import (
    POLICIES,
    Oracle,
    expected,
    finish,
    make_engine,
    make_request,
    make_scheduler,
    tokens_of,
)
from tests.core.kv import admitted, append, compute, forked, new, state
from tests.core.test_workloads import MAX_LEN, workload

WINDOWS = (None, 8)


def in_turn(num_blocks: int, windows: tuple[int | None, ...] = WINDOWS) -> KVCache:
    return KVCache(num_blocks, 2, windows=windows)


def test_a_sequence_holds_the_sum_of_its_groups() -> None:
    assert in_turn(0).most_blocks(1000, 4) == 500 + 7
    assert in_turn(0, (None, 8, 8)).most_blocks(1000, 4) == 500 + 7 + 7
    assert in_turn(0).most_blocks(6, 4) == 3 + 3
    assert in_turn(0).blocks_for(6) == 3


def test_each_group_has_its_own_blocks() -> None:
    kv = in_turn(16)
    seq = admitted(kv, range(7))
    (other,) = seq.others
    assert len(seq.table) == len(other) == 4
    assert not set(seq.table) & set(other)
    assert [kv.pool.group[block] for block in seq.table] == [0] * 4
    assert [kv.pool.group[block] for block in other] == [1] * 4
    assert held_blocks(seq) == [
        block for pair in zip(seq.table, other, strict=True) for block in pair
    ]
    kv.check([seq])
    kv.release(seq)
    assert not any(kv.pool.refs)


def test_only_the_group_with_a_window_gives_blocks_back() -> None:
    kv = in_turn(16)
    seq = admitted(kv, range(12))
    full, (windowed,) = seq.table, seq.others
    append(seq, 99)
    assert kv.reserve(seq, 13)
    assert seq.table[:6] == full
    assert seq.others[0][:3] == (NOWHERE, NOWHERE, windowed[2])
    assert len(seq.table) == len(seq.others[0]) == 7
    assert seq.capacity == 14
    kv.check([seq])
    compute(kv, seq)
    kv.check([seq])


def test_what_one_group_gave_back_another_takes() -> None:
    kv = in_turn(13)
    seq = admitted(kv, range(12))
    given = seq.others[0][:2]
    append(seq, 99)
    assert kv.reserve(seq, 13)
    append(seq, 98)
    append(seq, 97)
    compute(kv, seq, 13)
    before = state(kv, seq)
    assert not kv.reserve(seq, 19), "three blocks for each group, and one is left behind"
    assert state(kv, seq) == before
    assert kv.reserve(seq, 15)
    taken = {seq.table[6], seq.table[7], seq.others[0][6], seq.others[0][7]}
    assert taken >= set(given)
    kv.check([seq])


def test_a_long_prompt_takes_few_blocks_for_its_window() -> None:
    kv = in_turn(64)
    seq = new(range(40))
    assert kv.admit(seq, 40, 4)
    assert (len(seq.table), len(seq.others[0])) == (20, 7)
    assert seq.capacity == 14
    compute(kv, seq, 4)
    kv.check([seq])


def test_a_refused_admission_changes_nothing() -> None:
    kv = in_turn(12)
    seq = new(range(12))
    holder = admitted(kv, [70])
    before = state(kv, seq, holder)
    assert not kv.admit(seq, 12)
    assert state(kv, seq, holder) == before
    kv.release(holder)
    assert kv.admit(seq, 12)


def test_a_prefix_is_there_for_all_groups_or_for_none() -> None:
    kv = in_turn(32)
    seq = admitted(kv, range(12))
    seq.tokens += range(12, 21)
    seq.num_pending += 9
    assert kv.reserve(seq, 21)
    compute(kv, seq)
    kv.release(seq)
    assert kv.num_cached(new(range(21))) == 20
    again = new(range(21))
    assert kv.admit(again, 21)
    assert again.num_computed == len(again.chain) * 2 == 20
    assert NOWHERE not in again.table
    behind = (20 - 8 + 1) // 2
    assert again.others[0][:behind] == (NOWHERE,) * behind
    assert NOWHERE not in again.others[0][behind:]
    kv.check([again])


@pytest.mark.parametrize("group", [0, 1])
def test_a_prefix_ends_where_either_group_has_a_hole(group: int) -> None:
    kv = in_turn(32)
    seq = admitted(kv, range(20))
    lost = (seq.table, *seq.others)[group][6]  # of tokens 12 and 13
    kv.release(seq)
    kv.pool.index[group].pop(kv.pool.content[lost].key)  # type: ignore[union-attr]
    kv.pool.content[lost] = None
    # With all of the text, the window of the next token sees tokens 11 and up.
    assert kv.num_cached(new(range(20))) == 12


def test_a_hole_that_no_window_shows_matters_to_the_full_group_alone() -> None:
    for group, cached in ((0, 4), (1, 18)):
        kv = in_turn(32)
        seq = admitted(kv, range(20))
        lost = (seq.table, *seq.others)[group][2]
        kv.release(seq)
        kv.pool.index[group].pop(kv.pool.content[lost].key)  # type: ignore[union-attr]
        kv.pool.content[lost] = None
        assert kv.num_cached(new(range(20))) == cached


def test_a_cut_for_one_group_shows_another_a_hole() -> None:
    """The first cut moves the window of the other group back, over a hole of its own."""
    kv = in_turn(64, (None, 6))
    seq = admitted(kv, range(20))
    for group, place in ((0, 8), (1, 6)):
        lost = (seq.table, *seq.others)[group][place]
        kv.pool.index[group].pop(kv.pool.content[lost].key)  # type: ignore[union-attr]
        kv.pool.content[lost] = None
    kv.release(seq)
    assert kv.num_cached(new(range(20))) == 12


@pytest.mark.parametrize("windows", [(4,), (None, 4)])
def test_what_stayed_private_and_is_gone_is_not_published(windows: tuple[int | None, ...]) -> None:
    """Also when nothing has its key any more."""
    kv = KVCache(32, 2, windows=windows, hash_block=lambda parent, tokens: b"same")
    holder = admitted(kv, [7, 7, 7])
    seq = admitted(kv, range(8))
    seq.tokens += [99, 98]
    seq.num_pending += 2
    assert kv.reserve(seq, 10)
    kv.release(holder)
    evicted = [kv.pool.take() for _ in range(len(kv.pool.free))]
    for block in evicted:
        kv.pool.release(block)
    compute(kv, seq)
    assert len(seq.chain) == 0
    kv.check([seq])


def test_equal_prefixes_computed_side_by_side_end_up_shared_in_each_group() -> None:
    kv = in_turn(32)
    first, second = new(range(9)), new(range(9))
    assert kv.admit(first, 9)
    assert kv.admit(second, 9)
    compute(kv, first)
    compute(kv, second)
    assert first.table[:4] == second.table[:4]
    assert first.others[0][:4] == second.others[0][:4]
    assert first.others[0][4] != second.others[0][4]
    kv.check([first, second])


def test_the_first_to_write_behind_a_fork_copies_a_block_of_each_group() -> None:
    kv = in_turn(32)
    parent = admitted(kv, range(5))
    child = forked(kv, parent)
    assert (child.table, child.others) == (parent.table, parent.others)
    append(child, 9)
    assert kv.reserve(child, 6)
    assert kv.copies == [
        (parent.table[2], child.table[2]),
        (parent.others[0][2], child.others[0][2]),
    ]
    kv.check([parent, child])


def test_drafts_give_back_a_block_of_each_group() -> None:
    kv = in_turn(64)
    seq = admitted(kv, range(4))
    append(seq, 9)
    assert kv.reserve(seq, 5)
    assert kv.reserve_drafts(seq, 9)
    assert seq.num_draft_blocks == (2, 2)
    assert (len(seq.table), len(seq.others[0])) == (5, 5)
    kv.release_drafts(seq)
    assert (len(seq.table), len(seq.others[0]), seq.capacity) == (3, 3, 6)
    kv.check([seq])


def test_a_contrastive_search_keeps_all_blocks_and_counts_them() -> None:
    params = SamplingParams(penalty_alpha=0.5, top_k=4, max_tokens=90)
    kv = in_turn(0)
    assert kv.most_blocks(100, 4, params) == 100
    scheduler = make_scheduler(99, 2, budget=16, windows=WINDOWS)
    with pytest.raises(ValueError, match="need up to 100 tokens = 100 blocks"):
        scheduler.add(make_request(0, range(10), penalty_alpha=0.5, top_k=4, max_tokens=90))
    scheduler.add(make_request(0, range(10), max_tokens=90))


def test_check_sees_a_block_of_another_group() -> None:
    kv = in_turn(16)
    seq = admitted(kv, [1])
    seq.table, seq.others = seq.others[0], (seq.table,)
    with pytest.raises(AssertionError, match="is of another group"):
        kv.check([seq])


def test_check_sees_a_hole_in_the_middle() -> None:
    kv = in_turn(32, (8,))
    seq = admitted(kv, range(20))
    kv.pool.release(seq.table[1])
    seq.table = (seq.table[0], NOWHERE, *seq.table[2:])
    with pytest.raises(AssertionError, match=r"block 1 of .* went too early"):
        kv.check([seq])


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_workload_is_answered_in_groups(policy: Policy) -> None:
    num_preempted = num_cached = num_copies = num_given = 0
    for number in range(120):
        dice = random.Random(number)
        block_size = number % 5 + 1
        windows = dice.choice((WINDOWS, (None, 5, 5), (12, 3), (None, 3, 9)))
        budget = MAX_LEN if policy.whole_prompts else dice.choice((8, 16, 64))
        most = KVCache(0, block_size, windows=windows).most_blocks(MAX_LEN, budget)
        drafts = Speculation(Oracle(0.7, dice)) if dice.random() < 0.5 else None
        scheduler = make_scheduler(
            most + dice.choice((0, 0, 1, 4, 10)),
            block_size,
            policy=policy,
            budget=budget,
            seats=dice.randint(1, 8),
            caching=dice.random() < 0.8,
            speculation=drafts,
            windows=windows,
        )
        engine, runner = make_engine(scheduler, max_model_len=MAX_LEN)
        events, answers = [], {}
        for prompt, params in workload(dice, dice.randint(1, 10)):
            while dice.random() < 0.6:
                events += engine.step()
                engine.check()
            answers |= expected(engine.requests[engine.add(prompt, params)])
        events += finish(engine)
        assert tokens_of(events) == answers
        num_preempted += sum(len(step.preempted) for step in runner.steps)
        num_copies += sum(len(step.copies) for step in runner.steps)
        num_cached += sum(length for step in runner.steps for _, length in step.admitted)
        num_given += sum(NOWHERE in w.others[0] for step in runner.steps for w in step.work)
    assert num_preempted > 20
    assert num_copies > 20
    assert num_cached > 200
    assert num_given > 200


def test_more_streams_fit_where_half_of_the_layers_see_little() -> None:
    most: dict[tuple[int | None, ...], int] = {}
    for windows in ((None, None), (None, 8)):
        scheduler = make_scheduler(64, 4, budget=16, seats=8, windows=windows)
        engine, runner = make_engine(scheduler)
        answers = {}
        for i in range(8):
            request_id = engine.add((i % 3, 1), SamplingParams(max_tokens=62))
            answers |= expected(engine.requests[request_id])
        assert tokens_of(finish(engine)) == answers
        most[windows] = max(sum(work.start >= 48 for work in step.work) for step in runner.steps)
    assert most == {(None, None): 2, (None, 8): 4}
