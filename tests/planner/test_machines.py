"""Machines of clouds by their names: what is in them, that they are paid whole, and dates."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import date

import pytest

from ridgeline.model.cost.hardware import parse_machines
from ridgeline.planner import catalogue, plan
from ridgeline.planner.capacity.option import availability, replicas_for, up_share
from ridgeline.planner.capacity.report import name_of
from ridgeline.planner.catalogue import devices, find_devices, machines, prices_of, spot_terms
from tests.model.cost.published_configs import PUBLISHED

LLAMA = PUBLISHED["llama-3.1-8b"]["config"]
TODAY = date(2026, 11, 24)


@pytest.mark.parametrize(
    ("typed", "device", "num"),
    [
        ("Standard_NC24ads_A100_v4", "a100-80-pcie", 1),
        ("nc24ads a100 v4", "a100-80-pcie", 1),
        ("p5.48xlarge", "h100-sxm", 8),
        ("P5.48XLARGE", "h100-sxm", 8),
        ("a3-highgpu-8g", "h100-sxm", 8),
        ("g5.xlarge", "a10g", 1),
        ("nd h100 v5", "h100-sxm", 8),  # a series has one size
        ("Standard_ND96isr_H100_v5", "h100-sxm", 8),
        ("g2-standard-48", "l4", 4),
        ("p4de", "a100-80-sxm", 8),
        ("h100-sxm@p5.48xlarge", "h100-sxm", 8),  # as plans print it
    ],
)
def test_a_machine_is_what_is_in_it(typed: str, device: str, num: int) -> None:
    (found,), (note,) = find_devices(typed)
    assert found.id.startswith(f"{device}@")
    assert (found.max_ranks, found.per_card) == (num, num)
    assert found.usable_bytes == devices()[device].usable_bytes
    assert f" has {num} x {device}, and is paid whole: " in note


def test_devices_and_machines_stand_in_one_list() -> None:
    found = find_devices("l4,g2-standard-48,4090").devices
    assert [device.id for device in found] == ["l4", "l4@g2-standard-48", "rtx4090"]
    assert find_devices("a2").devices[0].id == "a2"  # a card, and a series of Google's


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("p5.49xlarge", "p5.4xlarge or p5.48xlarge or p5e.48xlarge"),
        ("Standard_ND96isr_H100_v6", "Standard_ND96isr_H100_v5 or Standard_ND96isr_H200_v5"),
        ("g5.xxlarge", "g5.xlarge"),
    ],
)
def test_an_unknown_machine_is_refused_with_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"there is no device '{typed}': did you mean {near}"):
        find_devices(typed)


def test_a_machine_is_paid_whole_and_shared_by_replicas() -> None:
    (eight,), _ = find_devices("p5.48xlarge")
    (price,), warnings = prices_of(eight, "on_demand", TODAY)
    assert (price.usd_per_hour, price.provider, price.date) == (55.04, "AWS", "2026-09-27")
    assert warnings == []
    assert [price.of(num, eight) for num in (1, 8, 9)] == [55.04, 55.04, 110.08]
    alone = devices()["h100-sxm"]
    assert prices_of(alone, "on_demand", TODAY)[0][0].of(2, alone) == pytest.approx(2 * 2.29)


def test_replicas_that_do_not_fill_a_machine_stand_in_no_two_of_them() -> None:
    (eight,), _ = find_devices("p5.48xlarge")
    (price,), _ = prices_of(eight, "on_demand", TODAY)
    of_3 = [price.of(3 * replicas, eight, 3) / price.usd_per_hour for replicas in (1, 2, 3, 5)]
    assert of_3 == [1, 1, 2, 3]  # two replicas of three in each, and two devices idle
    assert price.of(2 * 16, eight, 16) == 4 * price.usd_per_hour  # each of two machines


def test_several_machines_are_bought_whole_and_named_so() -> None:
    load = {"request_rate": 200.0, "prompt_tokens": 1000, "new_tokens": 300}
    found = plan(LLAMA, on="a3-highgpu-8g", spot=True, today=TODAY, **load)
    assert len({choice.num_machines for choice in found.choices}) > 1
    for choice in found.choices:
        ranks = choice.placement.num_devices
        needed = math.ceil(choice.replicas / (8 // ranks))
        assert choice.num_machines == needed == choice.as_dict()["num_machines"]
        assert choice.usd_per_hour == pytest.approx(needed * 88.49)
        assert name_of(choice).startswith(f"{needed} x a3-highgpu-8g (")
        if choice.spot is not None:
            more = math.ceil(choice.spot.replicas / (8 // ranks))
            assert choice.spot.usd_per_hour == pytest.approx(more * 52.56)
    said = next(note for note in found.assumptions if note.startswith("--on a3-highgpu-8g"))
    assert "of GCP in us-central1" in said
    assert "88.49 USD per hour, 52.56 as a spot machine on 2026-09-27" in said


def test_what_stands_in_one_machine_goes_with_it() -> None:
    """Of four replicas of two devices in one machine none is there when it goes."""
    load = {"request_rate": 60.0, "prompt_tokens": 1000, "new_tokens": 300, "replicas": "5"}
    wishes = load | {"tensor_parallel_size": "2", "evictions_per_hour": 2.0, "spot": True}
    (choice,) = plan(LLAMA, on="a3-highgpu-8g", today=TODAY, **wishes).choices
    spot = choice.spot
    assert spot is not None
    up = up_share(2.0, 0.0, spot.start_s)
    num_machines = replicas_for(2, up)  # two hold five replicas
    assert spot.availability == availability(2, num_machines, up) < 1
    assert spot.replicas == 5 + 4 * (num_machines - 2) > 5
    assert spot.provider == "GCP"


def test_a_machine_without_a_price_has_none_and_says_so() -> None:
    (four,), (note,) = find_devices("g2-standard-48")
    assert prices_of(four, "on_demand", TODAY) == ([], [])  # not that of four L4s elsewhere
    assert note.endswith("no dated price of it is known")


def test_prices_of_spot_machines_and_how_often_they_go_are_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (eight,), _ = find_devices("a3-highgpu-8g")
    (price,), _ = prices_of(eight, "spot", TODAY)
    assert price.usd_per_hour == pytest.approx(8 * 6.57)
    assert spot_terms("", eight).notice_s == 30  # of its provider
    often = replace(machines()["a3-highgpu-8g"], evictions_per_hour=0.2)
    monkeypatch.setattr(catalogue, "machines", lambda: {"a3-highgpu-8g": often})
    assert spot_terms("", eight).evictions_per_hour == 0.2


def test_every_machine_is_of_a_known_device_and_no_price_lacks_its_date() -> None:
    for machine in machines().values():
        assert machine.device in devices(), machine.name
        assert machine.source, machine.name
        assert machine.num > 0, machine.name
        assert machine.confidence in ("high", "medium", "low"), machine.name
        if machine.usd_per_hour:
            assert date(2025, 11, 1) <= date.fromisoformat(machine.date) <= TODAY, machine.name
        else:
            assert not machine.date, machine.name
    with pytest.raises(ValueError, match=r"vms\.csv, line 2"):
        parse_machines("name,provider\nx\n")


def test_a_plan_for_a_load_takes_a_machine_whole_and_a_model_all_it_needs_of_it() -> None:
    load = {"request_rate": 1.0, "prompt_tokens": 256, "new_tokens": 64}
    found = plan(LLAMA, on="p5.48xlarge", today=TODAY, **load)
    assert {choice.usd_per_hour for choice in found.choices} == {55.04}
    big = plan(PUBLISHED["llama-3.1-70b"]["config"], on="p5.48xlarge")
    assert big.placements[0].num_devices == 2
    assert big.placements[0].ledger.fits
