"""Machines that can be taken away: what is left of the goodput."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ridgeline.cli.commands.plan import show_spot
from ridgeline.foresight.simulator.fleet import RequestOutcome, serve_fleet
from ridgeline.foresight.simulator.run import SimRequest
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.planner.capacity.load import Slo
from ridgeline.planner.capacity.option import (
    CapacityOption,
    availability,
    eviction,
    goodput_per_s,
    latencies_of,
    replicas_for,
    share_again,
    up_share,
)
from ridgeline.planner.capacity.report import name_of
from tests.foresight.simulator.test_fleet import ROOMY
from tests.planner.capacity.test_search import HEADER, planned


def test_goodput_is_less_the_oftener_machines_go() -> None:
    """One of two machines of a full fleet goes for good: what comes then is late."""
    times = StepTime((1, 64), (0.01, 0.05), 0.001, 0, 0, 0, 0)
    load = [SimRequest(prompt=(i,) * 8, num_new=(20,), arrival_s=i / 40) for i in range(800)]
    limits = [Slo("e2el", "p95", 1000.0)]

    def share(ended: Sequence[RequestOutcome]) -> float:
        return latencies_of(ended, limits).good_share

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
    assert hit.tokens_again > 8
    again_per_s = hit.tokens_again * 1000 / 3600
    assert share_again(40.0, hit, 1000) == pytest.approx(again_per_s / (again_per_s + 40 * 28))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.floats(0.6, 0.9999))
def test_enough_of_the_spot_machines_are_up(needed: int, up: float) -> None:
    num = replicas_for(needed, up)
    assert availability(needed, num, up) >= 0.99
    assert num == needed or availability(needed, num - 1, up) < 0.99


def test_availability_is_that_of_a_binomial() -> None:
    assert availability(2, 3, 0.9) == pytest.approx(3 * 0.81 * 0.1 + 0.729)
    assert availability(1, 1, 0.7) == pytest.approx(0.7)
    assert up_share(1.0, 0.0, 3600.0) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="--evictions-per-hour"):
        replicas_for(4, 1e-4)


def test_spot_machines_cost_less_and_draining_saves_answers() -> None:
    found = planned(
        on="a100-80-sxm", request_rate=20.0, new_tokens="150", slo=["ttft:p95:1000"], spot=True,
        evictions_per_hour=6.0, notice=1.0, tensor_parallel_size="1",
    )  # fmt: skip
    best = found.choices[0]
    assert best.spot is not None
    assert best.spot.needed == best.replicas
    assert best.spot.replicas > best.replicas
    assert best.spot.usd_per_hour == pytest.approx(
        0.4515 * best.spot.replicas * best.placement.num_devices
    )
    assert best.spot.tokens_lost > 0
    assert best.spot.tokens_again > 0
    assert best.spot.share_again is not None
    assert 0 < best.spot.share_again < 0.05
    assert best.spot.requests_lost > 0
    assert best.spot.goodput_per_s is not None
    assert 0.9 * 20 < best.spot.goodput_per_s <= 20
    assert found.as_dict()["choices"][0]["spot"]["evictions_per_hour"] == 6.0
    assert not any("evictions an hour" in note for note in found.assumptions)
    assert math.isclose(best.spot.start_s, 60 + 16.06e9 / 1e9, rel_tol=0.01)


def test_without_a_price_of_spot_machines_none_is_made_up() -> None:
    found = planned(on="a100-80-pcie", spot=True)
    assert found.choices[0].spot is not None
    assert found.choices[0].spot.usd_per_hour is None
    assert any("0.05 evictions an hour" in note for note in found.assumptions)
    assert any("boots in 60 s" in note and "1 GB/s" in note for note in found.assumptions)


@pytest.mark.parametrize(
    ("provider", "notice_s", "per_hour"),
    [("AWS", 120, 0.0003), ("Azure", 30, 0.05), ("gcp", 30, 0.05), ("Nobody", 30, 0.05)],
)
def test_notice_and_evictions_go_by_who_rents_the_machine(
    provider: str, notice_s: float, per_hour: float, tmp_path: Path
) -> None:
    own = tmp_path / "mine.csv"
    rows = (f"l4,{provider},,{kind},{usd},,a quote,high" for kind, usd in
            (("on_demand", 1.0), ("spot", 0.4)))  # fmt: skip
    own.write_text(HEADER + "\n".join(rows))
    found = planned(on="l4", spot=True, prices=str(own), tensor_parallel_size="1")
    spot = found.choices[0].spot
    assert spot is not None
    assert (spot.provider, spot.notice_s, spot.evictions_per_hour) == (
        provider, notice_s, per_hour,
    )  # fmt: skip
    assert f"{notice_s} s of notice before a spot machine at {provider} goes: --notice" in (
        found.assumptions
    )
    mine = planned(on="l4", spot=True, prices=str(own), tensor_parallel_size="1", notice=7.0)
    assert mine.choices[0].spot is not None
    assert mine.choices[0].spot.notice_s == 7.0
    assert not any("of notice" in note for note in mine.assumptions)


def shown(choices: Sequence[CapacityOption]) -> list[str]:
    text = io.StringIO()
    show_spot(choices, Console(file=text, width=160, highlight=False))
    return text.getvalue().splitlines()


def test_what_no_eviction_was_simulated_of_is_unknown_and_not_0() -> None:
    closed = planned(on="l4,h100-sxm", request_rate=None, max_concurrency=4, spot=True)
    open_loop = planned(on="l4,h100-sxm", request_rate=0.5, spot=True)
    assert len(open_loop.choices) > 3
    for choice in (*closed.choices, *open_loop.choices[3:]):
        assert choice.spot is not None
        spot = choice.spot.as_dict()
        names = ("tokens_again", "share_again", "tokens_lost", "requests_lost", "goodput_per_s")
        assert [spot[name] for name in names] == [None] * 5
    rows = shown(closed.choices)[1:4]
    assert all(row.split()[-3:] == ["-"] * 3 for row in rows)
    first = open_loop.choices[0].spot
    assert first is not None
    assert first.tokens_again is not None  # a 0 that was simulated is one
    assert first.tokens_lost is not None


def test_the_table_of_spot_machines_names_the_choices() -> None:
    choices = planned(on="l4", request_rate=0.5, spot=True).choices
    names = [name_of(choice) for choice in choices[:3]]
    assert len(set(names)) == 3
    for name, row in zip(names, shown(choices)[1:4], strict=True):
        assert row.startswith(f"{name} ")
