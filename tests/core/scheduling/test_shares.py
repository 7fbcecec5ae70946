"""Owners share slots and steps: who has more gives some back, and no answer changes by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Listing
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Sequence, Status
from ridgeline.core.scheduling.admission import Admission, Room, fair_share
from ridgeline.core.scheduling.policies import Load, Policy, SplitFuse
from ridgeline.core.step import SeqId, Step, Wait
from ridgeline.foresight.simulator.run import Replica, SimRequest
from tests.core.harness import (
    POLICIES,
    Watched,
    expected,
    make_engine,
    make_scheduler,
    run_step,
    sizes_of,
)
from tests.core.harness import make_request as request_of


def asked(tenant: str, *prompt: int, num_new: int = 100, **params: object) -> SimRequest:
    said = SamplingParams(max_tokens=num_new, ignore_eos=True, **params)  # type: ignore[arg-type]
    return SimRequest(prompt=prompt, num_new=(num_new,) * said.num_seqs, params=said, tenant=tenant)


def server(
    num_blocks: int = 4096, seats: int = 16, budget: int = 64, policy: Policy | None = None
) -> tuple[Replica, Watched]:
    """Return admission and engine over a ledger, put together as a server does it."""
    scheduler = make_scheduler(
        num_blocks, 4, seats=seats, budget=budget, policy=policy or SplitFuse()
    )
    engine, runner = make_engine(scheduler, max_model_len=2000)
    return Replica(engine), runner


def runs(replica: Replica, step: Step, tenant: str) -> bool:
    """Whether a step has a sequence of a tenant, who is still there."""
    requests = replica.engine.requests
    numbers = [work.seq_id[0] for work in step.work]
    return any(number in requests and requests[number].owner == tenant for number in numbers)


def step(replica: Replica) -> None:
    replica.admit()
    replica.step()
    replica.engine.check()


# --- shares -------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 100))
def test_a_share_is_the_largest_that_all_can_have(wanted: list[int], num_slots: int) -> None:
    share = fair_share(wanted, num_slots)
    assert sum(min(num, share) for num in wanted) <= num_slots
    assert share == num_slots or sum(min(num, share + 1) for num in wanted) > num_slots


def test_a_tenant_enters_a_full_engine_up_to_its_share() -> None:
    queue: Admission[str] = Admission()
    for i in range(9):
        queue.push("new", [(f"new {i}", 1)])
        queue.push("old", [(f"old {i}", 1)])
    full = Room(-3, -50, 2, 0, 8, {"old": 20})
    assert queue.take(full, num_inside=lambda _: 0) == [f"new {i}" for i in range(4)]
    assert queue.take(full._replace(inside={"old": 20, "new": 4}), num_inside=lambda _: 0) == []
    three = full._replace(inside={"old": 20, "new": 2, "few": 1})  # who leaves some to the others
    assert queue.take(three, num_inside=lambda _: 0) == ["new 4"]


def test_prompts_that_fill_a_step_wait_outside() -> None:
    """Beside another key a share of slots lets prompts in, but no more than a step can read."""
    replica, _ = server(budget=64)
    replica.push(asked("v", 5, 6, num_new=200))
    for i in range(300):
        replica.push(asked("a", *range(10 + i, 30 + i), num_new=1))
    for _ in range(12):
        step(replica)
    queues = replica.engine.scheduler.queues
    inside = [seq for seq in (*queues.running, *queues.waiting) if seq.request.owner == "a"]
    assert 64 <= sum(seq.num_pending for seq in inside) <= 64 + 16 * 20


def test_alone_a_tenant_waits_for_a_free_slot() -> None:
    queue: Admission[str] = Admission()
    queue.push("a", [("one", 1)])
    assert queue.take(Room(0, 9, 2, 0, 8, {"a": 8}), num_inside=lambda _: 0) == []
    assert queue.take(Room(0, 9, 2, 0, 8, {}), num_inside=lambda _: 0) == []


# --- one key's load, another's short request ----------------------------------------------------

SEATS = 16
LOADS: dict[str, list[SimRequest]] = {
    "one short answer each": [asked("a", 10 + i, 11, 12) for i in range(SEATS)],
    "many answers": [asked("a", 10 + i, 11, 12, n=SEATS) for i in range(8)],
    "best of many": [asked("a", 10 + i, 11, 12, n=2, best_of=SEATS) for i in range(8)],
    "beams": [asked("a", 10 + i, 11, 12, n=2, best_of=12, use_beam_search=True) for i in range(8)],
    "many requests": [asked("a", 10 + i, 11, 12) for i in range(100)],
    "long prompts": [asked("a", *range(10 + i, 160 + i)) for i in range(40)],
    "due at a time": [replace(asked("a", 10 + i, 11, n=4), due_s=float(i)) for i in range(20)],
}


SCARCE = [(name, 4096, SEATS) for name in LOADS]  # slots, or blocks: 12 beams may want 312 of them
SCARCE += [(name, 64, 4 * SEATS) for name in LOADS if name != "beams"]


@pytest.mark.parametrize(("others", "num_blocks", "seats"), SCARCE)
def test_a_short_request_of_another_key_is_answered_within_a_few_steps(
    others: str, num_blocks: int, seats: int
) -> None:
    replica, runner = server(num_blocks, seats)
    for one in LOADS[others]:
        replica.push(one)
    for _ in range(6):
        step(replica)
    for i in range(3):  # one after the other, as a client asks
        victim, ran = asked("v", 5, 6 + i, num_new=8), list[bool]()
        replica.push(victim)
        while victim not in replica.ended:
            step(replica)
            ran.append(victim in replica.ended or runs(replica, runner.steps[-1], "v"))
            assert len(ran) < 40
        assert ran.index(True) <= 1, "its first step"
        assert len(ran) - ran.index(True) <= 10, "it has a token in almost each from there on"
    assert replica.has_work()


def test_who_has_too_many_gives_the_youngest_back_and_gets_them_again() -> None:
    replica, runner = server(seats=8)
    replica.push(asked("a", 10, 11, n=8, num_new=60))
    for _ in range(4):
        step(replica)
    for i in range(20):
        replica.push(asked("v", 5, 20 + i, num_new=6))
    for _ in range(4):
        step(replica)
    last = runner.steps[-1]
    of_a = {work.seq_id for work in last.work if work.seq_id[0] == 0}
    assert of_a == {(0, 0), (0, 1), (0, 2), (0, 3)}, "its oldest four go on"
    assert len(last.work) == 8
    while replica.has_work():
        step(replica)
    assert sum(len(one.work) for one in runner.steps[-8:]) >= 8 * 3, "all run again"


def test_what_one_key_does_not_want_the_other_has() -> None:
    replica, runner = server(seats=8)
    for i in range(3):
        replica.push(asked("a", 10 + i, 11, n=8, num_new=50))
    replica.push(asked("v", 5, 6, num_new=50, n=2))
    for _ in range(10):
        step(replica)
    rows = Counter(work.seq_id[0] for work in runner.steps[-1].work)
    assert sorted(rows.values()) == [2, 4], "of six that run four have a token, in turn"
    assert replica.engine.scheduler.queues.slots_taken() == 8
    assert not runner.steps[-1].preempted


def test_alone_a_key_has_all_and_gives_nothing_back() -> None:
    replica, runner = server(seats=8)
    for i in range(10):
        replica.push(asked("a", 10 + i, 11, n=8, num_new=10))
    while replica.has_work():
        step(replica)
    assert not any(one.preempted for one in runner.steps)
    assert Counter(len(one.work) for one in runner.steps).most_common(1)[0][0] == 8


def test_long_texts_of_one_key_give_their_blocks_back() -> None:
    """Four sequences hold all of the cache, and a quarter of the slots."""
    replica, runner = server(num_blocks=104, seats=16, budget=400)
    for i in range(4):
        replica.push(asked("a", *range(1000 * i, 1000 * i + 96), num_new=200))
    for _ in range(3):
        step(replica)
    victim, num_steps = asked("v", *range(5000, 5050), num_new=8), 0
    replica.push(victim)
    while victim not in replica.ended:
        step(replica)
        num_steps += 1
        assert num_steps < 18  # its 50 tokens take seven steps of 8 beside the others' answers
    assert any(one.preempted for one in runner.steps)
    assert replica.engine.has_work()


def test_a_search_wider_than_the_share_goes_on_beside_a_flood() -> None:
    replica, _ = server(seats=8)
    search = asked("a", 10, 11, best_of=8, n=2, use_beam_search=True, num_new=12)
    replica.push(search)
    for _ in range(3):
        step(replica)
    for i in range(400):  # more than there is time for
        replica.push(asked("v", 5, 20 + i % 50, num_new=30))
    num_steps = 0
    while search not in replica.ended:
        step(replica)
        num_steps += 1
        assert num_steps < 120, "the search stands still"
    assert replica.engine.has_work()


def test_a_search_that_comes_into_a_flood_begins_with_its_share() -> None:
    replica, _ = server(seats=8)
    for i in range(400):
        replica.push(asked("v", 5, 20 + i % 50, num_new=300))
    for _ in range(3):
        step(replica)
    search = asked("a", 10, 11, best_of=8, n=2, use_beam_search=True, num_new=12)
    replica.push(search)
    for _ in range(120):
        step(replica)
        if search in replica.ended:
            break
    else:
        raise AssertionError("the search stands still")


def test_answers_to_come_count_before_their_prompt_is_read() -> None:
    scheduler = make_scheduler(seats=8)
    scheduler.add(request_of(0, [1, 2], owner="a", n=5))
    scheduler.add(request_of(1, [3, 4], owner="v"))
    assert scheduler.room().inside == {"a": 5, "v": 1}


@pytest.mark.parametrize("due_s", [inf, 1.0])
def test_the_only_text_of_an_owner_keeps_its_blocks(due_s: float) -> None:
    """However large it is, and although another owner's request is due."""
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=16)
    scheduler.add(request_of(0, range(11), owner="a", max_tokens=3))
    run_step(scheduler)
    scheduler.add(request_of(1, range(100, 107), owner="v", due_s=due_s, max_tokens=3))
    step = run_step(scheduler)
    assert step.preempted == ()
    assert sizes_of(step) == {(0, 0): 1}
    assert dict(step.waits) == {(1, 0): Wait.BLOCKS}


# --- steps --------------------------------------------------------------------------------------


def decoding(owner: str, first_id: int, count: int) -> list[Sequence]:
    seqs = []
    for request_id in range(first_id, first_id + count):
        (seq,) = request_of(request_id, [1, 2], owner=owner).sequences
        seq.status, seq.num_pending, seq.num_computed = Status.RUNNING, 1, 1
        seqs.append(seq)
    return seqs


def requested(
    policy: SplitFuse, running: list[Sequence], waiting: Listing[Sequence] = ()
) -> list[Sequence]:
    return [seq for seq, _ in policy.token_requests(running, waiting, Load(), 500)]


def test_a_step_has_as_many_of_an_owner_as_of_all_others() -> None:
    """So a step beside many answers of another key is at most about twice as long."""
    policy = SplitFuse()
    many = decoding("a", 0, 40)
    assert len(requested(policy, many)) == 40
    assert len(requested(policy, many[:7] + decoding("v", 50, 1))) == 5
    for num_others, most in ((1, 4), (12, 12), (30, 30)):
        chosen = requested(policy, many + decoding("v", 50, num_others))
        assert Counter(s.request.owner for s in chosen) == {"a": most, "v": num_others}
    newcomer = request_of(60, [1, 2, 3], owner="v").sequences
    assert len(requested(policy, many, newcomer)) == 4 + 1


def prompts_of(owner: str, first_id: int, count: int, *, length: int) -> list[Sequence]:
    asked = (request_of(i, [1] * length, owner=owner) for i in range(first_id, first_id + count))
    return [seq for request in asked for seq in request.sequences]


@pytest.mark.parametrize("load", [Load(), Load(num_outside=1000), Load(is_read=False)])
def test_beside_another_owner_many_prompts_count_as_one(load: Load) -> None:
    """So a step of an answer is about twice as long at most, however many texts another sends."""
    policy, (answer,) = SplitFuse(), decoding("v", 0, 1)
    flood = prompts_of("a", 10, 50, length=20)
    found = list(policy.token_requests([answer], flood, load, 2000))
    assert found[0] == (answer, 1)
    assert sum(count for _, count in found[1:]) == 6


@pytest.mark.parametrize("due_s", [inf, 5.0])
def test_prompts_of_two_owners_have_equal_parts_whether_due_or_short(due_s: float) -> None:
    policy, (answer,) = SplitFuse(), decoding("v", 0, 1)
    flood, (newcomer,) = prompts_of("a", 10, 50, length=4), prompts_of("b", 90, 1, length=30)
    for seq in flood:
        seq.request.due_s = due_s
    granted = dict(policy.token_requests([answer], [*flood, newcomer], Load(), 2000))
    assert granted == {answer: 1, newcomer: 6, flood[0]: 4, flood[1]: 2}  # of 12 for two owners
    newcomer.num_pending, newcomer.num_computed = 2, 28  # what it does not want is for the other
    granted = dict(policy.token_requests([answer], [*flood, newcomer], Load(), 2000))
    assert granted == {answer: 1, newcomer: 2, **dict.fromkeys(flood[:2], 4), flood[2]: 2}


def test_who_decodes_is_held_up_by_prompts_of_its_own_as_when_alone() -> None:
    policy, flood = SplitFuse(), prompts_of("a", 10, 50, length=40)
    own, (answer,) = prompts_of("v", 90, 1, length=300), decoding("v", 0, 1)
    found = [*policy.token_requests([answer], [*flood, *own], Load(num_outside=99), 2000)]
    assert sum(count for _, count in found[1:]) == 64
    assert sum(count for seq, count in found if seq in own) == 32
    both = decoding("v", 0, 3) + decoding("a", 3, 3)
    found = [
        *policy.token_requests(both, [*flood, *prompts_of("v", 90, 6, length=40)], Load(), 2000)
    ]
    assert sum(count for _, count in found[6:]) == 2 * 64  # twice as many of "v" wait as decode


def test_what_is_beyond_an_owners_share_comes_last_and_gets_what_is_left() -> None:
    policy = SplitFuse()
    flood, (newcomer,) = prompts_of("a", 10, 3, length=40), prompts_of("v", 90, 1, length=70)
    for seq in flood[1:]:
        seq.is_over_share = True
    found = [*policy.token_requests([], [flood[0], newcomer, *flood[1:]], Load(), 150)]
    assert found == [(flood[0], 32), (newcomer, 32)], "a short step, whoever comes next"
    newcomer.num_pending, newcomer.num_computed = 10, 60
    found = [*policy.token_requests([], [newcomer, flood[0], *flood[1:]], Load(), 150)]
    assert found == [(newcomer, 10), (flood[0], 40), (flood[1], 14)]


def test_all_of_an_owner_decode_in_turn() -> None:
    policy, many, other = SplitFuse(), decoding("a", 0, 40), decoding("v", 50, 1)
    for _ in range(39):
        for seq in requested(policy, many + other):
            seq.tokens.append(7)
    counts = [seq.num_generated for seq in many]
    assert counts[0] == 39, "the oldest in each step"
    assert {*counts[1:]} == {3}, "the others alike"


# --- answers ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(POLICIES),
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(1, 20),
            st.integers(1, 12),
            st.sampled_from([{}, {}, {"n": 3}, {"best_of": 3, "n": 1, "use_beam_search": True}]),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from((1, 64)),
)
def test_answers_are_the_same_whoever_else_asks(
    policy: Policy,
    wishes: list[tuple[str, int, int, dict[str, object], int]],
    least: int,
) -> None:
    policy = SplitFuse(min_chunk=least) if isinstance(policy, SplitFuse) else policy
    replica, _ = server(24, 4, 40, policy)
    engine = replica.engine
    answers: dict[SeqId, list[int]] = {}
    said: dict[SeqId, list[int]] = {}

    def note() -> None:
        replica.admit()
        for request in engine.requests.values():
            if request.id not in known:
                known.add(request.id)
                answers.update(expected(request))
        for event in replica.step():
            if event.token is not None:
                said.setdefault(event.seq_id, []).append(event.token)
        engine.check()

    known: set[int] = set()
    for tenant, length, num_new, params, num_steps in wishes:
        replica.push(asked(tenant, *(i % 2 for i in range(length)), num_new=num_new, **params))
        for _ in range(num_steps):
            note()
    for _ in range(3000):
        if not replica.has_work():
            break
        note()
    assert not replica.has_work(), "it does not come to an end"
    assert said == answers


def test_marks_are_gone_with_the_other_owner() -> None:
    scheduler = make_scheduler(seats=2, budget=8)
    for request_id, owner in enumerate("aab"):
        scheduler.add(request_of(request_id, [1, 2], owner=owner, max_tokens=8))
    assert sizes_of(run_step(scheduler)).keys() == {(0, 0), (2, 0)}
    (later,) = scheduler.queues.waiting
    assert later.is_over_share
    scheduler.queues.pause(later.request)
    assert not later.is_over_share
    scheduler.queues.resume(later.request)
    run_step(scheduler)
    assert later.is_over_share
    scheduler.queues.drop(scheduler.queues.alive[2, 0])
    run_step(scheduler)
    assert not later.is_over_share
    assert not scheduler.queues.is_shared
