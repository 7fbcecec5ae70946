"""Machines that can be taken away: what is left of the goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ridgeline.planner.choice import seen_of
from ridgeline.planner.load import Slo
from ridgeline.planner.spot import eviction, goodput_per_s
from ridgeline.simulator.fleet import Ended, serve_fleet
from ridgeline.simulator.run import Asked
from ridgeline.simulator.steptime import StepTime
from tests.simulator.test_fleet import ROOMY


def test_goodput_is_less_the_oftener_machines_go() -> None:
    """One of two machines of a full fleet goes for good: what comes then is late."""
    times = StepTime((1, 64), (0.01, 0.05), 0.001, 0, 0, 0, 0)
    load = [Asked(prompt=(i,) * 8, num_new=(20,), arrival_s=i / 40) for i in range(800)]
    limits = [Slo("e2el", "p95", 1000.0)]

    def share(ended: Sequence[Ended]) -> float:
        return seen_of(ended, limits).good_share

    engine = replace(ROOMY, max_num_seqs=8)
    before = share(serve_fleet(load, engine, times, 2))
    hit = eviction(load, engine, times, 2, 0.0, 100.0, drain=True)
    assert before > 0.95 > 0.8 > share(hit.ended)
    assert hit.share_of_absence == pytest.approx(0.1, rel=0.01)  # of 100 s the load lasts 10
    found = [
        goodput_per_s(40.0, before, hit, share(hit.ended), often) for often in (0.0, 1, 5, 1e6)
    ]
    assert found[0] == 40 * before
    assert found[0] > found[1] > found[2] > found[3] == 0
    assert found[0] - found[2] == pytest.approx(5 * (found[0] - found[1]))
    spoilt = sum(before - share(hit.ended) for _ in load)
    assert found[0] - found[1] == pytest.approx(10 * spoilt / 3600, rel=0.01)
