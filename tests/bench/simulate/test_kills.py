"""Servers that end at random in a simulated fleet: as many as asked, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.bench.simulate.predicted import cost_of, random_kills
from ridgeline.foresight.simulator.fleet import ROUTERS, serve_fleet
from tests.foresight.simulator.test_fleet import ROOMY, TIMES, spread


@given(st.integers(1, 50), st.floats(0, 60), st.floats(0, 600), st.floats(0, 60), st.integers(0, 9))
def test_none_ends_that_is_not_there(
    num: int, per_minute: float, until_s: float, back_after_s: float, seed: int
) -> None:
    back_s = [0.0] * num
    before_s = 0.0
    for kill in random_kills(num, per_minute, until_s, back_after_s, seed):
        assert before_s <= kill.at_s < until_s
        assert kill.at_s >= back_s[kill.replica]
        assert kill.back_s == kill.at_s + back_after_s
        back_s[kill.replica], before_s = kill.back_s, kill.at_s


def test_as_many_end_as_were_asked_for() -> None:
    kills = random_kills(1000, 100.0, 600.0, 10.0, 0)
    assert 900 < len(kills) < 1100
    assert random_kills(10, 0.0, 600.0, 10.0, 0) == ()


def test_what_was_moved_is_counted_and_nothing_is_lost() -> None:
    load = spread(60, 0.02)
    kills = random_kills(4, 120.0, 1.2, 0.3, 1)
    assert kills
    ended = serve_fleet(load, ROOMY, TIMES, 4, router=ROUTERS["least-work"](), faults=kills)
    plain = serve_fleet(load, ROOMY, TIMES, 4, router=ROUTERS["least-work"]())
    cost = cost_of(kills, ended)
    assert cost["requests_moved"] > 0
    assert cost["requests_lost"] == 0
    assert 0 < cost["share_again"] < 1
    assert sum(one.num_new for one in ended) == sum(one.num_new for one in plain)
    assert cost_of((), plain)["tokens_again"] == 0


def test_a_prefix_draws_requests_in_the_router_s_own_rule() -> None:
    """Each of two long prefixes is read once; with turns both servers read both."""
    load = spread(40, 0.5)
    prefixes = [tuple(range(first, first + 256)) for first in (0, 1000)]
    load = [
        replace(one, prompt=prefixes[i // 2 % 2] + one.prompt[:8]) for i, one in enumerate(load)
    ]
    num = {}
    for name in ("least-work", "round-robin"):
        ended = serve_fleet(load, ROOMY, TIMES, 2, router=ROUTERS[name]())
        num[name] = sum(one.num_cached_tokens for one in ended)
    assert num["least-work"] > num["round-robin"]
