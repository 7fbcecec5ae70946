"""Fleets: one replica is a simulation; every request ends once, whatever happens to replicas."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.foresight.simulator.fleet import (
    ROUTERS,
    Evict,
    RequestOutcome,
    Slow,
    View,
    least_tokens,
    prefix_aware,
    round_robin,
    serve_fleet,
)
from ridgeline.foresight.simulator.run import SimRequest, simulate
from tests.foresight.simulator.test_run import SETTINGS, TIMES, loads, requests_of

few = settings(max_examples=30, deadline=None)
ROOMY = replace(SETTINGS, num_blocks=400, max_model_len=400)


def spread(num: int, gap_s: float, *, prompt: int = 20, new: int = 12) -> list[SimRequest]:
    return [
        SimRequest(prompt=(100 + i,) * prompt, num_new=(new,), arrival_s=i * gap_s)
        for i in range(num)
    ]


@st.composite
def faults(draw: st.DrawFn) -> tuple[int, list[Evict | Slow]]:
    num = draw(st.integers(1, 4))
    found: list[Evict | Slow] = []
    for replica in range(num):
        if draw(st.booleans()):
            at_s = draw(st.floats(0, 1.5))
            found.append(
                Evict(
                    at_s=at_s,
                    replica=replica,
                    notice_s=draw(st.sampled_from((0.0, 0.05, 1.0))),
                    drain=draw(st.booleans()),
                    back_s=draw(st.sampled_from((None, at_s + 0.3))),
                )
            )
        if draw(st.booleans()):
            found.append(Slow(at_s=draw(st.floats(0, 1)), replica=replica, factor=2.0))
    return num, found


@few
@given(loads())
def test_one_replica_is_a_simulation(load: list[SimRequest]) -> None:
    alone = requests_of(simulate(load, SETTINGS, TIMES))
    fleet = serve_fleet(load, SETTINGS, TIMES, 1)
    assert sorted((e.first_token_s, e.finish_s, e.num_new) for e in fleet) == sorted(
        (r.first_token_s, r.finish_s, sum(r.num_generated)) for r in alone
    )


@few
@given(st.integers(1, 5))
def test_one_replica_is_a_simulation_in_a_closed_loop(concurrency: int) -> None:
    load = [replace(asked, arrival_s=None) for asked in spread(12, 0.0)]
    alone = requests_of(simulate(load, SETTINGS, TIMES, concurrency=concurrency))
    fleet = serve_fleet(load, SETTINGS, TIMES, 1, concurrency=concurrency)
    assert sorted(e.finish_s for e in fleet) == sorted(r.finish_s for r in alone)


@few
@given(loads(), faults(), st.sampled_from(sorted(ROUTERS)))
def test_every_request_ends_once(
    load: list[SimRequest], broken: tuple[int, list[Evict | Slow]], router: str
) -> None:
    num, what = broken
    ended = serve_fleet(load, ROOMY, TIMES, num, router=ROUTERS[router](), faults=what)
    assert Counter(id(e.request) for e in ended) == Counter(id(asked) for asked in load)
    for e in ended:
        assert e.finish_s >= e.arrival_s == e.request.arrival_s
        if not e.is_lost:
            assert e.num_new == sum(e.request.num_new)
            assert e.first_token_s is not None
            assert e.first_token_s >= e.arrival_s
    if not any(isinstance(fault, Evict) for fault in what):
        assert not any(e.is_lost or e.num_moves for e in ended)


def test_draining_saves_what_going_at_once_loses() -> None:
    load = spread(10, 0.02)
    at_s = 0.1
    going = Evict(at_s=at_s, replica=0, drain=False)
    lost = serve_fleet(load, ROOMY, TIMES, 2, faults=[going])
    saved = serve_fleet(load, ROOMY, TIMES, 2, faults=[replace(going, drain=True)])
    assert 0 < sum(e.is_lost for e in lost) < 10
    assert not any(e.is_lost for e in saved)
    moved = [e for e in saved if e.num_moves]
    # What was said before is read again, not said again.
    assert moved
    assert all(e.num_again >= 20 and e.num_new == 12 for e in moved)
    assert all(e.replica == 1 for e in moved)


def test_all_answers_of_a_request_go_on_elsewhere() -> None:
    """What they have said is read again, with the prompt; nothing of it is said again."""
    load = [replace(asked, num_new=(12, 3, 9)) for asked in spread(6, 0.02)]
    at_s = 0.15
    ended = serve_fleet(load, ROOMY, TIMES, 2, faults=[Evict(at_s=at_s, replica=0)])
    moved = [one for one in ended if one.num_moves]
    assert moved
    for one in ended:
        assert one.num_new == len(one.token_s) == 24
        assert list(one.token_s) == sorted(one.token_s)
    for one in moved:
        num_before = sum(token_s <= at_s for token_s in one.token_s)
        # The last token of each answer had not been computed, nor need those of one that has ended.
        assert num_before - 3 - 3 <= one.num_again - 20 <= num_before
        assert one.num_computed >= one.num_again + 24
    assert any(one.num_again > 20 + 3 * 2 for one in moved), "none had ended one of its answers"


def test_what_a_cache_has_and_what_had_not_begun_is_not_computed_again() -> None:
    """Six equal prompts, one at a time: a server ends that answers one, while others wait."""
    settings = replace(ROOMY, enable_prefix_caching=True, max_num_seqs=1)
    load = [replace(asked, prompt=(7,) * 64) for asked in spread(6, 0.001)]
    for at_s in (0.2, 0.3):
        ended = serve_fleet(load, settings, TIMES, 2, faults=[Evict(at_s=at_s, replica=0)])
        moved = [one for one in ended if one.num_moves]
        begun = [one for one in moved if one.first_token_s is not None and one.first_token_s < at_s]
        assert 0 < len(begun) < len(moved)
        for one in moved:
            num_before = sum(token_s <= at_s for token_s in one.token_s)
            assert one.num_again <= (64 + num_before - one.num_cached_tokens if one in begun else 0)
            assert one.num_cached_tokens >= 48, "the other server has read it"
        assert all(one.num_again > 0 for one in begun)


def test_turns_of_a_session_come_in_turn_and_find_what_was_read() -> None:
    """On one replica as in a simulation; on two with least work where their beginning was read."""
    load = [
        replace(one, turn=turn, arrival_s=None if turn else one.arrival_s, think_s=0.01 * turn)
        for one in spread(4, 0.05)
        for turn in range(3)
    ]
    settings = replace(ROOMY, enable_prefix_caching=True)
    alone = requests_of(simulate(load, settings, TIMES))
    fleet = serve_fleet(load, settings, TIMES, 1)
    assert sorted((e.first_token_s, e.finish_s, e.num_cached_tokens) for e in fleet) == sorted(
        (r.first_token_s, r.finish_s, r.num_cached_tokens) for r in alone
    )
    assert any(e.num_cached_tokens for e in fleet)
    many = serve_fleet(load, settings, TIMES, 2, router=ROUTERS["least-work"](), concurrency=2)
    assert len(many) == len(load)
    assert not any(e.is_lost for e in many)


def test_with_notice_enough_nothing_moves() -> None:
    load = spread(4, 0.01)
    ended = serve_fleet(
        load, ROOMY, TIMES, 2, faults=[Evict(at_s=0.05, replica=0, notice_s=60, drain=False)]
    )
    assert not any(e.is_lost or e.num_moves for e in ended)


def test_who_finds_nobody_waits_for_the_one_that_loads() -> None:
    ended = serve_fleet(spread(3, 0.01), ROOMY, TIMES, 1, opens_s=[5.0])
    assert all(e.first_token_s is not None and e.first_token_s > 5.0 for e in ended)
    gone = serve_fleet(spread(3, 1.0), ROOMY, TIMES, 1, faults=[Evict(at_s=0.5, replica=0)])
    assert [e.is_lost for e in gone] == [False, True, True]


def test_a_slow_replica_gets_less() -> None:
    load = spread(60, 0.02)

    def served(ended: list[RequestOutcome]) -> Counter[int | None]:
        return Counter(e.replica for e in ended)

    slow = served(serve_fleet(load, ROOMY, TIMES, 2, faults=[Slow(at_s=0, replica=0, factor=4.0)]))
    assert slow[0] < slow[1]
    blind = serve_fleet(
        load, ROOMY, TIMES, 2, router=round_robin(), faults=[Slow(at_s=0, replica=0, factor=4.0)]
    )
    assert served(blind)[0] == served(blind)[1]


def test_routers_choose() -> None:
    asked = SimRequest(prompt=(1, 2), num_new=(1,))
    views = [View(0, 50, 0), View(2, 10, 0), View(5, 500, 64)]
    assert least_tokens(asked, views) == 2
    turns = round_robin()
    assert [turns(asked, views) for _ in range(4)] == [0, 2, 5, 0]
    assert prefix_aware(1000)(asked, views) == 5
    assert prefix_aware(100)(asked, views) == 2  # the cache is there, but so is the queue


def test_requests_of_one_prefix_stay_together() -> None:
    load = [
        SimRequest(prompt=(i % 2,) * 16 + (9 + i,) * 4, num_new=(2,), arrival_s=i * 0.5)
        for i in range(12)
    ]
    ended = serve_fleet(load, ROOMY, TIMES, 2, router=prefix_aware())
    homes = {(e.request.prompt[0], e.replica) for e in ended}
    assert len(homes) == 2


def test_a_fault_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="no replica 3 of 2"):
        serve_fleet([], SETTINGS, TIMES, 2, faults=[Slow(at_s=0, replica=3, factor=2)])
