"""Devices as people type them: what each name is taken for, and that it is said."""

from __future__ import annotations

import pytest

from ridgeline.planner import plan
from ridgeline.planner.catalogue import devices, find_devices, offers
from tests.model.cost.published_configs import PUBLISHED

LLAMA = PUBLISHED["llama-3.1-8b"]["config"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("5090 laptop", "rtx5090-mobile"),
        ("3060", "rtx3060-12"),
        ("3090 Ti", "rtx3090ti"),
        ("5070 ti", "rtx5070ti"),
        ("h100", "h100-sxm"),
        ("A100", "a100-80-sxm"),
        ("A100 80GB", "a100-80-sxm"),
        ("h100/2g.20gb", "h100-sxm/2g.20gb"),
        ("mi300", "mi300x"),
        ("7900 XTX", "rx7900xtx"),
        ("A6000", "rtxa6000"),
        ("rtx 6000 ada", "rtx6000ada"),
        ("rtx pro 6000", "rtxpro6000"),
        ("m4-max", "m4-max-128"),
        ("M4 Max 64GB", "m4-max-64"),
        ("m2 ultra", "m2-ultra-192"),
        ("m5 max", "m5-max-128"),
        ("mac mini", "m4-16"),
        ("DGX Spark", "dgx-spark"),
        ("strix halo", "strix-halo"),
        ("epyc 9654", "cpu-epyc-9654"),
        ("Xeon 8480+", "cpu-spr-8480"),
        ("raspberry pi", "cpu-rpi5"),
    ],
)
def test_a_name_is_taken_for_the_likeliest_and_that_is_said(typed: str, meant: str) -> None:
    (device,), (note,) = find_devices(typed)
    assert device.id == meant
    assert note.startswith(f"--on {typed}: taken for {meant} ({device.name})")


@pytest.mark.parametrize("typed", ["l4", "L4", "h100-sxm", "h100-sxm/2g.20gb", "here", "ALL"])
def test_an_id_is_no_guess(typed: str) -> None:
    assert find_devices(typed).notes == []


def test_others_of_the_name_are_named_in_one_line() -> None:
    found = plan(LLAMA, on="h100")
    line = "--on h100: taken for h100-sxm (NVIDIA H100 SXM5); there are also h100-pcie, h100-nvl"
    assert line in found.assumptions
    (note,) = find_devices("m4").notes
    assert note.endswith("m4-max-128 and 2 more")


def test_a_name_of_too_many_or_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'rtx' is in the names of \d+ devices, such as rtx4090,"):
        find_devices("rtx")
    for typed in ("", "/", "NVIDIA", "banana", "l4,,t4"):
        with pytest.raises(
            ValueError, match=r"there is no device .* `ridgeline plan --list-devices`"
        ):
            find_devices(typed)


def test_the_shop_has_what_can_be_bought_with_price_source_date_and_confidence() -> None:
    sold = find_devices("shop").devices
    assert {device.id for device in sold} == set(offers())
    assert len(sold) >= 70
    for offer in offers().values():
        assert offer.usd > 0, offer
        assert offer.source, offer
        assert offer.needs in ("pc", "server", ""), offer
        assert offer.kind in ("list", "shop", "used"), offer
        assert offer.confidence in ("high", "medium", "low"), offer
        assert "2012-01" < offer.date < "2027-01", offer


def test_what_is_sold_is_known_well_enough_to_be_planned() -> None:
    for device in find_devices("shop").devices:
        assert device.watts > 0, device.id
        assert device.read_bytes_per_s > 0, device.id
        assert device.peak_ops_per_s, device.id


def test_one_memory_for_processor_and_graphics_is_not_divided_over_machines() -> None:
    assert {d.max_ranks for d in devices().values() if d.kind == "soc"} == {1, 2}
    assert devices()["dgx-spark"].max_ranks == 2  # two are sold to be linked
    with pytest.raises(ValueError, match="m4-max-128 has no link to other devices"):
        plan(LLAMA, on="m4-max-128", tensor_parallel_size="2")


def test_a_mac_gives_its_graphics_a_part_of_the_memory() -> None:
    seen = 11_453.25e6  # of 16 GB: recommendedMaxWorkingSetSize in logs of llama.cpp
    assert devices()["m1-16"].usable_bytes == pytest.approx(seen, rel=1e-3)
    assert devices()["m4-max-128"].usable_bytes == 96 << 30
