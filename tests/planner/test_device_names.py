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
        ("H800", "h800-sxm"),
        ("RTX 2080", "rtx2080"),
        ("2080 Ti", "rtx2080ti"),
        ("GTX 1660 Ti", "gtx1660ti"),
        ("RX 7900 GRE", "rx7900gre"),
        ("Tesla T4", "t4"),
        ("Xeon 6148", "cpu-skx-6148"),
        ("Xeon Gold 6148", "cpu-skx-6148"),
        ("i7-13700K", "cpu-13700k"),
        ("Raspberry Pi 4", "cpu-rpi4-8"),
        ("m1 max 24-core", "m1-max-32"),
    ],
)
def test_a_name_is_taken_for_the_likeliest_and_that_is_said(typed: str, meant: str) -> None:
    (device,), (note,) = find_devices(typed)
    assert device.id == meant
    assert note.startswith(f"--on {typed}: taken for {meant} ({device.name})")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("m1 8gb", "m1-8"),
        ("m1 pro 16 GB", "m1-pro-16"),
        ("M3 Max 96GiB", "m3-max-96"),
        ("3060 8gb", "rtx3060-8"),
        ("h100 94gb", "h100-nvl"),
        ("v100 32GB", "v100-sxm2-32"),
        ("b200 192gb", "b200-sxm"),  # sold as one of 180 and of 192
        ("raspberry pi 5 8gb", "cpu-rpi5-8"),
    ],
)
def test_the_memory_that_a_name_says_is_taken(typed: str, meant: str) -> None:
    (device,), _ = find_devices(typed)
    assert device.id == meant


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("m1 pro 64gb", "m1-pro-32 or m1-pro-16"),
        ("rtx 4090 48gb", "rtx4090 or rtx4090d or rtx4090-mobile"),
        ("rtx 3060 1gb", "rtx3060-12 or rtx3060-8 or rtx3060-mobile"),  # no beginning of "12"
        ("raspberry pi 4 16gb", "cpu-rpi4-8 or cpu-rpi4-4"),
        ("rtx 2090", "rtx5090 or rtx4090 or rtx3090"),
    ],
)
def test_a_device_that_does_not_exist_is_refused_with_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"there is no device '{typed}': did you mean {near}\\?"):
        find_devices(typed)


def test_slots_of_a_processor_are_filled_as_the_name_says() -> None:
    (device,), (note,) = find_devices("epyc 9654 384gb")
    assert (device.id, device.usable_bytes) == ("cpu-epyc-9654", 384_000_000_000)
    assert "384 GB" in note
    found = plan(LLAMA, on="ryzen 9 7950x 8gb")
    assert not found.placements[0].ledger.fits


def test_another_card_of_the_name_is_not_taken_for_it() -> None:
    for typed in ("rtx 2080", "gtx 1080", "rtx 4070"):
        (device,), notes = find_devices(typed)
        assert device.name.endswith(typed[-4:])
        assert not any("ti" in note.partition("(")[0] for note in notes)


@pytest.mark.parametrize("typed", ["l4", "L4", "h100-sxm", "h100-sxm/2g.20gb", "here", "ALL"])
def test_an_id_is_no_guess(typed: str) -> None:
    assert find_devices(typed).notes == []


def test_others_of_the_name_are_named_in_one_line() -> None:
    found = plan(LLAMA, on="h100")
    line = "--on h100: taken for h100-sxm (NVIDIA H100 SXM5); there are also h100-pcie, h100-nvl"
    assert line in found.assumptions
    (note,) = find_devices("m4").notes
    assert note.endswith("m4-max-128 and 3 more")


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
    assert devices()["m1-pro-32"].usable_bytes == pytest.approx(22_906.5e6, rel=1e-4)  # of 32 GB
    assert devices()["m3-24"].usable_bytes == pytest.approx(17_179.89e6, rel=1e-4)
    assert devices()["m4-max-128"].usable_bytes == 96 << 30
