"""Slots of states: who holds one, what is kept of a prompt, and what a later prompt resumes."""

from __future__ import annotations

import pytest

from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.cache.state_slots import StateSlots
from ridgeline.core.request import Sequence
from ridgeline.core.step import Work
from tests.core.harness import make_request, make_scheduler, run_step
from tests.core.kv import compute, forked, new


def caches(
    num_seqs: int, num_checkpoints: int, *, every: int = 8, num_blocks: int = 32
) -> tuple[KVCache, StateSlots]:
    states = StateSlots(num_seqs, num_checkpoints, every=every)
    return KVCache(num_blocks, 4, states=states), states


def advance(kv: KVCache, seq: Sequence, num_tokens: int) -> Work:
    """Grant so many tokens and fold them back; return the work, with its saves."""
    tokens = tuple(seq.tokens[seq.num_computed : seq.num_computed + num_tokens])
    work = [Work(seq.id, seq.num_computed, tokens, seq.table, (), seq.request.sampling, (), ())]
    kv.add_states(work, [seq])
    kv.forget_copies()
    compute(kv, seq, seq.num_computed + num_tokens)
    kv.publish_states(seq, work[0])
    kv.check([seq])
    return work[0]


def saved_at(work: Work) -> list[int]:
    return [work.start + count for count, _ in work.save]


def read_whole(kv: KVCache, tokens: range, *, chunk: int = 100) -> list[int]:
    """Read a prompt in chunks and let it go; return the positions that were kept."""
    seq = new(tokens)
    assert kv.admit(seq, len(tokens))
    found: list[int] = []
    while seq.num_pending:
        found += saved_at(advance(kv, seq, min(chunk, seq.num_pending)))
    kv.release(seq)
    return found


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
def test_a_prompt_is_kept_at_its_end_and_on_the_way(chunk: int) -> None:
    kv, _ = caches(1, 8)
    assert read_whole(kv, range(23), chunk=chunk) == [8, 16, 20]


def test_the_last_token_is_always_computed() -> None:
    kv, _ = caches(1, 8)
    assert read_whole(kv, range(24)) == [8, 16, 20]
    assert read_whole(kv, range(100, 104)) == []


def test_a_distance_of_no_whole_blocks_is_rounded_down() -> None:
    kv, _ = caches(1, 9, every=11)
    assert read_whole(kv, range(23)) == [8, 16, 20]
    kv, _ = caches(1, 9, every=1)
    assert read_whole(kv, range(14)) == [4, 8, 12]


def test_with_few_slots_the_end_of_a_prompt_is_kept() -> None:
    kv, states = caches(1, 1)
    assert read_whole(kv, range(23)) == [20]
    assert len(states.checkpoints) == 1


def test_an_answer_is_not_kept() -> None:
    kv, _ = caches(1, 8)
    seq = new(range(6))
    assert kv.admit(seq, 30)
    assert saved_at(advance(kv, seq, 6)) == [4]
    seq.tokens += range(20)
    seq.num_pending += 20
    assert saved_at(advance(kv, seq, 20)) == []


def test_a_prompt_resumes_at_the_last_checkpoint_and_not_at_the_last_block() -> None:
    kv, states = caches(2, 8)
    read_whole(kv, range(23))
    slots = {slot for _, slot in states.checkpoints.values()}
    seq = new([*range(18), *range(90, 95)])  # 16 tokens are in the cache, and so is a state
    assert kv.num_cached(seq) == 16
    assert kv.admit(seq, 23)
    assert seq.num_computed == 16
    [(source, target)] = states.copies
    assert target == seq.state not in slots
    assert source in slots
    other = new([*range(14), *range(90, 95)])  # of 12 the state behind 8
    assert kv.num_cached(other) == 8
    assert kv.num_cached(new([*range(6), 90, 91])) == 0


def test_a_state_from_elsewhere_is_resumed_like_one_that_was_saved() -> None:
    kv, states = caches(1, 1)
    read_whole(kv, range(23))  # one is kept, behind 20 tokens
    block = next(block for block, one in enumerate(kv.pool.content) if one and one.tokens[0] == 8)
    content = kv.pool.content[block]
    assert content is not None
    states.restore(block, content)
    slot = states.restore(block, content)  # once more, of the same block
    read_whole(kv, range(50, 54))  # too short to be kept, and it has a slot
    kv.check([])
    assert kv.num_cached(new(range(23))) == 12, "of one state that is kept the latest is"
    seq = new([*range(14), 90])
    assert kv.admit(seq, 15)
    assert (seq.num_computed, states.copies) == (12, [(slot, seq.state)])
    kv.check([seq])


def test_a_checkpoint_is_of_what_its_block_holds() -> None:
    kv, _ = caches(2, 8, num_blocks=2)
    read_whole(kv, range(6))
    assert kv.num_cached(new(range(6))) == 4
    other = new(range(50, 56))  # takes both blocks, and nobody keeps its state
    assert kv.admit(other, 6)
    compute(kv, other)
    assert kv.pool.num_indexed
    assert kv.num_cached(new(range(50, 56))) == 0
    kv.release(other)
    again = new(range(6))
    assert kv.admit(again, 6)
    compute(kv, again)
    assert kv.num_cached(new(range(6))) == 4, "the same tokens stand behind the same again"


def test_a_checkpoint_of_the_same_block_is_replaced() -> None:
    kv, states = caches(2, 8, num_blocks=6)
    for _ in range(3):
        read_whole(kv, range(6))
        read_whole(kv, range(50, 73))
    assert len(states.checkpoints) <= 6


def test_the_checkpoint_that_was_used_longest_ago_makes_room() -> None:
    kv, states = caches(1, 2)
    read_whole(kv, range(6))
    read_whole(kv, range(20, 26))
    read_whole(kv, range(6))  # used again
    read_whole(kv, range(40, 46))
    assert [kv.num_cached(new(range(at, at + 6))) for at in (0, 20, 40)] == [4, 0, 4]
    assert not states.copies


def test_the_only_checkpoint_may_become_the_state_itself() -> None:
    kv, states = caches(1, 1)
    read_whole(kv, range(6))
    filler = new(range(30, 33))
    assert kv.admit(filler, 3)
    kv.release(filler)
    states.free.clear()
    kept = next(iter(states.checkpoints.values()))[1]
    seq = new(range(6))
    assert kv.admit(seq, 6)
    assert states.copies == [(kept, kept)]
    assert seq.state == kept


def test_a_fork_copies_and_a_release_drops_the_copy() -> None:
    kv, states = caches(2, 0)
    parent = new(range(6))
    assert kv.admit(parent, 6)
    compute(kv, parent)
    child = forked(kv, parent)
    assert states.copies == [(parent.state, child.state)]
    kv.check([parent, child])
    kv.release(child)
    assert states.copies == []
    kv.release(child)  # twice is once
    kv.check([parent])


def test_what_is_not_published_is_given_back() -> None:
    """The step's sequence ended, or another content has the block's key."""
    kv, states = caches(1, 2)
    seq = new(range(6))
    assert kv.admit(seq, 6)
    work = [Work(seq.id, 0, tuple(range(6)), seq.table, (), seq.request.sampling, (), ())]
    kv.add_states(work, [seq])
    assert work[0].save
    kv.check([seq])
    kv.publish_states(seq, work[0])  # its block is not: nothing was computed
    assert not states.checkpoints
    kv.release(seq)
    kv.add_states([], [])
    assert sorted(states.free) == [0, 1, 2]


def test_a_failed_step_drops_all_checkpoints() -> None:
    scheduler = make_scheduler(checkpoints=4)
    kv = scheduler.queues.kv
    scheduler.add(make_request(0, range(10), max_tokens=3))
    run_step(scheduler)
    assert kv.num_cached(new(range(10))) == 8
    scheduler.add(make_request(1, range(10), max_tokens=3))
    assert scheduler.schedule().state_copies
    scheduler.retract()
    scheduler.queues.check()
    assert kv.num_cached(new(range(10))) == 0
    step = run_step(scheduler)
    assert step.state_copies == ()
    assert [work.start for work in step.work] == [0, 0]


def drafted(kv: KVCache, seq: Sequence, num_drafts: int) -> Work | None:
    """Return work with drafts behind a sequence's last token, if there is a slot for its state."""
    start = seq.num_computed
    if not kv.reserve_drafts(seq, start + 1 + num_drafts):
        return None
    tokens = (seq.tokens[-1], *range(num_drafts))
    sampling = seq.request.sampling
    work = [Work(seq.id, start, tokens, seq.table, (0,), sampling, (), (), num_drafts)]
    kv.add_states(work, [seq])
    return work[0]


@pytest.mark.parametrize("is_right", [False, True])
def test_a_state_is_kept_before_drafts_until_it_is_known_whether_they_are_right(
    is_right: bool,
) -> None:
    kv, states = caches(1, 1)
    seq = new(range(6))
    assert kv.admit(seq, 6)
    compute(kv, seq, 5)
    work = drafted(kv, seq, 3)
    assert work is not None
    assert work.state == seq.state
    [(count, slot)] = work.save
    assert (count, slot != seq.state) == (1, True)
    kv.check([seq])
    states.settle(seq, is_right=is_right)
    assert seq.state == (work.state if is_right else slot)
    kv.check([seq])
    assert states.free == [slot if is_right else work.state]


def test_no_checkpoint_is_taken_among_drafts() -> None:
    """A whole prompt is behind the drafts' first position, however it was cut."""
    for count in range(1, 14):
        kv, _ = caches(1, 8, every=4)
        seq = new(range(count))
        assert kv.admit(seq, count)
        while seq.num_pending > 1:
            advance(kv, seq, 1)
        work = drafted(kv, seq, 10)
        assert work is not None
        assert [saved for saved, _ in work.save] == [1]


def test_drafts_take_no_more_slots_than_checkpoints() -> None:
    kv, states = caches(3, 1)
    pair = [new(range(6)), new(range(20, 26))]
    for seq in pair:
        assert kv.admit(seq, 6)
        compute(kv, seq, 5)
    assert drafted(kv, pair[0], 2)
    before = pair[1].table
    assert drafted(kv, pair[1], 9) is None, "the slot that is free is for a fork"
    assert pair[1].table == before
    kv.release(pair[0])  # amid the step
    kv.check([pair[1]])
    assert len(states.free) == 3
    assert drafted(kv, pair[1], 2)
    kv, _ = caches(1, 0)
    seq = new(range(6))
    assert kv.admit(seq, 8)
    assert drafted(kv, seq, 1) is None


def test_drafts_take_the_place_of_the_oldest_checkpoint() -> None:
    kv, states = caches(1, 2)
    for begin in (0, 20, 40):
        read_whole(kv, range(begin, begin + 6))
    seq = new(range(40, 46))
    assert kv.admit(seq, 6)
    compute(kv, seq, 5)
    assert len(states.checkpoints) == 2
    assert not states.free
    assert drafted(kv, seq, 2)
    assert len(states.checkpoints) == 1
    assert kv.num_cached(new(range(40, 46))) == 4


def test_a_lost_copy_before_drafts_is_found() -> None:
    kv, states = caches(1, 2)
    seq = new(range(6))
    assert kv.admit(seq, 6)
    compute(kv, seq, 5)
    assert drafted(kv, seq, 2)
    seq.state, other = states.free[0], seq.state
    with pytest.raises(AssertionError, match="has two holders"):
        kv.check([seq])
    seq.state = other
    kv.check([seq])


def test_steps_say_where_states_are() -> None:
    scheduler = make_scheduler(checkpoints=4)
    scheduler.add(make_request(0, range(10), max_tokens=3))
    step = run_step(scheduler)
    [work] = step.work
    assert work.state >= 0
    assert [count for count, _ in work.save] == [8]
    assert step.state_copies == ()
    scheduler.add(make_request(1, range(10), max_tokens=3))
    step = run_step(scheduler)
    [(source, target)] = step.state_copies
    assert source == work.save[0][1]
    assert [work.state for work in step.work] == [work.state, target]
    assert run_step(make_scheduler()).work == ()


def test_a_lost_slot_is_found() -> None:
    kv, states = caches(1, 1)
    seq = new(range(6))
    assert kv.admit(seq, 6)
    states.free.append(seq.state)
    with pytest.raises(AssertionError, match="two holders"):
        kv.check([seq])
    states.free.pop()
    states.copies.append((0, 99))
    with pytest.raises(AssertionError, match="without a holder"):
        kv.check([seq])
