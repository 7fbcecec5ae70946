"""The grid beside ``bench search``: around its answer, and further if its limit is not there."""

from __future__ import annotations

from itertools import pairwise

import pytest
from peers.bench_search import grid

from ridgeline.bench.search.knee import Trial, likely_limit
from ridgeline.bench.search.slo import Tally, parse_slo

SLO = parse_slo("ttft:p95:500")


def trial(load: float, limit: float) -> Trial:
    num_met = 100 if load <= limit else 0
    return Trial(load, (Tally(SLO, num_met, 100),), False, load / limit, load)


@pytest.mark.parametrize(("limit", "num"), [(10.0, 7), (13.0, 10), (8.5, 8), (7.2, 11)])
def test_a_grid_finds_the_limit_also_outside_of_its_reach(limit: float, num: int) -> None:
    numbers = list[int]()

    def hold(load: float, number: int) -> Trial:
        numbers.append(number)
        return trial(load, limit)

    trials = grid(10.0, 3, hold)
    assert len(trials) == num
    assert numbers == [*range(num)]  # each is a seed of its own
    found = likely_limit(trials)
    assert found is not None
    assert found == pytest.approx(limit, rel=0.05)
    loads = sorted(one.load for one in trials)
    assert all(b / a == pytest.approx(1.05) for a, b in pairwise(loads))


def test_a_grid_that_never_fails_ends() -> None:
    trials = grid(10.0, 1, lambda load, number: trial(load, 1e9))
    assert len(trials) == 3 + 4
    assert likely_limit(trials) is None
