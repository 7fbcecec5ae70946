"""The speed of simulations: all ways serve the same load."""

from __future__ import annotations

import pytest
from peers.simulator_speed import WAYS, measure, new_load


def test_each_way_serves_all_of_the_load() -> None:
    load = new_load(4.0, 60)
    with_records, fleet, lean = (simulated(load) for simulated in WAYS.values())
    assert fleet.ends_s == with_records.ends_s
    assert lean.ends_s == pytest.approx(with_records.ends_s, abs=0.1)
    assert lean.num_steps == pytest.approx(with_records.num_steps, rel=0.1)
    assert all(asked.arrival_s < end_s for asked, end_s in zip(load, lean.ends_s, strict=True))


def test_there_is_a_row_for_each_way() -> None:
    rows = measure(30.0, 40)
    assert rows.keys() == WAYS.keys()
    assert all(min(row.values()) > 0 for row in rows.values())
